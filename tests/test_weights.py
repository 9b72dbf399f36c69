"""Hugging Face folders of safetensors: every tensor where it belongs, every broken checkpoint refused by name."""

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weights
from checkpoints import config, random_tensors, save_hf, save_tensors, tensor_shapes
from jkv.config import ModelConfig
from weights.safetensors import read_header

KINDS = ("llama", "qwen2", "qwen3")


def load(folder: Path, dtype: str = "auto") -> dict[str, jax.Array]:
    return weights.parameter_arrays(weights.load_parameters(weights.open_checkpoint(folder), dtype))


def expected_parameters(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the decoder should hold, put together here by hand."""
    found = dict(tensors)
    wanted = {"embedding": found.pop("model.embed_tokens.weight"), "norm.scale": found.pop("model.norm.weight")}
    if "lm_head.weight" in found:
        wanted["head.kernel"] = found.pop("lm_head.weight")
    layers = {name.split(".")[2] for name in found}
    for layer in layers:
        hf, ours = f"model.layers.{layer}.", f"layers.{layer}."
        wanted[ours + "attention_norm.scale"] = found.pop(hf + "input_layernorm.weight")
        wanted[ours + "mlp_norm.scale"] = found.pop(hf + "post_attention_layernorm.weight")
        for norm in ("q_norm", "k_norm"):
            if f"{hf}self_attn.{norm}.weight" in found:
                wanted[f"{ours}{norm}.scale"] = found.pop(f"{hf}self_attn.{norm}.weight")
        for stored, leaf in (("weight", "kernel"), ("bias", "bias")):
            for name, parts in {
                "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "out": ("self_attn.o_proj",),
                "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
                "down": ("mlp.down_proj",),
            }.items():
                if f"{hf}{parts[0]}.{stored}" in found:
                    wanted[f"{ours}{name}.{leaf}"] = np.concatenate([found.pop(f"{hf}{p}.{stored}") for p in parts])
    assert not found
    return wanted


def assert_same(found: dict[str, jax.Array], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert found[path].dtype == array.dtype, path
        np.testing.assert_array_equal(np.asarray(found[path]), array, err_msg=path)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen2", "num_attention_heads": 14, "hidden_size": 56, "head_dim": None},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "attention_bias": True},
        {"model_type": "llama", "num_key_value_heads": None},
    ],
    ids=str,
)
def test_every_tensor_is_in_its_parameter(tmp_path, settings):
    values = config(**settings)
    folder = save_hf(tmp_path, values)
    assert_same(load(folder), expected_parameters(random_tensors(values)))


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoints_of_these_tests_have_transformers_names(tmp_path, kind):
    torch = pytest.importorskip("torch", reason="compares names with transformers' modules")
    from transformers import AutoModelForCausalLM

    values = config(kind)
    model = AutoModelForCausalLM.from_pretrained(save_hf(tmp_path, values), dtype=torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == dict(tensor_shapes(values))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_load_like_one_file(tmp_path, kind):
    one = load(save_hf(tmp_path / "one", config(kind)))
    assert_same(load(save_hf(tmp_path / "three", config(kind), shards=3)), {k: np.asarray(v) for k, v in one.items()})


def test_a_padded_vocabulary_has_more_rows_than_tokens(tmp_path):
    folder = save_hf(tmp_path, config(vocab_size=320))
    assert load(folder)["embedding"].shape == (320, 64)


def test_a_tree_of_links_loads(tmp_path):
    real = save_hf(tmp_path / "blobs", config())
    (tmp_path / "snapshot").mkdir()
    for file in real.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert load(tmp_path / "snapshot").keys() == load(real).keys()


def test_a_lone_file_of_another_name_is_read(tmp_path):
    folder = save_hf(tmp_path, config())
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert load(folder)


# dtypes


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_auto_is_the_config_s_dtype_or_the_tensors_own(tmp_path, key):
    values = config()
    del values["dtype"]
    folder = save_hf(tmp_path, values | ({key: "bfloat16"} if key else {}), dtype="bfloat16")
    assert weights.open_checkpoint(folder).dtype == "bfloat16"
    assert {array.dtype for array in load(folder).values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_a_cast_rounds_each_number_once(tmp_path, stored, wanted):
    folder = save_hf(tmp_path, config("qwen2"), dtype=stored)
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    tensors = {k: v.astype(kinds[stored]).astype(kinds[wanted]) for k, v in random_tensors(config("qwen2")).items()}
    assert_same(load(folder, wanted), expected_parameters(tensors))


def test_numbers_too_large_for_float16_are_refused(tmp_path):
    folder = save_hf(tmp_path, config())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    save_tensors(folder, tensors)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight .*float16.* bfloat16"):
        load(folder, "float16")
    load(folder, "bfloat16")


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'int4'.*float32"):
        load(save_hf(tmp_path, config()), "int4")


# Tensors and config that do not fit together


def refusal(folder: str | Path) -> str:
    with pytest.raises(ValueError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder).rstrip("/") in message or folder == ""
    return message


def drop(tensors: dict[str, np.ndarray], *names: str) -> None:
    for name in names:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: drop(t, "model.norm.weight"), ["model.norm.weight is missing"]),
        (lambda t: drop(t, "lm_head.weight"), ["lm_head.weight is missing", "tie_word_embeddings"]),
        (lambda t: drop(t, "model.layers.0.self_attn.k_proj.weight"), ["0.self_attn.k_proj.weight is missing"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.ones((16, 64), np.float32)}),
            ["model.layers.0.self_attn.k_proj.weight", "(16, 64)", "(32, 64)"],
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": np.ones((320, 64), np.float32)}),
            ["model.embed_tokens.weight", "(320, 64)", "(308, 64)"],
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": np.ones(64, np.float32)}),
            ["model.layers.1.self_attn.q_proj.bias is not used"],
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": np.ones(64, np.float32)}),
            ["model.layers.2.input_layernorm.weight is not used", "2 layers"],
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, change, words):
    tensors = random_tensors(config())
    change(tensors)
    folder = save_hf(tmp_path, config())
    save_tensors(folder, tensors)
    message = refusal(folder)
    assert all(word in message for word in words), message


def test_all_that_does_not_fit_is_told_at_once(tmp_path):
    tensors = random_tensors(config())
    drop(tensors, "model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    tensors["surplus"] = np.ones(2, np.float32)
    folder = save_hf(tmp_path, config())
    save_tensors(folder, tensors)
    message = refusal(folder)
    assert all(word in message for word in ("model.norm.weight", "layers.1.mlp.up_proj.weight", "surplus"))
    save_tensors(folder, {"surplus": np.ones(2, np.float32)})
    assert "more" in refusal(folder) and len(refusal(folder)) < 500


def test_known_inert_tensors_are_accepted(tmp_path):
    values = config(tie_word_embeddings=True)
    folder = save_hf(tmp_path, values)
    tensors = random_tensors(values)
    before = load(folder)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    save_tensors(folder, tensors | extra)
    assert_same(load(folder), {k: np.asarray(v) for k, v in before.items()})


# Broken and foreign files


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def rewrite_header(file: Path, change) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def replace_by_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("../blobs/deadbeef")


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 1234567\n"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: f.write_bytes(LFS_POINTER), ["Git LFS pointer", "git lfs pull"]),
        (lambda f: f.write_bytes(b""), ["empty"]),
        (lambda f: cut(f, 5), ["not a safetensors file"]),
        (lambda f: cut(f, 300), ["cut off"]),
        (lambda f: cut(f, f.stat().st_size - 100), ["bytes where its header says"]),
        (lambda f: f.write_bytes(f.read_bytes() + b"0"), ["bytes where its header says"]),
        (lambda f: f.write_bytes(b"PK\x03\x04" + b"\0" * 5000), ["not a safetensors file"]),
        (lambda f: f.write_bytes(b"\xff" * 5000), ["not a safetensors file"]),
        (replace_by_link, ["broken link", "../blobs/deadbeef"]),
        (replace_by_folder, ["a folder where a file should be"]),
        (
            lambda f: rewrite_header(f, lambda h: h["lm_head.weight"].update(dtype="F8_E4M3")),
            ["lm_head.weight", "F8_E4M3", "F32, F16, BF16", "GGUF"],
        ),
        (
            lambda f: rewrite_header(f, lambda h: h["lm_head.weight"].update(shape=[308, 65])),
            ["lm_head.weight", "(308, 65)"],
        ),
        (lambda f: rewrite_header(f, lambda h: h.pop("model.layers.0.mlp.up_proj.weight")), ["holes"]),
        (lambda f: rewrite_header(f, lambda h: h["lm_head.weight"].pop("dtype")), ["not a safetensors file"]),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, spoil, words):
    file = save_hf(tmp_path, config()) / "model.safetensors"
    spoil(file)
    message = refusal(tmp_path)
    assert str(file) in message and all(word in message for word in words), message


def test_no_damage_to_a_header_escapes(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, ml_dtypes.bfloat16)}, file)
    whole, draw = file.read_bytes(), random.Random(0)
    refused = 0
    damaged = [whole[:size] for size in range(len(whole))]
    for _ in range(400):
        at, byte = draw.randrange(len(whole) - 32), draw.randrange(256)
        damaged.append(whole[:at] + bytes([byte]) + whole[at + 1 :])
    for content in damaged:
        file.write_bytes(content)
        try:
            read_header(file)
        except ValueError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > len(whole) + 200


def test_shards_that_are_not_there_are_listed(tmp_path):
    folder = save_hf(tmp_path, config(), shards=4)
    (folder / "model-00002-of-00004.safetensors").unlink()
    (folder / "model-00003-of-00004.safetensors").unlink()
    message = refusal(folder)
    assert "model-00002-of-00004.safetensors, model-00003-of-00004.safetensors" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"weight_map": {"a": "../model.safetensors"}}', ["../model.safetensors"]),
        ('{"weight_map": {}}', ["weight_map"]),
        ("[]", ["list"]),
        ("{", ["not valid JSON"]),
    ],
)
def test_a_broken_index_is_refused(tmp_path, content, words):
    folder = save_hf(tmp_path, config(), shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    message = refusal(folder)
    assert "model.safetensors.index.json" in message and all(word in message for word in words)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = save_hf(tmp_path, config(), shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    first = load_file(folder / "model-00001-of-00002.safetensors")
    name = sorted(first)[0]
    save_file(load_file(second) | {name: first[name]}, second)
    assert name in refusal(folder)


class Canary:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_pickle_is_never_opened(tmp_path):
    folder = save_hf(tmp_path / "model", config())
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Canary(tmp_path / "ran")}))
    message = refusal(folder)
    assert "pytorch_model.bin" in message and "only safetensors" in message
    assert not (tmp_path / "ran").exists()


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    folder = save_hf(tmp_path / "model", config(auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert load(folder) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["not valid JSON"]),
        ("[1]", ["list"]),
        (b"\xff\xfe\x00", ["not valid JSON"]),
        (json.dumps(config() | {"model_type": "gpt_neox"}), ["'gpt_neox'", "llama, qwen2, qwen3"]),
        (json.dumps(config(num_hidden_layers="two")), ["two"]),
        (json.dumps({"model_type": "llama"}), ["num_hidden_layers"]),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path, content, words):
    folder = save_hf(tmp_path, config())
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(folder)
    assert "config.json" in message and all(word in message for word in words), message


def test_things_that_are_no_model_are_refused_with_the_remedy(tmp_path):
    folder = save_hf(tmp_path / "model", config())
    assert "give its folder" in refusal(folder / "model.safetensors")
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)
    (folder / "q8.gguf").touch()
    assert str(folder / "q8.gguf") in refusal(folder)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    assert "adapter" in refusal(tmp_path / "adapter")
    (tmp_path / "link").symlink_to("nowhere")
    assert "nowhere" in refusal(tmp_path / "link")
    assert "no such file or folder" in refusal(tmp_path / "absent")
    assert "no such file or folder" in refusal("./absent")
    assert "no such file or folder" in refusal("")
    with pytest.raises(ValueError, match="revision"):
        weights.open_checkpoint(tmp_path, revision="main")


def test_home_is_expanded(tmp_path, monkeypatch):
    save_hf(tmp_path / "my model", config())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert weights.open_checkpoint("~/my model").path == tmp_path / "my model"


# What a checkpoint tells


def test_a_checkpoint_describes_itself(tmp_path):
    folder = save_hf(tmp_path, config(eos_token_id=[1, 7]), shards=2)
    checkpoint = weights.open_checkpoint(str(folder))
    assert (checkpoint.name, checkpoint.path, checkpoint.format) == (str(folder), folder, "safetensors")
    assert checkpoint.config == ModelConfig.from_hf(config(eos_token_id=[1, 7]))
    assert checkpoint.generation["eos_token_id"] == [1, 7]
    assert checkpoint.tokenizer == folder and checkpoint.revision is None
    assert checkpoint.size == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").unlink()
    bare = weights.open_checkpoint(folder)
    assert bare.tokenizer is None and bare.generation == {}


def test_the_content_hash_is_that_of_the_weights(tmp_path):
    one, same, other = (save_hf(tmp_path / name, config(), seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    hashes = [weights.content_hash(weights.open_checkpoint(folder)) for folder in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


# Random weights


def test_random_parameters_have_a_loaded_model_s_shapes(tmp_path):
    values = config("qwen3", attention_bias=True)
    drawn = weights.parameter_arrays(weights.random_parameters(ModelConfig.from_hf(values), dtype="bfloat16", seed=3))
    loaded = load(save_hf(tmp_path, values), "bfloat16")
    assert {k: (v.shape, v.dtype) for k, v in drawn.items()} == {k: (v.shape, v.dtype) for k, v in loaded.items()}
    again, other = (
        weights.parameter_arrays(weights.random_parameters(ModelConfig.from_hf(values), dtype="bfloat16", seed=seed))
        for seed in (3, 4)
    )
    assert all((drawn[path] == again[path]).all() for path in drawn)
    assert all((drawn[path] != other[path]).any() for path in drawn)
    assert np.linalg.matrix_rank(np.asarray(drawn["embedding"], np.float32)) == 64


# Cost

PROBE = """
import sys
import jax
import weights

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

checkpoint = weights.open_checkpoint(sys.argv[1])
weights.random_parameters(weights.open_checkpoint(sys.argv[2]).config)
before = status("VmRSS")
model = weights.load_parameters(checkpoint, "float32")
total = sum(float(array.sum()) for array in weights.parameter_arrays(model).values())
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from Linux's /proc")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_loading_holds_one_model_in_host_memory(tmp_path, stored):
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "head_dim": 64,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
    }
    folder = save_hf(tmp_path / "large", config(**sizes), dtype=stored, shards=2)
    small = save_hf(tmp_path / "small", config())
    parameters = sum(int(np.prod(shape)) for _, shape in tensor_shapes(config(**sizes)))
    held = 4 * parameters
    peak = int(
        subprocess.run([sys.executable, "-c", PROBE, folder, small], check=True, capture_output=True, text=True).stdout
    )
    assert 0.9 * held < peak < 1.25 * held, f"{peak / held:.2f} models"


def test_importing_starts_nothing_and_reading_a_folder_needs_no_network(tmp_path):
    folder = save_hf(tmp_path, config())
    script = (
        "import socket, sys, weights\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "def refuse(*_): raise AssertionError('a connection was made')\n"
        "socket.socket.connect = refuse\n"
        "weights.load_parameters(weights.open_checkpoint(sys.argv[1]))\n"
        "slow = {'orbax.checkpoint', 'torch', 'gguf'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", script, folder], check=True)
