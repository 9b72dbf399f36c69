"""`pallas_kernels.key_redundancy` as Pallas Triton kernels.

A key's cosines with all keys sum to its product with the sum of all unit keys. So only the search for the spared keys
looks at every pair; what a slot is spared is subtracted afterwards. Keys are multiplied as they are stored and their
products are scaled, so that no unit key is rounded.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.blocks import Load, check_columns, hold, of_head, product, split_columns
from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.decode_attention.split import splits_for
from pallas_kernels.dispatch import Gpu, Implementation

MOST_PARTS = 16  # every program of the search adds up the sums of all parts
GROUP = 8  # tiles between two questions whether there is anything to do


class Tiles(NamedTuple):
    """How the work is cut; all sizes of blocks are powers of two.

    Attributes:
        rows: keys whose spared ones a program looks for, and slots whose sums it corrects.
        slots: keys of one step of a program.
        parts: programs that share the sum of the unit keys of one kv head.
        warps, stages: of Triton's code and of its pipeline of loads.
    """

    rows: int
    slots: int
    parts: int
    warps: int = 8
    stages: int = 3


def tiles(k: jax.ShapeDtypeStruct | Array, gpu: Gpu) -> Tiles:
    """The more rows, the fewer times all keys are read, if there is room for them beside three stages of keys."""
    batch, heads, capacity, size = k.shape
    exact = k.dtype == jnp.float32  # and off the tensor cores
    stages, room = Tiles._field_defaults["stages"], gpu.shared_memory // (size * k.dtype.itemsize)
    slots = 32 if exact or 128 + stages * 64 > room else 64
    rows = 64 if exact or 128 + stages * slots > room else 128
    return Tiles(rows, slots, min(MOST_PARTS, splits_for(batch * heads, capacity, slots, gpu)))


def key_redundancy(k: Array, length: Array, *, threshold: float, retain: str, implementation: Implementation) -> Array:
    """Three kernels and the softmax.

    Raises:
        ValueError: head_dim is no multiple of 16.
    """
    batch, heads, capacity, size = k.shape
    check_columns("key_redundancy", size)
    cut = tiles(k, implementation.gpu)
    call = partial(
        pl.pallas_call,
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=implementation.interpret,
    )
    keys, slots, sums = of_head(capacity, size), of_head(capacity), of_head(cut.parts, size)
    floats = jax.ShapeDtypeStruct((batch, heads, capacity), jnp.float32)
    scale, total = call(
        partial(_sum, cut=cut),
        grid=(cut.parts, heads, batch),
        in_specs=[of_head(), keys],
        out_specs=[slots, sums],
        out_shape=[floats, jax.ShapeDtypeStruct((batch, heads, cut.parts, size), jnp.float32)],
        name="key_sums",
    )(length, k)
    blocks = pl.cdiv(capacity, cut.rows)
    spared, cosine, total = call(
        partial(_search, cut=cut, threshold=threshold, retain=retain),
        grid=(blocks, heads, batch),
        in_specs=[of_head(), keys, slots, sums],
        out_specs=[slots, slots, slots],
        out_shape=[jax.ShapeDtypeStruct(floats.shape, jnp.int32), floats, floats],
        name="key_search",
    )(length, k, scale, total)
    total = call(
        partial(_subtract, cut=cut),
        grid=(blocks, heads, batch),
        in_specs=[of_head(), slots, slots, slots],
        out_specs=slots,
        out_shape=floats,
        name="key_totals",
    )(length, spared, cosine, total)
    valid = jnp.arange(capacity, dtype=jnp.int32).reshape(1, 1, -1) < length[..., None]
    mean = total / jnp.maximum(length, 1)[..., None].astype(jnp.float32)
    return jnp.where(valid, jax.nn.softmax(jnp.where(valid, mean, MASKED), axis=-1), 0.0)


def _sum(length_ref, k_ref, scale_ref, sum_ref, *, cut: Tiles) -> None:
    """What makes the length of each key 1, and the sum of one part of the unit keys."""
    length, columns = plgpu.load(length_ref.at[...]), split_columns(k_ref.shape[1])

    def step(i: Array, sums: list[Array]) -> list[Array]:
        slot, where = i * cut.slots + jnp.arange(cut.slots, dtype=jnp.int32), pl.ds(i * cut.slots, cut.slots)
        valid = slot < length
        load = partial(plgpu.load, mask=valid[:, None], other=0.0)
        keys = [load(k_ref.at[where, piece]).astype(jnp.float32) for piece in columns]
        square = sum(jnp.sum(x * x, axis=1) for x in keys)
        scale = 1 / (jnp.sqrt(square) + 1e-6)
        plgpu.store(scale_ref.at[where], scale, mask=valid)
        return [total + jnp.sum(x * scale[:, None], axis=0) for total, x in zip(sums, keys, strict=True)]

    part, count = pl.program_id(0), pl.cdiv(length, cut.slots)
    sums = [jnp.zeros((piece.size,), jnp.float32) for piece in columns]
    sums = lax.fori_loop(part * count // cut.parts, (part + 1) * count // cut.parts, step, sums)
    for piece, total in zip(columns, sums, strict=True):
        plgpu.store(sum_ref.at[part, piece], total)


def _search(
    length_ref,
    k_ref,
    scale_ref,
    sum_ref,
    spared_ref,
    cosine_ref,
    total_ref,
    *,
    cut: Tiles,
    threshold: float,
    retain: str,
) -> None:
    """For a block of keys: the slot that each spares, -1 for none; its cosine with that; the sum of its cosines."""
    start, length = pl.program_id(0) * cut.rows, plgpu.load(length_ref.at[...])
    row, block = start + jnp.arange(cut.rows, dtype=jnp.int32), pl.ds(start, cut.rows)
    valid = row < length
    scale = plgpu.load(scale_ref.at[block], mask=valid, other=1.0)
    if retain == "first":
        spared = jnp.zeros_like(row)
    else:
        spared = _find(k_ref, scale_ref, row, scale, length, cut=cut, threshold=threshold)
    if retain == "last":
        spared = jnp.maximum(spared, 0)
    # A key's cosine with itself counts as 0.
    counts = valid & (spared >= 0) & (spared != row)
    other = jnp.where(counts, spared, 0)
    width = min(k_ref.shape[1] & -k_ref.shape[1], 64)

    def add(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        cosine, square, total = state
        columns, column = pl.ds(i * width, width), i * width + jnp.arange(width, dtype=jnp.int32)
        key = plgpu.load(k_ref.at[block, columns], mask=valid[:, None], other=0.0).astype(jnp.float32)
        where = jnp.broadcast_to(other[:, None], key.shape), jnp.broadcast_to(column[None], key.shape)
        similar = plgpu.load(k_ref.at[where], mask=counts[:, None], other=0.0).astype(jnp.float32)
        every = lax.fori_loop(
            0, cut.parts, lambda part, x: x + plgpu.load(sum_ref.at[part, columns]), jnp.zeros((width,), jnp.float32)
        )
        cosine += jnp.sum(key * similar, axis=1)
        square += jnp.sum(key * key, axis=1)
        return cosine, square, total + jnp.sum(key * every[None], axis=1)

    nothing = (jnp.zeros(row.shape, jnp.float32),) * 3
    cosine, square, total = lax.fori_loop(0, k_ref.shape[1] // width, add, nothing)
    cosine *= scale * plgpu.load(scale_ref.at[other], mask=counts, other=0.0)
    plgpu.store(spared_ref.at[block], spared, mask=valid)
    plgpu.store(cosine_ref.at[block], cosine, mask=valid)
    plgpu.store(total_ref.at[block], total * scale - square * scale * scale, mask=valid)


def _find(k_ref, scale_ref, row: Array, scale: Array, length: Array, *, cut: Tiles, threshold: float) -> Array:
    """The largest slot whose cosine with each of a block's rows exceeds the threshold; -1 for none."""
    size, own = k_ref.shape[1], cut.rows // cut.slots
    first = pl.program_id(0) * own  # of the tiles that hold the rows themselves

    def tile(start: Array, count: int) -> tuple[Array, Load]:
        slot = start + jnp.arange(count, dtype=jnp.int32)
        mask = (slot < length)[:, None]
        return slot, lambda columns: plgpu.load(k_ref.at[pl.ds(start, count), columns], mask=mask, other=0.0)

    keys = hold(tile(first * cut.slots, cut.rows)[1], size, k_ref.dtype)
    least = threshold / scale
    of = jax.ShapeDtypeStruct((cut.rows, cut.slots), k_ref.dtype)

    def step(i: Array, found: Array, *, itself: bool) -> Array:
        slot, others = tile(i * cut.slots, cut.slots)
        scale = plgpu.load(scale_ref.at[pl.ds(i * cut.slots, cut.slots)], mask=slot < length, other=0.0)
        alike = product(keys, others, of, size) * scale[None] > least[:, None]
        if itself:  # a key's cosine with itself counts as 0
            same = row[:, None] == slot[None]
            alike = alike | same if threshold < 0 else alike & ~same
        if threshold < 0:
            alike &= (slot < length)[None]
        return jnp.maximum(found, jnp.max(jnp.where(alike, slot[None], -1), axis=1))

    def step_over(i: Array, found: Array) -> Array:
        return step(jnp.where(i < first, i, i + own), found, itself=False)

    def search(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        found, least = state
        stop = jnp.where(least < 0, others - i * GROUP, 0)
        found = lax.fori_loop(jnp.maximum(stop - GROUP, 0), stop, step_over, found)
        return found, jnp.min(found)

    # From the end, until every row has found a slot. The rows' own tiles come last, so that no other has to look out
    # for a key's own slot.
    any_row = first * cut.slots < length
    others = jnp.where(any_row, jnp.maximum(pl.cdiv(length, cut.slots) - own, first), 0)
    nothing = jnp.where(row < length, -1, 0)
    found, _ = lax.fori_loop(0, pl.cdiv(others, GROUP), search, (nothing, jnp.min(nothing)))
    return lax.fori_loop(first, jnp.where(any_row, first + own, first), partial(step, itself=True), found)


def _subtract(length_ref, spared_ref, cosine_ref, total_ref, out_ref, *, cut: Tiles) -> None:
    """The sums of a block of slots without the cosines of the keys that spare them."""
    start, length, wide = pl.program_id(0) * cut.rows, plgpu.load(length_ref.at[...]), GROUP * cut.slots
    row, block = start + jnp.arange(cut.rows, dtype=jnp.int32), pl.ds(start, cut.rows)

    def load(ref, i: Array, count: int) -> Array:
        mask = i * count + jnp.arange(count, dtype=jnp.int32) < length
        return plgpu.load(ref.at[pl.ds(i * count, count)], mask=mask, other=-1)

    def subtract(i: Array, total: Array) -> Array:
        spared, cosine = load(spared_ref, i, cut.slots), load(cosine_ref, i, cut.slots)
        return total - jnp.sum(jnp.where(spared[None] == row[:, None], cosine[None], 0.0), axis=1)

    def search(i: Array, total: Array) -> Array:
        spared = load(spared_ref, i, wide)
        any_here = jnp.max(((spared >= start) & (spared < start + cut.rows)).astype(jnp.int32))
        return lax.fori_loop(i * GROUP, (i + any_here) * GROUP, subtract, total)

    total = plgpu.load(total_ref.at[block], mask=row < length, other=0.0)
    total = lax.fori_loop(0, jnp.where(start < length, pl.cdiv(length, wide), 0), search, total)
    plgpu.store(out_ref.at[block], total, mask=row < length)
