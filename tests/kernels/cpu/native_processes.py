"""Fresh processes that load a native library made of few sources, by a compiler that only pretends."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hf_paged.kernels.cpu import building, isa, library
from hf_paged.kernels.cpu.library import NativeStatus

# What tells and chooses the instruction set: a library that is complete and takes few seconds.
STAND_IN = ("dtype.h", "isa.cpp", "isa.h", "isa_probe.h", "isa_probe_avx512bf16.cpp", "op.h", "op_isa.cpp", "team.h")
VARIABLES = ("HF_PAGED_CPU_ISA", "HF_PAGED_CACHE", "XDG_CACHE_HOME", "CXX", "CC", "TMPDIR")
# Logs every call; makes empty objects, and as the library a copy of one that was made before.
FAKE_COMPILER = """#!/bin/sh
echo " $* " >> {log}
previous=
for word; do [ "$previous" = -o ] && output=$word; previous=$word; done
case " $* " in
    *" -shared "*) sleep ${{FAKE_SECONDS:-0}}; cp {library} "$output" ;;
    *) : > "$output" ;;
esac
"""


def write_stand_in_sources(folder: Path) -> Path:
    """Copies the few sources into a folder and returns it."""
    folder.mkdir()
    for name in STAND_IN:
        shutil.copy(building.SOURCES / name, folder)
    return folder


@dataclasses.dataclass
class Place:
    """Where one test's processes live: their cache, their home, their compiler."""

    folder: Path
    sources: Path
    library: Path

    def __post_init__(self):
        self.cache = self.folder / "cache"
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.log = self.folder / "compiler.log"
        self.compiler = self.write_compiler("fake-c++")

    def write_compiler(self, name: str, library: Path | None = None) -> Path:
        """Writes a program that pretends to compile, and to take FAKE_SECONDS for the library."""
        path = self.folder / name
        path.write_text(FAKE_COMPILER.format(log=self.log, library=library or self.library))
        path.chmod(0o755)
        return path

    @property
    def num_builds(self) -> int:
        """How often a library was linked."""
        return self.log.read_text().count(" -shared ") if self.log.exists() else 0

    def built_library(self) -> Path:
        """The only library in the cache."""
        (path,) = self.cache.glob("native/*/libhf_paged_cpu.so")
        return path

    def environment(self, **changes: str) -> dict[str, str]:
        """Variables of a process; an empty value leaves the variable out."""
        variables = {"HF_PAGED_CACHE": str(self.cache), "CXX": str(self.compiler), "TMPDIR": str(self.temporary)}
        return {name: value for name, value in (variables | changes).items() if value}

    def start(self, ask: Callable[..., Any] | None = None, *, patches: Sequence[str] = (), **changes: str) -> Running:
        """Starts a process that loads the library, and then answers `ask()`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, self.environment(**changes), self.sources, tuple(patches), ask)
        process = context.Process(target=_child, args=arguments)
        process.start()
        sender.close()
        return Running(process, receiver)

    def load(self, ask: Callable[..., Any] | None = None, *, patches: Sequence[str] = (), **changes: str) -> Loaded:
        """Starts such a process and waits for what it says."""
        return self.start(ask, patches=patches, **changes).result()


@dataclasses.dataclass
class Loaded:
    """What a process found."""

    status: NativeStatus | None = None
    answer: Any = None
    error: Exception | None = None
    messages: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """What users see without asking for more."""
        return [text for level, text in self.messages if level == "WARNING"]


@dataclasses.dataclass
class Running:
    """A process that has not answered yet."""

    process: Any
    receiver: Any

    def result(self) -> Loaded:
        """Waits for the answer; a process that died of a signal fails the test."""
        try:
            loaded = self.receiver.recv()
        except EOFError:
            loaded = None
        self.process.join(60)
        code = self.process.exitcode
        assert loaded is not None and code == 0, f"exit code {code}" + (
            f" ({signal.Signals(-code).name})" if code and code < 0 else ""
        )
        return loaded

    def kill(self) -> None:
        """Ends it in the middle of what it does."""
        self.process.kill()
        self.process.join(60)


class _Messages(logging.Handler):
    def __init__(self, kept: list[tuple[str, str]]):
        super().__init__(logging.INFO)
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.levelname, record.getMessage()))


def _patch_cache(module: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Changes what a function says about places in the cache folder."""
    ask = getattr(module, name)

    def answer(path: Path) -> Any:
        return change(ask(path)) if str(path).startswith(os.environ["HF_PAGED_CACHE"]) else ask(path)

    return mock.patch.object(module, name, answer)


def _without_programs(found: os.statvfs_result) -> os.statvfs_result:
    return os.statvfs_result((*found[:8], found.f_flag | os.ST_NOEXEC, *found[9:]))


PATCHES = {
    "old torch": lambda: mock.patch.object(torch, "__version__", "2.9.1+cpu"),
    "no AVX2": lambda: mock.patch.object(isa, "_cpu_flags", lambda: {"sse2", "avx"}),
    "AVX2 only": lambda: mock.patch.object(isa, "_cpu_flags", lambda: {"avx2", "fma", "f16c"}),
    "all of AMX": lambda: mock.patch.object(isa, "_cpu_flags", lambda: set().union(*isa._CPU_FLAGS.values())),
    "ARM": lambda: mock.patch("platform.machine", return_value="aarch64"),
    "macOS": lambda: mock.patch.object(isa.sys, "platform", "darwin"),
    "no programs": lambda: mock.patch.dict(os.environ, {"PATH": ""}),
    "packaged": lambda: mock.patch.object(library, "_PACKAGED", Path(os.environ["HF_PAGED_CACHE"]).parent / "package"),
    "full cache": lambda: _patch_cache(shutil, "disk_usage", lambda found: found._replace(free=0)),
    "cache of no programs": lambda: _patch_cache(os, "statvfs", _without_programs),
    "no home": lambda: mock.patch("pathlib.Path.home", side_effect=RuntimeError("Could not determine home directory.")),
}


def _child(sender: Any, environment: dict[str, str], sources: Path, patches: Sequence[str], ask: Any) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    tempfile.tempdir = None  # read TMPDIR again
    building.SOURCES = sources
    loaded = Loaded()
    logger = logging.getLogger("hf_paged")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Messages(loaded.messages))
    for name in patches:
        PATCHES[name]().start()
    try:
        loaded.status = library.status()
        loaded.answer = ask() if ask is not None else None
    except Exception as error:
        loaded.error = error
    sender.send(loaded)
    sender.close()


def only_owner_writes(folder: Path) -> bool:
    """Whether nobody else could put a library there."""
    return not stat.S_IMODE(folder.stat().st_mode) & 0o022
