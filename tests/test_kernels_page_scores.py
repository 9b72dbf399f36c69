"""`page_scores` by its kernel and its reference: bounds that no key of a page exceeds, and plain products."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation

KERNEL = Implementation("triton", interpret=True)


@pytest.mark.parametrize("implementation", ["xla", KERNEL], ids=["xla", "triton"])
@pytest.mark.parametrize(
    ("group", "size", "pages"), [(1, 64, 1), (3, 80, 17), (4, 96, 40), (7, 128, 33), (16, 64, 130)]
)
def test_bounds_and_products(implementation, group, size, pages):
    rng = np.random.default_rng(pages)
    q = rng.standard_normal((2, 2, group, size)).astype(np.float32)
    keys = rng.standard_normal((2, 2, pages, 8, size)).astype(np.float32)
    low, high = keys.min(axis=3), keys.max(axis=3)
    expected = np.maximum(q[:, :, :, None] * high[:, :, None], q[:, :, :, None] * low[:, :, None]).sum(-1)
    bounds = pallas_kernels.page_scores(*(jnp.asarray(x) for x in (q, high, low)), implementation=implementation)
    np.testing.assert_allclose(bounds, expected, rtol=2e-5, atol=2e-5)
    products = np.einsum("bhgd,bhpsd->bhgps", q, keys)
    assert np.all(products.max(axis=-1) <= np.asarray(bounds) + 1e-4)
    plain = pallas_kernels.page_scores(jnp.asarray(q), jnp.asarray(high), implementation=implementation)
    np.testing.assert_allclose(plain, np.einsum("bhgd,bhpd->bhgp", q, high), rtol=2e-5, atol=2e-5)


def test_half_precision_is_summed_in_float32():
    rng = np.random.default_rng(0)
    q, one, other = (jnp.asarray(rng.standard_normal((1, 2, n, 64)), jnp.bfloat16) for n in (4, 20, 20))
    high, low = jnp.maximum(one, other), jnp.minimum(one, other)
    found = pallas_kernels.page_scores(q, high, low, implementation=KERNEL)
    wide, most, least = (np.asarray(x, np.float32) for x in (q[:, :, :, None], high[:, :, None], low[:, :, None]))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.maximum(wide * most, wide * least).sum(-1), rtol=1e-2, atol=1e-2)
