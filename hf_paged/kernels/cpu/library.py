"""The one native library: prebuilt in the wheel, else built before, else built now, else torch's own operators."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from . import building, library_cache
from .building import BuildError
from .isa import VARIABLE, check_available, machine_isas, requested_isa, unsupported_platform
from .library_cache import Entry

logger = logging.getLogger(__name__)

OLDEST_TORCH = (2, 10)
_PACKAGED = Path(__file__).parent

Source = Literal["wheel", "cache", "built", "none"]


@dataclasses.dataclass(frozen=True)
class NativeStatus:
    """Which native library this process uses.

    Args:
        source (`str`):
            `"wheel"` (it came with the package), `"cache"` (some process built it before), `"built"` (this process
            built it) or `"none"` (torch's operators are used).
        path (`Path`, *optional*):
            The library's file.
        isa (`str`):
            The level in use: `"amx"`, `"avx512"`, `"avx2"`, or `"torch"` for none.
        available (`tuple[str, ...]`):
            The levels that this machine has, the fastest first.
        reason (`str`):
            Why there is no library, or why the level is not the fastest; else empty.
    """

    source: Source
    path: Path | None
    isa: str
    available: tuple[str, ...]
    reason: str = ""

    def describe(self) -> str:
        """Returns one line for people."""
        why = f" ({self.reason})" if self.reason else ""
        if self.path is None:
            return f"native CPU operators: none, torch's are used{why}"
        origin = {"wheel": "came with the package", "cache": "built before", "built": "built now"}[self.source]
        return f"native CPU operators: {self.isa}{why}, of {', '.join(self.available)}; {origin}: {self.path}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return dataclasses.asdict(self) | {"path": str(self.path) if self.path else None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NativeStatus:
        """Returns what `to_dict` was called on.

        Args:
            values (`dict[str, Any]`):
                From `to_dict`, or read from JSON.
        """
        path = Path(values["path"]) if values["path"] else None
        return cls(**values | {"path": path, "available": tuple(values["available"])})


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """Whether torch has the operators now, and if not, why not."""

    source: Source
    path: Path | None
    reason: str = ""


_lock = threading.Lock()
_status: NativeStatus | None = None
_loaded: _Loaded | None = None


def load() -> bool:
    """Makes `torch.ops.hf_paged` available if this machine can have it, and returns whether it is.

    The first call decides for the process; it may compile for half a minute or more, and says so. Later ones are free.
    Safe from several threads, before and after a fork.

    Raises:
        ConfigurationError: If `HF_PAGED_CPU_ISA` names no level, or one that this machine lacks.
    """
    return status().path is not None


def status() -> NativeStatus:
    """Returns which library is used and why; decides it, as `load`, if that is still to be done.

    Raises:
        ConfigurationError: If `HF_PAGED_CPU_ISA` names no level, or one that this machine lacks.
    """
    global _status
    if _status is None:
        with _lock:
            if _status is None:
                _status = _decide()
    return _status


def find_without_building() -> dict[str, Any]:
    """Returns what `load` would find now: the levels of this machine, the library and where it comes from, or why not.

    Nothing is loaded or built, and no decision is made.
    """
    found: dict[str, Any] = {"levels": list(machine_isas()), "requested": os.environ.get(VARIABLE) or None}
    source, path, why = "none", None, _why_impossible() or ""
    if not why:
        source, path, why = _found()
    return found | {"source": source, "path": None if path is None else str(path), "reason": why}


def _found() -> tuple[Source, Path | None, str]:
    sources = building.source_hash(building.SOURCES)
    packaged = library_cache.read_entry(_PACKAGED)
    if packaged is not None and packaged.sources == sources:
        return "wheel", packaged.path, ""
    try:
        key = building.build_key(sources, building.find_torch().version)
        compiler: str | None = building.compiler_key(building.find_compiler())
        why = "not built yet; the first use builds it"
    except BuildError as error:
        compiler, why = None, str(error)
        key = building.build_key(sources, torch.__version__)
    entry = library_cache.find_entry(key, compiler)
    return ("cache", entry.path, "") if entry is not None else ("none", None, why)


def _decide() -> NativeStatus:
    requested = requested_isa()
    available = machine_isas()
    if requested is not None:
        check_available(requested, available)
    if requested == "torch":
        logger.info("CPU operators: torch's (HF_PAGED_CPU_ISA=torch).")
        return NativeStatus("none", None, "torch", available, "HF_PAGED_CPU_ISA=torch")
    loaded = _load_once()
    if loaded.path is None:
        logger.warning("Native CPU operators are not used, torch's are, which is slower: %s.", loaded.reason)
        return NativeStatus("none", None, "torch", available, loaded.reason)
    return _choose_level(loaded, requested)


def _choose_level(loaded: _Loaded, requested: str | None) -> NativeStatus:
    operators = torch.ops.hf_paged
    available = tuple(operators.available_isas())
    if requested is not None:
        check_available(requested, available)
        operators.set_isa(requested)
    isa = operators.isa()
    reason = "HF_PAGED_CPU_ISA" if requested is not None else ""
    logger.info("CPU operators: native, %s (%s, %s).", isa, loaded.source, loaded.path)
    return NativeStatus(loaded.source, loaded.path, isa, available, reason)


def _load_once() -> _Loaded:
    """Loading, and giving up, are remembered for the process; a wrong `HF_PAGED_CPU_ISA` can still be corrected."""
    global _loaded
    if _loaded is None:
        _loaded = _load_library()
    return _loaded


def _load_library() -> _Loaded:
    reason = _why_impossible()
    if reason is not None:
        return _Loaded("none", None, reason)
    reason = "no library was found"
    try:
        for source, entry in _candidates():
            try:
                _register(entry.path)
                return _Loaded(source, entry.path)
            except OSError as error:
                reason = f"the library does not load: {error.__cause__ or error}"
                if source != "built":
                    logger.warning("%s; building it again.", reason)
    except (BuildError, OSError) as error:
        reason = str(error)
    return _Loaded("none", None, reason)


def _register(path: Path) -> None:
    torch.ops.load_library(str(path))
    if not hasattr(torch.ops.hf_paged, "available_isas"):
        raise OSError(f"{path}: it has no operators of hf_paged")


def _why_impossible() -> str | None:
    reason = unsupported_platform()
    if reason is None and machine_isas() == ("torch",):
        reason = "they need a processor with AVX2, FMA and F16C"
    if reason is None and _torch_version() < OLDEST_TORCH:
        reason = f"they need torch {'.'.join(map(str, OLDEST_TORCH))} or newer, this is {torch.__version__}"
    return reason


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def _candidates() -> Iterator[tuple[Source, Entry]]:
    """Libraries to try, the best first; the next one is asked for only if one did not load."""
    sources = building.source_hash(building.SOURCES)
    packaged = library_cache.read_entry(_PACKAGED)
    if packaged is not None and packaged.sources == sources:
        yield "wheel", packaged
    elif (_PACKAGED / library_cache.LIBRARY_NAME).exists():
        logger.warning("The library in %s is damaged, or of other sources; building one.", _PACKAGED)

    installed = building.find_torch()
    build_key = building.build_key(sources, installed.version)
    try:
        compiler = building.find_compiler()
    except BuildError:
        entry = library_cache.find_entry(build_key, None)
        if entry is None:
            raise
        yield "cache", entry
        raise
    compiler_key = building.compiler_key(compiler)
    entry = library_cache.find_entry(build_key, compiler_key)
    if entry is not None:
        yield "cache", entry

    def build(path: Path) -> None:
        building.compile_library(path, compiler, installed, building.SOURCES)

    distrusted = entry.sha256 if entry is not None else ""
    entry, was_built = library_cache.obtain_entry(build_key, compiler_key, sources, build, distrusted)
    yield ("built" if was_built else "cache"), entry


def _forget_lock() -> None:
    """In a forked child, a lock that another thread of the parent held would never be released."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
