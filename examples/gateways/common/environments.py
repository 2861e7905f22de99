"""An environment of its own for each gateway, in the project's cache folder; made once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from filelock import FileLock

from benchmarks.cpu.environments import MARK, Environment, PeerUnavailableError, make_environment, run
from hf_paged.cache_folder import cache_folder


def gateways_folder() -> Path:
    """Returns the folder of all environments; `HF_PAGED_CACHE` moves it."""
    return cache_folder() / "gateways"


def python_environment(name: str, requirements: tuple[str, ...], log: Callable[[str], None]) -> Path:
    """Returns the folder with the programs of a virtual environment; makes it at the first call.

    Args:
        name (`str`):
            Of the gateway.
        requirements (`tuple[str, ...]`):
            Words for pip.
        log (`Callable[[str], None]`):
            Told what takes long.

    Raises:
        PeerUnavailableError: If something cannot be installed.
    """
    return make_environment(name, gateways_folder(), log, Environment(requirements)) / "bin"


def node_environment(
    name: str,
    packages: dict[str, str],
    log: Callable[[str], None],
    finish: Callable[[Path, TextIO], None],
) -> Path:
    """Returns a folder with `node_modules`; makes it at the first call. No package's install script is run.

    Args:
        name (`str`):
            Of the gateway.
        packages (`dict[str, str]`):
            Versions by name.
        log (`Callable[[str], None]`):
            Told what takes long.
        finish (`Callable[[Path, TextIO], None]`):
            Called with the folder and a file for output, for what has to be built.

    Raises:
        PeerUnavailableError: If something cannot be installed.
    """
    folder = gateways_folder() / name
    wanted = json.dumps({"private": True, "dependencies": packages})
    if shutil.which("npm") is None:
        raise PeerUnavailableError("npm is not installed; Debian's package npm brings it")
    gateways_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        mark = folder / MARK
        if not (mark.exists() and mark.read_text(encoding="utf-8") == wanted):
            log(f"installing {', '.join(packages)} in {folder} (once, takes some minutes)")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / "package.json").write_text(wanted, encoding="utf-8")
            with folder.with_suffix(".log").open("w", encoding="utf-8") as output:
                npm(folder, output, "install", "--ignore-scripts")
                finish(folder, output)
            mark.write_text(wanted, encoding="utf-8")
    return folder


def npm(folder: Path, output: TextIO, *words: str) -> None:
    """Runs npm in a folder, with the Node that is installed there, if one is.

    Args:
        folder (`Path`):
            Where `package.json` is.
        output (`TextIO`):
            Where its words go.
        words (`str`):
            Of the command.

    Raises:
        PeerUnavailableError: If it fails.
    """
    quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
    path = f"{folder / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    run(output, "env", f"PATH={path}", "npm", "--prefix", str(folder), *words, *quiet)
