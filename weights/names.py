"""The table of names: which Hugging Face tensors make each parameter, in which rows.

The table runs from parameters to tensors, so that a parameter without a tensor and a tensor without a parameter are
both found by comparing names, before anything is read.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from jkv.config import ModelConfig
from weights.source import TensorReader

_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_LEAF = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_INERT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_HEAD = "lm_head.weight"
_SHOWN = 4


class Part(NamedTuple):
    """A tensor that fills some rows of a parameter, in the parameter's order."""

    tensor: str
    shape: tuple[int, ...]


def parts_of(parameter: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[Part, ...]:
    """Tensors that make one parameter, under Hugging Face's names.

    Args:
        parameter: its path, as in "layers.0.qkv.kernel".
        shape: its shape; parts are stacked along the first axis.
        config: the model's sizes.
    """
    match parameter.split("."):
        case ["embedding"]:
            return (Part(f"{_TOP['embedding']}.weight", shape),)
        case ["layers", layer, module, leaf]:
            queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            rows = {"qkv": (queries, keys, keys), "gate_up": (config.intermediate_size,) * 2}.get(module, shape[:1])
            return tuple(
                Part(f"model.layers.{layer}.{name}.{_LEAF[leaf]}", (size, *shape[1:]))
                for name, size in zip(_LAYER[module], rows, strict=True)
            )
        case [module, leaf]:
            return (Part(f"{_TOP[module]}.{_LEAF[leaf]}", shape),)
    raise KeyError(parameter)


def assign(
    wanted: Mapping[str, tuple[int, ...]], reader: TensorReader, config: ModelConfig, *, name: str, stacked: bool
) -> dict[str, tuple[Part, ...]]:
    """Gives every parameter its tensors and every tensor its parameter.

    Args:
        wanted: shape of every parameter, by its path.
        reader: the checkpoint's tensors.
        config: the model's sizes.
        name: the model, for the message.
        stacked: the tensors are the parameters themselves, under their paths.

    Raises:
        ValueError: a tensor is missing, of the wrong shape or unknown; all of them in one line.
    """
    parts = {
        parameter: (Part(parameter, shape),) if stacked else parts_of(parameter, shape, config)
        for parameter, shape in wanted.items()
    }
    expected = {part.tensor: part.shape for made_of in parts.values() for part in made_of}
    inert = {x for x in reader.names() if _INERT.fullmatch(x) or (x == _HEAD and config.tie_embeddings)}
    owner = f"model ({config.model_type}, {config.num_layers} layers)"
    check_tensors(expected, reader, name=name, owner=owner, inert=inert)
    return parts


def check_tensors(
    expected: Mapping[str, Sequence[int]],
    reader: TensorReader,
    *,
    name: str,
    owner: str,
    inert: Collection[str] = (),
) -> None:
    """Compares the tensors that are there with those that should be.

    Args:
        expected: shape of every tensor that is used.
        reader: the checkpoint's tensors.
        name: the checkpoint, for the message.
        owner: what uses the tensors, for the message.
        inert: tensors that may be there without being used.

    Raises:
        ValueError: a tensor is missing, of the wrong shape or unknown; all of them in one line.
    """
    problems = list(_problems(expected, reader, owner, inert))
    if problems:
        rest = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{name}: the weights do not fit the config: {'; '.join(problems[:_SHOWN])}{rest}")


def _problems(
    expected: Mapping[str, Sequence[int]], reader: TensorReader, owner: str, inert: Collection[str]
) -> Iterator[str]:
    found = frozenset(reader.names())
    for tensor, shape in expected.items():
        if tensor in found:
            if reader.shape(tensor) != shape:
                yield f"{tensor} has shape {reader.shape(tensor)}, wanted {shape}"
        elif tensor == _HEAD:
            yield f"{_HEAD} is missing and tie_word_embeddings is false (true shares the embedding)"
        else:
            yield f"{tensor} is missing"
    for tensor in reader.names():
        if tensor not in expected and tensor not in inert:
            yield f"{tensor} is not used by this {owner}"
