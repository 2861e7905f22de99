"""What `hf-paged bench serve` is told, in vLLM's words; the command line is made from it."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ...errors import ConfigurationError

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DATASETS = ("random", "packaged", "sharegpt", "custom")
# `--save-result` and `--plot` without a name.
NAME_BY_ITSELF = Path("-")
KEY_VARIABLES = ("OPENAI_API_KEY", "HF_PAGED_API_KEY")


def _flag(default: Any, group: str, read: Callable[[str], Any] | None = None, **options: Any) -> Any:
    """A field that is a flag of the command line; `read` makes its value of a word."""
    factory = {"default_factory": lambda: dict(default)} if isinstance(default, dict) else {"default": default}
    words = ({"type": read} if read else {}) | options
    return dataclasses.field(metadata={"group": group, "words": words}, **factory)


def _pairs(separator: str) -> Callable[[str], tuple[str, str]]:
    def read(word: str) -> tuple[str, str]:
        name, found, value = word.partition(separator)
        if not found or not name:
            raise argparse.ArgumentTypeError(f"{word!r} is not of the form NAME{separator}VALUE")
        return name, value

    return read


def _objective(word: str) -> tuple[str, float]:
    name, value = _pairs(":")(word)
    if name not in GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GOODPUT_METRICS)}")
    return name, float(value)


def _metrics(word: str) -> tuple[str, ...]:
    names = tuple(filter(None, word.split(",")))
    if not names or set(names) - set(METRICS):
        raise argparse.ArgumentTypeError(f"{word!r}: allowed are {', '.join(METRICS)}")
    return names


def _percentiles(word: str) -> tuple[float, ...]:
    values = tuple(map(float, word.split(",")))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{word!r}: percentiles lie between 0 and 100")
    return values


def _json_object(word: str) -> dict[str, Any]:
    value = json.loads(word)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{word!r} is not a JSON object")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeBenchSettings:
    """Which server, what is sent, when, and what is written down. Every field is a flag of `hf-paged bench serve`.

    Args:
        base_url (`str`, *optional*):
            URL of the server, instead of --host and --port.
        host (`str`, defaults to `"127.0.0.1"`):
            Its host.
        port (`int`, defaults to `8000`):
            Its port.
        backend (`str`, defaults to `"openai"`):
            Only decides the endpoint, if none is named.
        endpoint (`str`, *optional*):
            /v1/completions (the default) or /v1/chat/completions.
        model (`str`, *optional*):
            The model's name; by default the first that the server lists.
        served_model_name (`str`, *optional*):
            Its name in requests, if it is not that of --model.
        header (`tuple[tuple[str, str], ...]`, defaults to `()`):
            Further headers, NAME=VALUE.
        api_key (`str`, *optional*):
            The server's key; by default OPENAI_API_KEY or HF_PAGED_API_KEY of the environment.
        insecure (`bool`, defaults to `False`):
            Do not verify the server's certificate.
        ready_check_timeout_sec (`float`, defaults to `60.0`):
            So long the server may take until it answers a first request.
        request_timeout (`float`, defaults to `3600.0`):
            A request that takes longer failed.
        dataset_name (`str`, defaults to `"random"`):
            Where prompts come from.
        dataset_path (`Path`, *optional*):
            sharegpt: a JSON file of conversations; custom: JSON lines with `prompt`.
        num_prompts (`int`, defaults to `1000`):
            How many requests.
        input_len (`int`, defaults to `1024`):
            random: tokens of a prompt.
        output_len (`int`, *optional*):
            Tokens of an answer; by default 128, or what the file says.
        random_range_ratio (`float`, defaults to `0.0`):
            random: lengths differ by this share up and down, below 1.
        random_prefix_len (`int`, defaults to `0`):
            random: so many tokens are the same in all prompts.
        tokenizer (`str`, *optional*):
            random: the tokenizer that counts; by default the model's.
        ignore_eos (`bool`, defaults to `False`):
            Answers do not end before their length.
        num_warmups (`int`, defaults to `0`):
            Requests beforehand that do not count.
        seed (`int`, defaults to `0`):
            Fixes prompts, lengths and arrivals.
        request_rate (`float`, defaults to infinite):
            Arrivals per second on average; inf: all at once.
        burstiness (`float`, defaults to `1.0`):
            Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts, inf evenly.
        max_concurrency (`int`, *optional*):
            At most so many requests at a time.
        temperature (`float`, defaults to `0.0`):
            0 is greedy.
        top_p (`float`, *optional*):
            See the server.
        top_k (`int`, *optional*):
            See the server.
        min_p (`float`, *optional*):
            See the server.
        frequency_penalty (`float`, *optional*):
            See the server.
        presence_penalty (`float`, *optional*):
            See the server.
        repetition_penalty (`float`, *optional*):
            See the server.
        logprobs (`int`, *optional*):
            Log probabilities of so many tokens at each position.
        extra_body (`dict[str, Any]`, defaults to `{}`):
            Further fields of every request.
        goodput (`tuple[tuple[str, float], ...]`, defaults to `()`):
            Also count requests that meet all of these: ttft, tpot, e2el in ms.
        percentile_metrics (`tuple[str, ...]`, defaults to `("ttft", "tpot", "itl", "e2el")`):
            What to show: ttft,tpot,itl,e2el.
        metric_percentiles (`tuple[float, ...]`, defaults to `(99.0,)`):
            Percentiles with commas between.
        save_result (`Path`, *optional*):
            Write figures as JSON; without a name, to one made of label, rate, model and time.
        save_detailed (`bool`, defaults to `False`):
            The file also holds times, texts and errors of each request.
        result_dir (`Path`, defaults to the current one):
            Folder of the file.
        result_filename (`str`, *optional*):
            Name of the file.
        plot (`Path`, *optional*):
            Draw latencies and load into a .png, .svg or .pdf; without a name, to a PNG beside the figures.
        label (`str`, *optional*):
            Name of this run in results.
        metadata (`tuple[tuple[str, str], ...]`, defaults to `()`):
            Noted in the file, NAME=VALUE.
        disable_tqdm (`bool`, defaults to `False`):
            No progress bar.

    Raises:
        ConfigurationError: If values make no sense.
    """

    base_url: str | None = _flag(None, "server", metavar="URL")
    host: str = _flag("127.0.0.1", "server")
    port: int = _flag(8000, "server", int)
    backend: str = _flag("openai", "server", choices=["openai", "vllm", "openai-chat"])
    endpoint: str | None = _flag(None, "server", metavar="PATH")
    model: str | None = _flag(None, "server")
    served_model_name: str | None = _flag(None, "server")
    header: tuple[tuple[str, str], ...] = _flag((), "server", _pairs("="), nargs="+", metavar="NAME=VALUE")
    api_key: str | None = dataclasses.field(
        default=None, repr=False, metadata={"group": "server", "words": {"metavar": "KEY"}}
    )
    insecure: bool = _flag(False, "server")
    ready_check_timeout_sec: float = _flag(60.0, "server", float, metavar="SECONDS")
    request_timeout: float = _flag(3600.0, "server", float, metavar="SECONDS")

    dataset_name: str = _flag("random", "requests", choices=DATASETS)
    dataset_path: Path | None = _flag(None, "requests", Path)
    num_prompts: int = _flag(1000, "requests", int)
    input_len: int = _flag(1024, "requests", int, aliases=["--random-input-len"])
    output_len: int | None = _flag(
        None,
        "requests",
        int,
        aliases=["--random-output-len", "--sharegpt-output-len", "--custom-output-len"],
    )
    random_range_ratio: float = _flag(0.0, "requests", float)
    random_prefix_len: int = _flag(0, "requests", int)
    tokenizer: str | None = _flag(None, "requests", metavar="PATH_OR_ID")
    ignore_eos: bool = _flag(False, "requests")
    num_warmups: int = _flag(0, "requests", int)
    seed: int = _flag(0, "requests", int)

    request_rate: float = _flag(math.inf, "load", float)
    burstiness: float = _flag(1.0, "load", float)
    max_concurrency: int | None = _flag(None, "load", int)

    temperature: float = _flag(0.0, "sampling", float)
    top_p: float | None = _flag(None, "sampling", float)
    top_k: int | None = _flag(None, "sampling", int)
    min_p: float | None = _flag(None, "sampling", float)
    frequency_penalty: float | None = _flag(None, "sampling", float)
    presence_penalty: float | None = _flag(None, "sampling", float)
    repetition_penalty: float | None = _flag(None, "sampling", float)
    logprobs: int | None = _flag(None, "sampling", int)
    extra_body: dict[str, Any] = _flag({}, "sampling", _json_object, metavar="JSON")

    goodput: tuple[tuple[str, float], ...] = _flag((), "results", _objective, nargs="+", metavar="NAME:MS")
    percentile_metrics: tuple[str, ...] = _flag(METRICS, "results", _metrics, metavar="NAMES")
    metric_percentiles: tuple[float, ...] = _flag((99.0,), "results", _percentiles, metavar="NUMBERS")
    save_result: Path | None = _flag(None, "results", Path, nargs="?", const=NAME_BY_ITSELF, metavar="FILE")
    save_detailed: bool = _flag(False, "results")
    result_dir: Path = _flag(Path(), "results", Path)
    result_filename: str | None = _flag(None, "results")
    plot: Path | None = _flag(None, "results", Path, nargs="?", const=NAME_BY_ITSELF, metavar="FILE")
    label: str | None = _flag(None, "results")
    metadata: tuple[tuple[str, str], ...] = _flag((), "results", _pairs("="), nargs="+", metavar="NAME=VALUE")
    disable_tqdm: bool = _flag(False, "results")

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("input_len", 1), ("num_warmups", 0), ("random_prefix_len", 0)):
            self._check(name, getattr(self, name) >= least, f"at least {least}")
        for name in ("request_rate", "burstiness", "request_timeout"):
            self._check(name, getattr(self, name) > 0, "more than 0")
        for name in ("max_concurrency", "output_len"):
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "at least 1")
        self._check("random_range_ratio", 0 <= self.random_range_ratio < 1, "at least 0 and below 1")
        parts = urlsplit(self.url)
        self._check("base_url", parts.scheme in ("http", "https") and bool(parts.hostname), "an http or https URL")
        if self.dataset_name in ("sharegpt", "custom"):
            self._check("dataset_path", self.dataset_path is not None, f"a file for --dataset-name {self.dataset_name}")

    def _check(self, name: str, is_right: bool, must_be: str) -> None:
        if not is_right:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"`{flag}` must be {must_be}, got {getattr(self, name)!r}.")

    @property
    def url(self) -> str:
        """Returns the server's URL, without what endpoints begin with."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/").removesuffix("/v1")

    @property
    def key(self) -> str | None:
        """Returns the key for the server, if there is one."""
        return self.api_key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)

    @property
    def key_place(self) -> str | None:
        """Returns where the key was found, in words."""
        if any(name.lower() in ("authorization", "x-api-key") for name, _ in self.header):
            return "`--header`"
        return "`--api-key`" if self.api_key else next(filter(os.environ.get, KEY_VARIABLES), None)

    @property
    def path(self) -> str:
        """Returns the endpoint's path."""
        default = "/v1/chat/completions" if self.backend == "openai-chat" else "/v1/completions"
        return self.endpoint or default

    @property
    def is_chat(self) -> bool:
        """Returns whether requests are chats."""
        return self.path.endswith("/chat/completions")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in two lines; there are too many flags to list them all beside it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n(see {self.prog} --help)\n")


