"""Reads the queries and keys of an EAGLE-3 draft: SpeContext's retrieval head.

Drafts come in two layouts. The official one has its sizes at the top of config.json and its layer's tensors under
"midlayer."; that of the speculators library nests the sizes and calls the layer "layers.0.". The rest is alike:

    embed_tokens.weight                  [V, E]       not in all; the target's embedding takes its place
    fc.weight                            [E, 3 E]     makes a feature of three of the target's hidden states
    LAYER.input_layernorm.weight         [E]          norm of the embedded token
    LAYER.hidden_norm.weight             [E]          norm of the feature
    LAYER.self_attn.q_proj.weight        [H G D, 2 E] embedding half first
    LAYER.self_attn.k_proj.weight        [H D, 2 E]
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jkv.config import ModelConfig
from jkv.models.retrieval_head import HeadConfig, RetrievalHead
from weights.hub import download, is_hub_id
from weights.names import Part, check_tensors
from weights.safetensors import SafetensorsReader, weight_files
from weights.source import TensorReader, read_json

_OFFICIAL, _SPECULATORS = "midlayer", "layers.0"
_EMBEDDING = "embed_tokens.weight"
# What a draft guesses tokens with; the last two are the target's, which trainers of speculators leave in.
_IGNORED = (
    "{}.self_attn.v_proj.weight",
    "{}.self_attn.o_proj.weight",
    "{}.mlp.gate_proj.weight",
    "{}.mlp.up_proj.weight",
    "{}.mlp.down_proj.weight",
    "{}.post_attention_layernorm.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)


@dataclass(frozen=True, kw_only=True)
class HeadCheckpoint:
    """A draft whose config and tensors' shapes have been read and checked.

    Attributes:
        name: the draft as the user gave it.
        path: folder that it was read from.
        files: the files that hold its weights.
        config: of the head that `load_head` makes.
        parts: tensors that make each parameter.
        revision: commit of a draft from the Hugging Face hub.
    """

    name: str
    path: Path
    files: tuple[Path, ...] = field(repr=False)
    config: HeadConfig
    parts: Mapping[str, tuple[Part, ...]] = field(repr=False)
    revision: str | None
    tensors: TensorReader = field(repr=False)


def open_head(
    draft: str | Path, target: ModelConfig, *, revision: str | None = None, uses_features: bool = True
) -> HeadCheckpoint:
    """Finds an EAGLE-3 draft and reads everything but its weights.

    Args:
        draft: a folder of config.json and safetensors, or a hub id OWNER/NAME; what exists locally comes first.
        target: sizes of the model that it was trained for.
        revision: branch, tag or commit of a hub id.
        uses_features: false leaves out the half of the projections that is for features, and their fusion.

    Raises:
        ValueError: there is no such draft, it is broken or no EAGLE-3 draft, or it does not fit the target; one line
            with the remedy.
    """
    name = os.fspath(draft)
    folder, commit = _find_folder(name, revision, target)
    config, layer = _read_config(folder, name=name, target=target)
    files = weight_files(folder)
    tensors = SafetensorsReader(files, ignored=frozenset(tensor.format(layer) for tensor in _IGNORED))
    if not any(tensor.startswith(f"{layer}.") for tensor in tensors.names()):
        raise ValueError(f"{name}: no tensor of {layer}, so not an EAGLE-3 draft; give one that is")
    if _EMBEDDING in tensors.names():
        config = replace(config, vocab_size=target.vocab_size)
    parts = _parts(config, layer)
    expected = {part.tensor: part.shape for made_of in parts.values() for part in made_of}
    check_tensors(expected, tensors, name=name, owner="retrieval head (EAGLE-3)")
    return HeadCheckpoint(
        name=name,
        path=folder,
        files=files,
        config=config if uses_features else replace(config, feature_layers=()),
        parts=parts,
        revision=commit,
        tensors=tensors,
    )


def load_head(checkpoint: HeadCheckpoint, dtype: str = "float32") -> RetrievalHead:
    """Reads a draft's weights into a retrieval head on the default device, one parameter after the other.

    Args:
        checkpoint: from `open_head`.
        dtype: of the parameters.
    """

    def read(path: str, spec: jax.ShapeDtypeStruct) -> jax.Array:
        # The first columns are all of them, or the embedding's half of the projections.
        width = spec.shape[-1]
        rows = [checkpoint.tensors.read(part.tensor)[..., :width] for part in checkpoint.parts[path]]
        return jax.device_put(np.concatenate(rows).astype(spec.dtype, copy=False))

    graph, state = nnx.split(RetrievalHead(checkpoint.config, dtype=dtype))
    leaves = [
        (keys, leaf.replace(read(".".join(map(str, keys)), leaf.get_value())))
        for keys, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def _find_folder(name: str, revision: str | None, target: ModelConfig) -> tuple[Path, str | None]:
    path = Path(name).expanduser()
    exists = bool(name) and os.path.lexists(path)
    if revision is not None and (exists or not is_hub_id(name)):
        raise ValueError(f"revision {revision!r} applies to a draft of the Hugging Face hub, and {name} is not one")
    if exists and path.is_dir():
        return path, None
    if exists:
        raise ValueError(f"{path}: not a folder; give the draft's folder, which holds config.json and safetensors")
    if not is_hub_id(name):
        raise ValueError(f"draft {name!r}: no such folder; give one with an EAGLE-3 draft, or a hub id OWNER/NAME")
    return download(name, revision=revision, check=partial(_read_config, target=target))


def _read_config(folder: Path, *, name: str, target: ModelConfig) -> tuple[HeadConfig, str]:
    """The head, with features and without an embedding of its own, and the name of the draft's layer."""
    values = read_json(folder / "config.json")
    try:
        return _parse(values, target)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: config.json: {str(error).removeprefix('config.json: ')}") from None


