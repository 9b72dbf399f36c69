"""Feeds given text through the decode path, and says what the model made of it.

Nothing leaves a cache inside an interval. So a policy that reads all that it holds can be fed many tokens at once, each
seeing what is cached and the tokens of the block before it, and the caches are those of one token at a time. A policy
that chooses what a step reads is fed token by token.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jkv.api import LLM
from jkv.cache import Slots, Token, settle
from jkv.engine import Engine, Request, State
from jkv.loop import bucket
from jkv.models import rope
from jkv.models.decoder import Decoder, Layer, join
from jkv.oracle import Oracle
from jkv.policies import Policy
from jkv.sampling import Sampling, seed_words

MOST_AT_ONCE = 32  # tokens of a block; its logits are in memory whole


def block_size(policy: Policy) -> int:
    """Tokens that are fed at once: the largest divisor of the interval up to `MOST_AT_ONCE`."""
    return max(n for n in range(1, MOST_AT_ONCE + 1) if (policy.interval or MOST_AT_ONCE) % n == 0)


def reads_everything(policy: Policy) -> bool:
    """Whether a step reads all that the policy holds, so that it can be fed many tokens at once."""
    return all(getattr(type(policy), name) is getattr(Policy, name) for name in ("select", "settle", "plan", "notice"))


@dataclass
class Track:
    """A policy on its way through texts; `fed` tokens of each have been fed after the prompts."""

    engine: Engine
    weights: nnx.State
    request: Request
    state: State
    fed: int = 0

    @classmethod
    def begin(cls, llm: LLM, policy: Policy, prompts: Sequence[Sequence[int]], longest: int) -> "Track":
        """Reads the prompts of texts of up to `longest` tokens."""
        length = np.array([len(prompt) for prompt in prompts], np.int32)
        most = int(length.max())
        engine = llm.engine(policy, Sampling(), max_len=longest, max_new=longest - int(length.min()), max_prompt=most)
        request = Request(jnp.asarray(seed_words(0)), jnp.full((8,), -1, jnp.int32), llm.bring(policy))
        tokens = np.zeros((len(prompts), bucket(most)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        limit, rows = np.full(len(prompts), longest, np.int32), np.arange(len(prompts), dtype=np.uint32)
        state, _ = engine.prefill(llm.weights, tokens, length, limit, rows, request)
        return cls(engine, llm.weights, request, state)

    def feed(self, tokens: np.ndarray, count: np.ndarray) -> Array:
        """Logits after each of the next tokens, as `feed`; compacts when an interval ends, but for an `Oracle`."""
        policy = self.engine.policy
        self.state, logits = feed(self.engine, self.weights, self.state, tokens, count, self.request)
        self.fed += tokens.shape[1]
        if policy.interval and not isinstance(policy, Oracle) and self.fed % policy.interval == 0:
            self.state = self.engine.compact(self.state)
        return logits


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def feed(
    engine: Engine, weights: nnx.State, state: State, tokens: Array, count: Array, request: Request
) -> tuple[State, Array]:
    """Feeds the next tokens of each row's text; no compaction may be due before the last of them.

    Args:
        engine: the policy and the model.
        weights: its parameters.
        state: after `Engine.prefill` and earlier blocks; its buffers are taken over.
        tokens: int32 `[B, N]`.
        count: how many of them each row has, int32 `[B]`; rows with fewer are left as they are from there on.
        request: what the policy brings.

    Returns:
        The state, and logits float32 `[B, N, V]`: those after token n predict token n + 1.
    """
    model = join(engine.config, weights, engine.spec.implementation)
    if reads_everything(engine.policy):
        return _feed_block(engine, model, state, tokens, count)

    def step(state: State, column: tuple[Array, Array]) -> tuple[State, Array]:
        token, index = column
        active = index < count
        state = replace(state, token=token, done=~active)
        state, logits = engine.decode_step(model, state, request.brought)
        return replace(state, pos=state.pos + active), logits

    state, logits = lax.scan(step, state, (tokens.T, jnp.arange(tokens.shape[1], dtype=jnp.int32)))
    return state, jnp.moveaxis(logits, 0, 1)


def _feed_block(engine: Engine, model: Decoder, state: State, tokens: Array, count: Array) -> tuple[State, Array]:
    size = tokens.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    pos = state.pos[:, None] + index[None]
    active = index[None] < count[:, None]
    x = model.embed(tokens)
    cos, sin = rope.cos_sin(model.config.rope, model.config.head_dim, pos)
    stores = []
    for number, (layer, store) in enumerate(zip(model.layers, state.stores, strict=True)):
        store, x = _feed_layer(engine.at(number).policy, layer, store, x, cos, sin, (tokens, pos, active))
        stores.append(store)
    return replace(state, stores=tuple(stores), pos=state.pos + count), model.logits(x)


def _feed_layer(
    policy: Policy, layer: Layer, store: Slots, x: Array, cos: Array, sin: Array, block: tuple[Array, Array, Array]
) -> tuple[Slots, Array]:
    """One layer of a block: all tokens are appended one after the other, and attend together."""
    heads = layer.heads(x, cos, sin)
    columns = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (*heads, *block))
    held = store.length

    def append(store: Slots, column: Any) -> tuple[Slots, None]:
        return settle(policy.append(store, Token(*column)), column[0]), None

    store, _ = lax.scan(append, store, columns)
    q = jnp.moveaxis(heads.q, 1, 3)
    _, _, active = block
    # Row by row of the block: what was held, and the block's own tokens up to it.
    seen = jnp.maximum(held[:, :, None] + jnp.cumsum(active, axis=1, dtype=jnp.int32)[:, None], 1)
    probs = _probabilities(q, store.k, seen)
    out = jnp.einsum("bhgtc,bhcd->bthgd", probs.astype(store.v.dtype), store.v, preferred_element_type=jnp.float32)

    def observe(store: Slots, column: Any) -> tuple[Slots, None]:
        token, seen = column
        return policy.observe(store, Token(*token), seen), None

    if type(policy).observe is not Policy.observe:
        store, _ = lax.scan(observe, store, (columns, jnp.moveaxis(probs, 3, 0)))
    return store, layer.finish(x, out.astype(x.dtype))


def _probabilities(q: Array, k: Array, seen: Array) -> Array:
    """Attention of queries `[B, H, G, N, D]` to the first `seen` int32 `[B, H, N]` slots: float32 `[B, H, G, N, C]`."""
    logits = jnp.einsum("bhgtd,bhcd->bhgtc", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    slot = jnp.arange(k.shape[2], dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    return jax.nn.softmax(jnp.where(slot < seen[:, :, None, :, None], logits, -jnp.inf), axis=-1)
