"""GGUF files: header, config, tensors."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from checkpoints import config as hf_config
from checkpoints import random_tensors, save_hf
from gguf_files import F32, model_metadata, permute, save_gguf, write_gguf
from jkv.config import ModelConfig
from jkv.models.rope import inv_freq
from weights import load_parameters, open_checkpoint, parameter_arrays
from weights.gguf import open_gguf
from weights.gguf_config import ARCHITECTURES, read_config
from weights.gguf_header import GgufHeader
from weights.hub import embedded_file

# Exact in both: what the file holds is what the model has.
PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}


def small(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    return hf_config(kind, **{"vocab_size": 310, **changes})


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        open_gguf(path, name="model")
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{path}: ")
    return message


def embedded_model() -> Path:
    try:
        return embedded_file()
    except ValueError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_tensors_come_back_exactly(tmp_path, architecture, tied, kind):
    config = small(architecture, tie_word_embeddings=tied)
    checkpoint = open_gguf(save_gguf(tmp_path / "m.gguf", config, kinds={"*": kind}), name="m")
    expected = random_tensors(config)
    assert set(checkpoint.tensors.names()) == set(expected)
    for name, tensor in expected.items():
        found, dtype = checkpoint.tensors.read(name), PLAIN[kind] if tensor.ndim == 2 else np.float32
        assert found.dtype == dtype and checkpoint.tensors.shape(name) == tensor.shape
        np.testing.assert_array_equal(found.astype(np.float32), tensor.astype(dtype).astype(np.float32))
    assert checkpoint.dtype == np.dtype(PLAIN[kind]).name
    assert checkpoint.config.tie_embeddings is tied


def test_llama_rows_do_move_in_the_file(tmp_path):
    """The permutation that the round trip undoes is not the identity, and qwen's rows stand as they are."""
    stored = {}
    for architecture in ("llama", "qwen2"):
        path = save_gguf(tmp_path / f"{architecture}.gguf", small(architecture))
        reader = gguf.GGUFReader(path)
        stored[architecture] = next(t.data for t in reader.tensors if t.name == "blk.1.attn_q.weight")
        own = random_tensors(small(architecture))["model.layers.1.self_attn.q_proj.weight"]
        assert np.array_equal(stored[architecture], own) == (architecture == "qwen2")
    rows = np.arange(8)
    np.testing.assert_array_equal(permute(rows, 2), [0, 2, 1, 3, 4, 6, 5, 7])


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_quantised_tensors_are_near_what_was_stored(tmp_path, kind):
    config = small(attention_bias=True)
    checkpoint = open_gguf(save_gguf(tmp_path / "m.gguf", config, kinds={"*": kind}), name="m")
    levels = {Kind.Q4_0: 8, Kind.Q4_1: 15, Kind.Q5_0: 16, Kind.Q5_1: 31, Kind.Q8_0: 127}[kind]
    assert checkpoint.dtype == "float32"
    for name, tensor in random_tensors(config).items():
        found = checkpoint.tensors.read(name)
        assert found.dtype == np.float32
        if tensor.ndim == 1:
            np.testing.assert_array_equal(found, tensor)
            continue
        blocks = tensor.reshape(-1, 32)
        width = np.ptp(blocks, axis=1) if "1" in kind.name else np.abs(blocks).max(axis=1)
        error = np.abs(found.reshape(-1, 32) - blocks).max(axis=1)
        assert (error <= 1.02 * width / levels).all() and error.max() > 0