def _parse(values: Mapping[str, Any], target: ModelConfig) -> tuple[HeadConfig, str]:
    layer, sizes = _OFFICIAL, values
    kind = values.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type {kind!r} is not supported; give a draft of type 'eagle3'")
        layer, sizes = _SPECULATORS, values.get("transformer_layer_config")
        if not isinstance(sizes, dict):
            raise ValueError("the key 'transformer_layer_config' is missing; is this a whole checkpoint?")
    if values.get("norm_before_fc"):
        raise ValueError("norm_before_fc true is not supported; give a draft without that norm")
    draft = ModelConfig.from_hf(sizes)
    _check_sizes(draft, target, values.get("target_hidden_size"))
    config = HeadConfig(
        hidden_size=draft.hidden_size,
        num_heads=draft.num_heads,
        num_kv_heads=draft.num_kv_heads,
        head_dim=draft.head_dim,
        norm_eps=draft.norm_eps,
        rope=draft.rope,
        max_position=draft.max_position,
        feature_layers=_feature_layers(values, target.num_layers),
    )
    return config, layer


def _check_sizes(draft: ModelConfig, target: ModelConfig, target_hidden_size: Any) -> None:
    for key, found, wanted in (
        ("hidden_size", draft.hidden_size, target.hidden_size),
        ("target_hidden_size", target_hidden_size, target.hidden_size),
        ("num_attention_heads", draft.num_heads, target.num_heads),
        ("num_key_value_heads", draft.num_kv_heads, target.num_kv_heads),
        ("head_dim", draft.head_dim, target.head_dim),
    ):
        if found is not None and found != wanted:
            raise ValueError(
                f"{key} is {found}, and the model's is {wanted}; give a draft that was trained for this model"
            )


def _feature_layers(values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs are fused."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = values.get(key) or (values.get("eagle_config") or {}).get(key)
    if ids is None:
        ids = [2, layers // 2, layers - 3]
    elif not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{key} is {ids!r}; it must be a list of layers")
    elif ids[0] == 1:
        # Some trainers count the layers whose outputs are fused, and all of these begin with the second.
        ids = [i + 1 for i in ids]
    if not all(0 <= i < layers for i in ids):
        raise ValueError(
            f"{key} stands for the inputs of layers {ids}, and the model has {layers} layers; give a draft that was "
            "trained for this model"
        )
    return tuple(ids)


def _parts(config: HeadConfig, layer: str) -> dict[str, tuple[Part, ...]]:
    """Tensors of a whole draft that make each parameter."""
    hidden, inner = config.hidden_size, 2 * config.hidden_size
    parts = {
        "embedding_norm.scale": (Part(f"{layer}.input_layernorm.weight", (hidden,)),),
        "feature_norm.scale": (Part(f"{layer}.hidden_norm.weight", (hidden,)),),
        "fc.kernel": (Part("fc.weight", (hidden, config.fused * hidden)),),
        "qk.kernel": (
            Part(f"{layer}.self_attn.q_proj.weight", (config.num_heads * config.head_dim, inner)),
            Part(f"{layer}.self_attn.k_proj.weight", (config.num_kv_heads * config.head_dim, inner)),
        ),
    }
    if config.vocab_size:
        parts["embedding"] = (Part(_EMBEDDING, (config.vocab_size, hidden)),)
    return parts
