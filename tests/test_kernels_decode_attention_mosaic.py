"""decode_attention on Mosaic GPU, interpreted on CPU under its race detector, against the jnp reference."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Implementation, dispatch, shapes
from test_kernels_decode_attention import ACTIVE, attend, check_attended, inputs

mosaic = pytest.importorskip(
    "pallas_kernels.decode_attention.mosaic", reason="this jax has no Mosaic GPU with mma", exc_type=ImportError
)
RACE = "RACE DETECTED"


def kernel(capability: int, cores: int) -> Implementation:
    shared_memory = dispatch.SHARED_MEMORY[capability]
    gpu = dispatch.Gpu(capability=capability, cores=cores, shared_memory=shared_memory)
    return Implementation("mosaic", gpu=gpu, interpret=True)


@pytest.fixture
def no_race(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fails the test if the detector speaks up; from jax 0.12 on it raises by itself."""
    yield
    said = capfd.readouterr()
    assert RACE not in said.out + said.err


# Capacities that are no multiple of a tile, and parts that are longer than the pipeline, of one tile, and empty.
@pytest.mark.parametrize(
    ("group", "size", "capacity", "capability", "cores"),
    [(1, 64, 112, 80, 1), (4, 96, 640, 90, 1), (7, 128, 1152, 90, 24), (16, 256, 104, 80, 24)],
)
def test_writes_the_new_token_and_attends(no_race, group, size, capacity, capability, cores):
    arguments = inputs(group, size, capacity, "bfloat16")
    found = attend(kernel(capability, cores), arguments, True)
    check_attended(found, arguments, True)
    assert not np.any(np.asarray(found.out[2]).astype(np.float32))  # the row without a slot


def test_without_a_new_token(no_race):
    arguments = inputs(3, 64, 200, "bfloat16")
    arguments |= {"new": None, "notes": None, "length": arguments["length"] - ACTIVE[:, None].astype(np.int32)}
    check_attended(attend(kernel(90, 24), arguments, False), arguments, False)


def test_detector_sees_a_tile_overwritten_too_early(monkeypatch, capfd):
    monkeypatch.setattr(mosaic.plgpu, "commit_smem", lambda: None)
    arguments = inputs(1, 128, 640, "bfloat16")
    said = ""
    try:
        jax.block_until_ready(attend(kernel(90, 1), arguments, False))
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    assert RACE in said + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("group", "size", "capacity", "dtype", "reason"),
    [
        (2, 128, 128, "float32", "bfloat16 and float16, got float32"),
        (2, 80, 128, "bfloat16", "multiples of 32 from 64 to 256, got 80"),
        (2, 320, 128, "bfloat16", "multiples of 32 from 64 to 256, got 320"),
        (17, 64, 128, "bfloat16", "up to 16 query heads .* got 17"),
        (2, 64, 24, "bfloat16", "32 or more, got 24"),
        (2, 64, 109, "bfloat16", "8 slots .* multiples, .* got 109"),
    ],
)
def test_refuses_what_it_cannot_take(group, size, capacity, dtype, reason):
    with pytest.raises(ValueError, match=f"mosaic .*{reason}; use triton or xla"):
        attend(kernel(90, 1), inputs(group, size, capacity, dtype), False)


@pytest.mark.parametrize("gpu", [dispatch.A100, dispatch.H200], ids=["a100", "h200"])
def test_a_core_holds_two_programs(gpu):
    for heads in shapes.MODELS.values():
        for cache in shapes.CACHES.values():
            shape = (cache.batch, heads.kv_heads, cache.capacity, heads.head_dim)
            cut = mosaic.tiles(jax.ShapeDtypeStruct(shape, jnp.bfloat16), gpu)
            assert cut.slots <= cache.capacity
            # Keys and values, weights and logits of sixteen rows, and what reductions take.
            taken = cut.stages * 4 * cut.slots * heads.head_dim + 16 * cut.slots * 6 + 4096
            assert 2 * (taken + 1024) <= gpu.shared_memory + 1024
