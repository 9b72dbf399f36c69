"""Reads the recordings in tests/oracles and replays them: the policies they stand for, and caches made by hand.

The recorded codes pad on the left, count padding towards the budget and compact a batch as soon as its longest row is
over it. Here rows are aligned to their first token, so that padding is left out, and `LongestRow` repeats the trigger.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jkv.cache import Prompt, Slots, Token, settle
from jkv.policies.base import Policy
from jkv.policies.full import Full
from jkv.policies.gkv import GKV
from jkv.policies.rkv import RKV
from jkv.policies.snapkv import SnapKV
from jkv.policies.streamingllm import StreamingLLM

FOLDER = Path(__file__).parent / "oracles"


class LongestRow:
    """Compacts every row as soon as one of the batch is over the target."""

    def due(self, slots: Slots) -> Array:
        longest = jnp.max(slots.length, axis=0, keepdims=True)
        return jnp.broadcast_to(longest > self.target(slots.seen)[:, None], slots.length.shape)  # type: ignore


@dataclass(frozen=True, kw_only=True)
class LongestGKV(LongestRow, GKV):
    """`GKV` in a batch of the recorded code."""


@dataclass(frozen=True, kw_only=True)
class LongestRKV(LongestRow, RKV):
    """`RKV` in a batch of the recorded code."""


@dataclass(frozen=True, kw_only=True)
class LongestStreamingLLM(LongestRow, StreamingLLM):
    """`StreamingLLM` in a batch of the recorded code."""


@dataclass(frozen=True, kw_only=True)
class ByScoreRKV(RKV):
    """`RKV` as its authors' code leaves the cache: by descending score, then the window, even if nothing has to go."""

    def due(self, slots: Slots) -> Array:
        return slots.length >= self.target(slots.seen)[:, None]

    def choose(self, slots: Slots, score: Array, count: Array) -> Array:
        index = super().choose(slots, score, count)
        rank = jnp.take_along_axis(score, jnp.minimum(index, score.shape[-1] - 1), axis=-1)
        place = jnp.where(index == score.shape[-1], 2, jnp.where(rank == jnp.inf, 1, 0))
        return lax.sort((place, jnp.where(place == 0, -rank, 0.0), index), num_keys=3)[2]


def policy_of(config: Mapping[str, Any], *, batch: int, interval: int) -> Policy:
    """The policy that a recording's configuration stands for."""
    kind, tokens = config["algo"], {"interval": interval}
    gkv, rkv, streaming = (LongestGKV, LongestRKV, LongestStreamingLLM) if batch > 1 else (GKV, RKV, StreamingLLM)
    match kind:
        case "full":
            return Full()
        case "streamingllm" | "rkvstream":
            return streaming(budget=config["budget"], sink=config["first_tokens"], **tokens)
        case "gkv_repo_streamingllm" | "gkvstream":
            return streaming(budget=config["sink_len"] + config["window_size"], sink=config["sink_len"], **tokens)
    tokens |= {"budget": config["budget"], "window": config["window_size"]}
    if config.get("compress_mode") == "ratio":
        tokens |= {"budget": config["compress_ratio"], "floor": config["budget"]}
    match kind:
        case "snapkv":
            return RKV(lam=1.0, pool=config["kernel_size"], **tokens)
        case "rkv":
            # Its "percent" directions gave the same numbers as the plain ones.
            retain = config["retain_direction"].removesuffix("_percent")
            return ByScoreRKV(lam=config["mix_lambda"], pool=config.get("kernel_size", 7), retain=retain, **tokens)
    assert kind in ("gkv_repo_score", "gkv"), kind
    pool = config.get("kernel_size", 5) if config["enable_pooling"] else 1
    lam = config["mix_lambda"] if config["suppressing_redundancy"] else 1.0
    if config["enable_score_cache"]:
        return gkv(
            alpha=config["alpha"],
            smooth=config["smooth_method"],
            lam=lam,
            pool=pool,
            normalize=not config["disable_norm"],
            shift=config.get("gamma", 200.0) if config.get("attention_shift_indicator") else 0.0,
            **tokens,
        )
    if not config["suppressing_redundancy"]:
        return SnapKV(pool=pool, **tokens)
    retain = "recent" if config.get("triton_similarity", True) else "last"
    return rkv(lam=lam, pool=pool, reduce="probs", retain=retain, **tokens)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Configuration and arrays of one recording."""
    with np.load(path) as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("config"))), arrays


@dataclass(frozen=True)
class Stream:
    """Recorded keys and queries, each row aligned to its first token.

    Attributes:
        k: `[B, H, T, D]`.
        q: `[B, H, G, T, D]`.
        tokens: token ids, `[B, T]`.
        pads: padding that stood before each row, `[B]`.
    """

    k: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    pads: np.ndarray

    @property
    def v(self) -> np.ndarray:
        """Values that tell tokens apart: eviction does not look at them, but they move with their keys."""
        return self.k[..., ::-1]


def align(x: np.ndarray, pads: np.ndarray, axis: int) -> np.ndarray:
    """Moves each row's padding from its left to its right."""
    return np.stack([np.roll(row, -pad, axis=axis) for row, pad in zip(x, pads, strict=True)])


