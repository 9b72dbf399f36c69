"""What a run will hold and read, exactly and before anything is loaded: for `--dry-run` and the report at the end."""

import os
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jkv.cache import Prompt
from jkv.config import CacheSpec, ModelConfig
from jkv.models.decoder import Decoder
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

    @property
    def total(self) -> int:
        """Bytes of weights and cache together; the compiled programs' workspace comes on top."""
        return self.weights + self.kv_held + self.metadata_held


def make_plan(config: ModelConfig, policy: Policy, spec: CacheSpec, *, batch: int, length: int, dtype: str) -> Plan:
    """Counts the bytes of `batch` rows that grow to `length` tokens; nothing is allocated."""
    layers = Counter(policy.at(index, config.num_layers) for index in range(config.num_layers))
    stores = {own: jax.eval_shape(lambda own=own: own.ingest(spec, _empty_prompt(spec, batch))) for own in layers}
    kv_held = sum(count * _nbytes(own.kv(stores[own])) for own, count in layers.items())
    held = sum(count * _nbytes(stores[own]) for own, count in layers.items())
    shared = jax.eval_shape(lambda: policy.shared(spec, batch))
    return Plan(
        batch=batch,
        length=length,
        weights=weight_bytes(config, dtype),
        kv_held=kv_held,
        metadata_held=held - kv_held + _nbytes(shared),
        kv_read=sum(count * own.bytes_read(spec, length) for own, count in layers.items()),
        capacity=policy.capacity(spec),
        tokens_read=min((own.tokens_read(spec, length) for own in layers), key=lambda read: sum(read.values())),
    )


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of a model's parameters in `dtype`."""
    return _nbytes(nnx.state(Decoder(config, dtype=dtype)))


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


def _nbytes(tree: object) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def describe_plan(plan: Plan, full: Plan, *, name: str) -> str:
    """A table of what a policy holds and reads beside full attention, and whether it fits the device."""
    rows = [
        ("", name, "full"),
        ("slots per kv head", plan.capacity, full.capacity),
        ("tokens read", *(sum(p.tokens_read.values()) for p in (plan, full))),
        ("weights", *(format_bytes(p.weights) for p in (plan, full))),
        ("kv held", *(format_bytes(p.kv_held) for p in (plan, full))),
        ("beside the kv", *(format_bytes(p.metadata_held) for p in (plan, full))),
        ("kv read per token", *(format_bytes(p.kv_read) for p in (plan, full))),
        ("in all", *(format_bytes(p.total) for p in (plan, full))),
    ]
    wide = max(len(name), 12) + 2
    lines = [f"{plan.batch} rows of {plan.length} tokens"] + [f"{a:20}{b!s:>{wide}}{c!s:>14}" for a, b, c in rows]
    limit = memory_limit()
    fits = "fits" if plan.total <= limit else "does not fit; lower the budget, --slots or --max-new-tokens"
    parts = " + ".join(f"{count} {part}" for part, count in plan.tokens_read.items())
    lines.append(f"read per kv head and step, at most: {parts}")
    return "\n".join([*lines, f"{fits} in {format_bytes(limit)}, workspace of the programs not counted"])
