"""What the bodies of several routes have in common: sampling fields, output formats, how mistakes are told."""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints, model_validator

from ..errors import ApiError

logger = logging.getLogger(__name__)

MAX_ANSWERS = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_LENGTH = 1024
MAX_ID_LENGTH = 128

_MAX_SHOWN = 200  # characters of a client's value in a message
_MAX_NOTED = 1000  # names of unknown fields of which the log has spoken
_MAX_NOTED_AT_ONCE = 20
_LONGEST_HINTED = 64  # characters of a name that is looked up among the fields
_noted: set[tuple[str, str]] = set()


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, not {value}.")
    return value


# JSON knows only one kind of number: 16.0 is 16. Clients that send "16" mean it; true is no number.
Integer = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Strict(), Field(ge=0, lt=2**31)]
RequestId = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@+=-]*$")
]


class Part(BaseModel):
    """An object in a request's body. Fields that it does not have are left out; the log names them once."""

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.keys() <= (known := _names(cls)):
            unknown = (name for name in data if name not in known)
            for name in itertools.islice(unknown, _MAX_NOTED_AT_ONCE):
                _note_unknown_field(cls, str(name)[:_MAX_SHOWN])
        return data


class Body(Part):
    """A request's body. Fields that no route knows are left out, as gateways send them."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


@functools.cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset([field.alias or name for name, field in model.model_fields.items()])


def _note_unknown_field(model: type[BaseModel], name: str) -> None:
    place = "a request" if issubclass(model, Body) else f"the {model.__name__} of a request"
    if (place, name) in _noted or len(_noted) >= _MAX_NOTED:
        return
    _noted.add((place, name))
    near = difflib.get_close_matches(name, _names(model), n=1, cutoff=0.85) if len(name) <= _LONGEST_HINTED else []
    hint = f"; did its sender mean `{near[0]}`?" if near else ""
    level = logging.WARNING if near else logging.INFO
    logger.log(level, "%s has the field %s, which is unknown and has no effect%s", place, shortened(name), hint)


def shortened(value: Any) -> str:
    """Returns a client's value for a message: not long, and without control characters.

    Args:
        value (`Any`):
            What the client sent.
    """
    if isinstance(value, (list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        value = value[: _MAX_SHOWN + 1]
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**100 else "a number of more than 100 digits"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns the answer to a body that does not fit its model: the first thing that is wrong, and how many more.

    Args:
        errors (`Sequence[Mapping[str, Any]]`):
            As pydantic lists them, `"body"` at the front of each location or not.
    """
    # Of a field that may be of several types there is an error for each; that of the type that was sent says most.
    first = min(errors, key=_vagueness)
    location = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The body is not JSON: {reason}.", code="invalid_json")
    # Behind such a field comes the type's name; clients know fields and list places.
    names = [part for part in location if isinstance(part, int) or _is_field(part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).removeprefix(".")
    problem = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
    problem = problem.replace("Input should", "must").replace("List should", "must")
    if first["type"] == "missing":
        text = f"`{path}` is missing." if path else "The body is empty; it must be a JSON object."
    elif first["type"] != "value_error":
        text = f"`{path or 'body'}` {problem}, got {shortened(first.get('input'))}."
    elif problem.startswith("`"):
        text, path = problem, problem.split("`")[1]
    else:
        text = f"`{path}`: {problem}"
    others = {error["loc"][:2] for error in errors} - {first["loc"][:2]}
    if others:
        text += f" ({len(others)} more field{'s are' if len(others) > 1 else ' is'} wrong.)"
    return ApiError(400, text, param=path or None, code="invalid_value")


def _vagueness(error: Mapping[str, Any]) -> tuple[int, int]:
    kind = error["type"]
    return (2 if kind.endswith("_type") else 1 if kind.endswith("_parsing") else 0), -len(error["loc"])


def _is_field(part: str) -> bool:
    return part.replace("_", "").isalnum() and part.islower() and part not in _TYPE_NAMES


_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "constrained"}


def refuse(field: str, message: str) -> ValueError:
    """Returns the error by which a validator refuses a field.

    Args:
        field (`str`):
            Its name.
        message (`str`):
            What is wrong with it, as the end of a sentence.
    """
    return ValueError(f"`{field}` {message}")


class StreamOptions(Part):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; there is none here


class JsonSchemaFormat(Part):
    """The schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # answers follow the schema in any case


class ResponseFormat(Part):
    """What form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # beside `json_object`: some clients

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise refuse("response_format.json_schema", "is missing, and `response_format.type` is 'json_schema'.")
        return self


class StructuredOutputs(Part):
    """vLLM's way to ask for an answer of a certain form."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: str | None = None


class SamplingFields(Body):
    """How to sample, and who asks; the same in completions and chats."""

    model: str | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_ANSWERS)] | None = None
    best_of: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    seed: Annotated[Integer, Field(ge=_MIN_SEED, le=_MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: RequestId | None = None
    request_timeout: Annotated[Number, Field(gt=0)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT_LENGTH)] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> SamplingFields:
        if self.use_beam_search:
            raise refuse("use_beam_search", "is not offered by this server; leave it out, or ask for `n` samples.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refuse(
                "best_of",
                f"must equal `n` ({self.n or 1}), got {shortened(self.best_of)}; ask for `n` answers instead.",
            )
        if self.truncate_prompt_tokens == 0:
            raise refuse("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit; got 0.")
        return self

    @property
    def wants_usage(self) -> bool:
        """Returns whether a stream ends with a chunk that has the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Returns whether every chunk of a stream has the token counts so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)
