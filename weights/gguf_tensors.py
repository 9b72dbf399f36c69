"""Tensors of a GGUF file under Hugging Face names, dequantised one at a time."""

import math

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jkv.config import ModelConfig
from weights.gguf_header import GgufHeader, TensorEntry

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor that divides the rotary frequencies: part of the config, not of the weights."""

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Dequantising makes about ten temporaries: pieces of this many numbers keep them in the processor's cache.
_PIECE = 1 << 17


class GgufTensors:
    """The tensors of a GGUF file under their Hugging Face names, in the file's order."""

    def __init__(self, header: GgufHeader, config: ModelConfig):
        """Looks every tensor up, without reading it.

        Raises:
            ValueError: a tensor of unknown name or type, or one that ends past the end of the file.
        """
        self._header, self._config = header, config
        self._entries: dict[str, TensorEntry] = {}
        for stored, entry in header.tensors.items():
            if stored == ROPE_FACTORS:
                continue  # what it holds has become the config's rope
            hf_name = _hf_name(stored)
            if hf_name is None:
                raise header.error(f"the tensor {stored!r} has no place in a {config.model_type} model")
            _check_entry(header, stored, entry)
            self._entries[hf_name] = entry

    @property
    def dtype(self) -> str:
        """Dtype name of most stored numbers; "float32" when any tensor is quantised."""
        sizes: dict[str, int] = {}
        for entry in self._entries.values():
            plain = _PLAIN.get(GGMLQuantizationType(entry.type_id))
            if plain is None:
                return "float32"
            sizes[plain.name] = sizes.get(plain.name, 0) + math.prod(entry.shape)
        return max(sizes, key=sizes.__getitem__)

    def names(self) -> tuple[str, ...]:
        """Hugging Face names, one a tensor."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`, `[out, in]` for a matrix."""
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor.

        Returns:
            A read-only view of the file for float32, float16 and bfloat16 (a copy where rows have to move), freshly
            dequantised float32 otherwise.
        """
        tensor = _read(self._header, self._entries[name])
        if self._config.model_type == "llama" and ".self_attn." in name:
            heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
            return _split_halves(tensor, heads.get(name.split(".")[-2], 0))
        return tensor


def read_stored(header: GgufHeader, stored: str) -> np.ndarray:
    """Reads a tensor by its name in the file; raises ValueError when it cannot be read."""
    _check_entry(header, stored, header.tensors[stored])
    return _read(header, header.tensors[stored])


def _read(header: GgufHeader, entry: TensorEntry) -> np.ndarray:
    kind = GGMLQuantizationType(entry.type_id)
    stored = header.data[entry.start : entry.start + _stored_bytes(entry)]
    plain = _PLAIN.get(kind)
    return (stored.view(plain) if plain is not None else _dequantize(stored, kind)).reshape(entry.shape)


def _hf_name(stored: str) -> str | None:
    if stored in _NAMES:
        return _NAMES[stored]
    match stored.split("."):
        case ["blk", layer, part, ("weight" | "bias") as leaf] if layer.isdecimal() and part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{leaf}"
    return None


def _stored_bytes(entry: TensorEntry) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.type_id)]
    return math.prod(entry.shape) // block * size


def _check_entry(header: GgufHeader, stored: str, entry: TensorEntry) -> None:
    try:
        kind = GGMLQuantizationType(entry.type_id)
        block, size = GGML_QUANT_SIZES[kind]
        if kind not in _PLAIN:
            dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, NotImplementedError):
        known = [kind.name for kind in GGMLQuantizationType if kind.value == entry.type_id]
        raise header.error(
            f"the tensor {stored!r} has quantization type {known[0] if known else entry.type_id}, which cannot be "
            "dequantised; use a file with F16, BF16, Q8_0, Q6_K, Q5_K or Q4_K tensors"
        ) from None
    if not entry.shape or entry.shape[-1] % block:
        raise header.error(f"the tensor {stored!r} of shape {entry.shape} does not fill blocks of {block} numbers")
    if entry.start + _stored_bytes(entry) > len(header.data):
        raise header.error(f"the file ends inside the tensor {stored!r}; download it again")


def _dequantize(stored: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Dequantises bytes `[N]` to float32 numbers, piece by piece, so that one tensor and one piece are alive."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks, step = len(stored) // size, max(1, _PIECE // block)
    numbers = np.empty(blocks * block, np.float32)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        numbers[first * block : last * block] = dequantize(stored[None, first * size : last * size], kind)[0]
    return numbers


def _split_halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order of Llama's queries and keys (0 `heads`: neither, returned as it is).

    Its rotary embedding turns neighbouring rows (2i, 2i + 1) of a head, this project's the rows (i, i + D/2).
    """
    if not heads:
        return tensor
    rest = tensor.shape[1:]
    return tensor.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(tensor.shape)
