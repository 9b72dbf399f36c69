"""`pallas_kernels.decode_attention` as a Pallas Triton kernel: flash decoding.

A program takes one part of the filled slots of one kv head, for all query heads of its group, so that keys and values
are read once; where there are lists of pages, one part of a list, for the query heads that share it. The new token
needs no place in a tile: it is the softmax over one slot that the first part starts from, and since every part reads
only the slots before it, that part may write it to the cache meanwhile.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.split import Cache, Partials, Token, combine, pack, padded, splits_for
from pallas_kernels.decode_attention.triton_part import attend_part
from pallas_kernels.dispatch import Gpu, Implementation
from pallas_kernels.gather_attention import Pages


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
    pages: Pages | None = None,
    group: int,
    logits: bool = False,
    interpret: bool,
) -> tuple[Partials, Cache]:
    """The parts, and the cache with the new token in it.

    Args:
        q: queries `[B, H, G, D]`; with a new token, its key and its value are two rows more.
        cache: what is attended to and written to.
        length: filled slots, the new token's included, int32 `[B, H]`.
        token: the new token, or None.
        cut: how the work is cut.
        pages: what is read of the cache, or None for all of it.
        group: G.
        logits: whether they are wanted; not with pages.
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
    lists = 1 if pages is None else pages.index.shape[2]
    if pages is not None:
        index, start = (x.reshape(batch, heads * lists, *x.shape[3:]) for x in (pages.index, pages.start))
        pages = Pages(index, start, pages.size)
    of_head = partial(_spec, lists=lists)
    inputs = (length, q, token, pages, cache)
    written = None if token is None else cache
    # The cache is the last of the inputs and of the outputs.
    count, ends = len(jax.tree.leaves(written)), [len(jax.tree.leaves(x)) for x in (inputs, (partials, written))]
    partials, written = pl.pallas_call(
        partial(attend_part, group=group, lists=lists, tile=cut.slots, splits=cut.splits),
        grid=(batch, heads * lists, cut.splits),
        in_specs=(*jax.tree.map(of_head, inputs[:3]), jax.tree.map(_spec, pages), jax.tree.map(of_head, cache)),
        out_specs=(
            Partials(of_head(partials.out, 3), of_head(partials.lse, 3), jax.tree.map(of_head, partials.logits)),
            jax.tree.map(of_head, written),
        ),
        out_shape=(partials, jax.tree.map(lambda x: array(x.shape, x.dtype), written)),
        input_output_aliases={ends[0] - i: ends[1] - i for i in range(1, count + 1)},
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="decode_attention" if pages is None else "gather_attention",
    )(*inputs)
    return partials, written or cache


def _spec(x: Array, axes: int = 2, *, lists: int = 1) -> Any:
    """What a program sees of an array whose first `axes` axes, or all of them, are the grid's.

    Args:
        x: the array.
        axes: as above.
        lists: programs of the grid's second axis that see the same.
    """
    axes = min(axes, x.ndim)
    rest = x.shape[axes:]
    return pl.BlockSpec((None,) * axes + rest, lambda b, h, s: (*(b, h // lists, s)[:axes], *[0] * len(rest)))
