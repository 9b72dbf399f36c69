"""`pallas_kernels.gather_attention` as a Pallas Triton kernel: that of decode_attention, reading its slots by index.

The steps over a list come before those over the slots from `start` on, and the parts of a row share out both.
"""

import jax
from jax import Array

from pallas_kernels.decode_attention import Attended, NewToken, Notes, Share
from pallas_kernels.decode_attention.split import Cache, Token, combine, pack, splits_for
from pallas_kernels.decode_attention.triton import Tiles, attend_parts
from pallas_kernels.decode_attention.triton import tiles as tiles_of_cache
from pallas_kernels.dispatch import Gpu, Implementation
from pallas_kernels.gather_attention import Pages

# Slots that are read from `start` on, about: only rows tell how many there are.
TAIL = 512


def tiles(k: jax.ShapeDtypeStruct | Array, pages: Pages, gpu: Gpu) -> Tiles:
    """Tiles for some pages of a cache `[B, H, C, D]`: steps as for all of it, in as many parts as the pages are worth.

    Two stages more, for a step's pages are on their way before its slots can be.
    """
    rows, lists, count = k.shape[0] * k.shape[1], *pages.index.shape[2:]
    slots = tiles_of_cache(k, gpu).slots
    splits = splits_for(rows * lists, min(k.shape[2], count * pages.size + TAIL), slots, gpu)
    return Tiles(slots, splits, stages=5)


def gather_attention(
    q: Array,
    k: Array,
    v: Array,
    length: Array,
    pages: Pages,
    new: NewToken | None = None,
    notes: Notes | None = None,
    *,
    beside: Share | None,
    implementation: Implementation,
) -> Attended:
    """One kernel, and a second one that combines the parts if there are several."""
    group, cache, token = q.shape[2], Cache(k, v), None
    if new is not None:
        q, cache, token = pack(q, new), Cache.of(k, v, notes), Token(new.active, notes.place if notes else None)
    partials, cache = attend_parts(
        q.astype(k.dtype),
        cache,
        length,
        token,
        tiles(k, pages, implementation.gpu),
        pages=pages,
        group=group,
        interpret=implementation.interpret,
    )
    out, _ = combine(partials, length, beside, group=group)
    return cache.attended(out, None, notes)
