"""What a run will hold and read, exactly and before anything is loaded: for `--dry-run` and the report at the end."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jkv.cache import Prompt
from jkv.config import CacheSpec, ModelConfig
from jkv.memory import Peak, abstract_weights, nbytes
from jkv.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes of one run.

    Attributes:
        batch: rows.
        length: tokens of the longest text, prompt and answer together.
        weights: of the parameters.
        kv_held: of keys and values allocated for all rows.
        metadata_held: of everything else that the policy keeps for all rows.
        kv_read: read for one token of one row to attend and to choose what to attend to, the text at its longest.
        capacity: slots allocated per row, layer and kv head.
        tokens_read: tokens read per kv head for that token, by what they are read for, in the layer that reads least.
    """

    batch: int
    length: int
    weights: int
    kv_held: int
    metadata_held: int
    kv_read: int
    capacity: int
    tokens_read: dict[str, int]


def make_plan(config: ModelConfig, policy: Policy, spec: CacheSpec, *, batch: int, length: int, dtype: str) -> Plan:
    """Counts the bytes of `batch` rows that grow to `length` tokens; nothing is allocated."""
    layers = Counter(policy.at(index, config.num_layers) for index in range(config.num_layers))
    stores = {own: jax.eval_shape(lambda own=own: own.ingest(spec, _empty_prompt(spec, batch))) for own in layers}
    kv_held = sum(count * nbytes(own.kv(stores[own])) for own, count in layers.items())
    held = sum(count * nbytes(stores[own]) for own, count in layers.items())
    shared = jax.eval_shape(lambda: policy.shared(spec, batch))
    return Plan(
        batch=batch,
        length=length,
        weights=nbytes(abstract_weights(config, dtype)),
        kv_held=kv_held,
        metadata_held=held - kv_held + nbytes(shared),
        kv_read=sum(count * own.bytes_read(spec, length) for own, count in layers.items()),
        capacity=policy.capacity(spec),
        tokens_read=min((own.tokens_read(spec, length) for own in layers), key=lambda read: sum(read.values())),
    )


def memory_limit() -> int:
    """Bytes that the default device may use: what its allocator reports, or the machine's memory on CPU."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def format_bytes(count: float) -> str:
    """A byte count for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def parse_bytes(text: str, name: str) -> int:
    """The bytes of a size such as 80GiB, 40 GB or 512MiB.

    Args:
        text: a number and a unit, of 1,000 (GB) or 1,024 (GiB).
        name: what to call it in an error.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")) if found else 0
    if size < 1:
        raise ValueError(f"{name} {text!r} must be a size above 0 with its unit, as 80GiB, 80GB or 512MiB")
    return size


def _empty_prompt(spec: CacheSpec, batch: int) -> Prompt:
    heads = jnp.zeros((batch, spec.num_kv_heads, 1, spec.head_dim), spec.dtype)
    return Prompt(
        q=jnp.zeros((batch, spec.num_kv_heads, spec.group, 1, spec.head_dim), spec.dtype),
        k=heads,
        v=heads,
        k_pre=heads,
        tokens=jnp.zeros((batch, 1), jnp.int32),
        length=jnp.ones((batch,), jnp.int32),
    )


def describe_plan(plan: Plan, full: Plan, totals: tuple[int, int], *, name: str) -> str:
    """A table of what a policy holds and reads beside full attention, with the most that either takes."""
    rows = [
        ("", name, "full"),
        ("slots per kv head", plan.capacity, full.capacity),
        ("tokens read", *(sum(p.tokens_read.values()) for p in (plan, full))),
        ("weights", *(format_bytes(p.weights) for p in (plan, full))),
        ("kv held", *(format_bytes(p.kv_held) for p in (plan, full))),
        ("beside the kv", *(format_bytes(p.metadata_held) for p in (plan, full))),
        ("kv read per token", *(format_bytes(p.kv_read) for p in (plan, full))),
        ("in all, at most", *map(format_bytes, totals)),
    ]
    wide = max(len(name), 12) + 2
    lines = [f"{plan.batch} rows of {plan.length} tokens"] + [f"{a:20}{b!s:>{wide}}{c!s:>14}" for a, b, c in rows]
    parts = " + ".join(f"{count} {part}" for part, count in plan.tokens_read.items())
    lines.append(f"read per kv head and step, at most: {parts}")
    return "\n".join(lines)


def describe_programs(programs: Mapping[str, Peak]) -> str:
    """A line for each program: what it takes at its fullest, and how much of that is workspace."""
    lines = [
        f"{name:20}{format_bytes(peak.total):>12}, workspace {format_bytes(peak.workspace)}"
        for name, peak in programs.items()
    ]
    return "\n".join(["at the fullest of each program:", *lines])
