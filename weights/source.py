"""What a checkpoint is, whatever its format: a config, named tensors, a tokenizer's folder."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jkv.config import ModelConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class TensorReader(Protocol):
    """Tensors of a checkpoint, read one at a time."""

    def names(self) -> tuple[str, ...]:
        """Names: Hugging Face's, or in a converted checkpoint the parameters' own paths."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor: a read-only view of the mapped file, or freshly decoded (bfloat16 as ``ml_dtypes.bfloat16``)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened model: everything but the weights has been read and checked.

    Attributes:
        name: the model as the user gave it.
        path: folder or file that it was read from.
        files: the files that hold its weights.
        generation: Hugging Face's generation_config.json; empty when there is none.
        tokenizer: folder with tokenizer.json, and tokenizer_config.json and chat_template.jinja where the model has
            them; None when it has no tokenizer.
        dtype: dtype name that "auto" stands for.
        revision: commit of a model from the Hugging Face hub.
        sha256: of the weights that a converted checkpoint was made from; see `content_hash`.
    """

    name: str
    path: Path
    files: tuple[Path, ...] = field(default=(), repr=False)
    format: Literal["safetensors", "gguf", "orbax"]
    config: ModelConfig
    generation: Mapping[str, Any]
    tokenizer: Path | None
    dtype: str
    revision: str | None
    tensors: TensorReader = field(repr=False)
    sha256: str | None = None

    @property
    def size(self) -> int:
        """Bytes of weights on disk."""
        return sum(file.stat().st_size for file in self.files or (self.path,))


def content_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 of the weights' files in the order of their names, as hexadecimal digits.

    A converted checkpoint has that of the weights it was made from, so both names of a model hash alike.
    """
    if checkpoint.sha256 is not None:
        return checkpoint.sha256
    digest = hashlib.sha256()
    for file in sorted(checkpoint.files or (checkpoint.path,)):
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: the file cannot be read, or holds something else; the message names it.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {describe_missing(file) or error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds a JSON {type(value).__name__}, not an object; download it again")
    return value


def describe_missing(file: Path) -> str | None:
    """What is wrong with a path that should be a readable file, and the remedy; None when it is one."""
    if file.is_symlink() and not file.exists():
        return f"broken link to {file.readlink()}; download the model again, or restore the link's target"
    if not file.exists():
        return "no such file; download the model again"
    if file.is_dir():
        return "a folder where a file should be; download the model again"
    return None
