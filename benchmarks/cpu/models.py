"""The model in the formats of the peers, converted once and kept beside their environments."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from .environments import PeerUnavailableError

WORKERS = Path(__file__).parent / "workers"
TIMEOUT_SECONDS = 900


class Format(NamedTuple):
    """A format.

    Args:
        script (`str`):
            What converts: `python SCRIPT MODEL TARGET`.
        environment (`str`, *optional*):
            Where it runs; by default in the project's own environment.
        suffix (`str`):
            Ending of the target's name.
    """

    script: str
    environment: str | None
    suffix: str


FORMATS = {
    "openvino": Format("export_openvino.py", "openvino", "-openvino"),
    "gguf": Format("export_gguf.py", None, "-bf16.gguf"),
}


def convert_model(
    name: str, model: Path, cache: Path, environment_of: Callable[[str], Path], log: Callable[[str], None]
) -> Path:
    """Returns the model in a format; converts it at the first call.

    Args:
        name (`str`):
            Key of `FORMATS`.
        model (`Path`):
            A Transformers folder.
        cache (`Path`):
            Folder of all converted models.
        environment_of (`Callable[[str], Path]`):
            Makes an environment.
        log (`Callable[[str], None]`):
            Told what takes long.

    Raises:
        PeerUnavailableError: If it cannot be converted.
    """
    wanted = FORMATS[name]
    # Another model may lie in a folder of the same name.
    which = hashlib.sha256(f"{model.resolve()} {(model / 'config.json').stat().st_mtime_ns}".encode()).hexdigest()[:8]
    target = cache / "models" / f"{model.name}-{which}{wanted.suffix}"
    mark = target.with_name(target.name + ".done")
    python = str(environment_of(wanted.environment) / "bin" / "python") if wanted.environment else sys.executable
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock")):
        if not mark.exists():
            log(f"converting {model.name} into {target} (once)")
            _run([python, str(WORKERS / wanted.script), str(model), str(target)])
            mark.touch()
    return target


def _run(command: list[str]) -> None:
    script = Path(command[1]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise PeerUnavailableError(f"{script} took longer than {TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise PeerUnavailableError(f"{script} failed: {reason[:300]}")
