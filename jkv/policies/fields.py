"""What the fields of a policy may hold, as their annotations say: to check values and to read them from text."""

import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

INTERNAL = {"internal": True}  # marks a field that the policy sets itself
PLAIN = (bool, int, float, str, tuple, type(None))


def field_kinds(cls: type) -> dict[str, tuple[Any, ...]]:
    """For each field of a dataclass that a user may set the types that it may have, or the values of a `Literal`."""
    hints = get_type_hints(cls)
    return {spec.name: _kinds(hints[spec.name]) for spec in fields(cls) if not spec.metadata.get("internal")}


def name_kinds(kinds: tuple[Any, ...]) -> str:
    """The kinds of a field in words."""
    return " or ".join(kind.__name__ if isinstance(kind, type) else str(kind) for kind in kinds)


def is_of(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Whether a field of these kinds may hold the value; annotations that are not plain types may hold anything."""
    return any(_is_of(value, kind) for kind in kinds)


def _kinds(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    return tuple(get_origin(part) or part for part in parts)


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(kind, (str, int)):
        return type(value) is type(kind) and value == kind
    if kind not in PLAIN:
        return True
    # A truth value is no number, though Python counts it as one.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
