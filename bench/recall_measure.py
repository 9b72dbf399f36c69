"""How much of the attention of a text lies on what a policy reads of it.

A text is read, and its last tokens are fed one by one, under full attention, once: a `Passage`. Every policy then goes
over the same queries, keys and values with stores of its own; what it would have attended to changes nothing.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jkv.attention import attend
from jkv.cache import Prompt, Slots, Token, View
from jkv.config import CacheSpec, ModelConfig
from jkv.engine import compact_store
from jkv.models import rope
from jkv.models.decoder import Decoder, join, single_layer
from jkv.policies import Policy
from jkv.policies.base import Step
from jkv.policies.full import Full
from jkv.prompt import read_prompt
from pallas_kernels.dispatch import XLA, Implementation

BLOCK = 512  # prompt tokens handled at once
# The middle of a text is what is left without these: nearly all of a head's attention is on its ends.
SINKS, RECENT = 4, 64


class Fed(NamedTuple):
    """One token in one layer under full attention; slot and position in the text are the same.

    Attributes:
        x: what entered the layer, `[B, E]`.
        token: what the layer made of it.
        probs: attention of each query head, float32 `[B, H, G, T]`.
        shared, own: the most that 1, 2, ... T tokens can have of it, if the query heads of a kv head have to agree on
            them, float32 `[B, H, 1, T]`, and if they do not, `[B, H, G, T]`.
    """

    x: Array
    token: Token
    probs: Array
    shared: Array
    own: Array


class Figures(NamedTuple):
    """What became of one token in one layer, or of N tokens in L, with the axes `[N, L]` in front.

    Attributes:
        recall: share of a query head's attention that is on what it reads, `[B, H, G]`.
        best: mean of the shares of a kv head's query heads, had they read as many of the best tokens, `[B, H]`.
        middle, all_middle: mean attention that is on what is read of the middle of the text, and on all of it,
            `[B, H]`.
        tokens: tokens that are read for a kv head, `[B, H]`.
        attended: tokens that a query head attends to, `[B, H]`: fewer, where query heads have tokens of their own.
    """

    recall: Any
    best: Any
    middle: Any
    all_middle: Any
    tokens: Any
    attended: Any


@dataclass(frozen=True)
class Passage:
    """A text under full attention.

    Attributes:
        decoder: the model.
        spec: sizes of the caches.
        prompts: what entered each layer as the first tokens were read, `[B, S, E]`, and what the layer made of it.
        fed: each later token, by step and layer.
    """

    decoder: Decoder
    spec: CacheSpec
    prompts: list[tuple[Array, Prompt]]
    fed: list[list[Fed]]

    def find_best(self, budget: int) -> np.ndarray:
        """The most that `budget` tokens of a kv head can have of the attention, `[N, L, B, H]`."""
        last = min(budget, self.spec.max_len) - 1
        return np.stack([np.stack([np.asarray(fed.shared[:, :, 0, last]) for fed in layers]) for layers in self.fed])


def read_passage(decoder: Decoder, text: np.ndarray, steps: int, *, implementation: Implementation = XLA) -> Passage:
    """Reads texts int32 `[B, T]`, the last `steps` tokens of them one by one."""
    config, weights, longest = decoder.config, nnx.state(decoder), text.shape[1]
    dtype = decoder.embedding[...].dtype.name
    spec = CacheSpec.of(
        config,
        max_len=longest,
        max_new=steps,
        max_prompt=longest - steps,
        dtype=dtype,
        implementation=implementation,
    )
    tokens = jnp.asarray(text[:, :-steps])
    x, prompts, stores = decoder.embed(tokens), [], []
    for index in range(config.num_layers):
        entered = x
        x, prompt = _read_layer(config, spec, single_layer(weights, index), entered, tokens)
        prompts.append((entered, prompt))
        stores.append(ingest_prompt(Full(), spec, (), entered, prompt, ())[0])
    fed = []
    for position in range(longest - steps, longest):
        token = jnp.asarray(text[:, position])
        x, layers = decoder.embed(token), []
        for index, store in enumerate(stores):
            pos = jnp.full_like(token, position)
            x, stores[index], one = _feed_layer(config, spec, single_layer(weights, index), store, x, token, pos)
            layers.append(one)
        fed.append(layers)
    return Passage(decoder, spec, prompts, fed)


@partial(jax.jit, static_argnums=(0, 1))
def _read_layer(
    config: ModelConfig, spec: CacheSpec, weights: nnx.State, x: Array, tokens: Array
) -> tuple[Array, Prompt]:
    layer = join(replace(config, num_layers=1), weights, spec.implementation).layers[0]
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    cos, sin = rope.cos_sin(config.rope, config.head_dim, position)
    length = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return read_prompt(layer, x, cos, sin, tokens, length, block=BLOCK, implementation=spec.implementation)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _feed_layer(
    config: ModelConfig, spec: CacheSpec, weights: nnx.State, store: Slots, x: Array, token: Array, pos: Array
) -> tuple[Array, Slots, Fed]:
    layer, full = join(replace(config, num_layers=1), weights, spec.implementation).layers[0], Full()
    heads = layer.heads(x, *rope.cos_sin(config.rope, config.head_dim, pos))
    one = Token(*heads, token=token, pos=pos, active=jnp.ones(token.shape, bool))
    store = full.append(store, one)
    attended = attend(heads.q, full.select(store, heads.q, ()), return_probs=True)
    probs = attended.probs
    assert probs is not None
    fed = Fed(x, one, probs, sum_best(jnp.mean(probs, axis=2, keepdims=True)), sum_best(probs))
    return layer.finish(x, attended.out), full.settle(store, attended), fed


def sum_best(probs: Array) -> Array:
    """Sums of the 1, 2, ... largest along the last axis."""
    return jnp.cumsum(jnp.sort(probs, axis=-1, descending=True), axis=-1)


def measure(policy: Policy, passage: Passage, brought: Any = ()) -> Figures:
    """The figures `[N, L, ...]` of a policy that has been adapted to the model, with what it brings."""
    decoder, spec = passage.decoder, passage.spec
    layers, weights = decoder.config.num_layers, nnx.state(decoder)
    of_layer = [policy.at(index, layers) for index in range(layers)]
    shared, stores = policy.shared(spec, passage.prompts[0][1].tokens.shape[0]), []
    for own, (x, prompt) in zip(of_layer, passage.prompts, strict=True):
        store, shared = ingest_prompt(own, spec, shared, x, prompt, brought)
        stores.append(store)
    rows = np.ones(passage.prompts[0][1].length.shape, bool)
    figures = []
    for step, fed in enumerate(passage.fed):
        plan, shared = _plan(policy, decoder.config, spec, weights, shared, tuple(stores), fed[0], brought)
        for index, own in enumerate(of_layer):
            stores[index], shared, one = _read_token(own, stores[index], shared, plan, fed[index], brought)
            figures.append(one)
        if policy.interval and (step + 1) % policy.interval == 0:
            stores = [compact_store(own, store, rows) for own, store in zip(of_layer, stores, strict=True)]
    return jax.tree.map(lambda *x: np.stack(x).reshape(-1, layers, *x[0].shape), *jax.device_get(figures))


def ingest_prompt(
    policy: Policy, spec: CacheSpec, shared: Any, x: Array, prompt: Prompt, brought: Any
) -> tuple[Any, Any]:
    """A layer's store and the shared state, once the layer has read the prompt."""
    store, shared = _ingest(policy, spec, shared, x, prompt, brought)
    # The prompt's own arrays may be among them, and a store's buffers are taken over.
    return jax.tree.map(jnp.copy, store), shared


