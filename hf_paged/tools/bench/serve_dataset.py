"""The prompts of `hf-paged bench serve`."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ..prompts import user_prompts
from .serve_settings import ServeBenchSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_OUTPUT_LEN = 128
# A text of random tokens is seldom cut into the same number again; so often it is lengthened or cut.
MAX_TRIES = 12


@dataclasses.dataclass(frozen=True)
class ServeRequest:
    """What is asked.

    Args:
        prompt (`str` or `list[int]`):
            Text, or token ids (not for chats).
        output_len (`int`, *optional*):
            Most tokens of the answer; by default the server's choice.
        prompt_len (`int`, *optional*):
            Tokens of the prompt, if known; the server's count is preferred.
        body (`dict[str, Any]`):
            Further fields of this request.
    """

    prompt: str | list[int]
    output_len: int | None = DEFAULT_OUTPUT_LEN
    prompt_len: int | None = None
    body: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_requests(
    settings: ServeBenchSettings, load_tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> list[ServeRequest]:
    """Returns the requests of a run.

    Args:
        settings (`ServeBenchSettings`):
            What is wanted.
        load_tokenizer (`Callable[[], PreTrainedTokenizerBase]`):
            Called where tokens must be counted.

    Raises:
        ConfigurationError: If the file of prompts cannot be used.
    """
    makers = {"random": _random, "packaged": _packaged, "sharegpt": _sharegpt, "custom": _custom}
    return makers[settings.dataset_name](settings, load_tokenizer)


def _random(settings: ServeBenchSettings, load_tokenizer: Callable[[], Any]) -> list[ServeRequest]:
    tokenizer = load_tokenizer()
    source = random.Random(settings.seed)
    special = set(tokenizer.all_special_ids)
    # Pieces of characters, alone, become texts that are cut otherwise.
    ids = [i for i in range(tokenizer.vocab_size) if i not in special and "\ufffd" not in tokenizer.decode([i])]
    ratio = settings.random_range_ratio

    def length(middle: int) -> int:
        return max(1, source.randint(round(middle * (1 - ratio)), round(middle * (1 + ratio))))

    prefix = random_text(tokenizer, ids, settings.random_prefix_len, source) if settings.random_prefix_len else ""
    requests = []
    for _ in range(settings.num_prompts):
        input_len, output_len = length(settings.input_len), length(settings.output_len or DEFAULT_OUTPUT_LEN)
        prompt = prefix + random_text(tokenizer, ids, input_len, source)
        requests.append(ServeRequest(prompt, output_len, input_len + settings.random_prefix_len))
    return requests


def random_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], length: int, source: random.Random) -> str:
    """Returns a text that a tokenizer cuts into so many tokens, or nearly.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        ids (`list[int]`):
            Tokens to draw from.
        length (`int`):
            How many.
        source (`random.Random`):
            Chooses.
    """
    tokens = source.choices(ids, k=length)
    text = ""
    for _ in range(MAX_TRIES):
        text = str(tokenizer.decode(tokens))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) == length:
            break
        tokens = tokens[:length] + source.choices(ids, k=max(0, length - len(tokens)))
    return text


def _packaged(settings: ServeBenchSettings, load_tokenizer: Callable[[], Any]) -> list[ServeRequest]:
    prompts = list(user_prompts())
    random.Random(settings.seed).shuffle(prompts)
    rounds = -(-settings.num_prompts // len(prompts))
    # Numbered from the second round on: a prefix cache must not know them.
    texts = prompts + [f"{number}. {prompt}" for number in range(2, rounds + 1) for prompt in prompts]
    return [ServeRequest(text, settings.output_len or DEFAULT_OUTPUT_LEN) for text in texts[: settings.num_prompts]]


def _sharegpt(settings: ServeBenchSettings, load_tokenizer: Callable[[], Any]) -> list[ServeRequest]:
    """First turns of people, with the length of the answer that they got."""
    path = _file(settings)
    try:
        talks = [talk["conversations"] for talk in json.loads(path.read_text(encoding="utf-8"))]
        turns = [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) >= 2]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"`--dataset-path` {path} is no ShareGPT file: {error!r}.") from error
    random.Random(settings.seed).shuffle(turns)
    turns = _enough(turns, settings)
    if settings.output_len is not None:
        return [ServeRequest(question, settings.output_len) for question, _ in turns]
    tokenizer = load_tokenizer()
    lengths = [max(1, len(tokenizer.encode(answer, add_special_tokens=False))) for _, answer in turns]
    return [ServeRequest(question, length) for (question, _), length in zip(turns, lengths, strict=True)]


def _custom(settings: ServeBenchSettings, load_tokenizer: Callable[[], Any]) -> list[ServeRequest]:
    path = _file(settings)
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [(row["prompt"], row.get("output_len") or row.get("output_tokens")) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"`--dataset-path` {path} needs a `prompt` in each line: {error!r}.") from error
    chosen = _enough(found, settings)
    return [ServeRequest(prompt, settings.output_len or length or DEFAULT_OUTPUT_LEN) for prompt, length in chosen]


def _file(settings: ServeBenchSettings) -> Path:
    path = settings.dataset_path
    if path is None or not path.is_file():
        raise ConfigurationError(f"`--dataset-path` must be a file, got {path}.")
    return path


def _enough(rows: list[Any], settings: ServeBenchSettings) -> list[Any]:
    if not rows:
        raise ConfigurationError(f"`--dataset-path` {settings.dataset_path} holds no prompts.")
    return [rows[i % len(rows)] for i in range(settings.num_prompts)]
