"""The operations of `pallas_kernels` with random arguments, and what their results must hold and their calls must move.

Checks take lengths of all kinds, and slots beyond them that must not matter; timings take full caches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_kernels
from pallas_kernels import NewToken, Notes, Pages, Share
from pallas_kernels.shapes import Cache, Heads

DTYPE = jnp.dtype("bfloat16")
LENGTHS = (0, 17, 109, 1, 64, 15)
Arguments = dict[str, Any]


class Parts(NamedTuple):
    """What of a result is defined.

    Attributes:
        close: arrays `[B, H, ...]` that may differ from the reference by rounding.
        exact: arrays that may not.
    """

    close: tuple[Array, ...] = ()
    exact: tuple[Array, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operation.

    Attributes:
        function: takes the arguments, and `implementation`.
        arguments: by name.
        parts: takes the result and the arguments.
        again: takes the arguments and the result; gives the arguments of the next call, which are other ones where
            the operation works in place, and what is left of the result.
        moved: bytes that must be read and written, at the least.
        flops: of the products, at the least.
    """

    function: Callable[..., Any]
    arguments: Arguments
    parts: Callable[[Any, Arguments], Parts]
    again: Callable[[Arguments, Any], tuple[Arguments, Any]] = lambda arguments, result: (arguments, result)
    moved: int
    flops: int = 0


class Draw:
    """Random arrays for one layer's cache, bfloat16 unless named otherwise.

    Attributes:
        length: filled slots, int32 `[B, H]`.
        size: numbers of a slot.
    """

    def __init__(self, seed: int, heads: Heads, cache: Cache, poison: float | None):
        """Fills the caches where `poison` is None; else leaves slots beyond many lengths, which hold it."""
        self.heads, self.cache, self.poison = heads, cache, poison
        self.rng = np.random.default_rng(seed)
        lead = (cache.batch, heads.kv_heads)
        self.length = np.full(lead, cache.capacity, np.int32)
        if poison is not None:
            most = cache.capacity
            some = (most, *LENGTHS, most - 3, *self.rng.integers(0, most + 1, 5))
            self.length = np.minimum(np.resize(some, lead), most).astype(np.int32)
        self.rows, self.size = self.length.size, heads.head_dim

    def normal(self, *dims: int, scale: float = 1.0, dtype: Any = DTYPE) -> Array:
        """`[B, H, ...]`."""
        key = jax.random.key(int(self.rng.integers(2**31)))
        return normal(key, scale, (*self.length.shape, *dims), jnp.dtype(dtype))

    def slots(self, scale: float = 1.0) -> Array:
        """Keys or values `[B, H, C, D]`."""
        return self.normal(self.cache.capacity, self.size, scale=scale)

    def hide(self, x: Array, length: np.ndarray | None = None) -> Array:
        """`x` `[B, H, C, ...]` with poison beyond the length."""
        return x if self.poison is None else _poison(x, self.length if length is None else length, self.poison)


def make_decode_attention(draw: Draw, *, return_probs: bool = False) -> Case:
    """With a new token and its notes; in checks some rows have ended."""
    heads, cache, batch = draw.heads, draw.cache, draw.cache.batch
    active = np.ones(batch, bool) if draw.poison is None else draw.rng.random(batch) < 0.8
    stored = np.maximum(draw.length - active[:, None], 0)
    pos = np.broadcast_to(np.arange(cache.capacity, dtype=np.int32), (*draw.length.shape, cache.capacity))
    arguments = {
        "q": draw.normal(heads.group, draw.size, scale=2),
        "k": draw.hide(draw.slots(), stored),
        "v": draw.hide(draw.slots(), stored),
        "length": jnp.asarray(draw.length),
        "new": NewToken(draw.normal(draw.size), draw.normal(draw.size), jnp.asarray(active)),
        "notes": Notes(
            place=jnp.asarray(draw.rng.integers(0, 9999, batch), jnp.int32),
            pos=jnp.asarray(pos),
            window=draw.normal(cache.window, heads.group, draw.size),
        ),
    }
    slots, probs = int(stored.sum()), 4 * draw.rows * heads.group * cache.capacity if return_probs else 0
    numbers = 2 * slots + draw.rows * (3 * heads.group + 4)
    return Case(
        function=partial(pallas_kernels.decode_attention, return_probs=return_probs),
        arguments=arguments,
        parts=lambda found, _: Parts(
            tuple(x for x in found[:2] if x is not None), (found.k, found.v, *found.notes[1:])
        ),
        again=lambda before, found: (
            before | {"q": found.out, "k": found.k, "v": found.v, "notes": found.notes},
            found.probs,
        ),
        moved=DTYPE.itemsize * numbers * draw.size + probs,
        flops=4 * slots * heads.group * draw.size,
    )