@partial(jax.jit, static_argnums=(0, 1))
def _ingest(policy: Policy, spec: CacheSpec, shared: Any, x: Array, prompt: Prompt, brought: Any) -> tuple[Any, Any]:
    return policy.ingest(spec, prompt), policy.read_prompt(shared, x, prompt, brought)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _plan(
    policy: Policy,
    config: ModelConfig,
    spec: CacheSpec,
    weights: nnx.State,
    shared: Any,
    stores: tuple[Any, ...],
    fed: Fed,
    brought: Any,
) -> tuple[Any, Any]:
    """What the policy chooses before the layers, of which `fed` is the first."""
    token, model = fed.token, join(config, weights, spec.implementation)
    cos, sin = rope.cos_sin(config.rope, config.head_dim, token.pos)
    return policy.plan(shared, Step(model, stores, token.token, fed.x, cos, sin, token.pos, token.active, brought))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _read_token(policy: Policy, store: Any, shared: Any, plan: Any, fed: Fed, brought: Any) -> tuple[Any, Any, Figures]:
    """One token in one layer, in the order of the engine's decode step."""
    token = fed.token
    shared = policy.notice(shared, fed.x, token, brought)
    store = policy.append(store, token)
    view = policy.select(store, token.q, plan)
    figures = compare(mask_read(view, fed.probs.shape[-1]), fed)
    attended = attend(token.q, view, return_probs=policy.needs_probs)
    store = policy.observe(policy.settle(store, attended), token, attended.probs)
    return store, shared, figures


