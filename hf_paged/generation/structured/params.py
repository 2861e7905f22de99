"""What form an answer must have. Plain Python: the bookkeeping reads it without torch and without a grammar library."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequestError
from .schema import close_objects

MAX_GRAMMAR_CHARS = 2**20  # of a schema, expression or grammar; a longer one is refused unread
MAX_WHITESPACE = 64  # in one place, where whitespace is free: no model can go on with it for ever
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarSource:
    """What a grammar is compiled from. Equal sources give equal grammars.

    Args:
        kind (`str`):
            `"json"`, `"regex"`, `"choice"`, `"grammar"` or `"structural_tag"`.
        text (`str`):
            The schema, expression or grammar; of choices and structural tags their JSON.
        options (`tuple[tuple[str, Any], ...]`, defaults to `()`):
            How JSON is written, as the compiler takes it.
    """

    kind: str
    text: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an answer must have, with the names of vLLM. Exactly one of the first six is given.

    Constrained JSON is compact by default, `{"a":1,"b":[2,3]}`, so that no model can go on with whitespace for ever.

    Args:
        json (`str`, `dict` or a pydantic model class, *optional*):
            A JSON schema.
        regex (`str`, *optional*):
            A regular expression that the whole answer matches, without look-around and back-references. `\\d` and
            `\\w` are ASCII, as in JSON schemas.
        choice (`list[str]`, *optional*):
            The answer is one of these.
        grammar (`str`, *optional*):
            A context-free grammar in Lark's syntax with a rule `start`, or in GBNF (`root ::= ...`).
        json_object (`bool`, *optional*):
            `True`: any JSON object.
        structural_tag (`str` or `dict`, *optional*):
            Text in which each of some `triggers` begins a tag: `{"triggers": ["<f="], "structures": [{"begin":
            "<f=add>", "schema": {...}, "end": "</f>"}]}`.
        disable_fallback (`bool`, defaults to `False`):
            Accepted for vLLM's sake: there is one compiler, and nothing to fall back to.
        disable_any_whitespace (`bool`, defaults to `True`):
            Write JSON without whitespace between its parts; `False` allows up to 64 characters of it in each place.
            vLLM's default is `False`.
        disable_additional_properties (`bool`, defaults to `False`):
            Objects have no properties but those that the schema names, unless it says otherwise.
        whitespace_pattern (`str`, *optional*):
            A regular expression for what may stand between the parts of JSON, instead.

    Raises:
        InvalidRequestError: If not exactly one form is given, or something is malformed.

    Example:

    ```python
    params = SamplingParams(max_tokens=100, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    ```
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    source: GrammarSource = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"`{name}` must be True or False, got {getattr(self, name)!r:.100}.")
        if self.json_object not in (None, True, False):
            raise InvalidRequestError(f"`json_object` must be True or None, got {self.json_object!r:.100}.")
        pattern = self.whitespace_pattern
        if pattern is not None and (not isinstance(pattern, str) or len(pattern) > MAX_GRAMMAR_CHARS):
            raise InvalidRequestError(
                f"`whitespace_pattern` must be a regular expression of at most {MAX_GRAMMAR_CHARS} characters, got "
                f"{pattern!r:.100}."
            )
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"`structured_outputs` takes exactly one of {', '.join(f'`{name}`' for name in KINDS)}, got "
                f"{' and '.join(f'`{name}`' for name in given) or 'none'}."
            )
        source = _source(self, given[0])
        if len(source.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"`structured_outputs.{given[0]}` has {len(source.text)} characters; at most {MAX_GRAMMAR_CHARS} are "
                "allowed."
            )
        object.__setattr__(self, "source", source)

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """Returns what was given as one of these.

        Args:
            value (`StructuredOutputsParams` or `Mapping[str, Any]`):
                One, or its fields.

        Raises:
            InvalidRequestError: If it is neither, or a field is unknown.
        """
        if isinstance(value, cls):
            return value
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"`structured_outputs` must be a StructuredOutputsParams or a dict of its fields, got {value!r:.100}."
            )
        unknown = sorted(str(name) for name in value if name not in names)
        if unknown:
            raise InvalidRequestError(
                f"`structured_outputs` has no field {unknown[0]!r:.100}; there are {', '.join(names)}."
            )
        return cls(**value)


def _source(params: StructuredOutputsParams, kind: str) -> GrammarSource:
    value = getattr(params, kind)
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else _schema("json", value)
        if params.disable_additional_properties:
            schema = close_objects(schema)
        return GrammarSource("json", _dumps(kind, schema), _json_options(params))
    if kind == "choice":
        return GrammarSource("choice", _dumps(kind, _choices(value)))
    if kind == "structural_tag":
        return GrammarSource("structural_tag", _dumps(kind, _tags(params, value)), _json_options(params))
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"`structured_outputs.{kind}` must be a non-empty string, got {value!r:.100}.")
    return GrammarSource(kind, value)


def _json_options(params: StructuredOutputsParams) -> tuple[tuple[str, Any], ...]:
    one_of = ("coerce_one_of", True)  # pydantic's unions are such, of branches that exclude each other
    if params.whitespace_pattern is not None:
        return one_of, ("whitespace_pattern", params.whitespace_pattern)
    if params.disable_any_whitespace:
        return one_of, ("whitespace_flexible", False)
    return one_of, ("whitespace_pattern", rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}")


def _schema(name: str, value: Any) -> Any:
    """A JSON schema as Python objects, from whatever it was given as."""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"`structured_outputs.{name}` has {len(value)} characters; at most {MAX_GRAMMAR_CHARS} are allowed."
            )
        try:
            value = json_module.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"`structured_outputs.{name}` is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"`structured_outputs.{name}` must be a JSON schema (a dict, its JSON text or a pydantic model class), got "
            f"{value!r:.100}."
        )
    return value


def _choices(value: Any) -> list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not is_list or not value or not all(isinstance(text, str) for text in value):
        raise InvalidRequestError(
            f"`structured_outputs.choice` must be a non-empty list of strings, got {value!r:.100}."
        )
    return list(value)


def _tags(params: StructuredOutputsParams, value: Any) -> dict[str, Any]:
    """The triggers and structures of a structural tag, each structure with the trigger that it belongs to."""
    name = "structured_outputs.structural_tag"
    value = _schema("structural_tag", value)
    triggers, structures = value.get("triggers"), value.get("structures")
    is_list = isinstance(triggers, Sequence) and isinstance(structures, Sequence) and not isinstance(triggers, str)
    if not is_list or not triggers or not structures or not all(isinstance(t, str) and t for t in triggers):
        raise InvalidRequestError(
            f"`{name}` must hold `triggers` (non-empty strings) and `structures`, got {dict(value)!r:.200}."
        )
    tags = []
    for place, structure in enumerate(structures):
        begin = structure.get("begin") if isinstance(structure, Mapping) else None
        end = structure.get("end", "") if isinstance(structure, Mapping) else None
        if not isinstance(begin, str) or not isinstance(end, str):
            raise InvalidRequestError(
                f"`{name}.structures[{place}]` must have `begin` and `end` (strings), got {structure!r:.200}."
            )
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequestError(
                f"`{name}.structures[{place}].begin` is {begin!r:.100}, which begins with none of the `triggers`."
            )
        schema = _schema("structural_tag", structure.get("schema", {}))
        if params.disable_additional_properties:
            schema = close_objects(schema)
        tags.append({"trigger": trigger, "begin": begin, "schema": schema, "end": end})
    return {"tags": tags}


def _dumps(name: str, value: Any) -> str:
    try:
        return json_module.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_json)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequestError(f"`structured_outputs.{name}` cannot be written as JSON: {reason}") from error


def _as_json(value: Any) -> Any:
    """Mappings and sequences of other kinds than Python's own."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