def test_every_other_type_is_dequantised_whole(tmp_path):
    """Rows of 256, more than one piece of work; the gguf package cannot make these types, so their bytes are random."""
    kinds = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.TQ2_0, Kind.IQ2_XXS]
    config = small("qwen2", hidden_size=256, intermediate_size=768, num_hidden_layers=2)
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {"token_embd.weight": np.zeros((310, 256), np.float32)}
    parts = [f"blk.{i}.ffn_{part}.weight" for i in range(2) for part in ("gate", "up")]
    parts += [f"blk.{i}.attn_{part}.weight" for i in range(2) for part in ("q", "k", "output")]
    for part, kind in zip(parts, kinds, strict=False):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # No byte above 0x3b: whatever two of them make a float16 scale, it is finite.
        stored = rng.integers(0, 0x3C, (768, 256 // block * size), np.uint8)
        tensors[part] = (stored, kind)
    path = write_gguf(tmp_path / "m.gguf", model_metadata(config), tensors, architecture="qwen2")
    checkpoint = open_gguf(path, name="m")
    for name, (stored, kind) in ((n, t) for n, t in tensors.items() if isinstance(t, tuple)):
        hf_name = name.replace("blk", "model.layers").replace("ffn_gate", "mlp.gate_proj")
        hf_name = hf_name.replace("ffn_up", "mlp.up_proj").replace("attn_output", "self_attn.o_proj")
        hf_name = hf_name.replace("attn_q", "self_attn.q_proj").replace("attn_k", "self_attn.k_proj")
        found = checkpoint.tensors.read(hf_name)
        assert found.shape == (768, 256) and np.isfinite(found).all() and np.unique(found).size > 2, kind.name
        np.testing.assert_array_equal(found, gguf.dequantize(stored, kind))


def test_dtype_is_that_of_most_numbers(tmp_path):
    kinds = {"embed_tokens": Kind.F16, "*": Kind.BF16}
    assert open_gguf(save_gguf(tmp_path / "a.gguf", small(), kinds=kinds), name="m").dtype == "bfloat16"
    kinds = {"embed_tokens": Kind.F16, "lm_head": Kind.F16, "*": F32}
    assert open_gguf(save_gguf(tmp_path / "b.gguf", small(vocab_size=4000), kinds=kinds), name="m").dtype == "float16"


@pytest.mark.parametrize(
    "config",
    [
        small("llama"),
        small("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        small("llama", num_key_value_heads=4, rms_norm_eps=1e-5, max_position_embeddings=4096),
        small("qwen2", num_attention_heads=14, num_key_value_heads=2, hidden_size=448, head_dim=None),
        small("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ],
    ids=["llama", "biases", "multi_head", "qwen2", "qwen3"],
)
def test_config_is_that_of_the_checkpoint(tmp_path, config):
    found = read_config(GgufHeader(save_gguf(tmp_path / "m.gguf", config)))
    expected = ModelConfig.from_hf({**config, "dtype": None})
    assert found.norm_eps == pytest.approx(expected.norm_eps, rel=1e-6)
    fields = ("norm_eps", "bos_id", "eos_ids")
    assert {k: v for k, v in vars(found).items() if k not in fields} == {
        k: v for k, v in vars(expected).items() if k not in fields
    }
    assert (found.bos_id, found.eos_ids) == (0, (1,))


def test_every_end_token_is_an_eos(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 1}
    assert read_config(GgufHeader(save_gguf(tmp_path / "m.gguf", small(), metadata=ends))).eos_ids == (1, 5)
    without = {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.bos_token_id": None}
    found = read_config(GgufHeader(save_gguf(tmp_path / "m.gguf", small(), metadata=without)))
    assert found.eos_ids == () and found.bos_id is None


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"scaling.type": "none"}, {}),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128},
            {"type": "yarn", "factor": 4.0, "original_max_position": 128},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0, "freq_base": 5e5},
            {"type": "yarn", "factor": 4.0, "beta_fast": 16.0, "theta": 5e5, "original_max_position": 512},
        ),
    ],
)
def test_rope_scaling(tmp_path, metadata, expected):
    path = save_gguf(tmp_path / "m.gguf", small("qwen2"), metadata={f"qwen2.rope.{k}": v for k, v in metadata.items()})
    rope = read_config(GgufHeader(path)).rope
    for key, value in {"type": "default", "theta": 10000.0, "original_max_position": 0, **expected}.items():
        assert getattr(rope, key) == value


