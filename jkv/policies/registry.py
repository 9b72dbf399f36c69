"""Policies by name: the registry, presets, and the parser of "gkv:budget=512,alpha=0.8"."""

import difflib
import functools
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from jkv.policies.base import Policy
from jkv.policies.fields import field_kinds, name_kinds

ENTRY_POINTS = "jkv.policies"
P = TypeVar("P", bound=Policy)


@dataclass(frozen=True)
class Entry:
    """A registered name: the policy with the defaults of that name, and what a preset stands for."""

    policy: Policy
    about: str = ""


_REGISTRY: dict[str, Entry] = {}


def register(name: str) -> Callable[[type[P]], type[P]]:
    """Class decorator that makes a policy known as `name`, with the defaults of its fields."""

    def add(cls: type[P]) -> type[P]:
        preset(name, cls())
        return cls

    return add


def preset(name: str, policy: Policy, about: str = "") -> None:
    """Makes a set of field values known as `name`.

    Raises:
        ValueError: another policy has this name.
    """
    known = _REGISTRY.get(name)
    if known and type(known.policy).__qualname__ != type(policy).__qualname__:
        raise ValueError(f"policy name {name!r} is taken by {type(known.policy).__name__}; choose another")
    _REGISTRY[name] = Entry(policy, about)


def names() -> list[str]:
    """Every registered name: policies first, then presets (``name@variant``)."""
    return sorted(_REGISTRY, key=lambda name: ("@" in name, name))


def entry(name: str) -> Entry:
    """The registered policy of a name; a name that another installed package provides is loaded on first use.

    Raises:
        ValueError: no such name; the message lists the names that exist.
    """
    if name not in _REGISTRY:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            _add_class(name, point.load())
    if name not in _REGISTRY:
        raise ValueError(f"policy {name!r} does not exist{_suggest(name, names())}; policies are {', '.join(names())}")
    return _REGISTRY[name]


def get_policy(spec: str | Policy) -> Policy:
    """A policy from its text form.

    Args:
        spec: ``name``, ``name:field=value,field=value``, or ``file.py:Class,field=value`` for a policy in a file of
            one's own. A `Policy` is returned as it is.

    Raises:
        ValueError: unknown name, field or value; the message says which and what is possible.
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"policy {spec!r} must be a Policy, or text such as 'gkv:budget=512'")
    name, _, rest = spec.partition(":")
    # A comma that no field=value follows belongs to the value, as in separators=.,?!
    items = [item for item in re.split(r",(?=\s*\w+\s*=)", rest) if item]
    if name.endswith(".py"):
        if not items:
            raise ValueError(f"policy {spec!r}: name the class, as in {name}:MyPolicy,budget=512")
        base = _load_file(Path(name), items.pop(0))
    else:
        base = entry(name.strip()).policy
    return replace(base, **dict(_parse(base, item) for item in items))


def describe(policy: Policy) -> Iterator[tuple[str, Any]]:
    """The fields of a policy that can be set and their values, in order of declaration."""
    for name in field_kinds(type(policy)):
        yield name, getattr(policy, name)


def format_policy(spec: str, policy: Policy) -> str:
    """The text form `spec` of a policy with every field of `policy` in it; `get_policy` reads it back."""
    name, colon, rest = spec.partition(":")
    start = f"{name}:{rest.split(',')[0]}," if name.endswith(".py") and colon else f"{name}:"
    return start + ",".join(f"{key}={value}" for key, value in describe(policy) if not isinstance(value, tuple))


def _parse(policy: Policy, item: str) -> tuple[str, Any]:
    key, equals, text = (part.strip() for part in item.partition("="))
    known = field_kinds(type(policy))
    if not equals or key not in known:
        raise ValueError(
            f"policy {type(policy).__name__}: {item!r} is not field=value of "
            f"{', '.join(known)}{_suggest(key, list(known))}"
        )
    try:
        return key, _convert(text, known[key])
    except ValueError:
        wanted = name_kinds(known[key])
        raise ValueError(f"policy {type(policy).__name__}: {key} is {text!r}; it must be {wanted}") from None


def _convert(text: str, kinds: tuple[Any, ...]) -> Any:
    if text in kinds:
        return text
    if bool in kinds and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    if int in kinds and text.lstrip("+-").isdigit():
        return int(text)
    if type(None) in kinds and text == "None":
        return None
    if float in kinds:
        # Not a division, so that 33.3% is 0.333 and is written as it was read.
        return float(f"{text[:-1]}e-2" if text.endswith("%") else text)
    if str in kinds:
        return text
    raise ValueError


def _load_file(path: Path, name: str) -> Policy:
    if not path.is_file():
        raise ValueError(f"policy file {path} does not exist; give the path of a Python file")
    module = _run_file(path.resolve(), path.stat().st_mtime_ns)
    cls = getattr(module, name, None)
    if cls is None:
        raise ValueError(f"policy file {path} has no class {name!r}")
    return _instance(f"{path}:{name}", cls)


@functools.lru_cache
def _run_file(path: Path, changed: int) -> types.ModuleType:
    """The module in a file, run once for each time of change: a class made anew would be compiled anew."""
    del changed
    name = f"policy file {path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    return module


def _add_class(name: str, cls: Any) -> None:
    preset(name, _instance(name, cls))


def _instance(name: str, cls: Any) -> Policy:
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ValueError(f"policy {name!r} must be a subclass of jkv.Policy, not {cls!r}")
    if any(f.default is MISSING and f.default_factory is MISSING for f in fields(cls)):
        raise ValueError(f"policy {name!r}: every field needs a default value")
    return cls()


def _suggest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
