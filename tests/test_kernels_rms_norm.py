"""The kernel of rms_norm, interpreted on CPU, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Implementation

TRITON = Implementation("triton", interpret=True)


@pytest.mark.parametrize("shape", [(1, 96), (1, 1, 128), (3, 80)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("implementation", ["xla", TRITON], ids=["xla", "triton"])
def test_rms_norm(shape, dtype, tolerance, implementation):
    rng = np.random.default_rng(shape[-1])
    x, scale = (jnp.asarray(3 * rng.standard_normal(s, np.float32), dtype) for s in (shape, shape[-1:]))
    found = pallas_kernels.rms_norm(x, scale, eps=1e-2, implementation=implementation)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-2) * np.asarray(scale, np.float64)
    assert found.dtype == x.dtype
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.max(np.abs(expected)))
