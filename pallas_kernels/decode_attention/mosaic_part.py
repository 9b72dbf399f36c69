"""One part of the slots of one kv head, as a program of Mosaic GPU.

The new token's slot lies in the last tile, which the last part alone copies. That part puts the token over whatever
the copy found in its slot, and writes the token to the cache after its last copy has landed: no copy, of this program
or of another, is under way to a slot while it is written.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.mosaic_gpu import mma  # pyright: ignore[reportAttributeAccessIssue]

from pallas_kernels.decode_attention.mosaic_pipeline import Pipeline, plgpu
from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.decode_attention.split import Cache


class Softmax(NamedTuple):
    """Attention over the slots seen so far, P query rows.

    Attributes:
        top: largest logit, `[P]`.
        total: exponentials relative to it, summed over the steps, `[P, slots]`.
        out: weighted values, `[P, D]`.
    """

    top: Array
    total: Array
    out: Array


def attend_part(
    length_ref,
    q_ref,
    token,
    cache,
    partials,
    k_tiles,
    v_tiles,
    weights,
    landed=None,
    saved=None,
    *,
    group: int,
    interpret: bool,
) -> None:
    """One part of one kv head; `token`, `cache` and `partials` hold references, as `attend_parts` has arrays."""
    head, part = (lax.axis_index("row"), lax.axis_index("head")), lax.axis_index("part")
    (rows, slots), size, dtype = weights.shape, q_ref.shape[3], q_ref.dtype
    splits = partials.out.shape[2]
    layouts = plgpu.Layout
    # Sixteen rows are one tile of `mma`, so its columns are shared out between the warps.
    lhs, rhs, acc = (x(dtype, m_warps=1) for x in (layouts.MMA_LHS, layouts.MMA_RHS, layouts.MMA_ACC))
    product = _product if interpret else mma

    length = stored = length_ref[*head]
    v_new = _full(0, (size,), rhs.reduce(0), dtype)
    if token is not None:
        is_new = (token.active[head[0]] > 0) & (length > 0)
        stored = jnp.where(is_new, length - 1, length)
        k_new = _load(q_ref.at[*head, group], rhs.reduce(1))
        mask = _full(is_new, (size,), rhs.reduce(0), bool)
        v_new = jnp.where(mask, _load(q_ref.at[*head, group + 1], rhs.reduce(0)), v_new)

    # Parts of the row's own length, so that a short row is shared out as evenly as a long one.
    steps = pl.cdiv(length, slots)
    first, stop = part * steps // splits, (part + 1) * steps // splits
    copies = Pipeline((cache.k, cache.v), (k_tiles, v_tiles), landed, head, first, stop)
    copies.start()
    q = _load(q_ref.at[*head, :rows], lhs)

    def step(i: Array, state: Softmax) -> Softmax:
        begin = copies.slot(i)
        copies.advance(i)
        keys = _load(copies.take(i, 0).T, rhs)
        if token is not None:
            keys = _mend(keys, k_new, stored - begin, axis=1, layout=rhs)
        logits = product(_full(0, (rows, slots), acc), q, keys) * size**-0.5
        if saved is not None:
            _store(saved, logits)
            target = partials.logits.at[*head, :, pl.ds(i * slots, slots)]
            _store(target, _load(saved.at[: target.shape[0]], layouts.WG_STRIDED(target.shape, 1)))
        slot = begin + plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=acc)
        logits = jnp.where((slot >= i * slots) & (slot < length), logits, MASKED)
        top = jnp.maximum(state.top, jnp.max(logits, axis=1))
        old, more = jnp.exp(state.top - top), jnp.exp(logits - _spread(top, 0, logits.shape))
        # From accumulators to a left operand there is a way through shared memory only.
        _store(weights, more.astype(dtype))
        # A weight of 0 would not silence a NaN beyond the length.
        values = _mend(_load(copies.take(i, 1), rhs), v_new, stored - begin, axis=0, layout=rhs)
        out = product(state.out * _spread(old, 0, state.out.shape), _load(weights, lhs), values)
        return Softmax(top, state.total * _spread(old, 0, more.shape) + more, out)

    nothing = Softmax(_full(MASKED, (rows,), acc.reduce(1)), *(_full(0, (rows, n), acc) for n in (slots, size)))
    top, total, out = lax.fori_loop(first, stop, step, nothing)
    copies.finish()
    total = jnp.sum(total, axis=1)
    total = jnp.where(total > 0, total, 1.0)
    _store(partials.out.at[*head, part], (out / _spread(total, 0, out.shape)).astype(partials.out.dtype))
    _store(partials.lse.at[*head, part], top + jnp.log(total))
    if token is not None:

        @pl.when(is_new & (part == splits - 1))
        def _() -> None:
            _store(cache.k.at[*head, stored], k_new)
            _store(cache.v.at[*head, stored], v_new)
            if token.place is not None:
                queries = (_load(q_ref.at[*head, i], rhs.reduce(1)) for i in range(group))
                _write_notes(cache, (*head, stored), token.place[head[0]], queries)


def _write_notes(cache: Cache, slot: tuple[Array, ...], place: Array, queries: Iterable[Array]) -> None:
    cache.pos[slot] = place
    if cache.window is not None:
        for i, query in enumerate(queries):
            target = cache.window.at[*slot[:2], place % cache.window.shape[2], i]
            _store(target, query.astype(cache.window.dtype))


def _mend(tile: Array, token: Array, there: Array, *, axis: int, layout: Any) -> Array:
    """A tile with the token in its slots, which lie along the axis, from `there` on."""

    def mended() -> Array:
        slot = plgpu.broadcasted_iota(jnp.int32, tile.shape, axis, layout=layout)
        return jnp.where(slot < there, tile, _spread(token, 1 - axis, tile.shape))

    return lax.cond(there < tile.shape[axis], mended, lambda: tile)


def _product(total: Array, a: Array, b: Array) -> Array:
    """`mma`, which the interpreter does not have."""
    return total + jnp.dot(a, b, preferred_element_type=jnp.float32)


def _full(value: Any, shape: tuple[int, ...], layout: Any, dtype: Any = jnp.float32) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def _spread(x: Array, axis: int, shape: tuple[int, ...]) -> Array:
    """A vector that lies along an axis, repeated along the other."""
    return lax.broadcast_in_dim(x, shape, [axis])


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _store(ref: Any, value: Array) -> None:
    """Writes from whatever registers the value is in, which jax 0.12 wants to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