def rope_factors(config: ModelConfig) -> np.ndarray:
    """Each frequency's divisor, as llama.cpp's converter writes it for Llama 3."""
    rope = config.rope
    freq = 1.0 / rope.theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    length = 2 * np.pi / freq
    smooth = (rope.original_max_position / length - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = 1 / ((1 - smooth) / rope.factor + smooth)
    low, high = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    return np.where(length < high, 1.0, np.where(length > low, rope.factor, between)).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, factor):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    config = small(head_dim=64, rope_parameters=scaling)
    expected = ModelConfig.from_hf(config)
    factors = rope_factors(expected)
    assert ((factors > 1) & (factors < factor)).any(), "no frequency lies between the bands"
    found = read_config(GgufHeader(save_gguf(tmp_path / "a", config, extra={"rope_freqs.weight": factors})))
    assert found.rope == expected.rope
    np.testing.assert_array_equal(*(inv_freq(model.rope, model.head_dim)[0] for model in (found, expected)))
    for wrong in (factors[:-1], factors * np.linspace(1, 1.1, 32, dtype=np.float32)):
        path = save_gguf(tmp_path / "b", config, extra={"rope_freqs.weight": wrong})
        assert "rope_freqs.weight" in refusal(path) and "safetensors" in refusal(path)
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = save_gguf(tmp_path / "c", config, metadata=scaled, extra={"rope_freqs.weight": factors})
    assert "'linear'" in refusal(path)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "num_experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window 4096"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "'factor'"),
        ({"llama.rope.dimension_count": 8}, "partial_rotary_factor 0.5"),
        ({"llama.attention.value_length": 8}, "value_length 8"),
        ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count differs from layer to layer"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count": 0}, "num_attention_heads is 0"),
        ({"llama.context_length": "long"}, "llama.context_length is 'long', not a number"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads cannot be shared among 3"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.pre": "superbpe"}, "'superbpe' is not supported; supported are default, gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["t h e"]}, "'t h e' is not two tokens"),
        ({"tokenizer.ggml.merges": ["th zzz"]}, "do not fit together"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.token_type": None}, "0 token types"),
        ({"tokenizer.ggml.tokens": ["a"] * 310}, "1 different"),
        ({"tokenizer.ggml.eos_token_id": 400}, "eos_token_id 400 is not in the vocabulary of 310"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, metadata, named):
    assert named in refusal(save_gguf(tmp_path / "m.gguf", small(), metadata=metadata))


def test_yarn_variants_are_refused(tmp_path):
    metadata = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    metadata["qwen2.rope.scaling.yarn_attn_factor"] = 1.5
    assert "yarn_attn_factor 1.5" in refusal(save_gguf(tmp_path / "m.gguf", small("qwen2"), metadata=metadata))


def test_architectures_and_tensors_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "a", {}, {}, architecture="gemma3")
    assert "'gemma3' is not supported; supported are llama, qwen2, qwen3" in refusal(path)
    path = write_gguf(tmp_path / "b", model_metadata(small()), {})
    assert "'token_embd.weight' is missing" in refusal(path)
    for name in ("blk.0.ffn_gate_exps.weight", "rope_factors_long.weight", "blk.x.attn_q.weight", "blk.0.attn_q"):
        path = save_gguf(tmp_path / "c", small(), extra={name: np.zeros(32, np.float32)})
        assert f"{name!r} has no place in a llama model" in refusal(path)
    path = save_gguf(tmp_path / "d", small(), extra={"blk.1.attn_q.bias": np.zeros(64, np.int32)})
    assert "'blk.1.attn_q.bias' has quantization type I32" in refusal(path)


