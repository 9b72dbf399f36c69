"""Tiny random decoders, a driver that runs one under a policy and keeps what it did, and a dense oracle in numpy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.config import CacheSpec, ModelConfig
from jkv.engine import Engine, Request, State
from jkv.models.decoder import Decoder, Layer
from jkv.policies import Policy
from jkv.sampling import Sampling, seed_words
from pallas_kernels.dispatch import XLA, Implementation

# The kinds of the test matrix: 2, 3 and 7 query heads a group, and heads that are wider than hidden_size / num_heads.
KINDS = ("llama", "qwen2-3", "qwen2-7", "qwen3")


def tiny(kind: str = "llama", *, seed: int = 0, **changes: Any) -> Decoder:
    """A random float32 decoder of 2 layers with an untied head.

    Norms and biases are off their defaults and projections are large, so that logits depend on all of them and heads
    attend to few tokens.

    Args:
        kind: one of `KINDS`, or another number of query heads a group behind the dash.
        seed: of the weights.
        changes: fields of the `ModelConfig`.
    """
    family, _, group = kind.partition("-")
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_kv_heads": 2,
        "num_heads": 2 * int(group or 2),
        "head_dim": 16,
        "max_position": 512,
    }
    if family == "qwen3":
        sizes |= {"hidden_size": 48, "qk_norm": True}
    config = ModelConfig(model_type=family, **sizes | {"qkv_bias": family == "qwen2"} | changes)
    graph, weights = nnx.split(Decoder(config))
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        noise = rng.standard_normal(x.shape, np.float32)
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return jnp.asarray(1 + 0.3 * noise)
        if "bias" in name:
            return jnp.asarray(0.5 * noise)
        if "embedding" in name:
            return jnp.asarray(noise)
        return jnp.asarray(1.3 * x.shape[1] ** -0.5 * noise)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, weights))


def token_ids(text: str) -> tuple[int, ...]:
    """A stand-in for a tokenizer, to which all text is a few ids of the tiny vocabulary."""
    return tuple(2 + ord(letter) % 8 for letter in text)


@dataclass
class Trace:
    """What a run did. S: sampled tokens of a row.

    Attributes:
        tokens: int `[B, S]`, -1 once a row has ended.
        logits: float32 `[B, S, V]`, those that each token was sampled from.
        finite: bool `[B, S]`.
        kept: after the prompt and after each compaction: decode steps done by then, tokens of each row in the cache
            or evicted from it `[B]`, and the positions that are held, `[L, B, H, C]`.
        held: slots filled after each decode step, before the compaction that follows, `[S - 1, L, B, H]`.
        state: the state at the end.
    """

    tokens: np.ndarray
    logits: np.ndarray
    finite: np.ndarray
    held: np.ndarray
    state: State
    kept: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)


def snapshot(x: jax.Array) -> np.ndarray:
    """A copy: a numpy view of a buffer would keep the next step from taking it over."""
    return np.asarray(jnp.copy(x))


def make_engine(
    model: Decoder,
    policy: Policy,
    *,
    longest: int,
    new: int,
    sampling: Sampling | None = None,
    implementation: Implementation = XLA,
    **options: Any,
) -> tuple[Engine, nnx.State]:
    """An engine for prompts of at most `longest` tokens and `new` sampled ones, and the weights it takes."""
    weights = nnx.state(model)
    c = model.config
    spec = CacheSpec.of(
        c,
        max_len=longest + new,
        max_new=new,
        max_prompt=longest,
        dtype="float32",
        implementation=implementation,
    )
    engine = Engine(config=model.config, policy=policy, spec=spec, sampling=sampling or Sampling(), **options)
    return engine, weights


def batch(
    prompts: Sequence[Sequence[int]], longest: int, limit: int | Sequence[int]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Right-padded tokens `[B, longest]`, length, limit and row ids: what `Engine.prefill` reads."""
    tokens = np.full((len(prompts), longest), 1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    limits = np.broadcast_to(np.asarray(limit, np.int32), length.shape)
    return jnp.asarray(tokens), jnp.asarray(length), jnp.array(limits), jnp.arange(len(prompts), dtype=jnp.uint32)


def request(eos: Sequence[int] = (-1,), seed: int = 0) -> Request:
    """Seed and eos ids as the engine takes them."""
    return Request(jnp.asarray(seed_words(seed)), jnp.asarray(eos, jnp.int32))


def run(
    model: Decoder,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    new: int,
    *,
    longest: int = 32,
    limit: int | Sequence[int] | None = None,
    eos: Sequence[int] = (-1,),
    seed: int = 0,
    steps: int = 1,
    until: int | None = None,
    sampling: Sampling | None = None,
    **options: Any,
) -> Trace:
    """Decodes up to `new` tokens a row, `steps` at a time, with a compaction after every interval.

    Args:
        model: the model.
        policy: the policy.
        prompts: token ids of each row; an empty one is a row that stays idle.
        new: tokens sampled, the prefill's included.
        longest: T that the prompts are padded to.
        limit: tokens to sample at most, of all rows or of each; None is `new`.
        eos: ids that end a row.
        seed: of the sampling.
        steps: steps of one compiled block.
        until: tokens after which the run is left as it stands; None is `new`.
        sampling: how tokens are drawn; greedy if None.
        options: the implementation, and further fields of the `Engine`.
    """
    engine, weights = make_engine(
        model, policy, longest=longest, new=new, sampling=sampling, keep_logits=True, **options
    )
    asked = request(eos, seed)
    state, out = engine.prefill(weights, *batch(prompts, longest, new if limit is None else limit), asked)
    outs, held, kept = [out], [], [(0, _seen(state), _positions(policy, state))]
    for step in range(steps, until or new, steps):
        state, out = engine.decode(weights, state, asked, steps=steps)
        outs.append(out)
        held.append(np.stack([snapshot(store.length) for store in state.stores]))
        if policy.interval and step % policy.interval == 0:
            state = engine.compact(state)
            kept.append((step, _seen(state), _positions(policy, state)))
    tokens, finite, logits = (
        np.concatenate([np.asarray(getattr(out, name)) for out in outs], axis=1)
        for name in ("tokens", "finite", "logits")
    )
    return Trace(tokens=tokens, logits=logits, finite=finite, held=np.asarray(held), state=state, kept=kept)


def _seen(state: State) -> np.ndarray:
    """Tokens that have gone through the layers: the last sampled one has not."""
    return snapshot(state.pos)


def _positions(policy: Policy, state: State) -> np.ndarray:
    return np.stack([snapshot(policy.positions(store)) for store in state.stores])


def visible(trace: Trace, row: int, prompt: int, total: int) -> np.ndarray:
    """Which tokens each query of a row could see in a run, bool `[L, H, total, total]`.

    A prompt's queries see all before them. A decoded one sees what was held after the last compaction before it, and
    every token since.
    """
    layers, _, heads, _ = trace.kept[0][2].shape
    seen = np.tril(np.ones((total, total), bool))[None, None].repeat(heads, 1).repeat(layers, 0)
    for start, (step, _, positions) in enumerate(trace.kept):
        first = prompt + step
        last = prompt + trace.kept[start + 1][0] if start + 1 < len(trace.kept) else total
        for layer, head in np.ndindex(layers, heads):
            held = positions[layer, row, head]
            gone = np.ones(total, bool)
            gone[held[held >= 0]] = False
            gone[first:] = False
            seen[layer, head, first:last, gone] = False
    return seen


def dense(model: Decoder, tokens: Sequence[int], seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole decoder over one text at once, in numpy and float64.

    Args:
        model: the model.
        tokens: ids of the text, T of them.
        seen: which token (last axis) a query may see, bool `[L, H, T, T]`, or `[L, H, G, T, T]`.

    Returns:
        Logits `[T, V]` and attention probabilities `[L, H, G, T, T]`.
    """
    c = model.config
    x = _wide(model.embedding)[np.asarray(tokens)]
    probs = []
    for index, layer in enumerate(model.layers):
        y, part = _attend(c, layer, x, seen[index])
        probs.append(part)
        x = x + y
        gate, up = np.split(_linear(layer.gate_up, _norm(layer.mlp_norm, x)), 2, axis=-1)
        x = x + _linear(layer.down, gate / (1 + np.exp(-gate)) * up)
    head = _wide(model.embedding) if model.head is None else _wide(model.head.kernel)
    return _norm(model.norm, x) @ head.T, np.stack(probs)


def _attend(c: ModelConfig, layer: Layer, x: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    length, inner, kv = len(x), c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = _linear(layer.qkv, _norm(layer.attention_norm, x))
    q = qkv[:, :inner].reshape(length, c.num_heads, c.head_dim)
    k = qkv[:, inner : inner + kv].reshape(length, c.num_kv_heads, c.head_dim)
    v = qkv[:, inner + kv :].reshape(length, c.num_kv_heads, c.head_dim)
    if c.qk_norm:
        q, k = _norm(layer.q_norm, q), _norm(layer.k_norm, k)
    q, k = _rotate(c, q), _rotate(c, k)
    out, probs = np.zeros_like(q), np.zeros((c.num_heads, length, length))
    seen = np.broadcast_to(seen if seen.ndim == 4 else seen[:, None], (c.num_kv_heads, c.group, length, length))
    for head in range(c.num_heads):
        kv_head, member = divmod(head, c.group)
        scores = np.where(seen[kv_head, member], q[:, head] @ k[:, kv_head].T / math.sqrt(c.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        probs[head] = weights / weights.sum(-1, keepdims=True)
        out[:, head] = probs[head] @ v[:, kv_head]
    grouped = probs.reshape(c.num_kv_heads, c.group, length, length)
    return _linear(layer.out, out.reshape(length, inner)), grouped


def _rotate(c: ModelConfig, x: np.ndarray) -> np.ndarray:
    half = c.head_dim // 2
    angle = np.arange(len(x))[:, None] * c.rope.theta ** (-np.arange(half) / half)
    turn = np.exp(1j * angle)[:, None] * (x[..., :half] + 1j * x[..., half:])
    return np.concatenate([turn.real, turn.imag], axis=-1)


def _linear(linear: Any, x: np.ndarray) -> np.ndarray:
    y = x @ _wide(linear.kernel).T
    return y if linear.bias is None else y + _wide(linear.bias)


def _norm(norm: Any, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * _wide(norm.scale)


def _wide(param: Any) -> np.ndarray:
    return np.asarray(param[...], np.float64)
