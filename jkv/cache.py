"""One layer's cache as a value: `Slots`, and the pure functions that fill, extend and thin it.

Slots are in the order of the text and filled from the left, separately for each row and kv head. So attention needs no
mask beyond a length, pooling runs over neighbours in the text, and "most recent" is the highest index.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import pallas_kernels
from pallas_kernels import NewToken, Notes, Pages
from pallas_kernels.decode_attention.reference import write
from pallas_kernels.dispatch import XLA, Implementation

STATIC = {"static": True}  # marks a field that is part of a pytree's structure, not an array in it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompt:
    """One layer's view of right-padded prompts.

    Attributes:
        q: queries after norm and RoPE, `[B, H, G, T, D]`.
        k, v: keys after norm and RoPE, and values, `[B, H, T, D]`.
        k_pre: keys before RoPE, `[B, H, T, D]`.
        tokens: token ids, int32 `[B, T]`.
        length: tokens of each row before its padding, int32 `[B]`.
        implementation: what runs the operations on them.
    """

    q: Array
    k: Array
    v: Array
    k_pre: Array
    tokens: Array
    length: Array
    implementation: Implementation = field(default=XLA, metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Token:
    """One layer's view of the token being decoded.

    Attributes:
        q: query after norm and RoPE, `[B, H, G, D]`.
        k, v: key after norm and RoPE, and value, `[B, H, D]`.
        k_pre: key before RoPE, `[B, H, D]`.
        token: token id, int32 `[B]`.
        pos: position in the text, int32 `[B]`.
        active: rows that are still decoding, bool `[B]`; the others must keep their cache as it is.
    """

    q: Array
    k: Array
    v: Array
    k_pre: Array
    token: Array
    pos: Array
    active: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """Tokens whose keys are made from a product when they are read, in chunks.

    Attributes:
        a, b: factors of the keys before RoPE, `[B, T, R]` and `[B, H, R, D]`; row t of `a` is the token at position t.
        v: values, `[B, H, T, D]`.
        index: chunks to read, int32 `[B, H, N]`; T / size or more is none.
        cos, sin: rotation of every position, float32 `[T or more, D/2]`.
        size: tokens of a chunk.
    """

    a: Array
    b: Array
    v: Array
    index: Array
    cos: Array
    sin: Array
    size: int = field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """What attention may read: the first `length` slots, or the `pages` among them, and what is `beside` them.

    Attributes:
        k, v: `[B, H, C, D]`.
        length: int32 `[B, H]`.
        new: token that attention writes to the last of them first, or None.
        notes: what attention writes of that token beside its key and value.
        pages: the slots to read if not all of them.
        beside: tokens to read that are in no slot.
        implementation: what runs attention.
    """

    k: Array
    v: Array
    length: Array
    new: NewToken | None = None
    notes: Notes | None = None
    pages: Pages | None = None
    beside: LowRank | None = None
    implementation: Implementation = field(default=XLA, metadata=STATIC)


class Bounds(NamedTuple):
    """The least and the greatest number of each page's keys in every channel, `[B, H, P, D]`.

    Those of an empty page are infinity and its negative; a score that is made of them has no meaning.
    """

    low: Array
    high: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The cache of one layer.

    Attributes:
        k, v: keys (after RoPE at their own text position) and values, `[B, H, C, D]`.
        pos: position in the text, int32 `[B, H, C]`; -1 in an empty slot.
        length: filled slots, int32 `[B, H]`.
        window: queries of the last W tokens, `[B, H, W, G, D]`; the token at position p is at index p mod W.
        extra: arrays `[B, H, C, ...]` by name that move with their slots.
        bounds: of the keys of each page, where a policy reads by pages.
        new: the token in the last slot of the active rows, until attention has written it there.
        place: position of that token in the text, int32 `[B]`.
        implementation: what runs the operations on the slots.
    """

    k: Array
    v: Array
    pos: Array
    length: Array
    window: Array
    extra: dict[str, Array] = field(default_factory=dict)
    bounds: Bounds | None = None
    new: NewToken | None = None
    place: Array | None = None
    implementation: Implementation = field(default=XLA, metadata=STATIC)

    @property
    def capacity(self) -> int:
        """Slots allocated per row and kv head (C)."""
        return self.k.shape[2]

    @property
    def filled(self) -> Array:
        """Which slots hold a token, bool `[B, H, C]`."""
        return jnp.arange(self.capacity, dtype=jnp.int32).reshape(1, 1, -1) < self.length[..., None]

    @property
    def seen(self) -> Array:
        """Tokens of the text so far, evicted ones included, int32 `[B]`."""
        return jnp.max(self.pos[:, 0], axis=-1) + 1

    def view(self) -> View:
        """Everything that is cached."""
        notes = None if self.place is None else Notes(self.place, self.pos, self.window)
        return View(self.k, self.v, self.length, self.new, notes, implementation=self.implementation)

    def recent(self, count: int) -> Array:
        """The last `count` filled slots, bool `[B, H, C]`."""
        slot = jnp.arange(self.capacity, dtype=jnp.int32).reshape(1, 1, -1)
        return self.filled & (slot >= self.length[..., None] - count)

    def window_queries(self) -> Array:
        """The observation window in time order, `[B, H, G, W, D]`."""
        size = self.window.shape[2]
        if not size:
            return jnp.moveaxis(self.window, 2, 3)
        position = self.seen[:, None] - size + jnp.arange(size, dtype=jnp.int32)[None]
        index = (position % size)[:, None, :, None, None]
        return jnp.moveaxis(jnp.take_along_axis(self.window, index, axis=2), 2, 3)


