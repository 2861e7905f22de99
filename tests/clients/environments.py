"""Clients of the server, each in an environment of its own below `build/clients`; made once."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

from benchmarks.cpu.environments import Environment, make_environment

CLIENTS = Path(__file__).parents[2] / "build" / "clients"
ENVIRONMENTS = {
    "openai-2": Environment(("openai==2.54.0",)),
    "openai-3": Environment(("openai==3.57.0",)),
    "langchain": Environment(("langchain-openai==1.7.4",)),
    "instructor": Environment(("instructor==1.17.0",)),
    "anthropic": Environment(("anthropic==2.14.0",)),
    "lm-eval": Environment(("lm-eval[api]==0.4.13",)),
    "schemathesis": Environment(("schemathesis==4.32.5",)),
}
NODE_PACKAGES = {"openai": "7.59.0"}


def python_of(name: str) -> Path:
    """The interpreter of a client's environment."""
    return make_environment(name, CLIENTS, print, ENVIRONMENTS[name]) / "bin" / "python"


def node_modules() -> Path:
    """The folder of JavaScript clients, with their `node_modules`."""
    folder = CLIENTS / "node"
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "package.json"
    wanted = json.dumps({"private": True, "dependencies": NODE_PACKAGES})
    with FileLock(CLIENTS / "node.lock"):
        if not (package.exists() and package.read_text() == wanted and (folder / "installed").exists()):
            shutil.rmtree(folder / "node_modules", ignore_errors=True)
            package.write_text(wanted)
            command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error"]
            subprocess.run(command, cwd=folder, check=True, timeout=300)
            (folder / "installed").touch()
    return folder
