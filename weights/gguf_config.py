"""Reads a model's shape from a GGUF file, by way of the Hugging Face config that it stands for."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.config import ModelConfig
from weights.gguf_header import GgufHeader
from weights.gguf_tensors import ROPE_FACTORS, read_stored

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def read_config(header: GgufHeader) -> ModelConfig:
    """The model's shape from a GGUF file's metadata and tensor names.

    Raises:
        ValueError: what the file has is not supported, or a key that the model needs is missing; the message names
            the file and the key (in Hugging Face's spelling where both have one).
    """
    architecture = header.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise header.error(
            f"general.architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    try:
        config = ModelConfig.from_hf(_hf_config(header, architecture))
    except ValueError as refusal:
        message = str(refusal)
        raise header.error(message.removeprefix(f"{header.path}: ").removeprefix("config.json: ")) from None
    if config.rope.type == "llama3":
        _check_rope_factors(header, config)
    return config


def _hf_config(header: GgufHeader, architecture: str) -> dict[str, Any]:
    def number(key: str, default: Any = None) -> Any:
        return header.number(f"{architecture}.{key}", default)

    def required(key: str) -> Any:
        value = number(key)
        if value is None:
            raise header.error(f"the key {architecture}.{key} is missing; is this a whole language model?")
        return value

    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise header.error("the tensor 'token_embd.weight' is missing; is this a whole language model?")
    heads, hidden = required("attention.head_count"), required("embedding_length")
    head_dim = number("attention.key_length") or hidden // max(heads, 1)
    value_dim = number("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise header.error(
            f"{architecture}.attention.value_length {value_dim} is not key_length {head_dim}; "
            "heads of two sizes are not supported"
        )
    window = number("attention.sliding_window", 0)
    ends = [header.number(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": required("context_length"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, architecture),
        "partial_rotary_factor": number("rope.dimension_count", head_dim) / max(head_dim, 1),
        # The converter leaves the head out when it is the embedding.
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "num_experts": number("expert_count", 0),
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "bos_token_id": header.number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _rope_scaling(header: GgufHeader, architecture: str) -> Mapping[str, Any] | None:
    def value(key: str) -> Any:
        return header.number(f"{architecture}.rope.scaling.{key}")

    factor = value("factor") or header.number(f"{architecture}.rope.scale_linear")
    kind = header.get(f"{architecture}.rope.scaling.type") or ("linear" if factor else "none")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise header.error(f"both {ROPE_FACTORS} and rope.scaling.type {kind!r}: only one of them is supported")
        # Llama 3's converter stores each frequency's divisor, not the numbers it comes from. All published models use
        # this band and context; the largest divisor is the factor. `_check_rope_factors` compares every one.
        return {
            "rope_type": "llama3",
            "factor": float(read_stored(header, ROPE_FACTORS).max(initial=1.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if kind == "none":
        return None
    for key, plain in (("attn_factor", 1), ("yarn_attn_factor", 1), ("yarn_ext_factor", 1), ("yarn_log_multiplier", 0)):
        if kind == "yarn" and value(key) not in (None, plain):
            raise header.error(f"{architecture}.rope.scaling.{key} {value(key)} is not supported; only {plain} is")
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": value("original_context_length"),
        "beta_fast": value("yarn_beta_fast"),
        "beta_slow": value("yarn_beta_slow"),
    }
    return {key: entry for key, entry in scaling.items() if entry is not None}


def _check_rope_factors(header: GgufHeader, config: ModelConfig) -> None:
    # Imported late: it starts jax, which a file without these factors does not need here.
    from jkv.models.rope import inv_freq

    stored, (ours, _) = read_stored(header, ROPE_FACTORS), inv_freq(config.rope, config.head_dim)
    plain = config.rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if stored.shape != ours.shape or not np.allclose(stored * ours, plain, rtol=1e-5, atol=0):
        raise header.error(
            f"the tensor {ROPE_FACTORS!r} is not Llama 3's scaling of an 8192-token context, which is the only one "
            "supported; use the model's safetensors checkpoint"
        )