def fill(prompt: Prompt, *, window: int = 0) -> Slots:
    """Slots that hold whole prompts: C = T."""
    batch, heads, length = prompt.k.shape[:3]
    position = jnp.arange(length, dtype=jnp.int32)[None]
    pos = jnp.where(position < prompt.length[:, None], position, -1)
    return Slots(
        k=prompt.k,
        v=prompt.v,
        pos=jnp.broadcast_to(pos[:, None], (batch, heads, length)),
        length=jnp.broadcast_to(prompt.length[:, None], (batch, heads)),
        window=_last_queries(prompt, window),
        implementation=prompt.implementation,
    )


def put(slots: Slots, token: Token) -> Slots:
    """Appends one token to every active row, which must have room.

    Only the length grows here: attention writes the token to its slot, and its queries to the window, as it reads the
    cache anyway. `settle` does the same without attention.

    Raises:
        ValueError: the token before has not been written yet.
    """
    if slots.new is not None:
        raise ValueError("the slots' last token is not written yet; attend to their view, or settle them")
    return replace(
        slots,
        length=jnp.where(token.active[:, None], jnp.minimum(slots.length + 1, slots.capacity), slots.length),
        new=NewToken(token.k, token.v, token.active),
        place=token.pos,
    )


def settle(slots: Slots, q: Array) -> Slots:
    """Writes the token that `put` left to attention; `q` are its queries `[B, H, G, D]`."""
    view = slots.view()
    return settled(slots, *write(q, view.k, view.v, view.length, view.new, view.notes))


def settled(slots: Slots, k: Array, v: Array, notes: Notes | None) -> Slots:
    """The slots with what attention made of their arrays."""
    if notes is None:
        return slots
    return replace(slots, k=k, v=v, pos=notes.pos, window=notes.window, new=None, place=None)


def keep(slots: Slots, index: Array, count: Array, *, fills: Mapping[str, float]) -> Slots:
    """Keeps `count` slots, given by index, and empties the others.

    Args:
        slots: what is held.
        index: int32 `[B, H, N]`; entries from `count` on are C.
        count: int32 `[B, H]`.
        fills: what `extra` arrays hold in an empty slot, where it is not 0.
    """
    full = jnp.arange(slots.capacity, dtype=jnp.int32).reshape(1, 1, -1) < count[..., None]

    def empty(x: Array, fill: float) -> Array:
        return jnp.where(full.reshape(full.shape + (1,) * (x.ndim - 3)), x, jnp.asarray(fill, x.dtype))

    k, v, pos, *extra = pallas_kernels.compact(
        (slots.k, slots.v, slots.pos, *slots.extra.values()), index, implementation=slots.implementation
    )
    return replace(
        slots,
        # Keys and values beyond the length are never read, so nothing is written there.
        k=k,
        v=v,
        pos=empty(pos, -1),
        length=count,
        extra={name: empty(x, fills.get(name, 0)) for name, x in zip(slots.extra, extra, strict=True)},
    )


def resize(slots: Slots, capacity: int, *, fills: Mapping[str, float] = MappingProxyType({})) -> Slots:
    """The same content with another capacity, which must hold the longest row; `fills` as in `keep`."""

    def fit(x: Array, fill: float = 0) -> Array:
        room = capacity - x.shape[2]
        if room <= 0:
            return x[:, :, :capacity]
        return jnp.pad(x, [(0, 0), (0, 0), (0, room)] + [(0, 0)] * (x.ndim - 3), constant_values=fill)

    extra = {name: fit(x, fills.get(name, 0)) for name, x in slots.extra.items()}
    return replace(slots, k=fit(slots.k), v=fit(slots.v), pos=fit(slots.pos, -1), extra=extra)


def max_pool(score: Array, size: int) -> Array:
    """Maximum over `size` neighbouring slots (odd, centred), on `[..., C]`; 0 and 1 leave the score as it is."""
    if size <= 1:
        return score
    lead = (1,) * (score.ndim - 1)
    return jax.lax.reduce_window(score, -jnp.inf, jax.lax.max, (*lead, size), (*lead, 1), "SAME")


def _last_queries(prompt: Prompt, window: int) -> Array:
    """The queries of each row's last `window` tokens, at index position mod `window`: `[B, H, W, G, D]`."""
    q = jnp.moveaxis(prompt.q, 3, 2)
    if not window:
        return q[:, :, :0]
    last = prompt.length[:, None] - 1
    slot = jnp.arange(window, dtype=jnp.int32)[None]
    position = jnp.maximum(last - (last - slot) % window, 0)
    return jnp.take_along_axis(q, position[:, None, :, None, None], axis=2)