def compare(read: Array, fed: Fed) -> Figures:
    """The figures of a token whose query heads read the tokens of `read`, bool `[B, H, J, T]`; J is 1 or G."""
    lists, size = read.shape[2:]
    count = jnp.sum(read, axis=-1, dtype=jnp.int32)
    sums = fed.shared if lists == 1 else fed.own
    best = jnp.take_along_axis(sums, jnp.maximum(count - 1, 0)[..., None], axis=-1)[..., 0]
    position = jnp.arange(size, dtype=jnp.int32)[None]
    middle = (position >= SINKS) & (position <= fed.token.pos[:, None] - RECENT)
    inside = jnp.where(middle[:, None, None], fed.probs, 0.0)
    return Figures(
        recall=jnp.sum(jnp.where(read, fed.probs, 0.0), axis=-1),
        best=jnp.mean(jnp.where(count > 0, best, 0.0), axis=-1),
        middle=jnp.mean(jnp.sum(jnp.where(read, inside, 0.0), axis=-1), axis=-1),
        all_middle=jnp.mean(jnp.sum(inside, axis=-1), axis=-1),
        tokens=jnp.sum(jnp.any(read, axis=2), axis=-1, dtype=jnp.int32),
        attended=jnp.mean(count.astype(jnp.float32), axis=-1),
    )


def mask_read(view: View, longest: int) -> Array:
    """The text positions that a view shows, bool `[B, H, J, longest]`; J is 1, or G where query heads have their own.

    Raises:
        ValueError: the view's slots do not say which tokens they hold.
    """
    if view.notes is None or view.new is None:
        raise ValueError("what the policy lets attention read has no text positions, or no token to be decoded")
    pos, place = view.notes.pos, view.notes.place
    slot = jnp.arange(pos.shape[2], dtype=jnp.int32).reshape(1, 1, -1)
    last = (slot == view.length[..., None] - 1) & view.new.active.reshape(-1, 1, 1)
    pos = jnp.where(last, place.reshape(-1, 1, 1), pos)
    read = (slot < view.length[..., None])[:, :, None]
    if (pages := view.pages) is not None:
        listed = _mark(pages.index, -(-pos.shape[2] // pages.size))
        listed = jnp.repeat(listed, pages.size, axis=-1)[..., : pos.shape[2]]
        read &= listed | (slot[:, :, None] >= pages.start[..., None])
    index = jnp.where(read & (pos >= 0)[:, :, None], pos[:, :, None], longest)
    found = _mark(index, longest)
    if (low := view.beside) is not None:
        chunks = _mark(low.index[:, :, None], low.v.shape[2] // low.size)
        made = jnp.repeat(chunks, low.size, axis=-1)[..., :longest]
        found |= jnp.pad(made, [(0, 0)] * 3 + [(0, longest - made.shape[-1])])
    return found


def _mark(index: Array, size: int) -> Array:
    """Which of `size` numbers are along the last axis of `index` `[B, H, J, N]`, bool `[B, H, J, size]`."""
    at = jnp.indices(index.shape, dtype=jnp.int32, sparse=True)[:3]
    return jnp.zeros((*index.shape[:3], size), bool).at[(*at, index)].set(True, mode="drop")