def make_window_scores(draw: Draw, *, reduce: str) -> Case:
    """Queries as peaked as a model's."""
    heads, window = draw.heads, draw.cache.window
    slots = int(draw.length.sum())
    return Case(
        function=partial(pallas_kernels.window_scores, reduce=reduce),
        arguments={
            "q": draw.normal(heads.group, window, draw.size, scale=2),
            "k": draw.hide(draw.slots()),
            "length": jnp.asarray(draw.length),
        },
        parts=lambda found, _: Parts((found,)),
        moved=DTYPE.itemsize * draw.size * (slots + draw.rows * heads.group * window)
        + 4 * draw.rows * draw.cache.capacity,
        flops=2 * slots * heads.group * window * draw.size,
    )


def make_key_redundancy(draw: Draw, *, retain: str = "recent") -> Case:
    """Keys in clusters of different sizes: those of independent keys are all the same."""
    centres = draw.normal(8, draw.size)
    which = np.minimum(draw.rng.geometric(0.3, (*draw.length.shape, draw.cache.capacity)) - 1, 7)
    centred = jnp.take_along_axis(centres, jnp.asarray(which, jnp.int32)[..., None], axis=2)
    filled = np.arange(draw.cache.capacity) < draw.length[..., None]

    def parts(found: Array, _: Arguments) -> Parts:
        # A softmax over thousands of slots is flat; its logarithms around their mean are the redundancies.
        logs = jnp.where(filled, jnp.log(jnp.maximum(found, 1e-30)), 0.0)
        mean = jnp.sum(logs, axis=-1, keepdims=True) / np.maximum(draw.length, 1)[..., None].astype(np.float32)
        return Parts((jnp.where(filled, logs - mean, found),))

    return Case(
        function=partial(pallas_kernels.key_redundancy, retain=retain),
        arguments={"k": draw.hide(centred + draw.slots(scale=0.5)), "length": jnp.asarray(draw.length)},
        parts=parts,
        moved=DTYPE.itemsize * draw.size * int(draw.length.sum()) + 4 * draw.rows * draw.cache.capacity,
        flops=draw.size * int(np.sum(draw.length.astype(np.int64) ** 2)),  # every pair once
    )


def make_select_top(draw: Draw) -> Case:
    """Scores with many ties, held slots and empty ones."""
    capacity, most = draw.cache.capacity, draw.cache.kept
    shape = (*draw.length.shape, capacity)
    score = draw.rng.standard_normal(shape, np.float32)
    score = np.where(draw.rng.random(shape) < 0.3, np.round(score), score)
    score[..., -draw.cache.window :] = np.inf
    score = np.where(np.arange(capacity) < draw.length[..., None], score, -np.inf)
    return Case(
        function=partial(pallas_kernels.select_top, most=most),
        arguments={"score": jnp.asarray(score), "count": jnp.asarray(np.minimum(draw.length, most))},
        parts=lambda found, _: Parts(exact=(found,)),
        moved=4 * draw.rows * (capacity + most + 1),
    )


