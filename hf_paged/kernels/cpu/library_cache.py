"""Where built libraries are kept: checked before every use, written atomically, built once for all processes.

<cache folder>/native/
    build.lock                       held by the process that builds
    <build key>-<compiler key>/
        libhf_paged_cpu.so
        libhf_paged_cpu.json         its sha256, and the hash of its sources
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from ...cache_folder import cache_folder
from .building import UNFINISHED_PREFIX

logger = logging.getLogger(__name__)

LIBRARY_NAME = "libhf_paged_cpu.so"
_MANIFEST_NAME = "libhf_paged_cpu.json"
_LOCK_TIMEOUT = 1800.0  # seconds; a lock whose process died is free at once, so this is for a stuck file system
_WAITING_NOTE = 30.0  # seconds between two words of a process that waits
_KEPT = 8  # libraries of other versions
_DAMAGED = "The library in %s is damaged and not used."
_ELSEWHERE = (
    "The native CPU operators cannot be kept in the cache folder (%s): they are kept in %s. "
    "HF_PAGED_CACHE names another."
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A library that is complete and unchanged since it was written.

    Args:
        path (`Path`):
            The shared object.
        sha256 (`str`):
            Of its bytes.
        sources (`str`):
            Hash of the sources that it was built from.
    """

    path: Path
    sha256: str
    sources: str


def write_manifest(library: Path, sources: str) -> Path:
    """Writes the checksum of a library beside it, and returns the path of that file.

    Args:
        library (`Path`):
            The shared object.
        sources (`str`):
            Hash of the sources that it was built from.
    """
    manifest = library.parent / _MANIFEST_NAME
    unfinished = manifest.with_suffix(".unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump({"sha256": _sha256(library), "sources": sources}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, manifest)
    return manifest


def read_entry(folder: Path) -> Entry | None:
    """Returns the library in a folder, or `None` if there is none or it is not what was written.

    Args:
        folder (`Path`):
            Of the library and its manifest.
    """
    path = folder / LIBRARY_NAME
    try:
        manifest = json.loads((folder / _MANIFEST_NAME).read_text(encoding="utf-8"))
        entry = Entry(path, str(manifest["sha256"]), str(manifest["sources"]))
        return entry if _sha256(path) == entry.sha256 else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def find_entry(build_key: str, compiler_key: str | None) -> Entry | None:
    """Returns a library that some process built before, or `None`.

    Args:
        build_key (`str`):
            What it must have been built from.
        compiler_key (`str`, *optional*):
            The compiler it must come from; `None` takes any.
    """
    pattern = f"{build_key}-{compiler_key or '*'}"
    for folder in _folders():
        if _forbids_programs(folder) or (folder.name == _temporary_name() and not _is_ours(folder)):
            continue
        with contextlib.suppress(OSError):  # such as a name that is too long
            for place in sorted(folder.glob(pattern)):
                found = read_entry(place)
                if found is not None:
                    return found
                if (place / _MANIFEST_NAME).exists():  # which is written last
                    logger.warning(_DAMAGED, place)
    return None


def obtain_entry(
    build_key: str, compiler_key: str, sources: str, build: Callable[[Path], None], distrusted: str = ""
) -> tuple[Entry, bool]:
    """Returns a library and whether this process built it; of processes that start together, one builds.

    Args:
        build_key (`str`):
            What it is built from.
        compiler_key (`str`):
            Which compiler builds it.
        sources (`str`):
            Hash of the sources, for the manifest.
        build (`Callable[[Path], None]`):
            Writes the library to a path.
        distrusted (`str`, *optional*):
            A sha256 of which it is known that it does not load: that file is replaced.

    Raises:
        BuildError: From `build`.
        OSError: If no folder can be written; names each.
    """
    failures: list[str] = []
    for folder in _folders():
        try:
            with _lock_of(folder):
                if failures:
                    logger.warning(_ELSEWHERE, failures[0], folder)
                return _obtain_locked(folder / f"{build_key}-{compiler_key}", sources, build, distrusted)
        except NotImplementedError as error:  # a file system without locks
            failures.append(f"{folder}: {error}")
        except OSError as error:  # also a lock that is never free
            failures.append(f"{folder}: {error.strerror or error}")
    raise OSError(f"no folder can be written ({'; '.join(failures)}); HF_PAGED_CACHE may name one")


def _obtain_locked(place: Path, sources: str, build: Callable[[Path], None], distrusted: str) -> tuple[Entry, bool]:
    entry = read_entry(place)
    if entry is not None and entry.sha256 != distrusted:
        return entry, False
    if (place / LIBRARY_NAME).exists() and not (place / _MANIFEST_NAME).exists():
        logger.warning(_DAMAGED, place)
    shutil.rmtree(place, ignore_errors=True)
    for leftover in place.parent.glob(f"*/{UNFINISHED_PREFIX}*"):  # of a build that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    place.mkdir()
    library = place / LIBRARY_NAME
    start = time.monotonic()
    logger.warning("Building the native CPU operators, once; this takes half a minute, on a busy machine minutes ...")
    try:
        with _signs_of_life(start):
            build(library)
        write_manifest(library, sources)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    logger.info("Built %s in %.0f s.", library, time.monotonic() - start)
    _drop_old(place.parent)
    entry = read_entry(place)
    assert entry is not None, "what was just written under the lock is complete"
    return entry, True


@contextlib.contextmanager
def _signs_of_life(start: float) -> Iterator[None]:
    """Minutes without a word look like a process that hangs."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_WAITING_NOTE):
            logger.warning("Still building the native CPU operators (%.0f s so far) ...", time.monotonic() - start)

    thread = threading.Thread(target=tell, name="hf_paged-build-note", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _lock_of(folder: Path) -> contextlib.AbstractContextManager:
    _make(folder)
    lock = filelock.FileLock(folder / "build.lock", timeout=_WAITING_NOTE)
    start, patience = time.monotonic(), 0.0
    while True:
        try:
            return lock.acquire(timeout=patience)
        except filelock.Timeout:
            waited = time.monotonic() - start
            if waited > _LOCK_TIMEOUT:
                raise
            since = f" ({waited:.0f} s so far)" if patience else ""
            logger.warning("Another process is building the native CPU operators; waiting for it%s ...", since)
            patience = _WAITING_NOTE


def _folders() -> list[Path]:
    """The cache folder, and for a home that cannot be written a folder of this user's own among temporary files."""
    folders = []
    with contextlib.suppress(RuntimeError):  # no home folder
        folders.append(cache_folder() / "native")
    with contextlib.suppress(OSError):  # no folder for temporary files
        folders.append(Path(tempfile.gettempdir()) / _temporary_name())
    return folders


def _temporary_name() -> str:
    return f"hf_paged-native-{os.getuid()}"


def _make(folder: Path) -> None:
    if folder.name != _temporary_name():
        folder.mkdir(parents=True, exist_ok=True)
    else:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _is_ours(folder):
            raise OSError("belongs to somebody else, or others can write to it")
    if _forbids_programs(folder):
        raise OSError("lies on a file system that runs no programs (noexec)")


def _forbids_programs(folder: Path) -> bool:
    """Nor does such a file system map libraries: one that is built there would be built again by every process."""
    try:
        return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))
    except OSError:
        return False


def _is_ours(folder: Path) -> bool:
    """Whoever can write there could make us run their code."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _drop_old(folder: Path) -> None:
    """Keeps the newest libraries; one that still runs somewhere stays usable after its name is gone."""
    places = [path for path in folder.iterdir() if path.is_dir()]
    for place in sorted(places, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT:]:
        shutil.rmtree(place, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
