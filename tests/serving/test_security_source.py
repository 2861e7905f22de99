"""The package's source has nothing that runs what it reads: no pickles, no `eval`, no sockets but the server's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_paged

PACKAGE = Path(hf_paged.__file__).parent
# Modules that make objects, code or connections of what comes in: CVE-2025-32444, CVE-2025-30165, CVE-2024-50050 and
# others of their kind are a socket of ZeroMQ behind which data are unpickled.
MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "zmq", "pty",
    "socketserver", "xmlrpc", "telnetlib", "code", "codeop", "imp", "msgpack_numpy",
}  # fmt: skip
# With arguments of any kind.
CALLS = {
    "eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "multiprocessing.connection.Listener", "multiprocessing.Manager",
    "torch.multiprocessing.Manager", "numpy.fromregex", "pandas.read_pickle", "runpy.run_path", "runpy.run_module",
    "torch.distributed.recv_object_list", "torch.distributed.rpc.init_rpc", "torch.package.PackageImporter",
    "torch.hub.load", "jinja2.Environment", "jinja2.Template", "yaml.unsafe_load", "yaml.full_load",
    "importlib.machinery.SourceFileLoader",
}  # fmt: skip
# Only with an argument that makes them harmless.
SAFE_ONLY_WITH = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "yaml.load": ("Loader", "SafeLoader"),
    "yaml.load_all": ("Loader", "SafeLoader"),
}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a source that run what they read, and what they use."""
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            yield from ((node.lineno, module) for module in modules if module.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            name = _name(node.func, names)
            if _is_dangerous(name, node):
                yield node.lineno, name


def _imported(tree: ast.Module) -> dict[str, str]:
    """What names stand for: `np` -> `numpy`, `load` -> `torch.load`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _name(function: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of what is called, as far as it can be read."""
    parts = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    return ".".join([names.get(function.id, function.id), *reversed(parts)])


def _is_dangerous(name: str, call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in ("compile", "builtins.compile", "builtins.eval", "builtins.exec", *CALLS):
        return True
    if name in SAFE_ONLY_WITH:
        argument, harmless = SAFE_ONLY_WITH[name]
        value = given.get(argument)
        found = value.value if isinstance(value, ast.Constant) else ast.unparse(value or ast.Constant(None))
        return found != harmless and not str(found).endswith(f".{harmless}")
    if name == "__import__" or name.endswith("import_module"):
        return False  # names of our own; which modules there may be is decided above
    shell = given.get("shell")
    return name.startswith("subprocess.") and not (
        shell is None or (isinstance(shell, ast.Constant) and not shell.value)
    )


def test_nothing_in_the_package_runs_what_it_reads_cve_2025_32444():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {what}" for path in files for line, what in findings(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import zmq.asyncio",
        "def f():\n    import cloudpickle as c",
        "eval('1')",
        "exec(x)",
        "import builtins\nbuiltins.eval(x)",
        "from builtins import eval as e\ne(x)",
        "compile(x, 'f', 'exec')",
        "import torch\ntorch.load(p)",
        "import torch as t\nt.load(p, weights_only=False)",
        "from torch import load\nload(p)",
        "import numpy as np\nnp.load(p, allow_pickle=True)",
        "import yaml\nyaml.load(x, Loader=yaml.Loader)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "import subprocess as s\ns.Popen(x, shell=flag)",
        "import os\nos.system(x)",
        "from jinja2 import Template\nTemplate(x)",
    ],
)
def test_what_runs_what_it_reads_would_be_found(source):
    assert list(findings(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile(x)",
        "import torch\ntorch.load(p, weights_only=True)",
        "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)",
        "import numpy as np\nnp.load(p, allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls'])",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment as E\nE()",
        "evaluate(x)",
    ],
)
def test_what_does_not_is_left_alone(source):
    assert not list(findings(source))