@functools.cache
def read_stream(name: str) -> Stream:
    _, arrays = read(FOLDER / "streams" / f"{name}.npz")
    k, q, mask = arrays["keys"], arrays["queries"], arrays["attention_mask"]
    pads = np.sum(mask == 0, axis=1)
    q = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])
    return Stream(k=align(k, pads, -2), q=align(q, pads, -2), tokens=np.zeros(mask.shape, np.int32), pads=pads)


def prompt_of(stream: Stream, length: int) -> Prompt:
    """The first `length` tokens of a stream, padding counted, as right-padded prompts."""
    k, v, q = stream.k[:, :, :length], stream.v[:, :, :length], stream.q[:, :, :, :length]
    arrays = {"q": q, "k": k, "v": v, "k_pre": k, "tokens": stream.tokens[:, :length], "length": length - stream.pads}
    arrays["length"] = arrays["length"].astype(np.int32)
    return Prompt(**{name: jnp.asarray(x) for name, x in arrays.items()})


def slots_of(
    stream: Stream, held: list[list[np.ndarray]], seen: np.ndarray, *, capacity: int, window: int, extra: dict[str, Any]
) -> Slots:
    """A cache made by hand.

    Args:
        stream: where keys, values and queries come from.
        held: positions of each row and head, in cache order.
        seen: tokens so far of each row, `[B]`.
        capacity: slots.
        window: observation window.
        extra: by name, the value of an empty slot and arrays shaped as `held`.
    """
    batch, heads, _, dim = stream.k.shape
    pos = np.full((batch, heads, capacity), -1, np.int32)
    k, v = np.zeros((2, batch, heads, capacity, dim), np.float32)
    beside = {name: np.full(pos.shape, empty, np.float32) for name, (empty, _) in extra.items()}
    queries = np.zeros((batch, heads, window, stream.q.shape[2], dim), np.float32)
    for row in range(batch):
        for head in range(heads):
            where = held[row][head]
            size = len(where)
            pos[row, head, :size] = where
            k[row, head, :size], v[row, head, :size] = stream.k[row, head, where], stream.v[row, head, where]
            for name, (_, values) in extra.items():
                beside[name][row, head, :size] = values[row][head]
        for p in range(max(seen[row] - window, 0), seen[row]):
            queries[row, :, p % window] = stream.q[row, :, :, p]
    length = np.array([[len(x) for x in row] for row in held], np.int32)
    arrays = jax.tree.map(jnp.asarray, (k, v, pos, length, queries, beside))
    return Slots(*arrays[:5], extra=arrays[5])


@functools.partial(jax.jit, static_argnums=0)
def feed(policy: Policy, store: Any, k: Array, v: Array, q: Array, tokens: Array, pos: Array) -> Any:
    """Appends tokens one by one: k, v `[B, H, N, D]`, q `[B, H, G, N, D]`, tokens and pos int32 `[B, N]`."""

    def step(store: Any, x: tuple[Array, ...]) -> tuple[Any, None]:
        k, v, q, token, pos = x
        token = Token(q=q, k=k, v=v, k_pre=k, token=token, pos=pos, active=jnp.ones(pos.shape, bool))
        return policy.observe(settle(policy.append(store, token), q), token, None), None

    axes = ((k, 2), (v, 2), (q, 3), (tokens, 1), (pos, 1))
    return lax.scan(step, store, tuple(jnp.moveaxis(x, axis, 0) for x, axis in axes))[0]


def feed_stream(policy: Policy, store: Any, stream: Stream, first: int, last: int) -> Any:
    """Appends a stream's tokens `first` to `last - 1`, padding counted."""
    place = np.arange(first, last, dtype=np.int32)[None] - stream.pads[:, None].astype(np.int32)

    def cut(x: np.ndarray) -> Array:
        index = place.reshape(len(place), *(1,) * (x.ndim - 3), -1, 1)
        return jnp.asarray(np.take_along_axis(x, index, axis=-2))

    tokens = jnp.asarray(np.take_along_axis(stream.tokens, place, axis=1))
    return feed(policy, store, cut(stream.k), cut(stream.v), cut(stream.q), tokens, jnp.asarray(place))


def kept_by(slots: Slots) -> list[list[np.ndarray]]:
    """Positions that each row and head holds, in cache order."""
    pos, length = np.asarray(slots.pos), np.asarray(slots.length)
    return [[pos[row, head, :size] for head, size in enumerate(sizes)] for row, sizes in enumerate(length)]
