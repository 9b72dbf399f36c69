"""The policies. A new one is one file in this folder: every module here is imported and registers itself."""

import importlib
import pkgutil

from jkv.policies.base import Evict, Policy
from jkv.policies.registry import describe, entry, format_policy, get_policy, names, preset, register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Evict", "Policy", "describe", "entry", "format_policy", "get_policy", "names", "preset", "register"]