def make_compact(draw: Draw) -> Case:
    """Any slots, as many as the length allows, of keys, values, positions and scores."""
    capacity, most = draw.cache.capacity, draw.cache.kept
    count = np.minimum(draw.length, most)
    index = np.argsort(draw.rng.random((*draw.length.shape, capacity)), axis=-1)[..., :most].astype(np.int32)
    index = np.sort(np.where(np.arange(most) < count[..., None], index, capacity), axis=-1)
    named = jnp.asarray(index < capacity)
    moves = int(np.sum((index < capacity) & (index != np.arange(most))))
    pos = jnp.asarray(draw.rng.integers(0, 2**30, (*draw.length.shape, capacity)), jnp.int32)
    arrays = (draw.slots(), draw.slots(), pos, draw.normal(capacity, dtype="float32"))

    def parts(found: Any, _: Arguments) -> Parts:
        return Parts(exact=tuple(_where(named, x[:, :, :most], 0) for x in found))

    return Case(
        function=pallas_kernels.compact,
        arguments={"arrays": arrays, "index": jnp.asarray(index)},
        parts=parts,
        again=lambda before, found: (before | {"arrays": found}, None),
        moved=2 * moves * (2 * DTYPE.itemsize * draw.size + 8) + index.nbytes,
    )


def make_prefill_attention(draw: Draw) -> Case:
    """Prompts of as many tokens as the cache has slots."""
    heads, tokens = draw.heads, draw.cache.capacity
    return Case(
        function=pallas_kernels.prefill_attention,
        arguments={
            "q": draw.normal(heads.group, tokens, draw.size, scale=2),
            "k": draw.slots(),
            "v": draw.slots(),
        },
        parts=lambda found, _: Parts((found,)),
        moved=2 * DTYPE.itemsize * draw.rows * (heads.group + 1) * tokens * draw.size,
        flops=2 * draw.rows * heads.group * tokens * tokens * draw.size,
    )


def make_rms_norm(draw: Draw) -> Case:
    """The one row of a batch of one, as wide as the query heads together."""
    size = draw.heads.kv_heads * draw.heads.group * draw.size
    row, scale = (draw.normal(size)[0, 0] for _ in range(2))
    return Case(
        function=partial(pallas_kernels.rms_norm, eps=1e-6),
        arguments={"x": row[None], "scale": scale},
        parts=lambda found, _: Parts((found[None],)),
        moved=3 * DTYPE.itemsize * size,
    )


