"""What the decode kernels share: the number of parts a cache is split into, and putting the parts together again."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.dispatch import Gpu

# Programs for a core, at least: one loads while another computes.
PROGRAMS = 1.5
# Slots of a part, at most: one long text among short ones must not leave the card to a few programs.
LONGEST = 4096


class Partials(NamedTuple):
    """Attention over each of S parts of a row's filled slots, P query rows a kv head: the group, and any padding.

    Attributes:
        out: `[B, H, S, P, D]`, in float32, or in the values' dtype where S is 1; zeros for a part without slots.
        lse: float32 `[B, H, S, P]`, the log of the summed exponentials of the logits; MASKED for a part without slots.
        logits: scaled, float32 `[B, H, P, C]`, anything from the length on; None unless probabilities are wanted.
    """

    out: Array
    lse: Array
    logits: Array | None


class Token(NamedTuple):
    """Which rows have a new token, bool `[B]`, and its position in the text, int32 `[B]`."""

    active: Any
    place: Any


class Cache(NamedTuple):
    """What is attended to and a new token written to, as arrays or references: `NewToken` and `Notes` tell the shapes.

    A window of no tokens is None.
    """

    k: Any
    v: Any
    pos: Any = None
    window: Any = None

    @classmethod
    def of(cls, k: Array, v: Array, notes: Notes | None) -> "Cache":
        """The arrays that an operation is given."""
        if notes is None:
            return cls(k, v)
        return cls(k, v, notes.pos, notes.window if notes.window.size else None)

    def attended(self, out: Array, probs: Array | None, notes: Notes | None) -> Attended:
        """What the operation returns; `notes` is what it was given."""
        if notes is not None and self.pos is not None:
            notes = Notes(notes.place, self.pos, notes.window if self.window is None else self.window)
        return Attended(out.astype(self.v.dtype), probs, self.k, self.v, notes)


def pack(q: Array, new: NewToken) -> Array:
    """Queries, key and value of a token as `[B, H, G + 2, D]`: one array, which XLA makes by one kernel."""
    return jnp.concatenate([x.astype(q.dtype) for x in (q, new.k[:, :, None], new.v[:, :, None])], axis=2)


def padded(size: int) -> int:
    """The axis of a block that tensor cores take: a power of two from 16 on."""
    return max(16, 1 << (size - 1).bit_length())


def pad_group(q: Array) -> Array:
    """Queries `[B, H, G, D]` with zero rows up to the P that tensor cores take."""
    return jnp.pad(q, ((0, 0), (0, 0), (0, padded(q.shape[2]) - q.shape[2]), (0, 0)))


def splits_for(rows: int, capacity: int, tile: int, gpu: Gpu) -> int:
    """Parts for `rows` pairs of row and kv head: as few as fill the card, for each has a price.

    Args:
        rows: B times H.
        capacity, tile: slots of the cache, and slots that a program takes at once.
        gpu: the card.
    """
    return max(-(-capacity // LONGEST), min(math.ceil(gpu.cores * PROGRAMS / rows), -(-capacity // tile)))


def combine(
    partials: Partials, length: Array, beside: Share | None = None, *, group: int
) -> tuple[Array, Array | None]:
    """Weighs the parts by their share of the softmax.

    Args:
        partials: as described there.
        length: filled slots, int32 `[B, H]`.
        beside: more parts; there are no logits then.
        group: G.

    Returns:
        float32 out `[B, H, G, D]`, in the partials' dtype where there is one part, and float32 probabilities
        `[B, H, G, C]` or None.
    """
    out, lse = partials.out[..., :group, :], partials.lse[..., :group]
    if out.shape[2] == 1 and beside is None:
        out, lse = out[:, :, 0], lse[:, :, 0]
    else:
        pairs = _join(out, lse)
        if beside is not None:
            pairs = _merge(pairs, _join(*beside))
        out, lse = pairs.imag, pairs.real[..., 0]
    if partials.logits is None:
        return out, None
    slot = jnp.arange(partials.logits.shape[-1], dtype=jnp.int32).reshape(1, 1, 1, -1)
    probs = jnp.exp(partials.logits[:, :, :group] - lse[..., None])
    return out, jnp.where(slot < length[..., None, None], probs, 0.0)


def _join(out: Array, lse: Array) -> Array:
    """Parts as one, lse + i out, `[B, H, G, D]`.

    A pair in one number makes one kernel: XLA would split a maximum, a sum and a weighted sum over several.
    """
    pairs = lax.complex(jnp.broadcast_to(lse[..., None], out.shape), out.astype(jnp.float32))
    return lax.reduce(pairs, np.complex64(MASKED), _merge, (2,))


def _merge(a: Array, b: Array) -> Array:
    """Two parts as one; two empty ones stay empty."""
    more = b.real - a.real
    lse = jnp.maximum(a.real, b.real) + jnp.log1p(jnp.exp(-jnp.abs(more)))
    # Shares that sum to 1 whatever the rounding of lse.
    return lax.complex(lse, a.imag + lax.logistic(more) * (b.imag - a.imag))
