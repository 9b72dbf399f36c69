"""jkv: long reasoning on a budgeted KV cache, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jkv.api import LLM, GenerationConfig, Piece, Result, Run, Stats, generate, load, stream
    from jkv.policies import Evict, Policy, get_policy, register

__version__ = "0.1.0"

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
    if name in __all__:
        home = "jkv.policies" if name in ("Evict", "Policy", "get_policy", "register") else "jkv.api"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'jkv' has no attribute {name!r}")