def make_gather_attention(draw: Draw) -> Case:
    """Half of the pages of 16 slots before the last 64, in any order and with places that name none."""
    heads, cache, size = draw.heads, draw.cache, 16
    start = np.maximum(draw.length - 64, 0)
    pages = np.argsort(draw.rng.random((*start.shape, cache.capacity // size)), axis=-1)[..., : cache.kept // size // 2]
    named = pages * size < start[..., None]
    slots = int(np.minimum(size, start[..., None] - pages * size)[named].sum() + (draw.length - start).sum())
    index = np.where(named, pages, cache.capacity).astype(np.int32)
    return Case(
        function=pallas_kernels.gather_attention,
        arguments={
            "q": draw.normal(heads.group, draw.size, scale=2),
            "k": draw.hide(draw.slots()),
            "v": draw.hide(draw.slots()),
            "length": jnp.asarray(draw.length),
            "pages": Pages(jnp.asarray(index)[:, :, None], jnp.asarray(start)[..., None], size),
        },
        parts=lambda found, _: Parts((found.out,)),
        again=lambda before, found: (before | {"q": found.out}, None),
        moved=DTYPE.itemsize * 2 * draw.size * (slots + draw.rows * heads.group),
        flops=4 * slots * heads.group * draw.size,
    )


def make_page_scores(draw: Draw) -> Case:
    """Bounds of as many pages as the cache has slots."""
    one, other = draw.slots(), draw.slots()
    count, group = draw.rows * draw.cache.capacity, draw.heads.group
    return Case(
        function=pallas_kernels.page_scores,
        arguments={
            "q": draw.normal(group, draw.size),
            "high": jnp.maximum(one, other),
            "low": jnp.minimum(one, other),
        },
        parts=lambda found, _: Parts((found,)),
        moved=DTYPE.itemsize * draw.size * (2 * count + draw.rows * group) + 4 * count * group,
        flops=4 * count * group * draw.size,
    )


def make_lowrank_attention(draw: Draw) -> Case:
    """Half of what a compaction leaves, in chunks of 8 tokens, in any order and with places that name none."""
    heads, size, rank, tokens = draw.heads, 8, 32, draw.cache.capacity // 8 * 8
    chunks = np.argsort(draw.rng.random((*draw.length.shape, tokens // size)), axis=-1)[..., : draw.cache.kept // 16]
    index = np.where(draw.rng.random(chunks.shape) < 0.1, tokens, chunks).astype(np.int32)
    read = int(np.sum(index < tokens)) * size
    angle = np.arange(tokens)[:, None] * 1e4 ** -(np.arange(draw.size // 2) / (draw.size // 2))
    a = draw.normal(tokens, rank)[:, 0]
    return Case(
        function=partial(pallas_kernels.lowrank_attention, size=size),
        arguments={
            "q": draw.normal(heads.group, draw.size, scale=2),
            "a": a,
            "b": draw.normal(rank, draw.size, scale=rank**-0.5),
            "v": draw.normal(tokens, draw.size),
            "index": jnp.asarray(index),
            "cos": jnp.asarray(np.cos(angle), jnp.float32),
            "sin": jnp.asarray(np.sin(angle), jnp.float32),
        },
        parts=lambda found, _: Parts((join_shares(found),)),
        moved=DTYPE.itemsize * (read * (rank + draw.size) + draw.rows * (rank + 2 * heads.group) * draw.size),
        flops=2 * read * draw.size * (rank + 2 * heads.group),
    )


def join_shares(share: Share) -> Array:
    """Attention over all sets together, `[B, H, G, D]`."""
    weights = jax.nn.softmax(share.lse, axis=2)[..., None]
    return jnp.sum(share.out * weights, axis=2)


# By the name of the operation and, behind it, of the variant.
OPERATIONS: dict[str, Callable[[Draw], Case]] = {
    "decode_attention": make_decode_attention,
    "decode_attention probs": partial(make_decode_attention, return_probs=True),
    "window_scores probs": partial(make_window_scores, reduce="probs"),
    "window_scores logits": partial(make_window_scores, reduce="logits"),
    "key_redundancy": make_key_redundancy,
    "key_redundancy first": partial(make_key_redundancy, retain="first"),
    "key_redundancy last": partial(make_key_redundancy, retain="last"),
    "gather_attention": make_gather_attention,
    "page_scores": make_page_scores,
    "lowrank_attention": make_lowrank_attention,
    "rms_norm": make_rms_norm,
    "select_top": make_select_top,
    "compact": make_compact,
    "prefill_attention": make_prefill_attention,
}


def make_case(name: str, seed: int, heads: Heads, cache: Cache, *, poison: float | None = None) -> Case:
    """A case of one of `OPERATIONS`.

    Args:
        name: of `OPERATIONS`.
        seed: of the numbers.
        heads, cache: the sizes.
        poison: what slots beyond the length hold, which is of all kinds then; None fills the caches.
    """
    return OPERATIONS[name](Draw(seed, heads, cache, poison))


@partial(jax.jit, static_argnums=(2, 3))
def normal(key: Array, scale: float, shape: tuple[int, ...], dtype: Any) -> Array:
    """Normal numbers, made on the device."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


@jax.jit
def _poison(x: Array, length: Array, value: float) -> Array:
    slot = jnp.arange(x.shape[2], dtype=jnp.int32).reshape(1, 1, -1)
    return _where(slot < length[..., None], x, value)


def _where(mask: Array, x: Array, other: float) -> Array:
    """`x` `[B, H, C, ...]` where `mask` `[B, H, C]` is true."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.asarray(other, x.dtype))
