"""`pallas_kernels.decode_attention` as a Pallas Triton kernel: flash decoding.

A program takes one part of the filled slots of one kv head, for all query heads of its group, so that keys and values
are read once. The new token needs no place in a tile: it is the softmax over one slot that the first part starts from,
and since every part reads only the slots before it, that part may write it to the cache meanwhile.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.decode_attention.split import Cache, Partials, Token, combine, pack, padded, splits_for
from pallas_kernels.dispatch import Gpu, Implementation


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        slots: slots of one step of a program, a power of two.
        splits: parts of a row.
        warps, stages: of Triton's code and of its pipeline of loads.
    """

    slots: int
    splits: int
    warps: int = 4
    stages: int = 3


def tiles(k: jax.ShapeDtypeStruct | Array, gpu: Gpu) -> Tiles:
    """Tiles for a cache `[B, H, C, D]`: 16 KiB of keys a step, of which two steps are on their way meanwhile."""
    batch, heads, capacity, size = k.shape
    slots = min(16384 // (k.dtype.itemsize * padded(size)), 64, padded(capacity))
    return Tiles(slots, splits_for(batch * heads, capacity, slots, gpu))


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    length: Array,
    new: NewToken | None = None,
    notes: Notes | None = None,
    *,
    beside: Share | None,
    return_probs: bool,
    implementation: Implementation,
) -> Attended:
    """One kernel; a second one combines the parts if there are several, and a last one makes probabilities."""
    group, cache, token = q.shape[2], Cache(k, v), None
    if new is not None:
        q, cache, token = pack(q, new), Cache.of(k, v, notes), Token(new.active, notes.place if notes else None)
    partials, cache = attend_parts(
        q.astype(k.dtype),
        cache,
        length,
        token,
        tiles(k, implementation.gpu),
        group=group,
        logits=return_probs,
        interpret=implementation.interpret,
    )
    out, probs = combine(partials, length, beside, group=group)
    return cache.attended(out, probs, notes)


def attend_parts(
    q: Array,
    cache: Cache,
    length: Array,
    token: Token | None,
    cut: Tiles,
    *,
    group: int,
    logits: bool,
    interpret: bool,
) -> tuple[Partials, Cache]:
    """The parts, and the cache with the new token in it.

    Args:
        q: queries `[B, H, G, D]`; with a new token, its key and its value are two rows more.
        cache: what is attended to and written to.
        length: filled slots, the new token's included, int32 `[B, H]`.
        token: the new token, or None.
        cut: how the work is cut.
        group: G.
        logits: whether they are wanted.
        interpret: run it on CPU.
    """
    batch, heads, size = *q.shape[:2], q.shape[-1]
    array: Any = jax.ShapeDtypeStruct
    parts = (batch, heads, cut.splits, group)
    partials = Partials(
        out=array((*parts, size), cache.v.dtype if cut.splits == 1 else jnp.float32),
        lse=array(parts, jnp.float32),
        logits=array((batch, heads, group, cache.k.shape[2]), jnp.float32) if logits else None,
    )
    inputs = (length, q, token, cache)
    written = None if token is None else cache
    # The cache is the last of the inputs and of the outputs.
    count, ends = len(jax.tree.leaves(written)), [len(jax.tree.leaves(x)) for x in (inputs, (partials, written))]
    partials, written = pl.pallas_call(
        partial(_attend, group=group, tile=cut.slots, splits=cut.splits),
        grid=parts[:3],
        in_specs=jax.tree.map(_spec, inputs),
        out_specs=(
            Partials(_spec(partials.out, 3), _spec(partials.lse, 3), jax.tree.map(_spec, partials.logits)),
            jax.tree.map(_spec, written),
        ),
        out_shape=(partials, jax.tree.map(lambda x: array(x.shape, x.dtype), written)),
        input_output_aliases={ends[0] - i: ends[1] - i for i in range(1, count + 1)},
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="decode_attention",
    )(*inputs)
    return partials, written or cache


def _spec(x: Array, axes: int = 2) -> Any:
    """What a program sees of an array whose first `axes` axes, or all of them, are the grid's."""
    axes = min(axes, x.ndim)
    rest = x.shape[axes:]
    return pl.BlockSpec((None,) * axes + rest, lambda *at: (*at[:axes], *[0] * len(rest)))


