"""The GPU kernels of `key_redundancy`, interpreted, against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation
from pallas_kernels.dispatch import A100, H200, Gpu
from pallas_kernels.key_redundancy.triton import GROUP, tiles
from pallas_kernels.shapes import CACHES, MODELS

ONE_CORE = Gpu(capability=80, cores=1, shared_memory=166912)  # one part a head
TOLERANCE = 2e-5


def clustered_keys(*shape: int, clusters: int = 9, lonely: float = 0.2) -> np.ndarray:
    """Keys around a few centres: most have similar ones, a part of them has none; their lengths differ."""
    rng = np.random.default_rng(shape)
    centres = rng.standard_normal((clusters, shape[-1]))
    noise = rng.standard_normal(shape)
    alone = rng.random(shape[:-1]) < lonely
    keys = np.where(alone[..., None], 3 * noise, centres[rng.integers(0, clusters, shape[:-1])] + 0.5 * noise)
    return keys * np.exp(rng.standard_normal(shape[:-1]))[..., None]


def check(k: jax.Array, length, gpu: Gpu = A100, **options) -> np.ndarray:
    """Compares with the reference, with NaN in the keys beyond the lengths."""
    length = np.asarray(length, np.int32).reshape(k.shape[:2])
    filled = jnp.arange(k.shape[2])[None, None, :, None] < length[..., None, None]
    implementation = Implementation("triton", gpu=gpu, interpret=True)
    redundancy = partial(pallas_kernels.key_redundancy, **options)
    found = jax.jit(partial(redundancy, implementation=implementation))(jnp.where(filled, k, jnp.nan), length)
    expected = np.asarray(jax.jit(redundancy)(k, length))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=0)
    return expected


def spread(redundancy: np.ndarray) -> float:
    """How much the slots of a full head differ, of what one has on average."""
    return np.ptp(redundancy) * redundancy.size


# One cosine more or less changes a slot by about 1 / length, which is far beyond the tolerance.
@pytest.mark.parametrize("retain", ["recent", "last", "first"])
@pytest.mark.parametrize(
    ("capacity", "size", "dtype"),
    [(109, 64, "float32"), (109, 128, "bfloat16"), (152, 80, "float32"), (152, 96, "bfloat16")],
)
def test_counts_as_the_reference_does(capacity, size, dtype, retain):
    k = jnp.asarray(clustered_keys(4, 2, capacity, size), dtype)
    expected = check(k, [capacity, 0, 1, 15, 17, 64, 109, capacity - 1], threshold=0.6, retain=retain)
    assert spread(expected[0, 0]) > 0.05
    assert not expected[0, 1].any()


@pytest.mark.parametrize("gpu", [ONE_CORE, H200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_groups_of_tiles(dtype, gpu):
    k = jnp.asarray(clustered_keys(1, 2, 640, 64), dtype)
    cut = tiles(k, gpu)
    assert GROUP * cut.slots < 640
    assert cut.parts == (1 if gpu is ONE_CORE else 10 if dtype == "bfloat16" else 16)
    check(k, [640, 600], gpu)


def test_search_goes_on_for_a_key_whose_like_is_the_oldest():
    k = np.zeros((1, 2, 640, 64))
    k[:, :, np.arange(640), np.arange(640) % 62] = 1  # every key has one like it among the last 62
    k[:, 0, [0, 320]] = np.eye(64)[63]  # but this one, whose only one is the first
    k[:, 1, [0, 639]] = np.eye(64)[63]
    k = jnp.asarray(k, jnp.float32)
    assert tiles(k, A100).slots * GROUP < 320
    expected = check(k, [640, 640])
    assert expected[0, 0, 0] < expected[0, 0, 320 - 62]


@pytest.mark.parametrize("threshold", [-0.1, 0.0, 0.9])
def test_thresholds(threshold):
    k = jnp.asarray(clustered_keys(1, 1, 256, 64), jnp.float32)
    check(k, [256], threshold=threshold)


def test_what_is_empty_is_not_alike_even_to_opposite_keys():
    k, options = jnp.asarray(clustered_keys(1, 1, 200, 64), jnp.float32), {"threshold": -0.1}
    longer = jnp.pad(k, ((0, 0), (0, 0), (0, 56), (0, 0)))
    implementation = Implementation("triton", interpret=True)
    length = np.array([[200]], np.int32)
    found = pallas_kernels.key_redundancy(longer, length, implementation=implementation, **options)
    expected = pallas_kernels.key_redundancy(k, length, **options)
    np.testing.assert_allclose(found[:, :, :200], expected, rtol=TOLERANCE)


def test_keys_that_are_nothing_or_the_same():
    k = clustered_keys(1, 2, 152, 64)
    k[0, 0, 20:90] = 0
    k[0, 1, :] = k[0, 1, 0]
    check(jnp.asarray(k, jnp.float32), [152, 130])


def test_keys_of_bfloat16_are_compared_without_rounding_them_again():
    k = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 256, 128)), jnp.bfloat16)
    unit = np.asarray(k[0, 0]).astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    rounded = np.asarray(jnp.asarray(unit, jnp.bfloat16)).astype(np.float64)
    threshold = 0.21
    spared, wrongly = (
        np.max(np.where((x @ x.T > threshold) & ~np.eye(256, dtype=bool), np.arange(256), -1), axis=1)
        for x in (unit, rounded)
    )
    assert np.any(spared != wrongly)
    assert np.min(np.abs(unit @ unit.T - threshold)) > 1e-5
    check(k, [256], threshold=threshold)


def test_no_array_holds_every_pair():
    k, length = jnp.zeros((1, 1, 1024, 16), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
    program = jax.make_jaxpr(partial(pallas_kernels.key_redundancy, implementation=Implementation("triton")))(k, length)
    outputs = [np.prod(x.aval.shape) for equation in program.jaxpr.eqns for x in equation.outvars]
    assert max(outputs) <= 1024


def test_refuses_a_head_that_is_no_multiple_of_16():
    with pytest.raises(ValueError, match="multiples of 16, got 40"):
        pallas_kernels.key_redundancy(jnp.zeros((1, 1, 8, 40)), np.array([[8]], np.int32), implementation="triton")


@pytest.mark.parametrize("gpu", [A100, H200, Gpu(capability=89, cores=128, shared_memory=101376)])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_tiles_fit(size, gpu):
    for heads, cache in ((heads, cache) for heads in MODELS.values() for cache in CACHES.values()):
        k = jax.ShapeDtypeStruct((cache.batch, heads.kv_heads, cache.capacity, size), jnp.dtype("bfloat16"))
        cut = tiles(k, gpu)
        assert cut.rows % cut.slots == 0
        assert all(x & (x - 1) == 0 for x in (cut.rows, cut.slots))
        assert (cut.rows + cut.stages * cut.slots) * size * 2 <= gpu.shared_memory
