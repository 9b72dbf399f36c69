"""Opens a GGUF file as a checkpoint."""

from pathlib import Path

from weights.gguf_config import read_config
from weights.gguf_header import GgufHeader
from weights.gguf_tensors import GgufTensors
from weights.source import Checkpoint
from weights.tokenizer_cache import save_tokenizer


def open_gguf(path: Path, *, name: str) -> Checkpoint:
    """Opens a GGUF file; no tensor is read, the tokenizer is built unless it is in the user's cache already.

    Args:
        path: the file.
        name: the model as the user gave it.

    Returns:
        The checkpoint. Its dtype is that of most stored numbers, float32 when a tensor is quantised.

    Raises:
        ValueError: no GGUF file, a truncated one, or an architecture, feature, tensor, quantization type or tokenizer
            that is not supported; one line with its name.
    """
    header = GgufHeader(path)
    config = read_config(header)
    tensors = GgufTensors(header, config)
    return Checkpoint(
        name=name,
        path=path,
        format="gguf",
        config=config,
        generation={},
        tokenizer=save_tokenizer(header),
        dtype=tensors.dtype,
        revision=None,
        tensors=tensors,
    )
