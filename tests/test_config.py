"""Model configurations as Hugging Face writes them: both spellings, what is refused, and rotary tables."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import config as hf_config
from jkv.config import CacheSpec, ModelConfig, RopeConfig
from jkv.models.rope import cos_sin, inv_freq, rotate


def older(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as transformers 4 writes it."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": old.pop("dtype")}
    return old | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, YARN])
def test_both_spellings_give_one_configuration(kind, rope):
    new = hf_config(kind, rope_parameters=rope, dtype="bfloat16")
    config = ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(older(new)) == config
    assert config.rope.theta == rope["rope_theta"]
    assert config.rope.type == rope["rope_type"]
    assert config.dtype == "bfloat16"


def test_fields_of_each_family():
    llama, qwen2, qwen3 = (ModelConfig.from_hf(hf_config(kind)) for kind in ("llama", "qwen2", "qwen3"))
    assert [c.qkv_bias for c in (llama, qwen2, qwen3)] == [False, True, False]
    assert [c.out_bias for c in (llama, qwen2, qwen3)] == [False, False, False]
    assert [c.qk_norm for c in (llama, qwen2, qwen3)] == [False, False, True]
    assert (qwen3.head_dim, qwen3.hidden_size // qwen3.num_heads) == (32, 16)
    biased = ModelConfig.from_hf(hf_config("llama", attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.out_bias, biased.mlp_bias) == (True, True, True)
    assert llama.group == 2
    assert llama.kv_bytes_per_token(4) == 2 * 2 * 2 * 16 * 4


def test_defaults_of_absent_keys():
    absent = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_parameters", "dtype", "eos_token_id")
    config = ModelConfig.from_hf({key: value for key, value in hf_config().items() if key not in absent})
    assert (config.head_dim, config.num_kv_heads, config.group) == (16, 4, 1)
    assert (config.rope.type, config.rope.theta) == ("default", 10000.0)
    assert (config.tie_embeddings, config.dtype, config.eos_ids) == (False, None, ())


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_rope_without_scaling_may_be_said_in_many_ways(scaling):
    old = older(hf_config()) | {"rope_scaling": scaling}
    assert ModelConfig.from_hf(old).rope == RopeConfig()


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ()), (0, (0,))])
def test_eos_ids(eos, ids):
    assert ModelConfig.from_hf(hf_config(eos_token_id=eos)).eos_ids == ids


def test_a_sliding_window_that_is_off_is_fine():
    off = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    assert ModelConfig.from_hf(hf_config("qwen2", **off))
    above = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
    assert ModelConfig.from_hf(hf_config("qwen2", layer_types=["full_attention"] * 2, **above))


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_experts": 8}, "num_experts"),
        ({"num_local_experts": 8}, "experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (quant_method 'awq')"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 query heads cannot be shared among 4 kv heads"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (rope(rope_type="dynamic", factor=2.0), "rope_type 'dynamic'"),
        (rope(rope_type="longrope", factor=2.0), "rope_type 'longrope'"),
        (rope(rope_type="linear"), "'factor'"),
        (rope(rope_type="yarn", partial_rotary_factor=0.5, factor=2.0), "partial_rotary_factor 0.5"),
        (
            rope(rope_type="llama3", factor=2.0) | {"max_position_embeddings": None},
            "'original_max_position_embeddings'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ModelConfig.from_hf(hf_config() | changes)
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_size_is_named(key):
    with pytest.raises(ValueError, match=f"'{key}' is missing"):
        ModelConfig.from_hf({k: v for k, v in hf_config().items() if k != key})


# Parameters, inverse frequencies of a head of 16 and the scale of cos and sin, as transformers 5.24 gives them.
TABLES = {
    "default": (
        {"rope_type": "default", "rope_theta": 1e6},
        [1.0, 0.1778279, 0.03162278, 0.005623413, 0.001, 0.0001778279, 3.162278e-05, 5.623413e-06],
        1.0,
    ),
    "linear": (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0,
    ),
    "llama3": (
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
        [1.0, 0.07940301, 0.004700754, 0.0009115831, 0.0001767767, 3.428102e-05, 6.64787e-06, 1.289173e-06],
        1.0,
    ),
    "yarn": (
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        [1.0, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    "yarn, every key": (
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 128}
        | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.5},
        [1.0, 0.06668107, 0.003952847, 0.0007029267, 0.000125, 2.222849e-05, 3.952847e-06, 7.029267e-07],
        1.0565079928608092,
    ),
    "yarn, given scale": (
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 4096}
        | {"attention_factor": 1.25},
        [1.0, 0.1778279, 0.02239947, 0.002343089, 0.000125, 2.222849e-05, 3.952847e-06, 7.029267e-07],
        1.25,
    ),
}


def of_size_16(parameters: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(head_dim=16, rope_parameters=parameters))


@pytest.mark.parametrize("name", TABLES)
def test_rotary_frequencies(name):
    parameters, expected, scale = TABLES[name]
    config = of_size_16(parameters)
    found, found_scale = inv_freq(config.rope, config.head_dim)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert found_scale == pytest.approx(scale, rel=1e-9)


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name in TABLES if name != "default"])
@pytest.mark.parametrize(("size", "longest"), [(16, 512), (64, 131072), (128, 4096)])
def test_rotary_frequencies_equal_those_of_transformers(name, size, longest):
    pytest.importorskip("torch", reason="transformers computes rotary tables with torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = TABLES[name][0]
    theirs = LlamaConfig(
        hidden_size=4 * size, num_attention_heads=4, max_position_embeddings=longest, rope_parameters=parameters
    )
    expected, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, "cpu")
    config = ModelConfig.from_hf(theirs.to_dict())
    found, found_scale = inv_freq(config.rope, config.head_dim)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)
    assert found_scale == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize("name", TABLES)
def test_products_of_rotated_vectors_depend_on_the_distance_alone(name):
    config = of_size_16(TABLES[name][0])
    q, k = np.random.default_rng(0).standard_normal((2, 1, 16)).astype(np.float32)
    scale = TABLES[name][2]

    def product(at: int, distance: int) -> float:
        query = rotate(jnp.asarray(q), *cos_sin(config.rope, config.head_dim, jnp.array([at])))
        key = rotate(jnp.asarray(k), *cos_sin(config.rope, config.head_dim, jnp.array([at - distance])))
        return float(jnp.sum(query * key))

    assert product(9, 0) == pytest.approx(float(np.sum(q * k)) * scale**2, abs=1e-5)
    for distance in (1, 5):
        assert product(100, distance) == pytest.approx(product(7, distance), abs=1e-4)
    assert abs(product(9, 5) - product(9, 1)) > 1e-2


def test_configurations_are_values():
    config = ModelConfig.from_hf(hf_config())
    assert hash(config) == hash(ModelConfig.from_hf(hf_config()))
    spec = CacheSpec(num_kv_heads=2, group=2, head_dim=16, max_len=64, max_new=8, max_prompt=56)
    assert {spec: 1}[CacheSpec(num_kv_heads=2, group=2, head_dim=16, max_len=64, max_new=8, max_prompt=56)] == 1
    with pytest.raises(AttributeError):
        config.head_dim = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": None}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ],
)
def test_values_that_are_not_numbers_are_refused_by_key(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(hf_config() | changes)
