"""`pallas_kernels.key_redundancy` as Pallas Triton kernels.

A row of cosines sums to the product of its key with the sum of all unit keys, so that only the search for the spared
keys has to look at every pair; what spares it costs a slot is subtracted afterwards. Keys are multiplied as they are
stored, and only the sums are scaled by the lengths of the keys, so that no unit key is rounded.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.decode_attention.reference import MASKED
from pallas_kernels.decode_attention.split import splits_for
from pallas_kernels.dispatch import Gpu, Implementation
from pallas_kernels.products import LEAST_DEPTH, hold, product, split_columns

MOST_PARTS = 16  # every search adds up all parts of the sum
GROUP = 8  # tiles that are searched before it is asked whether anything is left to find


class Tiles(NamedTuple):
    """How the work is cut; all sizes of blocks are powers of two.

    Attributes:
        rows: keys of one program of the search, and of the subtraction.
        slots: keys that these are multiplied with in one step.
        parts: programs that share the sum over the keys of one kv head.
        warps, stages: of Triton's code and of its pipeline of loads.
    """

    rows: int
    slots: int
    parts: int
    warps: int = 8
    stages: int = 3


def tiles(k: jax.ShapeDtypeStruct | Array, gpu: Gpu) -> Tiles:
    """Many rows read the other keys seldom; fewer if there would be too few programs, or on no tensor cores."""
    batch, heads, capacity, _ = k.shape
    parts = min(MOST_PARTS, splits_for(batch * heads, capacity, 64, gpu))
    small = k.dtype == jnp.float32 or batch * heads * capacity < 128 * gpu.cores
    return Tiles(64 if small else 128, 64, parts)


def key_redundancy(
    k: Array, length: Array, *, threshold: float, retain: str, implementation: Implementation
) -> Array:
    """Three kernels and the softmax.

    Raises:
        ValueError: head_dim is no multiple of 16.
    """
    batch, heads, capacity, size = k.shape
    if size % LEAST_DEPTH:
        raise ValueError(f"key_redundancy: triton takes head_dim in multiples of {LEAST_DEPTH}, got {size}; use xla")
    cut = tiles(k, implementation.gpu)
    of_head = lambda *shape: pl.BlockSpec((None, None, *shape), lambda i, h, b: (b, h, *[0] * len(shape)))
    lengths, keys, slots, sums = of_head(), of_head(capacity, size), of_head(capacity), of_head(cut.parts, size)
    floats = jax.ShapeDtypeStruct((batch, heads, capacity), jnp.float32)
    blocks = pl.cdiv(capacity, cut.rows)
    call = partial(
        pl.pallas_call,
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=implementation.interpret,
    )
    scale, total = call(
        partial(_measure, cut=cut),
        grid=(cut.parts, heads, batch),
        in_specs=[lengths, keys],
        out_specs=[slots, pl.BlockSpec((None, None, None, size), lambda i, h, b: (b, h, i, 0))],
        out_shape=[floats, jax.ShapeDtypeStruct((batch, heads, cut.parts, size), jnp.float32)],
        name="key_sums",
    )(length, k)
    spared, cosine, total = call(
        partial(_search, cut=cut, threshold=threshold, retain=retain),
        grid=(blocks, heads, batch),
        in_specs=[lengths, keys, slots, sums],
        out_specs=[slots] * 3,
        out_shape=[jax.ShapeDtypeStruct(floats.shape, jnp.int32), floats, floats],
        name="key_search",
    )(length, k, scale, total)
    total = call(
        partial(_subtract, cut=cut),
        grid=(blocks, heads, batch),
        in_specs=[lengths, slots, slots, slots],
        out_specs=slots,
        out_shape=floats,
        name="key_totals",
    )(length, spared, cosine, total)
    valid = jnp.arange(capacity, dtype=jnp.int32).reshape(1, 1, -1) < length[..., None]
    mean = total / jnp.maximum(length, 1)[..., None].astype(jnp.float32)
    return jnp.where(valid, jax.nn.softmax(jnp.where(valid, mean, MASKED), axis=-1), 0.0)


def _measure(length_ref, k_ref, scale_ref, sum_ref, *, cut: Tiles) -> None:
    """What makes a key's length 1, and the sum of one part of the unit keys."""
    size = k_ref.shape[1]
    length = plgpu.load(length_ref.at[...])
    columns = split_columns(size)

    def step(i: Array, sums: list[Array]) -> list[Array]:
        slot = i * cut.slots + jnp.arange(cut.slots, dtype=jnp.int32)
        valid = slot < length
        where = pl.ds(i * cut.slots, cut.slots)
        keys = [
            plgpu.load(k_ref.at[where, piece], mask=valid[:, None], other=0.0).astype(jnp.float32) for piece in columns
        ]
        squares = sum(jnp.sum(x * x, axis=1) for x in keys)
        scale = jnp.where(valid, 1 / (jnp.sqrt(squares) + 1e-6), 0.0)
        plgpu.store(scale_ref.at[where], scale, mask=valid)
        return [total + jnp.sum(x * scale[:, None], axis=0) for total, x in zip(sums, keys, strict=True)]

    part, count = pl.program_id(0), pl.cdiv(length, cut.slots)
    nothing = [jnp.zeros((piece.size,), jnp.float32) for piece in columns]
    sums = lax.fori_loop(part * count // cut.parts, (part + 1) * count // cut.parts, step, nothing)
    for piece, total in zip(columns, sums, strict=True):
        plgpu.store(sum_ref.at[piece], total)


def _search(
    length_ref, k_ref, scale_ref, sum_ref, spared_ref, cosine_ref, total_ref, *, cut: Tiles, threshold: float, retain: str
) -> None:
    """For a block of keys the slot that each spares, -1 for none, its cosine with it, and the sum of all cosines."""
    size, start = k_ref.shape[1], pl.program_id(0) * cut.rows
    length = plgpu.load(length_ref.at[...])
    row = start + jnp.arange(cut.rows, dtype=jnp.int32)
    block, valid = pl.ds(start, cut.rows), row < length
    scale = plgpu.load(scale_ref.at[block], mask=valid, other=0.0)
    load = lambda columns: plgpu.load(k_ref.at[block, columns], mask=valid[:, None], other=0.0)
    if retain == "first":
        spared = jnp.zeros_like(row)
    else:
        spared = _find(k_ref, scale_ref, load, row, length, threshold / jnp.where(valid, scale, 1.0), threshold, cut)
    if retain == "last":
        spared = jnp.maximum(spared, 0)
    has = valid & (spared >= 0) & (spared != row)
    other = jnp.where(has, spared, 0)
    part = jnp.arange(1 << (cut.parts - 1).bit_length(), dtype=jnp.int32)
    width = min(size & -size, 64)

    def add(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        cosine, square, total = state
        columns, number = pl.ds(i * width, width), i * width + jnp.arange(width, dtype=jnp.int32)
        key = load(columns).astype(jnp.float32)
        where = jnp.broadcast_to(other[:, None], key.shape), jnp.broadcast_to(number[None], key.shape)
        similar = plgpu.load(k_ref.at[where], mask=has[:, None], other=0.0).astype(jnp.float32)
        sums = plgpu.load(sum_ref.at[pl.ds(0, part.size), columns], mask=(part < cut.parts)[:, None], other=0.0)
        add_to = lambda total, factor: total + jnp.sum(key * factor, axis=1)
        return add_to(cosine, similar), add_to(square, key), add_to(total, jnp.sum(sums, axis=0)[None])

    nothing = (jnp.zeros(row.shape, jnp.float32),) * 3
    cosine, square, total = lax.fori_loop(0, size // width, add, nothing)
    cosine = cosine * scale * plgpu.load(scale_ref.at[other], mask=has, other=0.0)
    plgpu.store(spared_ref.at[block], spared, mask=valid)
    plgpu.store(cosine_ref.at[block], cosine, mask=valid)
    plgpu.store(total_ref.at[block], total * scale - square * scale * scale, mask=valid)


def _find(k_ref, scale_ref, load, row: Array, length: Array, least: Array, threshold: float, cut: Tiles) -> Array:
    """The largest slot whose product with a row, scaled by its own length alone, exceeds `least`; -1 for none."""
    size = k_ref.shape[1]
    keys = hold(load, size, k_ref.dtype)
    of = jax.ShapeDtypeStruct((cut.rows, cut.slots), k_ref.dtype)

    def step(i: Array, found: Array, *, itself: bool) -> Array:
        slot = i * cut.slots + jnp.arange(cut.slots, dtype=jnp.int32)
        where, valid = pl.ds(i * cut.slots, cut.slots), slot < length
        others = lambda columns: plgpu.load(k_ref.at[where, columns], mask=valid[:, None], other=0.0)
        scale = plgpu.load(scale_ref.at[where], mask=valid, other=0.0)
        alike = product(keys, others, of, size) * scale[None] > least[:, None]
        if itself:  # a key's cosine with itself counts as 0
            same = row[:, None] == slot[None]
            alike = alike | same if threshold < 0 else alike & ~same
        if threshold < 0:
            alike = alike & valid[None]
        return jnp.maximum(found, jnp.max(jnp.where(alike, slot[None], -1), axis=1))

    def search(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        found, least = state
        stop = jnp.where(least < 0, others - i * GROUP, 0)
        found = lax.fori_loop(jnp.maximum(stop - GROUP, 0), stop, step_over, found)
        return found, jnp.min(found)

    # The tiles that hold the rows themselves come last, so that no other one has to look for a key's own slot.
    own, first = cut.rows // cut.slots, pl.program_id(0) * (cut.rows // cut.slots)
    step_over = lambda i, found: step(jnp.where(i < first, i, i + own), found, itself=False)
    others = jnp.where(first * cut.slots < length, jnp.maximum(pl.cdiv(length, cut.slots) - own, 0), 0)
    nothing = jnp.where(row < length, -1, 0)
    found, _ = lax.fori_loop(0, pl.cdiv(others, GROUP), search, (nothing, jnp.min(nothing)))
    return lax.fori_loop(first, first + own, partial(step, itself=True), found)


def _subtract(length_ref, spared_ref, cosine_ref, total_ref, out_ref, *, cut: Tiles) -> None:
    """The sums of a block of rows without the cosines of the keys that spare them."""
    slots, start = 2 * cut.slots, pl.program_id(0) * cut.rows
    length = plgpu.load(length_ref.at[...])
    row = start + jnp.arange(cut.rows, dtype=jnp.int32)
    block = pl.ds(start, cut.rows)

    def step(i: Array, total: Array) -> Array:
        where = pl.ds(i * slots, slots)
        valid = i * slots + jnp.arange(slots, dtype=jnp.int32) < length
        spared = plgpu.load(spared_ref.at[where], mask=valid, other=-1)
        near = jnp.max(((spared >= start) & (spared < start + cut.rows)).astype(jnp.int32)) > 0

        def subtract() -> Array:
            cosine = plgpu.load(cosine_ref.at[where], mask=valid, other=0.0)
            return total - jnp.sum(jnp.where(spared[None] == row[:, None], cosine[None], 0.0), axis=1)

        return lax.cond(near, subtract, lambda: total)

    total = plgpu.load(total_ref.at[block], mask=row < length, other=0.0)
    total = lax.fori_loop(0, jnp.where(start < length, pl.cdiv(length, slots), 0), step, total)
    plgpu.store(out_ref.at[block], total, mask=row < length)
