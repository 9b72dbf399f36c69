"""Engines for the sizes of `pallas_kernels.shapes`, and their state as shapes, without running or loading anything."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.config import CacheSpec, ModelConfig
from jkv.engine import Call, Engine, Request, State
from jkv.policies import Evict, Policy, describe, get_policy
from jkv.sampling import Sampling
from pallas_kernels import Implementation
from pallas_kernels.shapes import Cache

DTYPE = "bfloat16"
SAMPLING = Sampling(temperature=0.6, top_p=0.95)  # as the papers' tables draw
LONGEST_TEXT = 32768


def make_policy(text: str, cache: Cache | None = None) -> Policy:
    """The policy that `text` describes; one that evicts compacts to what `cache` keeps, each time that it is full.

    One that selects reads so many tokens.
    """
    policy = get_policy(text).prepare(lambda text: tuple(text.encode()))
    if cache is not None and isinstance(policy, Evict):
        policy = replace(policy, budget=cache.kept, interval=cache.capacity - cache.kept)
    elif cache is not None and "budget" in dict(describe(policy)):
        policy = replace(policy, budget=cache.kept)  # pyright: ignore[reportCallIssue]
    return policy


def make_engine(
    config: ModelConfig,
    policy: Policy,
    implementation: Implementation,
    *,
    prompt: int,
    longest: int = LONGEST_TEXT,
    dtype: str = DTYPE,
) -> Engine:
    """An engine for prompts of `prompt` tokens and texts of `longest`."""
    spec = CacheSpec.of(
        config,
        max_len=longest,
        max_new=longest - prompt,
        max_prompt=prompt,
        dtype=dtype,
        implementation=implementation,
    )
    return Engine(config=config, policy=policy, spec=spec, sampling=SAMPLING)


def make_request() -> Request:
    """No seed in particular, and no token that ends a text."""
    return Request(jnp.zeros(2, jnp.uint32), jnp.full(8, -1, jnp.int32))


def prefill_shapes(engine: Engine, weights: nnx.State, batch: int, prompt: int, call: Call | None = None) -> State:
    """The state after a prompt, as shapes.

    Args:
        engine, weights: what would run; the weights may be shapes themselves.
        batch: rows.
        prompt: tokens of each.
        call: called in place of every jitted function, and must give its result as shapes.
    """
    tokens, lengths = np.zeros((batch, prompt), np.int32), np.full(batch, prompt, np.int32)
    rows = np.arange(batch, dtype=np.uint32)
    return engine.prefill(weights, tokens, lengths, lengths, rows, make_request(), call=call or shape_of_call)[0]


def shape_of_call(function: Any, static: Any, *args: Any, **options: Any) -> Any:
    """The result of a jitted function as shapes."""
    return jax.eval_shape(partial(function, static, **options), *args)
