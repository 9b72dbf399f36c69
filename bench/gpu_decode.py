"""The decode step of a whole model on the device at hand, against the time that its bytes take.

Weights are random and made on the device; caches are as full as they are in the middle of a long text, without one
having been read.
"""

import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from bench.engines import DTYPE, LONGEST_TEXT, make_engine, make_policy, make_request, prefill_shapes
from bench.gpu_operations import normal
from jkv.cache import Slots
from jkv.config import ModelConfig
from jkv.engine import Engine, State
from jkv.memory import abstract_weights
from jkv.policies import Evict
from pallas_kernels import Implementation
from pallas_kernels.dispatch import XLA
from pallas_kernels.shapes import Cache

INTERVALS = 3
BLOCKS = 4  # of steps, that stand for an interval where nothing is compacted
PROMPT = 8  # tokens of the prompt that the shapes of the state are taken from


def time_decode(
    config: ModelConfig, policy: str, cache: Cache, implementation: Implementation, seed: int
) -> dict[str, Any]:
    """Decodes intervals of full length, each with the compaction that ends it.

    Returns:
        `step` and `compaction`: seconds, the medians. `token`: seconds of a step with its share of the compaction.
        `tokens_per_second`: of all rows. `moved`: bytes that a step must move. `first`: seconds of the first interval,
        in which the programs are compiled. `problem`: what makes the figures void.
    """
    rule = make_policy(policy, cache)
    longest = LONGEST_TEXT if isinstance(rule, Evict) else cache.capacity
    engine = make_engine(config, rule, implementation, prompt=PROMPT, longest=longest)
    weights = random_weights(config, seed)
    blocks = rule.interval // engine.steps if rule.interval else BLOCKS
    # Before the first of the intervals, the one that warms up included.
    held = cache.kept if rule.interval else cache.capacity - (1 + INTERVALS) * BLOCKS * engine.steps
    state = make_state(engine, weights, cache.batch, held, seed)

    first, state, finite = run_interval(engine, weights, state, blocks)
    runs = []
    for _ in range(INTERVALS):
        seconds, state, sound = run_interval(engine, weights, state, blocks)
        runs.append(seconds)
        finite = finite and sound
    steps = blocks * engine.steps
    step, compaction = (median(times) for times in zip(*runs, strict=True))
    step = step / steps
    # Each interval begins with what a compaction leaves; without one, each begins where the one before has ended.
    length = held + steps / 2 if rule.interval else held + steps + INTERVALS * steps / 2
    token = step + compaction / steps
    return {
        "step": step,
        "compaction": compaction,
        "token": token,
        "tokens_per_second": cache.batch / token,
        "moved": count_bytes(config, cache.batch, length),
        "first": sum(first),
        "problem": "" if finite else "a logit is not a finite number",
    }


def run_interval(
    engine: Engine, weights: nnx.State, state: State, blocks: int
) -> tuple[tuple[float, float], State, bool]:
    """Decodes blocks and compacts: seconds of each of the two, the state, and whether all logits were finite."""
    request, outputs = make_request(), []
    start = time.perf_counter()
    for _ in range(blocks):
        state, out = Engine.decode(engine, weights, state, request, steps=engine.steps)
        outputs.append(out)
    jax.block_until_ready(state)
    decoded = time.perf_counter()
    if engine.policy.interval:
        state = jax.block_until_ready(engine.compact(state))
    seconds = decoded - start, time.perf_counter() - decoded
    return seconds, state, all(bool(np.all(out.finite)) and bool(np.all(out.tokens >= 0)) for out in outputs)


def count_bytes(config: ModelConfig, batch: int, length: float) -> int:
    """Bytes of weights and cache that one step must read, and of cache that it must write.

    Args:
        config: the model.
        batch: rows.
        length: tokens that each reads, its own included.
    """
    itemsize = jnp.dtype(DTYPE).itemsize
    weights = sum(x.size for x in jax.tree.leaves(abstract_weights(config, DTYPE))) * itemsize
    looked_up = 0 if config.tie_embeddings else (config.vocab_size - batch) * config.hidden_size * itemsize
    return round(weights - looked_up + config.kv_bytes_per_token(itemsize) * batch * (length + 1))


@functools.lru_cache(maxsize=1)
def random_weights(config: ModelConfig, seed: int) -> nnx.State:
    """Parameters that keep activations near one; those of the last model are kept for the next call."""
    shapes, keys = abstract_weights(config, DTYPE), _keys(seed)

    def draw(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return jnp.ones(x.shape, x.dtype)
        return normal(next(keys), x.shape[-1] ** -0.5 if "kernel" in name else 0.1, x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_state(engine: Engine, weights: nnx.State, batch: int, held: int, seed: int) -> State:
    """A batch in the middle of its texts, with `held` tokens in every store.

    Raises:
        TypeError: the policy's stores are not `Slots`.
    """
    # Shapes do not depend on the implementation, and the one for prompts may not even be installed.
    plain = replace(engine, spec=replace(engine.spec, implementation=XLA))
    shapes, keys = prefill_shapes(plain, weights, batch, PROMPT), _keys(seed)

    def draw(x: Any) -> Array:
        return normal(next(keys), 1.0, x.shape, x.dtype)

    def fill(slots: Slots) -> Slots:
        if not isinstance(slots, Slots):
            raise TypeError(f"{type(engine.policy).__name__}: do not know how to fill a {type(slots).__name__}")
        place = jnp.arange(slots.pos.shape[2], dtype=jnp.int32)
        fills = engine.policy.fills if isinstance(engine.policy, Evict) else {}
        return replace(
            slots,
            k=draw(slots.k),
            v=draw(slots.v),
            window=draw(slots.window),
            pos=jnp.broadcast_to(jnp.where(place < held, place, -1), slots.pos.shape),
            length=jnp.full(slots.length.shape, held, jnp.int32),
            extra={name: jnp.full(x.shape, fills.get(name, 0), x.dtype) for name, x in slots.extra.items()},
            implementation=engine.spec.implementation,
        )

    def rows(value: Any, dtype: Any = jnp.int32) -> Array:
        return jnp.full((batch,), value, dtype)

    return State(
        stores=tuple(fill(slots) for slots in shapes.stores),
        shared=engine.policy.shared(engine.spec, batch),
        token=rows(1),
        pos=rows(held),
        step=rows(1),
        limit=rows(2**30),
        row=jnp.arange(batch, dtype=jnp.uint32),
        done=rows(False, bool),
        seen=None,
    )


def _keys(seed: int) -> Iterator[Array]:
    """Keys, as many as are wanted."""
    return (jax.random.fold_in(jax.random.key(seed), i) for i in itertools.count())