class Softmax(NamedTuple):
    """Attention over the slots seen so far.

    Attributes:
        top, total: largest logit, and sum of exponentials relative to it, `[P]`.
        out: weighted values, `[P, D]`.
    """

    top: Array
    total: Array
    out: Array


def _attend(length_ref, q_ref, token, cache, partials, written, *, group: int, tile: int, splits: int) -> None:
    """One part of one kv head; All but the first two hold references, as `attend_parts` has arrays."""
    size = q_ref.shape[1]
    k_ref, v_ref, *_ = cache
    split = pl.program_id(2)
    row, column = (jnp.arange(padded(n), dtype=jnp.int32) for n in (group, size))
    in_group, in_head = row < group, column < size
    q = _load(q_ref, row, column, in_group)
    stored = plgpu.load(length_ref.at[...])

    def save_logits(logits: Array, slot: Array, valid: Array) -> None:
        if partials.logits is not None:
            mask = in_group[:, None] & valid[None]
            plgpu.store(partials.logits.at[_matrix(row, slot)], logits, mask=mask)

    state = Softmax(
        jnp.full(row.shape, MASKED, jnp.float32),
        jnp.zeros(row.shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if token is not None:
        is_new = plgpu.load(token.active.at[...]) & (stored > 0)
        stored = jnp.where(is_new, stored - 1, stored)
        mine = is_new & (split == 0)
        k_new, v_new = (_load(q_ref, jnp.full((1,), group + i, jnp.int32), column, mine[None]) for i in (0, 1))
        logit = jnp.sum(q.astype(jnp.float32) * k_new.astype(jnp.float32), axis=1) * size**-0.5
        save_logits(logit[:, None], stored[None], mine[None])
        state = Softmax(
            jnp.where(mine, logit, state.top),
            jnp.where(mine, 1.0, state.total),
            jnp.where(mine, v_new.astype(jnp.float32), state.out),
        )
        for ref, value in ((written.k, k_new), (written.v, v_new)):
            plgpu.store(ref.at[_matrix(stored[None], column)], value, mask=(in_head & mine)[None])
        if written.pos is not None:
            place = plgpu.load(token.place.at[...])
            plgpu.store(written.pos.at[stored[None],], place[None], mask=mine[None])
        if written.window is not None:
            index = jnp.broadcast_to(plgpu.load(token.place.at[...]) % written.window.shape[0], q.shape)
            mask = in_group[:, None] & in_head[None] & mine
            plgpu.store(written.window.at[index, *_matrix(row, column)], q.astype(written.window.dtype), mask=mask)

    def step(i: Array, state: Softmax) -> Softmax:
        slot = i * tile + jnp.arange(tile, dtype=jnp.int32)
        valid = slot < stored
        logits = _dot(q, _load(k_ref, slot, column, valid), 1) * size**-0.5
        save_logits(logits, slot, valid)
        logits = jnp.where(valid[None], logits, MASKED)
        top = jnp.maximum(state.top, jnp.max(logits, axis=1))
        old, weights = jnp.exp(state.top - top), jnp.exp(logits - top[:, None])
        more = _dot(weights.astype(v_ref.dtype), _load(v_ref, slot, column, valid), 0)
        return Softmax(top, state.total * old + jnp.sum(weights, axis=1), state.out * old[:, None] + more)

    # Parts of the row's own length, so that a short row is shared out as evenly as a long one.
    steps = pl.cdiv(stored, tile)
    state = lax.fori_loop(split * steps // splits, (split + 1) * steps // splits, step, state)
    total = jnp.where(state.total > 0, state.total, 1.0)
    out = (state.out / total[:, None]).astype(partials.out.dtype)
    plgpu.store(partials.out.at[_matrix(row, column)], out, mask=in_group[:, None] & in_head[None])
    plgpu.store(partials.lse.at[row], state.top + jnp.log(total), mask=in_group)


def _matrix(row: Array, column: Array) -> tuple[Array, Array]:
    """Indices of a block; unlike a slice, it may reach beyond the array where it is masked."""
    shape = (*row.shape, *column.shape)
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)


def _load(ref, row: Array, column: Array, valid: Array) -> Array:
    """The valid rows, and zeros: Triton's blocks are powers of two, and padding the arrays would copy the cache."""
    mask = valid[:, None] & (column < ref.shape[1])[None]
    return plgpu.load(ref.at[_matrix(row, column)], mask=mask, other=0.0)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Contracts columns of `a` with an axis of `b`; float32 stays float32 and does not become TensorFloat-32."""
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
