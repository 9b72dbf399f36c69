"""The GPU kernels of `compact`, interpreted, against the reference: equal, not close."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation
from pallas_kernels.compact.triton import SECTOR, THREADS, tiles
from pallas_kernels.dispatch import A100, H100
from pallas_kernels.shapes import CACHES, MODELS

SLICED = Implementation("triton", gpu=A100, interpret=True)  # few rows for a big card
WHOLE = replace(SLICED, gpu=replace(A100, cores=1))

compact = jax.jit(pallas_kernels.compact, static_argnames="implementation")


def draw_index(rng: np.random.Generator, batch: int, heads: int, capacity: int, most: int) -> np.ndarray:
    """Rows that keep nothing, a prefix that is in place, `most` slots from anywhere, and a prefix and some others."""
    index = np.full((batch, heads, most), capacity, np.int32)
    for row, entries in enumerate(index.reshape(-1, most)):
        count = int(rng.integers(1, most + 1))
        stay = (0, count, 0, count // 3)[row % 4]
        count = (0, count, most, count)[row % 4]
        entries[:stay] = np.arange(stay)
        entries[stay:count] = stay + np.sort(rng.choice(capacity - stay, count - stay, replace=False))
    return index


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return (
        jnp.asarray(rng.integers(-99, 99, shape)).astype(dtype)
        if dtype != "bool"
        else jnp.asarray(rng.random(shape) < 0.5)
    )


def check(arrays: tuple[jax.Array, ...], index: np.ndarray, implementation: Implementation) -> None:
    """Slots that the index names are the reference's, and the kernel writes to no other."""
    found = compact(arrays, index, implementation=implementation)
    named = np.zeros(arrays[0].shape[:3], bool)
    named[:, :, : index.shape[2]] = index < arrays[0].shape[2]
    assert len(found) == len(arrays)
    for x, y, old in zip(found, pallas_kernels.compact(arrays, jnp.asarray(index)), arrays, strict=True):
        assert (x.shape, x.dtype) == (old.shape, old.dtype)
        np.testing.assert_array_equal(np.asarray(x)[named], np.asarray(y)[named])
        np.testing.assert_array_equal(np.asarray(x)[~named], np.asarray(old)[~named])


@pytest.mark.parametrize("implementation", [WHOLE, SLICED], ids=["whole", "sliced"])
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_moves_keys_of_any_size(size, implementation):
    rng = np.random.default_rng(size)
    k, pos = draw(rng, (2, 2, 109, size), "bfloat16"), draw(rng, (2, 2, 109), "int32")
    check((k, pos), draw_index(rng, 2, 2, 109, 64), implementation)


# One slot, everything kept, several stretches, and several with a rest.
@pytest.mark.parametrize(("capacity", "most"), [(1, 1), (300, 300), (640, 512), (1152, 700)])
def test_moves_any_number_of_slots(capacity, most):
    rng = np.random.default_rng(capacity)
    check((draw(rng, (1, 4, capacity, 128), "float32"),), draw_index(rng, 1, 4, capacity, most), WHOLE)


@pytest.mark.parametrize("implementation", [WHOLE, SLICED], ids=["whole", "sliced"])
def test_moves_arrays_of_all_kinds_together(implementation):
    rng = np.random.default_rng(0)
    index = draw_index(rng, 1, 4, 257, 200)
    kinds = {
        "float32": (48,),
        "bfloat16": (48,),
        "int32": (),
        "bool": (),
        "int8": (48,),
        "float16": (4, 2),
        "uint8": (5,),
    }
    check(tuple(draw(rng, (1, 4, 257, *shape), dtype) for dtype, shape in kinds.items()), index, implementation)


def test_dropped_slots_may_hold_anything():
    rng = np.random.default_rng(0)
    index = draw_index(rng, 2, 2, 109, 64)
    k = np.full((2, 2, 109, 64), np.nan, np.float32)
    for b, h in np.ndindex(2, 2):
        slots = index[b, h][index[b, h] < 109]
        k[b, h, slots] = rng.standard_normal((len(slots), 64))
    check((jnp.asarray(k),), index, WHOLE)


def test_a_row_in_place_is_left_as_it_is():
    rng = np.random.default_rng(0)
    index = np.full((1, 3, 64), 109, np.int32)
    index[0, 0, :40], index[0, 1, :64] = np.arange(40), np.arange(64)
    k, pos = draw(rng, (1, 3, 109, 64), "bfloat16"), draw(rng, (1, 3, 109), "int32")
    for found, old in zip(compact((k, pos), index, implementation=SLICED), (k, pos), strict=True):
        np.testing.assert_array_equal(found, old)


def test_follows_select_top():
    rng = np.random.default_rng(0)
    score, count = rng.standard_normal((2, 2, 300), np.float32), np.array([[0, 7], [128, 100]], np.int32)
    picks = partial(pallas_kernels.select_top, score, count, most=128)
    index = picks(implementation=Implementation("triton", interpret=True))
    np.testing.assert_array_equal(index, picks())
    check((draw(rng, (2, 2, 300, 64), "bfloat16"),), np.asarray(index), WHOLE)


@pytest.mark.parametrize("gpu", [A100, H100], ids=["a100", "h100"])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 8, 64, 80, 96, 128, 256, 3000])
def test_tiles_cover_every_slot_by_whole_sectors(size, itemsize, gpu):
    for cache in CACHES.values():
        for heads in MODELS.values():
            rows = cache.batch * heads.kv_heads
            cut = tiles(size, itemsize, cache.kept, 3 * rows, gpu)
            assert cut.width * (cut.slices - 1) < size <= cut.width * cut.slices
            assert cut.slices == 1 or cut.width * itemsize >= SECTOR
            assert cut.entries & (cut.entries - 1) == cut.width & (cut.width - 1) == 0
            assert cut.entries >= 1
            assert cut.width * cut.entries * itemsize <= 128 * THREADS
