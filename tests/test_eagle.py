"""EAGLE-3 drafts: every tensor where it belongs, every draft that does not fit refused by name."""

import json
import pickle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import config, draft_tensors, save_draft, save_hf, save_tensors
from jkv.config import ModelConfig
from weights import parameter_arrays
from weights.eagle import load_head, open_head

MODEL = config(num_hidden_layers=6)
TARGET = ModelConfig.from_hf(MODEL)
LAYOUTS = ("official", "speculators")


def refused(folder: str | Path, target: ModelConfig = TARGET, **options: Any) -> str:
    """What `open_head` says of a draft."""
    with pytest.raises(ValueError) as caught:
        open_head(folder, target, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(folder: Path, **changes: Any) -> Path:
    """Changes keys of config.json; None removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_in_its_parameter(tmp_path, layout):
    tensors = draft_tensors(MODEL)
    checkpoint = open_head(save_draft(tmp_path, MODEL, layout=layout), TARGET)
    q, k = (tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qk")
    expected = {
        "embedding_norm.scale": tensors["midlayer.input_layernorm.weight"],
        "feature_norm.scale": tensors["midlayer.hidden_norm.weight"],
        "fc.kernel": tensors["fc.weight"],
        "qk.kernel": np.concatenate([q, k]),
    }
    if layout == "speculators":
        expected["embedding"] = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    found = parameter_arrays(load_head(checkpoint))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    assert checkpoint.files == (tmp_path / "model.safetensors",) and checkpoint.revision is None
    assert checkpoint.config.max_position == 128


def test_any_dtype_becomes_the_one_asked_for(tmp_path):
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16) if tensor.dtype == np.float32 else tensor
        for name, tensor in draft_tensors(MODEL).items()
    }
    head = load_head(open_head(save_draft(tmp_path, MODEL, tensors), TARGET), "float16")
    found = parameter_arrays(head)
    assert {array.dtype for array in found.values()} == {jnp.dtype("float16")}
    np.testing.assert_array_equal(found["fc.kernel"], tensors["fc.weight"].astype(np.float16))


def test_shards_are_read(tmp_path):
    folder = save_draft(tmp_path, MODEL)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_tensors(folder, tensors, shards=3)
    found = parameter_arrays(load_head(open_head(folder, TARGET)))
    np.testing.assert_array_equal(found["fc.kernel"], tensors["fc.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, (2, 3, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}}, (0, 3)),
    ],
    ids=str,
)
def test_layers_of_the_features(tmp_path, layout, changes, layers):
    tensors = draft_tensors(MODEL)
    tensors["fc.weight"] = tensors["fc.weight"][:, : 64 * len(layers)]
    folder = save_draft(tmp_path, MODEL, tensors, layout=layout, **changes)
    assert open_head(folder, TARGET).config.feature_layers == layers
    assert not open_head(folder, TARGET, uses_features=False).config.uses_features


def test_a_config_without_rope_theta_has_ten_thousand(tmp_path):
    edit(save_draft(tmp_path, MODEL), rope_parameters=None)
    assert open_head(tmp_path, TARGET).config.rope.theta == 10000


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", 32, "hidden_size is 64, and the model's is 32"),
        ("num_attention_heads", 8, "num_attention_heads is 4, and the model's is 8"),
        ("num_key_value_heads", 4, "num_key_value_heads is 2, and the model's is 4"),
        ("head_dim", 32, "head_dim is 16, and the model's is 32"),
    ],
)
def test_a_draft_of_another_model_is_refused(tmp_path, layout, key, value, said):
    folder = save_draft(tmp_path, MODEL, layout=layout)
    message = refused(folder, ModelConfig.from_hf({**MODEL, key: value}))
    assert message == f"{folder}: config.json: {said}; give a draft that was trained for this model"


def test_an_embedding_of_another_vocabulary_is_refused(tmp_path):
    folder = save_draft(tmp_path, MODEL, layout="speculators")
    message = refused(folder, ModelConfig.from_hf({**MODEL, "vocab_size": 320}))
    assert "embed_tokens.weight has shape (308, 64), wanted (320, 64)" in message


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_hidden_size": 128}, "target_hidden_size is 128, and the model's is 64"),
        ({"norm_before_fc": True}, "norm_before_fc true is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, "the inputs of layers [2, 4, 6], and the model has 6 layers"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "eagle_aux_hidden_state_layer_ids is '2'"),
    ],
    ids=str,
)
def test_a_config_that_is_not_supported_is_refused(tmp_path, layout, changes, said):
    message = refused(save_draft(tmp_path, MODEL, layout=layout, **changes))
    assert message.startswith(f"{tmp_path}: config.json: ") and said in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not supported"),
        ({"transformer_layer_config": None}, "the key 'transformer_layer_config' is missing"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "the key 'num_hidden_layers' is missing"),
    ],
    ids=str,
)
def test_a_config_of_speculators_that_is_not_supported_is_refused(tmp_path, changes, said):
    message = refused(edit(save_draft(tmp_path, MODEL, layout="speculators"), **changes))
    assert message.startswith(f"{tmp_path}: config.json: ") and said in message


def without(tensors: dict[str, np.ndarray]) -> None:
    del tensors["midlayer.hidden_norm.weight"]


def narrow(tensors: dict[str, np.ndarray]) -> None:
    tensors["midlayer.self_attn.k_proj.weight"] = tensors["midlayer.self_attn.k_proj.weight"][:, :64].copy()


def with_bias(tensors: dict[str, np.ndarray]) -> None:
    tensors["midlayer.self_attn.q_proj.bias"] = np.zeros(64, np.float32)


def with_norm(tensors: dict[str, np.ndarray]) -> None:
    tensors["midlayer.self_attn.q_norm.weight"] = np.ones(16, np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without, "LAYER.hidden_norm.weight is missing"),
        (narrow, "LAYER.self_attn.k_proj.weight has shape (32, 64), wanted (32, 128)"),
        (with_bias, "LAYER.self_attn.q_proj.bias is not used by this retrieval head"),
        (with_norm, "LAYER.self_attn.q_norm.weight is not used by this retrieval head"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, layout, change, said):
    tensors = draft_tensors(MODEL)
    change(tensors)
    layer = {"official": "midlayer", "speculators": "layers.0"}[layout]
    folder = save_draft(tmp_path, MODEL, tensors, layout=layout)
    for uses_features in (True, False):
        assert said.replace("LAYER", layer) in refused(folder, uses_features=uses_features)


def test_the_model_itself_is_no_draft(tmp_path):
    assert "no tensor of midlayer, so not an EAGLE-3 draft" in refused(save_hf(tmp_path, MODEL))


def test_a_tensor_of_another_dtype_is_passed_over_only_by_name(tmp_path):
    tensors = {**draft_tensors(MODEL), "counts": np.arange(4)}
    assert "tensor counts has dtype I64" in refused(save_draft(tmp_path, MODEL, tensors))


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def test_a_pickle_is_never_opened(tmp_path):
    folder = save_draft(tmp_path / "draft", MODEL)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Canary(tmp_path / "ran")}))
    message = refused(folder)
    assert "holds pytorch_model.bin, and only safetensors are read" in message
    assert "convert it once with torch.load and safetensors.torch.save_file" in message
    assert not (tmp_path / "ran").exists()


def test_what_is_not_there_is_refused(tmp_path):
    assert "no such folder; give one with an EAGLE-3 draft, or a hub id OWNER/NAME" in refused("a-draft")
    assert "no such file" in refused(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(1, np.float32)}, file)
    assert "not a folder; give the draft's folder" in refused(file)
    for name in ("a-draft", str(save_draft(tmp_path, MODEL))):
        assert f"revision 'main' applies to a draft of the Hugging Face hub, and {name}" in refused(
            name, revision="main"
        )


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Makes the hub serve `folder` whatever is asked for; returns what has been fetched."""
    import huggingface_hub

    fetched: list[str] = []

    def fetch_config(model: str, file: str, *, revision: str | None) -> str:
        fetched.append(f"{model}/{file}@{revision}")
        return str(folder / file)

    def fetch_rest(model: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        fetched.append(f"{model}@{revision}")
        assert "*.safetensors" in allow_patterns and ignore_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch_config)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch_rest)
    return fetched


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_of_the_hub(tmp_path, monkeypatch, layout):
    fetched = serve(monkeypatch, save_draft(tmp_path / "c0ffee", MODEL, layout=layout))
    checkpoint = open_head("someone/draft", TARGET, revision="refs/pr/1")
    assert (checkpoint.name, checkpoint.revision) == ("someone/draft", "c0ffee")
    assert fetched == ["someone/draft/config.json@refs/pr/1", "someone/draft@c0ffee"]
    assert load_head(checkpoint).config.uses_features


def test_a_draft_that_does_not_fit_is_not_downloaded(tmp_path, monkeypatch):
    fetched = serve(monkeypatch, save_draft(tmp_path, MODEL))
    message = refused("someone/draft", ModelConfig.from_hf({**MODEL, "hidden_size": 32}))
    assert message.startswith("someone/draft: config.json: hidden_size is 64")
    assert fetched == ["someone/draft/config.json@None"]
