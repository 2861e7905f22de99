"""Changes to JSON schemas before they are compiled. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequestError

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_PARTS = ("anyOf", "oneOf", "prefixItems", "items", "contains", "additionalProperties", "additionalItems")


def close_objects(schema: Any) -> Any:
    """Returns a copy of a schema whose objects have only the properties that it names, unless it says otherwise.

    Objects that `allOf` puts together stay open: each part would forbid the properties of the others.

    Args:
        schema (`Any`):
            A JSON schema.

    Raises:
        InvalidRequestError: If it is nested too deeply.
    """
    try:
        return _closed(schema)
    except RecursionError as error:
        raise InvalidRequestError("The JSON schema is nested too deeply.") from error


def _closed(schema: Any, is_part: bool = False) -> Any:
    if isinstance(schema, list):
        return [_closed(part, is_part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            closed[name] = {key: _closed(part) for key, part in value.items()}
        elif name in _PARTS:
            closed[name] = _closed(value)
        elif name == "allOf":
            closed[name] = _closed(value, is_part=True)
    is_open = any(name in schema for name in ("additionalProperties", "patternProperties", "allOf")) or is_part
    if not is_open and (schema.get("type") == "object" or "properties" in schema):
        closed["additionalProperties"] = False
    return closed
