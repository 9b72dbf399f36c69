"""jkv: long reasoning on a budgeted KV cache, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jkv.api import LLM, generate, load, stream
    from jkv.policies import Evict, Policy, get_policy, register
    from jkv.run import GenerationConfig, Piece, Result, Run, Stats

__version__ = "0.1.0"

_HOMES = {
    "jkv.api": ("LLM", "generate", "load", "stream"),
    "jkv.policies": ("Evict", "Policy", "get_policy", "register"),
    "jkv.run": ("GenerationConfig", "Piece", "Result", "Run", "Stats"),
}

__all__ = [
    "LLM",
    "Evict",
    "GenerationConfig",
    "Piece",
    "Policy",
    "Result",
    "Run",
    "Stats",
    "generate",
    "get_policy",
    "load",
    "register",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import jkv` is quick and `weights` can import `jkv.config`."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'jkv' has no attribute {name!r}")
