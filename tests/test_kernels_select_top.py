"""The GPU kernels of `select_top`, interpreted, against the reference: equal, not close."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels
from pallas_kernels import Implementation
from pallas_kernels.select_top.triton import tiles

TRITON = Implementation("triton", interpret=True)
LEVELS = [-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf]

select = jax.jit(partial(pallas_kernels.select_top, implementation=TRITON), static_argnames="most")


def check(score: np.ndarray, count: np.ndarray, most: int) -> None:
    found = select(score, count, most=most)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, pallas_kernels.select_top(score, count, most=most))


def draw_scores(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Scores with ties, held slots (inf) and empty ones (-inf)."""
    score = rng.standard_normal(shape).astype(np.float32)
    score = np.where(rng.random(shape) < 0.3, np.round(score), score)
    return np.where(rng.random(shape) < 0.2, rng.choice(np.array(LEVELS, np.float32), shape), score)


# One slot, less than a piece, exactly one, several and a rest, and more than registers hold.
@pytest.mark.parametrize(
    ("capacity", "most"),
    [(1, 1), (17, 15), (109, 64), (128, 128), (640, 512), (1152, 1024), (40000, 100)],
)
def test_picks_what_the_reference_picks(capacity, most):
    rng = np.random.default_rng(capacity)
    count = np.array([[0, 1], [most, most // 2], [rng.integers(0, most + 1), most - 1]], np.int32)
    check(draw_scores(rng, 3, 2, capacity), count, most)


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3)])
def test_takes_any_leading_axes(shape):
    rng = np.random.default_rng(0)
    check(draw_scores(rng, *shape, 20), rng.integers(0, 9, shape).astype(np.int32), 8)


@given(st.lists(st.sampled_from(LEVELS), min_size=12, max_size=12), st.integers(0, 8))
def test_equal_scores_go_to_the_lower_index(scores, count):
    check(np.array([scores], np.float32), np.array([count], np.int32), 8)


def test_a_full_row_keeps_all_and_a_dead_row_nothing():
    score = np.full((3, 640), -np.inf, np.float32)
    score[0, :640], score[1, :300] = np.inf, np.inf
    check(score, np.array([640, 300, 0], np.int32), 640)


def float_of(key: int) -> np.float32:
    """The float whose place among all floats is `key`; 0 is that of 0.0."""
    return np.int32(key if key >= 0 else key ^ 0x7FFFFFFF).view(np.float32)


def bounds_of(low: int, width: int, depth: int) -> list[int]:
    """The bounds between the fifths of an interval, of their fifths, and so on."""
    part = -(-width // 5)
    bounds = [low + i * part for i in range(1, 5)]
    deeper = [low, *bounds] if depth else []
    return bounds + [x for start in deeper for x in bounds_of(start, min(part, low + width - start), depth - 1)]


def test_scores_beside_the_bounds_of_the_search():
    smallest, largest = -0x7F800001, 0x7F800000
    bounds = bounds_of(smallest, largest - smallest + 1, 2)
    keys = sorted({min(max(x + d, smallest), largest) for x in bounds for d in range(-4, 5)})
    near = np.array([float_of(key) for key in keys if key != -1])
    near = near[(near == 0) | (np.abs(near) >= np.finfo(np.float32).tiny)]  # the CPU reference has no subnormals
    rng = np.random.default_rng(0)
    first = rng.integers(0, len(near) - 24, 64)
    score = np.stack([rng.permutation(near[i : i + 24]) for i in first] + [rng.choice(near, 24) for _ in range(64)])
    for count in (1, 2, 5, 12, 23):
        check(score, np.full((128,), count, np.int32), 23)


@pytest.mark.parametrize("capacity", [1, 109, 640, 1152, 2176, 16384, 34816, 100000])
def test_tiles_are_powers_of_two_and_one_sum_holds_two_counts(capacity):
    cut = tiles(capacity)
    assert cut.size & (cut.size - 1) == 0
    assert cut.size < 2**15
    assert cut.held == (capacity <= 36864)
