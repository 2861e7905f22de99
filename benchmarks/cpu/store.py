"""A run on disk: what was measured so far, so that an interrupted run can be continued.

run.json             settings, when it began, whether it finished
workloads.json       the token ids of all prompts
reference.json       first tokens in float32
round-1/machine.json bandwidth and peaks measured just before the round
round-1/NAME.json    what a peer did, written when it is done; NAME.log, what it printed
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RunStore:
    """The folder of one run.

    Args:
        folder (`Path`):
            Where the run is, or will be; a finished run and one with other settings are moved to `previous`.
        settings (`dict[str, Any]`):
            What must be the same for an interrupted run to be continued.
        fresh (`bool`, defaults to `False`):
            Begin anew even if the run there could be continued.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], fresh: bool = False):
        self.folder = folder
        run = read_json(folder / "run.json")
        self.resumed = run is not None and not run["finished"] and run["settings"] == settings and not fresh
        if run is None or not self.resumed:
            if folder.exists():
                _move_away(folder)
            run = {"settings": settings, "begun": time.strftime("%Y-%m-%d %H:%M:%S"), "finished": False}
            write_json(folder / "run.json", run)
        self.run: dict[str, Any] = run

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the content of a file of the run; makes it if it is not there.

        Args:
            name (`str`):
                Path below the run's folder.
            make (`Callable[[], dict[str, Any]]`):
                Returns the content.
        """
        found = read_json(self.folder / name)
        if found is None:
            found = make()
            write_json(self.folder / name, found)
        return found

    def result(self, number: int, peer: str) -> dict[str, Any] | None:
        """Returns what a peer did in a round, if it is known.

        Args:
            number (`int`):
                The round, from 1.
            peer (`str`):
                The peer's name.
        """
        return read_json(self.folder / f"round-{number}" / f"{peer}.json")

    def put_result(self, number: int, peer: str, result: dict[str, Any]) -> None:
        """Keeps what a peer did in a round.

        Args:
            number (`int`):
                The round, from 1.
            peer (`str`):
                The peer's name.
            result (`dict[str, Any]`):
                What it did.
        """
        write_json(self.folder / f"round-{number}" / f"{peer}.json", result)

    def finish(self) -> None:
        """Notes that nothing is left to do: the next run begins anew."""
        self.run["finished"] = True
        write_json(self.folder / "run.json", self.run)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a file, or `None` if there is no such file.

    Args:
        path (`Path`):
            The file.
    """
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object; whoever reads the file sees all of it or nothing.

    Args:
        path (`Path`):
            The file.
        content (`dict[str, Any]`):
            The object.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _move_away(folder: Path) -> None:
    """Renames an old run to the first free name."""
    number = 1
    while (target := folder.with_name(f"{folder.name}-previous-{number}")).exists():
        number += 1
    os.rename(folder, target)
