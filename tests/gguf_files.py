"""Writes tiny GGUF files for tests: random weights under llama.cpp's names, with a vocabulary."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from checkpoints import SPECIAL, THINK, make_tokenizer, random_tensors

F32 = GGMLQuantizationType.F32
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, *part, leaf = name.split(".")
    return f"blk.{layer}.{_PARTS['.'.join(part)]}.{leaf}"


def model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes about the shape of a model."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    sizes = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim,
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    return {f"{kind}.{key}": value for key, value in sizes.items()}


def byte_level_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    """The vocabulary of `make_tokenizer` as llama.cpp's converter writes it, with two rows that only pad."""
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [CONTROL if t in SPECIAL else USER_DEFINED if t in THINK else NORMAL for t in tokens]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "[PAD308]", "[PAD309]"],
        "tokenizer.ggml.token_type": [*kinds, UNUSED, UNUSED],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of Llama's queries and keys: the two halves of a head take turns."""
    return np.stack(np.split(rows.reshape(heads, -1, *rows.shape[1:]), 2, axis=1), axis=2).reshape(rows.shape)


def stored_tensors(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under Hugging Face names as a GGUF file holds them: renamed, Llama's queries and keys reordered."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            tensor = permute(tensor, heads[part])
        stored[gguf_name(name)] = tensor
    return stored


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    *,
    architecture: str = "llama",
    endianness: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Writes a file from plain values; a tensor given with a type is stored as its bytes stand."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianness)
    for key, value in metadata.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in (tensors or {}).items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_gguf(
    path: Path,
    config: Mapping[str, Any],
    *,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes a model of random weights.

    Args:
        path: the file.
        config: as from `checkpoints.config`.
        kinds: stored type of matrices by their Hugging Face part ("q_proj", "embed_tokens"); "*" for all others;
            float32 where none is given. Norms and biases are float32.
        metadata: replaces or adds values; None leaves a key out.
        extra: tensors to add, by their name in the file.
    """
    kinds = kinds or {}
    stored: dict[str, Any] = {}
    for name, tensor in random_tensors(config).items():
        kind = kinds.get(name.split(".")[-2], kinds.get("*", F32)) if tensor.ndim == 2 else F32
        ((key, array),) = stored_tensors(config, {name: tensor}).items()
        stored[key] = array if kind == F32 else (gguf.quants.quantize(array, kind), kind)
    values = {**model_metadata(config), **byte_level_metadata(), **(metadata or {})}
    return write_gguf(path, values, {**stored, **(extra or {})}, architecture=config["model_type"])
