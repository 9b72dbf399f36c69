"""`pallas_kernels.compact` in Pallas, Triton backend: in place, all arrays in one launch.

A block of threads owns a slice of D of one array in one row and head, and moves its slots from the left, a stretch of
entries at a time. That is safe in place because indices ascend, index[i] >= i: a stretch from entry s on reads slots
from s on and writes slots from s on, so what earlier stretches wrote is never read. Only within a stretch could a
thread's store run ahead of another's load, and the barrier between them forbids it. Rows, arrays and slices share no
byte, so they are parallel; slots are not.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import Gpu, Implementation

WARPS = 8
THREADS = 32 * WARPS
SECTOR = 32  # bytes: the least that a GPU's memory is read by


class Tiles(NamedTuple):
    """How one array is cut.

    Attributes:
        width: elements of a slot in one slice, a power of 2.
        slices: blocks of threads for each row and head.
        entries: slots moved together, a power of 2.
    """

    width: int
    slices: int
    entries: int


def tiles(size: int, itemsize: int, most: int, blocks: int, gpu: Gpu) -> Tiles:
    """Whole slots where that gives two blocks a core, else slices of them, down to a sector.

    Args:
        size: elements of a slot (D).
        itemsize: bytes of an element.
        most: entries of the index.
        blocks: blocks of threads that unsliced arrays would take.
        gpu: the card.
    """
    width = size & -size  # divides D, so that no lane is spare
    if width * itemsize < SECTOR:
        width = pl.next_power_of_2(size)
    width = min(width, 4096 // itemsize)
    while blocks * pl.cdiv(size, width) < 2 * gpu.cores and width * itemsize > SECTOR:
        width //= 2
    # Up to 128 bytes a thread in flight hide the memory's latency and still fit into registers.
    elements = THREADS * min(128 // itemsize, 64)
    return Tiles(width, pl.cdiv(size, width), min(elements // width, 8 * THREADS, pl.next_power_of_2(most)))


def compact(arrays: tuple[Array, ...], index: Array, *, implementation: Implementation) -> tuple[Array, ...]:
    """One kernel over rows, arrays and slices."""
    most = index.shape[2]
    flat = [x.reshape(-1, x.shape[2], math.prod(x.shape[3:])) for x in arrays]
    rows = index.shape[0] * index.shape[1]
    cuts = tuple(tiles(x.shape[2], x.dtype.itemsize, most, rows * len(flat), implementation.gpu) for x in flat)
    whole = [pl.BlockSpec((None, *x.shape[1:]), lambda row, _: (row, 0, 0)) for x in flat]
    moved = pl.pallas_call(
        partial(_move_row, cuts=cuts, interpret=implementation.interpret),
        grid=(rows, sum(cut.slices for cut in cuts)),
        in_specs=[pl.BlockSpec((None, most), lambda row, _: (row, 0)), *whole],
        out_specs=whole,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat],
        input_output_aliases={1 + i: i for i in range(len(flat))},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=implementation.interpret,
        name="compact",
    )(index.reshape(rows, most), *flat)
    return tuple(new.reshape(x.shape) for new, x in zip(moved, arrays, strict=True))


def _move_row(index_ref: Any, *refs: Any, cuts: tuple[Tiles, ...], interpret: bool) -> None:
    array_refs = refs[len(cuts) :]  # the outputs, which are the inputs' memory
    start, stop = _find_moves(index_ref, array_refs[0].shape[0])
    task, first = pl.program_id(1), 0
    for array_ref, cut in zip(array_refs, cuts, strict=True):
        column = (task - first) * cut.width
        move = partial(_move_slice, index_ref, array_ref, cut, column, start, stop, interpret)
        pl.when((task >= first) & (task < first + cut.slices))(move)
        first += cut.slices


def _find_moves(index_ref: Any, capacity: int) -> tuple[Array, Array]:
    """``(start, stop)``: the entries before `start` are in place, those from `stop` on are C."""
    most = index_ref.shape[0]
    size = min(16 * THREADS, pl.next_power_of_2(most))

    def add(piece: Array, seen: tuple[Array, Array]) -> tuple[Array, Array]:
        place = piece * size + jnp.arange(size, dtype=jnp.int32)
        index = plgpu.load(index_ref.at[place], mask=place < most, other=capacity)
        held = index < capacity
        return seen[0] + (held & (index == place)).astype(jnp.int32), seen[1] + held.astype(jnp.int32)

    none = jnp.zeros((size,), jnp.int32)
    in_place, held = lax.fori_loop(0, pl.cdiv(most, size), add, (none, none))
    return jnp.sum(in_place), jnp.sum(held)


def _move_slice(
    index_ref: Any, array_ref: Any, cut: Tiles, column: Array, start: Array, stop: Array, interpret: bool
) -> None:
    shape = (cut.entries, cut.width)
    columns = jnp.broadcast_to((column + jnp.arange(cut.width, dtype=jnp.int32))[None, :], shape)

    def spread(x: Array) -> Array:
        return jnp.broadcast_to(x[:, None], shape)

    def move(stretch: Array, _: None) -> None:
        place = start + stretch * cut.entries + jnp.arange(cut.entries, dtype=jnp.int32)
        there = place < stop
        source = plgpu.load(index_ref.at[place], mask=there, other=0)
        mask = spread(there) & (columns < array_ref.shape[1])
        kept = plgpu.load(array_ref.at[spread(source), columns], mask=mask)
        if not interpret:  # a program runs as one thread there
            plgpu.debug_barrier()
        plgpu.store(array_ref.at[spread(place), columns], kept, mask=mask)

    lax.fori_loop(0, pl.cdiv(stop - start, cut.entries), move, None)
