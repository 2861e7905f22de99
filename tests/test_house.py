"""The house around the code: what the repository must not mention, and what its pages promise."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_paged
from hf_paged import PagedConfig

ROOT = Path(__file__).parents[1]
MAX_LINES = 600
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
# Each pattern is spelled so that it does not match its own line.
UNWANTED = {
    "a path of somebody's machine": r"(?<![\w.~-])/(root|work|tmp)\b",
    "a folder beside the repository": r"\.\./[s]hared",
    "a planning page": r"\b(DESIGN|FACTS|CASES|TRANSFORMERS|SERVING)[.]md\b",
    "a case id": r"\b(DT|HF|ME|MF|PC|QT|SA|SC|ST|SV|TP)-[0-9]{2}\b",
    "an internal issue": r"(?i)\bissues?[ ]#?[0-9]+",
    "how the work was organized": r"(?i)\b(this|previous|helper)[ ]session\b|\bco-?[f]ounder\b|\bthe[ ]brief\b",
}


def _tracked() -> list[Path]:
    """The files that git knows or would add; without git, all that are not hidden."""
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        paths = [ROOT / name for name in listed]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not any(p.startswith(".") for p in path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("what", UNWANTED)
def test_no_file_mentions(what):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _tracked()
        for number, line in enumerate(_text(path).splitlines(), 1)
        if re.search(UNWANTED[what], line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a path of somebody's machine", "see " + "/".join(["", "root", "x"])),
        ("a folder beside the repository", "/".join(["..", "shared", "x"])),
        ("a planning page", "FACTS" + ".md"),
        ("a case id", "-".join(["PC", "01"])),
        ("an internal issue", " ".join(["as", "issue", "3", "says"])),
        ("how the work was organized", " ".join(["in", "this", "session"])),
    ],
)
def test_what_must_not_be_mentioned_would_be_found(what, text):
    assert re.search(UNWANTED[what], text)


def test_no_file_of_the_package_is_too_long_to_read():
    lengths = {path.relative_to(ROOT): len(_text(path).splitlines()) for path in (ROOT / "hf_paged").rglob("*.py")}
    too_long = {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not too_long, f"split these at a seam (at most {MAX_LINES} lines): {too_long}"


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == hf_paged.__version__
    assert re.search(rf"^## \[{re.escape(hf_paged.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_importing_the_package_loads_neither_torch_nor_transformers():
    check = "import sys, hf_paged; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exported_name_exists():
    for name in hf_paged.__all__:
        assert getattr(hf_paged, name) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_make_targets_that_a_page_names_exist(page):
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets, f"{page.name} names {sorted(named - targets)}; the Makefile has {sorted(targets)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_compiles_and_imports_only_what_is_exported(page):
    for block in _code_blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_paged":
                assert {alias.name for alias in node.names} <= set(hf_paged.__all__)


def test_the_files_that_the_architecture_page_names_exist():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    known = [path.relative_to(ROOT).as_posix() for path in _tracked()]
    for name in set(re.findall(r"`([\w/.]+\.py)`", page)):
        assert any(f"/{path}".endswith(f"/{name}") for path in known), f"there is no {name}"


def test_the_readme_lists_every_setting_with_its_default():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", readme, re.MULTILINE))
    defaults = {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(PagedConfig)}
    assert rows == defaults


def test_every_example_says_what_it_shows():
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert examples
    for example in examples:
        assert ast.get_docstring(ast.parse(_text(example))), f"{example.name} has no docstring"


def test_the_continuous_integration_script_can_be_run():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "it is executable"
    targets = re.findall(r"^make .*", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert targets and targets[0].split()[-4:] == ["style", "check", "test", "test-all"]
