"""Compiles the native library: every `csrc/*.cpp` by the flags of its suffix, in parallel, into one shared object."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...errors import HfPagedError

UNFINISHED_PREFIX = "build-"  # of folders in which a library is being built, beside where it will be
SOURCES = Path(__file__).parent / "csrc"
# torch's stable ABI as of 2.10: the library then works with every later torch, and with every Python.
_FLAGS = (
    *("-O3", "-std=c++17", "-march=x86-64", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
# Only these files may use more than plain x86-64 has; each is called only where the processor has it. Of an inline
# function that several files share, the linker keeps the copy of the file that is named first: so the order here, each
# level running whatever the levels before it need, is what keeps an instruction from where it does not exist.
_FLAGS_OF_SUFFIX = {
    "": (),
    "_avx2.cpp": _AVX2,
    "_avx512.cpp": _AVX512,
    "_avx512bf16.cpp": (*_AVX512, "-mavx512bf16"),
    "_avx512vnni.cpp": (*_AVX512, "-mavx512vnni"),
    "_amx.cpp": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
}
_FALLBACK_COMPILERS = ("c++", "g++", "clang++")
_FILE_TIMEOUT = 900.0  # seconds for one file, on a machine that swaps
_ERROR_LINES = 6
_ERROR = "error|undefined reference|No space left"
_NEEDED_SPACE = 16 * 2**20  # bytes; all objects and the library take less


class BuildError(HfPagedError, RuntimeError):
    """The native library cannot be built here; `library.load` turns it into the reason why torch is used."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Args:
        command (`tuple[str, ...]`):
            The program, and words that come before every other argument.
        identity (`str`):
            Changes when the program does.
    """

    command: tuple[str, ...]
    identity: str


@dataclasses.dataclass(frozen=True)
class Torch:
    """The installed torch, found without importing it.

    Args:
        version (`str`):
            Such as `"2.13.0+cpu"`.
        folder (`Path`):
            The package's folder, with `include/` and `lib/`.
    """

    version: str
    folder: Path


def find_torch() -> Torch:
    """Returns the torch that the library is compiled and linked against.

    Raises:
        BuildError: If there is none, or it has no headers.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
        raise BuildError(f"this torch comes without the headers of its stable interface ({folder / 'include'})")
    return Torch(importlib.metadata.version("torch"), folder)


def find_compiler() -> Compiler:
    """Returns the compiler that `CXX` names, else the first of c++, g++ and clang++.

    Raises:
        BuildError: If there is none.
    """
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX={os.environ['CXX']!r} is no command: {error}") from error
    for words in [named] if named else [[name] for name in _FALLBACK_COMPILERS]:
        if shutil.which(words[0]):
            return Compiler(tuple(words), _identity(words))
    if named:
        raise BuildError(f"CXX names {named[0]!r}, which is no program")
    raise BuildError(f"there is no C++ compiler (none of {', '.join(_FALLBACK_COMPILERS)}; CXX may name another)")


