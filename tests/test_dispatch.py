"""Which implementation runs: what is chosen on a device, what is refused, and that a missing one is missing alone."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jkv.policies import get_policy
from models import run, tiny
from pallas_kernels import dispatch
from pallas_kernels.dispatch import KERNELS, XLA, Implementation, choose, find


@dataclass
class Card:
    """A GPU as jax describes it."""

    compute_capability: str
    core_count: int
    platform: str = "gpu"


H100 = Card("9.0", 132)


def test_on_cpu_the_references_run():
    cpu = jax.devices("cpu")[0]
    assert choose(None, cpu, "float32") == choose("xla", cpu, "float32")
    assert find("compact", choose(None, cpu, "float32")) is find("compact", XLA)


@pytest.mark.parametrize("name", ["triton", "mosaic", "cudnn"])
def test_on_cpu_a_gpu_kernel_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*needs an NVIDIA GPU.*use xla"):
        choose(name, jax.devices("cpu")[0], "float32")


@pytest.mark.parametrize("name", [None, "triton", "mosaic", "cudnn", "eager", "xla"])
def test_on_a_gpu_every_operation_has_an_implementation(name):
    try:
        chosen = choose(name, H100, "bfloat16")
    except ValueError as error:
        assert name == "mosaic"
        pytest.skip(str(error))
    assert chosen.gpu == dispatch.H100
    assert chosen.name == (name or "triton")
    for op, kernels in KERNELS.items():
        names = [x for x in (chosen.name, *chosen.elsewhere) if x in ("xla", *kernels)]
        assert names, op


def test_an_old_or_unknown_card_gets_the_tiles_of_the_smallest():
    assert choose(None, Card("8.0", 108), "bfloat16").gpu == dispatch.A100
    assert choose(None, Card("8.9", 142), "bfloat16").gpu.shared_memory == dispatch.SMALLEST_SHARED_MEMORY


@pytest.mark.parametrize("name", ["mosaic", "cudnn"])
def test_half_precision_kernels_refuse_float32(name):
    with pytest.raises(ValueError, match="bfloat16"):
        choose(name, H100, "float32")
    assert "cudnn" not in choose(None, H100, "float32").elsewhere


def test_names_that_do_not_exist():
    with pytest.raises(ValueError, match="'cuda' does not exist; choose from xla, triton"):
        Implementation("cuda")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="compact has no implementation 'mosaic'; it has xla, triton"):
        find("compact", Implementation("mosaic"))
    assert find("compact", Implementation("mosaic", elsewhere=("xla",))) is find("compact", XLA)


def test_a_backend_that_jax_lost_drops_its_own_entries_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    for op in KERNELS:
        monkeypatch.delitem(sys.modules, f"pallas_kernels.{op}.triton", raising=False)
    with pytest.raises(ValueError, match="select_top: implementation 'triton' is not in this release of jax"):
        pallas_kernels.select_top(jnp.zeros((2, 8)), jnp.full(2, 3), most=4, implementation="triton")
    with pytest.raises(ValueError, match="triton' is not in this release"):
        choose("triton", H100, "bfloat16")
    assert choose(None, H100, "bfloat16").name == "xla"
    found = pallas_kernels.select_top(jnp.arange(8.0), jnp.int32(3), most=4)
    np.testing.assert_array_equal(found, [5, 6, 7, 8])


def test_importing_the_operations_imports_no_kernel_language():
    code = "import sys, pallas_kernels; print([m for m in sys.modules if 'pallas' in m and m.startswith('jax')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_entry_is_a_module():
    for op, kernels in KERNELS.items():
        for name in ("reference", *kernels):
            spec = importlib.util.find_spec(f"pallas_kernels.{op}.{name}")
            assert spec is not None, (op, name)


def test_eager_attention_gives_the_logits_of_full():
    model, prompts = tiny(), [[3, 9, 4, 20, 7], [5, 6]]
    eager = get_policy("full:attention=eager")
    assert eager.implementation == "eager"
    chosen = choose(eager.implementation, jax.devices("cpu")[0], "float32")
    expected, found = run(model, get_policy("full"), prompts, 6), run(model, eager, prompts, 6, implementation=chosen)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)
    assert np.std(found.logits) > 0.5


@pytest.mark.parametrize(("attention", "name"), [("flash", "cudnn"), ("splitk", "triton"), ("auto", None)])
def test_full_asks_for_its_attention(attention, name):
    assert get_policy(f"full:attention={attention}").implementation == name
