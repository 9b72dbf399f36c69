"""Weights in: Hugging Face safetensors, GGUF and Orbax checkpoints, from a folder, a file or the Hugging Face hub."""

from weights.conversion import cached
from weights.hub import EMBEDDED
from weights.load import load_parameters, parameter_arrays, random_parameters, resolve_dtype
from weights.open import open_checkpoint
from weights.source import Checkpoint, content_hash

__all__ = [
    "EMBEDDED",
    "Checkpoint",
    "cached",
    "content_hash",
    "load_parameters",
    "open_checkpoint",
    "parameter_arrays",
    "random_parameters",
    "resolve_dtype",
]