def source_hash(sources: Path) -> str:
    """Returns a hash of the sources and of how they are compiled.

    Args:
        sources (`Path`):
            The folder of C++ files.
    """
    found = hashlib.sha256(json.dumps([_FLAGS, sorted(_FLAGS_OF_SUFFIX.items())]).encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def build_key(sources_hash: str, torch_version: str) -> str:
    """Returns what a built library belongs to, but for the compiler.

    Args:
        sources_hash (`str`):
            From `source_hash`.
        torch_version (`str`):
            Such as `"2.13.0+cpu"`.
    """
    return _short_hash(f"{sources_hash} {torch_version} {platform.machine()} {platform.libc_ver()}", 20)


def compiler_key(compiler: Compiler) -> str:
    """Returns a short hash of which compiler it is.

    Args:
        compiler (`Compiler`):
            From `find_compiler`.
    """
    return _short_hash(compiler.identity, 10)


def compile_library(output: Path, compiler: Compiler, torch: Torch, sources: Path) -> None:
    """Builds the library. `output` appears complete or not at all.

    Args:
        output (`Path`):
            The shared object to make, in an existing folder.
        compiler (`Compiler`):
            From `find_compiler`.
        torch (`Torch`):
            From `find_torch`.
        sources (`Path`):
            The folder of C++ files.

    Raises:
        BuildError: If the compiler fails; with its first errors.
        OSError: If the folder cannot be written, or is full.
    """
    try:
        _compile(output, compiler, torch, sources)
    except BuildError as error:
        free = shutil.disk_usage(output.parent).free
        if free < _NEEDED_SPACE:
            raise OSError(errno.ENOSPC, f"only {free / 2**20:.1f} MiB are free: {error}") from error
        raise


def _compile(output: Path, compiler: Compiler, torch: Torch, sources: Path) -> None:
    files = sorted(sources.glob("*.cpp"), key=lambda path: (_level(path), path.name))
    with tempfile.TemporaryDirectory(prefix=UNFINISHED_PREFIX, dir=output.parent) as name:
        work = Path(name)
        # Relative names: no path of this machine ends up in the library's messages.
        include = torch.folder / "include"
        compile_one = [*compiler.command, "-isystem", str(include), f"-ffile-prefix-map={include}=torch"]
        commands = [
            [*compile_one, *flags_of(path.name), "-c", path.name, "-o", str(work / f"{path.stem}.o")] for path in files
        ]
        _run_all(commands, sources)
        library = work / output.name
        objects = [str(work / f"{path.stem}.o") for path in files]
        libraries = [f"-L{torch.folder / 'lib'}", "-ltorch_cpu"]
        _run([*compiler.command, "-shared", "-Wl,--no-undefined", *objects, "-o", str(library), *libraries], sources)
        if not library.exists():
            raise BuildError(f"{compiler.command[0]} ended without an error, but made no library")
        _flush(library)
        os.replace(library, output)


def flags_of(name: str) -> list[str]:
    """Returns the compiler's flags for a source file.

    Args:
        name (`str`):
            Its name, whose suffix tells the instruction set: `"norm_avx2.cpp"`; plain x86-64 without one.
    """
    return [*_FLAGS, *_FLAGS_OF_SUFFIX[level_of(name)]]


def level_of(name: str) -> str:
    """Returns the suffix of a source file that tells its instruction set, such as `"_avx2.cpp"`, or `""`.

    Args:
        name (`str`):
            The file's name.
    """
    return next((suffix for suffix in _FLAGS_OF_SUFFIX if suffix and name.endswith(suffix)), "")


def _level(path: Path) -> int:
    return list(_FLAGS_OF_SUFFIX).index(level_of(path.name))


def _run_all(commands: Sequence[list[str]], folder: Path) -> None:
    """Runs commands on all cores; the first failure keeps the others from starting.

    From the last: kernels unroll widely and take longest; started first, no core waits for one of them alone.
    """
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=_num_cores(), thread_name_prefix="hf_paged-compile")
    try:
        running = [pool.submit(_run, command, folder) for command in reversed(commands)]
        for done in concurrent.futures.as_completed(running):
            done.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(command: list[str], folder: Path) -> None:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_FILE_TIMEOUT,
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} was still busy after {_FILE_TIMEOUT:.0f} s") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed (exit code {done.returncode}){_errors_of(done.stdout)}")


def _errors_of(text: str) -> str:
    """The lines that say what is wrong: the first that name an error, else the last ones."""
    lines = ["".join(filter(str.isprintable, line)) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(_ERROR, line, re.IGNORECASE)][:_ERROR_LINES]
    chosen = errors or lines[-_ERROR_LINES:]
    return "".join(f"\n    {line[:300]}" for line in chosen) if chosen else ", without a word"


def _flush(path: Path) -> None:
    """A machine that stops right after must not find a file of zeros under the final name."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _identity(words: Sequence[str]) -> str:
    """Names, sizes and times of the programs: as telling as `--version`, and free of a process at every start.

    Of a name, every program on the path counts: the first may be a compiler cache in front of the second.
    """
    parts = []
    for word in words:
        folders = [None] if os.path.dirname(word) else os.get_exec_path()
        programs = {program for folder in folders if (program := shutil.which(word, path=folder))}
        parts += [word] if not programs else sorted(map(_state_of, programs))
    return " ".join(parts)


def _state_of(program: str) -> str:
    found = os.stat(program)
    return f"{os.path.realpath(program)} {found.st_size} {found.st_mtime_ns}"


def _short_hash(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
