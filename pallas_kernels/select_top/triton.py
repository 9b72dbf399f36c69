"""`pallas_kernels.select_top` in Pallas, Triton backend: a search for the lowest score that is picked, not a sort.

One block of threads does one row. Scores become integers of the same order (keys), held in registers. The search
narrows the interval of keys in which the last pick lies to a fifth in a pass, by counting the keys over four bounds
together, and ends early at a bound that parts the row at the right count. A running count over the slots then gives
every picked slot its place.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import Implementation

INFINITE = 0x7F800000  # the key of inf; that of -inf is LEAST
LEAST = -INFINITE - 1


class Tiles(NamedTuple):
    """How a row is cut.

    Attributes:
        size: slots of a piece; below 2**15.
        warps: of the block.
        held: all keys stay in registers; otherwise every pass reads the row again, from the core's own cache.
    """

    size: int
    warps: int
    held: bool


class Picks(NamedTuple):
    """Which keys of a row are picked: the `above` keys over `high`, and the first ones from `low` to `high`."""

    low: Array
    high: Array
    above: Array


def tiles(capacity: int) -> Tiles:
    """About 12 keys a thread while there are warps, for few rows must be quick too; 4 adjacent slots in one load."""
    warps = min(pl.next_power_of_2(pl.cdiv(capacity, 12 * 32)), 16)
    return Tiles(size=128 * warps, warps=warps, held=capacity <= 72 * 32 * warps)


def select_top(score: Array, count: Array, *, most: int, implementation: Implementation) -> Array:
    """One kernel, one block of threads a row."""
    capacity = score.shape[-1]
    cut = tiles(capacity)
    picked = pl.pallas_call(
        partial(_select_row, cut=cut),
        grid=(count.size,),
        in_specs=[pl.BlockSpec((None, capacity), lambda row: (row, 0)), pl.BlockSpec((None,), lambda row: (row,))],
        out_specs=pl.BlockSpec((None, most), lambda row: (row, 0)),
        out_shape=jax.ShapeDtypeStruct((count.size, most), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=1),
        interpret=implementation.interpret,
        name="select_top",
    )(score.reshape(-1, capacity), count.reshape(-1))
    return picked.reshape(*count.shape, most)


def _select_row(score_ref: Any, count_ref: Any, picked_ref: Any, *, cut: Tiles) -> None:
    count = jnp.minimum(plgpu.load(count_ref.at[...]), picked_ref.shape[0])
    _write_picks(_search(score_ref, count, cut), count, score_ref, picked_ref, cut.size)
    _write_rest(count, score_ref.shape[0], picked_ref, cut.size)


def _slots(piece: Any, size: int) -> Array:
    return piece * size + jnp.arange(size, dtype=jnp.int32)


def _load_keys(score_ref: Any, piece: Any, size: int) -> Array:
    """Int32 keys in the order of the scores, below `LEAST` beyond the row."""
    slot = _slots(piece, size)
    inside = slot < score_ref.shape[0]
    bits = lax.bitcast_convert_type(plgpu.load(score_ref.at[slot], mask=inside, other=0.0), jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the bits of negative floats grow as the floats fall
    key = jnp.where(key == -1, 0, key)  # -0.0 equals 0.0
    return jnp.where(inside, key, LEAST - 1)


def _search(score_ref: Any, count: Array, cut: Tiles) -> Picks:
    capacity = score_ref.shape[0]
    pieces = pl.cdiv(capacity, cut.size)
    held = [_load_keys(score_ref, i, cut.size) for i in range(pieces)] if cut.held else []

    def count_from(bound: Array) -> Array:
        """How many keys reach each bound: summed in every thread first, then over the threads for all bounds."""

        def add(key: Array, seen: Array) -> Array:
            return seen + (key[None, :] >= bound[:, None]).astype(jnp.int32)

        seen = jnp.zeros((bound.size, cut.size), jnp.int32)
        for key in held:
            seen = add(key, seen)
        if not held:
            seen = lax.fori_loop(0, pieces, lambda i, seen: add(_load_keys(score_ref, i, cut.size), seen), seen)
        return jnp.sum(seen, axis=1)

    def is_open(state: tuple[Array, ...]) -> Array:
        width, _, reached, _ = state
        return (width > 1) & (reached != count)

    def narrow(state: tuple[Array, ...]) -> tuple[Array, ...]:
        width, low, reached, above = state
        part = lax.div(width + jnp.uint32(4), jnp.uint32(5))
        step = part.astype(jnp.int32)
        seen = count_from(low + step * (1 + jnp.arange(4, dtype=jnp.int32)))
        enough = seen >= count
        steps = jnp.sum(enough.astype(jnp.int32))
        reached = jnp.minimum(reached, jnp.min(jnp.where(enough, seen, capacity)))
        above = jnp.maximum(above, jnp.max(jnp.where(enough, 0, seen)))
        # The last part is the shorter one: what lies past it has been counted in `above`.
        return jnp.minimum(part, width - part * steps.astype(jnp.uint32)), low + step * steps, reached, above

    # The interval has `width` keys from `low` on; `reached` of the row's keys are in or over it, `above` over it.
    reached = (count > 0).astype(jnp.int32) * capacity  # all or nothing needs no pass
    start = (jnp.uint32(INFINITE - LEAST + 1), jnp.int32(LEAST), reached, jnp.int32(0))
    width, low, _, above = lax.while_loop(is_open, narrow, start)
    return Picks(low, low + (width.astype(jnp.int32) - 1), above)


def _write_picks(picks: Picks, count: Array, score_ref: Any, picked_ref: Any, size: int) -> None:
    """Stores the picked slots in ascending order."""
    capacity, most = score_ref.shape[0], picked_ref.shape[0]
    room = count - picks.above

    def write(piece: Array, before: tuple[Array, Array]) -> tuple[Array, Array]:
        key = _load_keys(score_ref, piece, size)
        over = key > picks.high
        edge = (key >= picks.low) & ~over
        both = over.astype(jnp.int32) + (edge.astype(jnp.int32) << 16)  # one sum for two counts
        upto, total = jnp.cumsum(both), jnp.sum(both)
        overs, edges = before[0] + (upto & 0xFFFF), before[1] + (upto >> 16)
        place = jnp.where(over | (edge & (edges <= room)), overs + jnp.minimum(edges, room) - 1, most)
        plgpu.store(picked_ref.at[place], _slots(piece, size), mask=place < most)
        return before[0] + (total & 0xFFFF), before[1] + (total >> 16)

    lax.fori_loop(0, pl.cdiv(capacity, size), write, (jnp.int32(0), jnp.int32(0)))


def _write_rest(count: Array, capacity: int, picked_ref: Any, size: int) -> None:
    """Stores C from `count` on."""
    most = picked_ref.shape[0]

    def write(piece: Array, _: None) -> None:
        place = _slots(piece, size)
        plgpu.store(picked_ref.at[place], jnp.full_like(place, capacity), mask=(place >= count) & (place < most))

    lax.fori_loop(count // size, pl.cdiv(most, size), write, None)
