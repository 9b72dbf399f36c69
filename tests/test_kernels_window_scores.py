"""The GPU kernels of `window_scores`, interpreted, against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation
from pallas_kernels.dispatch import A100, H200, Gpu
from pallas_kernels.shapes import CACHES, MODELS
from pallas_kernels.window_scores.triton import tiles

SMALL = Gpu(capability=80, cores=1, shared_memory=60000)  # one part a head, and few queries at once
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-4}


def draw(shape: tuple[int, ...], capacity: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Queries `[B, H, G, W, D]` whose attention is uneven, and keys."""
    rng = np.random.default_rng([*shape, capacity])
    q, k = 3 * rng.standard_normal(shape), rng.standard_normal((*shape[:2], capacity, shape[-1]))
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype)


def check(q: jax.Array, k: jax.Array, length, gpu: Gpu = A100, tolerance: float = 0, **options) -> np.ndarray:
    """Compares with the reference, with NaN in the keys beyond the lengths."""
    length = np.asarray(length, np.int32).reshape(q.shape[:2])
    filled = jnp.arange(k.shape[2])[None, None, :, None] < length[..., None, None]
    implementation = Implementation("triton", gpu=gpu, interpret=True)
    score = partial(pallas_kernels.window_scores, **options)
    found = np.asarray(jax.jit(partial(score, implementation=implementation))(q, jnp.where(filled, k, jnp.nan), length))
    expected = np.asarray(jax.jit(score)(q, k, length))
    assert found.dtype == np.float32
    tolerance = tolerance or TOLERANCE[k.dtype.name]
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-7 * max(1, np.max(expected)))
    return expected


@pytest.mark.parametrize("reduce", ["probs", "logits"])
@pytest.mark.parametrize(
    ("group", "window", "size", "dtype"),
    [
        (1, 1, 64, "float32"),
        (3, 16, 64, "bfloat16"),
        (3, 5, 80, "float32"),
        (4, 8, 128, "bfloat16"),
        (7, 16, 96, "bfloat16"),
        (7, 2, 128, "float32"),
        (16, 1, 80, "bfloat16"),
    ],
)
def test_scores_as_the_reference_does(group, window, size, dtype, reduce):
    q, k = draw((4, 2, group, window, size), 109, dtype)
    expected = check(q, k, [0, 1, 15, 17, 64, 109, 108, window], reduce=reduce)
    assert np.ptp(expected[2, 1]) > 1e-2
    assert not expected[0].any()


@pytest.mark.parametrize("reduce", ["probs", "logits"])
@pytest.mark.parametrize("gpu", [SMALL, H200])
def test_parts_and_chunks_are_joined(gpu, reduce):
    q, k = draw((1, 2, 7, 32, 128), 640, "bfloat16")
    cut = tiles(q, k, gpu)
    assert (cut.parts, cut.chunks) == ((1, 8) if gpu is SMALL else (10, 1))
    check(q, k, [640, 300], gpu, reduce=reduce)


@pytest.mark.parametrize("reduce", ["probs", "logits"])
@pytest.mark.parametrize(("gpu", "group", "window"), [(A100, 3, 6), (SMALL, 16, 10)])
def test_deviation_over_the_window(gpu, group, window, reduce):
    q, k = draw((1, 2, group, window, 128), 152, "bfloat16")
    even, shifted = (check(q, k, [152, 77], gpu, reduce=reduce, shift=shift) for shift in (0.0, 200.0))
    assert np.max(shifted - even) > 1


@pytest.mark.parametrize("gpu", [A100, SMALL])
def test_deviation_of_nearly_equal_probabilities(gpu):
    q, k = draw((1, 1, 16, 16, 64), 109, "float32")
    q = q[:, :, :, :1] + 1e-4 * q  # squares of probabilities would cancel out to about nothing but rounding
    expected = check(q, k, [109], gpu, tolerance=5e-3, shift=1e4)
    assert np.max(expected) > 0.1


def test_no_array_holds_every_logit():
    q, k = draw((1, 2, 4, 16, 64), 512, "bfloat16")
    length = jnp.full((1, 2), 512, jnp.int32)
    program = jax.make_jaxpr(partial(pallas_kernels.window_scores, implementation=Implementation("triton")))(
        q, k, length
    )
    outputs = [np.prod(x.aval.shape) for equation in program.jaxpr.eqns for x in equation.outvars]
    assert max(outputs) < 16 * 512


def test_refuses_a_head_that_is_no_multiple_of_16():
    q, k = draw((1, 1, 1, 4, 40), 16, "float32")
    with pytest.raises(ValueError, match="multiples of 16, got 40"):
        pallas_kernels.window_scores(q, k, np.array([[16]], np.int32), implementation="triton")


@pytest.mark.parametrize("window", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cache", CACHES)
def test_tiles_fit_and_fill_the_card(cache, model, window):
    heads, sizes = MODELS[model], CACHES[cache]
    q = jax.ShapeDtypeStruct((sizes.batch, heads.kv_heads, heads.group, window, heads.head_dim), jnp.dtype("bfloat16"))
    k = jax.ShapeDtypeStruct((sizes.batch, heads.kv_heads, sizes.capacity, heads.head_dim), q.dtype)
    cut = tiles(q, k, A100)
    assert all(x & (x - 1) == 0 for x in (cut.heads, cut.tokens, cut.slots))
    assert cut.heads >= heads.group
    assert cut.tokens * cut.chunks >= window
    assert (cut.rows + cut.stages * cut.slots) * heads.head_dim * 2 <= A100.shared_memory
    programs, tiles_of_all = (sizes.batch * heads.kv_heads * x for x in (cut.parts, -(-sizes.capacity // cut.slots)))
    assert programs >= min(A100.cores, tiles_of_all) * 0.9