def test_unknown_quantization_type_is_refused(tmp_path):
    path = save_gguf(tmp_path / "m.gguf", small())
    data = bytearray(path.read_bytes())
    entry = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16
    assert data[entry : entry + 4] == b"\0\0\0\0"  # F32
    data[entry] = 200
    path.write_bytes(data)
    assert "'blk.1.ffn_up.weight' has quantization type 200" in refusal(path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF", "cut short"),
        (b"GGUF\x01\0\0\0" + bytes(64), "GGUF version 1"),
        (b"GGUF\x00\0\0\x03" + bytes(64), "big-endian"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "cut short"),
        (b"GGUF\x03\0\0\0" + bytes(16), "general.architecture None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_files_are_refused(tmp_path, content, named):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert named in refusal(path)


def test_big_endian_and_missing_files_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_metadata(small()), endianness=gguf.GGUFEndian.BIG)
    assert "big-endian" in refusal(path)
    assert "cannot be read" in refusal(tmp_path / "none.gguf")
    assert "cannot be read" in refusal(tmp_path)


def test_every_truncation_is_refused(tmp_path):
    whole = save_gguf(tmp_path / "m.gguf", small()).read_bytes()
    header = whole.index(b"output_norm.weight")
    path = tmp_path / "cut.gguf"
    for size in [*range(8, header, 397), *range(header, len(whole) - 1, 30011), len(whole) - 300]:
        path.write_bytes(whole[:size])
        assert "cut short" in refusal(path) or "ends inside the tensor" in refusal(path)


def test_damaged_headers_never_end_in_another_error(tmp_path):
    whole = save_gguf(tmp_path / "m.gguf", small()).read_bytes()
    header = whole.index(b"output_norm.weight")
    path, rng, refused = tmp_path / "bad.gguf", np.random.default_rng(0), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(4, header, 4):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            open_gguf(path, name="m")
        except ValueError as failure:
            assert "\n" not in str(failure)
            refused += 1
    assert refused > 5


def test_the_embedded_model_opens():
    checkpoint = open_gguf(embedded_model(), name="m")
    config = checkpoint.config
    assert (config.model_type, config.vocab_size, config.num_layers, config.head_dim) == ("llama", 49152, 30, 64)
    assert (config.num_heads, config.num_kv_heads, config.rope.theta, config.tie_embeddings) == (9, 3, 1e5, True)
    assert (config.bos_id, config.eos_ids, checkpoint.dtype) == (1, (2,), "float32")
    assert len(checkpoint.tensors.names()) == 272
    assert checkpoint.tensors.read("model.layers.29.self_attn.k_proj.weight").shape == (192, 576)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_those_of_the_safetensors_checkpoint(tmp_path, architecture):
    config = small(architecture, tie_word_embeddings=architecture == "qwen2")
    expected = parameter_arrays(load_parameters(open_checkpoint(save_hf(tmp_path / "hf", config))))
    found = parameter_arrays(load_parameters(open_checkpoint(save_gguf(tmp_path / "m.gguf", config))))
    assert set(found) == set(expected)
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_that_transformers_reads(tmp_path, architecture):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    pytest.importorskip("accelerate", reason="needs the parity extra")
    from transformers import AutoModelForCausalLM

    # transformers 5.24 does not read qwen3's key_length and takes its default of 128.
    config = small(architecture, head_dim=128 if architecture == "qwen3" else 16)
    kinds = {"q_proj": Kind.Q8_0, "k_proj": Kind.Q4_0, "down_proj": Kind.Q5_1, "o_proj": Kind.F16}
    path = save_gguf(tmp_path / "m.gguf", config, kinds=kinds)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    compare_weights(open_gguf(path, name="m"), model)


@pytest.mark.slow
@pytest.mark.parity
def test_the_embedded_models_weights_are_those_that_transformers_reads():
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    pytest.importorskip("accelerate", reason="needs the parity extra")
    from transformers import AutoModelForCausalLM

    path = embedded_model()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    compare_weights(open_gguf(path, name="m"), model)


def compare_weights(checkpoint, model) -> None:
    """Every tensor of the file equals the model's, and the model has no other."""
    parameters = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    assert set(parameters) == set(checkpoint.tensors.names())
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(checkpoint.tensors.read(name), parameter, err_msg=name)


def test_a_file_without_tokenizer(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", model_metadata(small()), {"token_embd.weight": np.zeros((9, 64), np.float32)}
    )
    assert open_gguf(path, name="m").tokenizer is None


def test_opening_reads_no_tensor_and_needs_no_torch(tmp_path):
    path = save_gguf(tmp_path / "m.gguf", small())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from weights.gguf import open_gguf\n"
        f"folder = open_gguf(Path({str(path)!r}), name='m').tokenizer\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "print(PreTrainedTokenizerFast.from_pretrained(folder)('the <think>').input_ids)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0, ")
