"""The versions of Triton that kernels are compiled with, each in a folder of its own under `build/gates`.

A folder holds nothing but Triton and stands first on the path of the process that compiles; everything else (torch,
which the package imports) comes from the environment that runs the gates.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gates"
# The oldest that the package supports, and the newest there is when the folder is made.
VERSIONS = {"oldest": "triton==3.6.*", "newest": "triton>=3.6,<4"}
_MARK = "made-of.txt"


class TritonUnavailableError(Exception):
    """A version of Triton cannot be installed; the message says why."""


@dataclasses.dataclass(frozen=True)
class TritonInstall:
    """An installed Triton.

    Args:
        folder (`Path`):
            Where it is; first on the path of who uses it.
        version (`str`):
            Its major and minor number.
        full_version (`str`):
            Its whole version.
    """

    folder: Path
    version: str
    full_version: str

    @property
    def tools(self) -> Path:
        """Returns the folder of NVIDIA's tools that come with it."""
        return self.folder / "triton" / "backends" / "nvidia" / "bin"

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of a process that uses it."""
        paths = [str(self.folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        dropped = ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def install(name: str, log: Callable[[str], None]) -> TritonInstall:
    """Returns a version of Triton; installs it at the first call.

    Args:
        name (`str`):
            Key of `VERSIONS`.
        log (`Callable[[str], None]`):
            Told what takes long.

    Raises:
        TritonUnavailableError: If it cannot be installed.
    """
    wanted = VERSIONS[name]
    folder = FOLDER / f"triton-{name}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    made_of = f"{wanted}\nPython {sys.version}\n"
    mark = folder / _MARK
    # Of two runs that start together, one makes it and the other waits.
    with FileLock(FOLDER / f"triton-{name}.lock"):
        if not (mark.exists() and mark.read_text(encoding="utf-8") == made_of):
            log(f"installing {wanted} in {folder} (once; remove the folder for a newer one)")
            shutil.rmtree(folder, ignore_errors=True)
            _pip_install(wanted, folder)
            mark.write_text(made_of, encoding="utf-8")
    full = next(iter(importlib.metadata.distributions(name="triton", path=[str(folder)]))).version
    return TritonInstall(folder, ".".join(full.split(".")[:2]), full)


def _pip_install(wanted: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", str(folder), wanted], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise TritonUnavailableError(f"`pip install {wanted}` failed: {reason}")
