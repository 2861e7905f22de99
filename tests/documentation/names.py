"""What there is that a page can name: verbs and their flags, metrics, variables of the environment, extras."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

from tests.documentation.pages import ROOT, Page, shell_lines

# Flags of other programs that pages name alone, and whose they are.
OF_OTHERS = {
    "--health-check-endpoint": "vllm-router",
    "--health-check-interval-secs": "vllm-router",
    "--index-url": "pip",
    "--no-deps": "pip",
}
_FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")


@functools.cache
def flags_of_verbs() -> dict[str, frozenset[str]]:
    """Returns the options of each verb of `hf-paged`, those of vLLM's that are understood included."""
    from typer.main import get_command

    from hf_paged.cli.app import app
    from hf_paged.serving import command_line
    from hf_paged.tools.bench import serve_settings

    found = {"": _options_of(get_command(app))}
    for name, command in get_command(app).commands.items():
        found[name] = _options_of(command)
        for inner, subcommand in getattr(command, "commands", {}).items():
            found[f"{name} {inner}"] = _options_of(subcommand)
    server = _options_of_parser(command_line.make_parser())
    found["serve"] = server
    found["run-batch"] |= server
    found["bench serve"] = _options_of_parser(serve_settings.make_parser())
    found["transformers-serve"] |= _options_of_transformers_serve()
    return {verb: frozenset(flags) for verb, flags in found.items()}


def _options_of(command) -> set[str]:
    found = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return {*found, "-h", "--help"}


def _options_of_transformers_serve() -> set[str]:
    """Read in the source: importing it takes many seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None, "Transformers is installed"
    source = Path(spec.origin).parent / "cli" / "serve.py"
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == "Serve":
            init = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
            names = [argument.arg.replace("_", "-") for argument in (*init.args.args, *init.args.kwonlyargs)]
            return {f"--{no}{name}" for name in names for no in ("", "no-")}
    raise AssertionError(f"{source} has no class Serve any more")


def _options_of_parser(parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


@functools.cache
def known_flags() -> frozenset[str]:
    """Returns all flags that a page may name without a command: ours, and vLLM's that get an answer of their own."""
    from hf_paged.vllm_names import FORMER

    former = {"--" + name.replace("_", "-") for name in FORMER}
    return frozenset().union(*flags_of_verbs().values(), former, OF_OTHERS)


def commands_of(page: Page) -> list[tuple[str, str]]:
    """Returns the `hf-paged ...` commands of a page's blocks and prose, each with where it stands."""
    lines = [
        (line, block.place) for block in page.blocks if block.language == "bash" for line in shell_lines(block.text)
    ]
    lines += [(code, page.name) for code in page.inline_code]
    found = []
    for line, place in lines:
        for part in re.split(r"\||&&|;|\$\(|<\(", line):
            words = part.split()
            while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("$", "exec", "nohup", "time")):
                words.pop(0)
            if words and words[0].split("/")[-1] == "hf-paged":
                found.append((" ".join(words[1:]), place))
    return found


def mistakes_in_command(command: str) -> list[str]:
    """Returns what is wrong with a command, given without the word `hf-paged`: verbs and flags that do not exist."""
    words = [word for word in _split(command) if word not in ("&", "...")]
    verbs = flags_of_verbs()
    plain = [word for word in words if not word.startswith("-")]
    if not plain or (words[0].startswith("-") and plain[0] not in verbs):
        return [f"no verb has `{word}`" for word in words if word.startswith("--") and word not in known_flags()]
    if plain[0] == "VERB":
        return []
    alternatives = [""] if len(plain) < 2 else re.split(r"\\?\|", plain[1])
    verb = plain[0]
    if f"{verb} {alternatives[0]}" in verbs or verb == "bench":
        wrong = [f"there is no `hf-paged {verb} {name}`" for name in alternatives if f"{verb} {name}" not in verbs]
        if wrong and alternatives not in ([""], ["..."], ["NAME"]):
            return wrong
        verb = f"{verb} {alternatives[0]}" if not wrong else verb
    if verb not in verbs:
        return [f"there is no `hf-paged {verb}`; there are {sorted(name for name in verbs if name)}"]
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    allowed = verbs[verb] if verb != "bench" else known_flags()
    return [f"`hf-paged {verb}` has no flag `{flag}`" for flag in flags if flag not in allowed | verbs[""]]


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command, comments=True)
    except ValueError:  # a quote that ends in another part of the line
        return command.split()


def flags_named_alone(page: Page) -> set[str]:
    """Returns the flags that a page's prose names as code alone, but those of other programs in its own blocks."""
    foreign = [line for block in page.blocks for line in shell_lines(block.text) if "hf-paged" not in line]
    found = set()
    for code in page.inline_code:
        if code.startswith("-"):
            found |= {flag.replace("_", "-") for flag in _FLAG.findall(re.sub(r"'[^']*'|\"[^\"]*\"", "", code))}
    return found - set(_FLAG.findall(" ".join(foreign)))


@functools.cache
def metric_names() -> frozenset[str]:
    """Returns the names of all samples that `/metrics` has, and of the families they belong to."""
    from hf_paged import PagedConfig
    from hf_paged.generation.stats import EngineStats
    from hf_paged.serving.metrics import Metrics

    # An engine that has done nothing: the names are all there.
    plan = SimpleNamespace(max_model_len=2048, block_size=16, num_blocks=8, enable_prefix_caching=True)
    live = SimpleNamespace(block_manager=SimpleNamespace(num_blocks=8, num_blocks_held=0))
    engine = SimpleNamespace(plan=plan, config=PagedConfig(), live=live, stats=EngineStats)
    metrics = Metrics(SimpleNamespace(engine=engine, num_running=0, num_waiting=0), "tiny")
    metrics.http_answered("/health", 200, 0.001)
    text = metrics.render()[0].decode()
    samples = re.findall(r"^([\w:]+)[{ ]", text, re.MULTILINE)
    families = re.findall(r"^# TYPE ([\w:]+)", text, re.MULTILINE)
    return frozenset({*samples, *families})


@functools.cache
def variables() -> frozenset[str]:
    """Returns the variables of the environment that mean something to the package."""
    from hf_paged.serving.command_line import ENVIRONMENT_PREFIX
    from hf_paged.serving.settings import ServerSettings

    settings = {ENVIRONMENT_PREFIX + name.upper() for name in ServerSettings.__dataclass_fields__}
    sources = [*(ROOT / "hf_paged").rglob("*.py"), *(ROOT / "hf_paged").rglob("*.cpp"), ROOT / "hatch_build.py"]
    used = {name for path in sources for name in re.findall(r"\bHF_PAGED_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    return frozenset({*settings, *used})


def extras() -> set[str]:
    """Returns the extras that the package can be installed with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])
