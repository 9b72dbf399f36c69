"""One program of the Triton kernel of attention over a cache: one part of what one list of query heads reads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.decode_attention.split import padded


class Softmax(NamedTuple):
    """Attention over the slots seen so far.

    Attributes:
        top, total: largest logit, and sum of exponentials relative to it, `[P]`.
        out: weighted values, `[P, D]`.
    """

    top: Array
    total: Array
    out: Array


class Reads(NamedTuple):
    """What a program may read before the new token.

    Attributes:
        steps: of all parts together.
        find: gives the slots of a step, and which of them are read.
        start: where the slots after the pages begin, or 0.
    """

    steps: Array
    find: Callable[[Array], tuple[Array, Array]]
    start: Array | int


class Block(NamedTuple):
    """Query heads `[P]` and columns `[D]` of a program, and which of them there are."""

    head: Array
    column: Array
    has_head: Array
    has_column: Array


def attend_part(
    length_ref: Any,
    q_ref: Any,
    token: Any,
    pages: Any,
    cache: Any,
    partials: Any,
    written: Any,
    *,
    group: int,
    lists: int,
    tile: int,
    splits: int,
) -> None:
    """One part of one list; all but the last four hold references to what it sees of the arrays of `attend_parts`."""
    heads, size, split = group // lists, q_ref.shape[1], pl.program_id(2)
    row, column = (jnp.arange(padded(n), dtype=jnp.int32) for n in (heads, size))
    at = pl.program_id(1) % lists
    block = Block(row + at * heads, column, row < heads, column < size)
    q = _load(q_ref, block.head, column, block.has_head)

    def save_logits(logits: Array, slot: Array, valid: Array) -> None:
        if partials.logits is not None:
            mask = block.has_head[:, None] & valid[None]
            plgpu.store(partials.logits.at[_matrix(block.head, slot)], logits, mask=mask)

    stored, mine = plgpu.load(length_ref.at[...]), None
    if token is not None:
        is_new = plgpu.load(token.active.at[...]) & (stored > 0)
        stored, mine = jnp.where(is_new, stored - 1, stored), is_new & (split == 0)
    reads = _plan(pages, stored, cache.k.shape[0], tile)
    state = Softmax(
        jnp.full(row.shape, MASKED, jnp.float32),
        jnp.zeros(row.shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if mine is not None:
        k_new, v_new = (_load(q_ref, jnp.full((1,), group + i, jnp.int32), column, mine[None]) for i in (0, 1))
        _write(q, k_new, v_new, stored, token, written, block, mine, mine & (at == 0))
        logit = jnp.sum(q.astype(jnp.float32) * k_new.astype(jnp.float32), axis=1) * size**-0.5
        save_logits(logit[:, None], stored[None], mine[None])
        read = mine & (stored >= reads.start)
        state = Softmax(
            jnp.where(read, logit, state.top),
            jnp.where(read, 1.0, state.total),
            jnp.where(read, v_new.astype(jnp.float32), state.out),
        )

    def step(i: Array, state: Softmax) -> Softmax:
        slot, valid = reads.find(i)
        logits = _dot(q, _load(cache.k, slot, column, valid), 1) * size**-0.5
        save_logits(logits, slot, valid)
        logits = jnp.where(valid[None], logits, MASKED)
        top = jnp.maximum(state.top, jnp.max(logits, axis=1))
        # What a step without any valid slot adds before there was a logit, the first logit takes away again.
        old, weights = jnp.exp(state.top - top), jnp.exp(logits - top[:, None])
        more = _dot(weights.astype(cache.v.dtype), _load(cache.v, slot, column, valid), 0)
        return Softmax(top, state.total * old + jnp.sum(weights, axis=1), state.out * old[:, None] + more)

    # Parts of what the row reads itself, so that little is shared out as evenly as much.
    state = lax.fori_loop(split * reads.steps // splits, (split + 1) * reads.steps // splits, step, state)
    total = jnp.where(state.total > 0, state.total, 1.0)
    out = (state.out / total[:, None]).astype(partials.out.dtype)
    mask = block.has_head[:, None] & block.has_column[None]
    plgpu.store(partials.out.at[_matrix(block.head, column)], out, mask=mask)
    plgpu.store(partials.lse.at[block.head], state.top + jnp.log(total), mask=block.has_head)


def _plan(pages: Any, stored: Array, capacity: int, tile: int) -> Reads:
    """First the steps over the list of pages, then those over the slots from `start` on."""
    place = jnp.arange(tile, dtype=jnp.int32)
    if pages is None:

        def find(i: Array) -> tuple[Array, Array]:
            slot = i * tile + place
            return slot, slot < stored

        return Reads(pl.cdiv(stored, tile), find, 0)

    index, size = pages.index, pages.size
    none, count = pl.cdiv(capacity, size), index.shape[0] * size
    start = plgpu.load(pages.start.at[...])
    end = jnp.minimum(start, stored)
    listed = (end > 0).astype(jnp.int32) * pl.cdiv(count, tile)

    def find_listed(i: Array) -> tuple[Array, Array]:
        entry = i * tile + place
        page = plgpu.load(index.at[lax.div(entry, size),], mask=entry < count, other=none)
        is_listed = i < listed
        slot = jnp.where(is_listed, jnp.minimum(page, none) * size + lax.rem(entry, size), end + entry - listed * tile)
        return slot, slot < jnp.where(is_listed, end, stored)

    return Reads(listed + pl.cdiv(stored - end, tile), find_listed, start)


def _write(
    q: Array,
    k: Array,
    v: Array,
    slot: Array,
    token: Any,
    written: Any,
    block: Block,
    mine: Array,
    first: Array,
) -> None:
    """Writes the new token: its queries if they are `mine`, the rest if this is the `first` of the kv head."""
    for ref, value in ((written.k, k), (written.v, v)):
        mask = (block.has_column & first)[None]
        plgpu.store(ref.at[_matrix(slot[None], block.column)], value, mask=mask)
    if written.pos is not None:
        place = plgpu.load(token.place.at[...])
        plgpu.store(written.pos.at[slot[None],], place[None], mask=first[None])
    if written.window is not None:
        index = jnp.broadcast_to(plgpu.load(token.place.at[...]) % written.window.shape[0], q.shape)
        mask = block.has_head[:, None] & block.has_column[None] & mine
        at = written.window.at[index, *_matrix(block.head, block.column)]
        plgpu.store(at, q.astype(written.window.dtype), mask=mask)


def _matrix(row: Array, column: Array) -> tuple[Array, Array]:
    """Indices of a block; unlike a slice, it may reach beyond the array where it is masked."""
    shape = (*row.shape, *column.shape)
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)


def _load(ref: Any, row: Array, column: Array, valid: Array) -> Array:
    """The valid rows, and zeros: Triton's blocks are powers of two, and padding the arrays would copy the cache."""
    mask = valid[:, None] & (column < ref.shape[1])[None]
    return plgpu.load(ref.at[_matrix(row, column)], mask=mask, other=0.0)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Contracts columns of `a` with an axis of `b`; float32 stays float32 and does not become TensorFloat-32."""
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