def make_parser(prog: str = "hf-paged bench serve") -> argparse.ArgumentParser:
    """Returns the parser of the command line: a flag for each field.

    Args:
        prog (`str`, defaults to `"hf-paged bench serve"`):
            What the command is called.
    """
    parser = _Parser(
        prog=prog,
        description="Send load to a server that speaks OpenAI's API; measure throughput and latencies.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    # The texts that the class documents its fields with.
    found = re.findall(r"^    (\w+) \(`.*\):\n        (.*)$", inspect.getdoc(ServeBenchSettings) or "", re.M)
    texts = {name: text.replace("%", "%%") for name, text in found}
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(ServeBenchSettings):
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        words = {"help": texts[field.name], **field.metadata["words"]}
        flags = [f"--{field.name.replace('_', '-')}", *words.pop("aliases", ())]
        default = {} if field.default is dataclasses.MISSING else field.default
        if isinstance(default, bool):
            groups[name].add_argument(*flags, action="store_true", **words)
        else:
            groups[name].add_argument(*flags, default=default, **words)
    return parser


def parse_settings(words: Sequence[str] | None = None) -> ServeBenchSettings:
    """Returns settings of a command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the process's own.

    Raises:
        ConfigurationError: If values make no sense.
    """
    found: dict[str, Any] = vars(make_parser().parse_args(words))
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return ServeBenchSettings(**values)
