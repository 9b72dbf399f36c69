"""Reads a Hugging Face folder of safetensors: single file or shards, memory-mapped tensor by tensor.

The header is parsed here: it takes a page of code, tells every kind of broken download apart by name, and a tensor
comes as a view of the file (the safetensors package copies it) that is unmapped as soon as it has been used.
"""

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jkv.config import ModelConfig
from weights.source import Checkpoint, describe_missing, read_json

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LFS = b"version https://git-lfs"
_HEADER_LIMIT = 100_000_000  # bytes, that of the format's own library


class Entry(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsReader:
    """Tensors of one or several safetensors files."""

    def __init__(self, files: Sequence[Path], *, ignored: Collection[str] = ()):
        """Reads and checks the files' headers; tensors named in `ignored` are passed over, whatever their dtype.

        Raises:
            ValueError: a file is missing, broken or not safetensors, or a tensor is twice there or of a dtype that is
                not supported.
        """
        self._entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in read_header(file, ignored=ignored).items():
                if name in self._entries:
                    raise ValueError(f"{file}: tensor {name} is in {self._entries[name].file.name} too")
                self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        """Names of the tensors, as stored."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `name`."""
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """Maps one tensor; the mapping ends with the array."""
        file, dtype, shape, offset = self._entries[name]
        return np.memmap(file, dtype, "r", offset, shape).view(np.ndarray)

    def common_dtype(self) -> str:
        """Name of the dtype of most stored numbers."""
        sizes: dict[str, int] = {}
        for entry in self._entries.values():
            sizes[entry.dtype.name] = sizes.get(entry.dtype.name, 0) + math.prod(entry.shape)
        return max(sizes, key=sizes.__getitem__)


def open_safetensors(folder: Path, *, name: str, revision: str | None = None, with_weights: bool = True) -> Checkpoint:
    """Opens a Hugging Face folder: config.json and safetensors.

    Args:
        folder: the folder.
        name: the model as the user gave it.
        revision: commit, for a folder of the hub's cache.
        with_weights: false for a folder whose weights are not there; the checkpoint then has no tensors.

    Raises:
        ValueError: the config is not supported, or a file is missing or broken; one line naming it.
    """
    config = read_config(folder, name=name)
    files = weight_files(folder) if with_weights else ()
    reader = SafetensorsReader(files)
    generation = folder / "generation_config.json"
    return Checkpoint(
        name=name,
        path=folder,
        files=files,
        format="safetensors",
        config=config,
        generation=read_json(generation) if generation.exists() else {},
        tokenizer=folder if (folder / "tokenizer.json").exists() else None,
        dtype=config.dtype or (reader.common_dtype() if with_weights else "float32"),
        revision=revision,
        tensors=reader,
    )


def read_config(folder: Path, *, name: str) -> ModelConfig:
    """Reads a folder's config.json; a refusal names the model."""
    values = read_json(folder / "config.json")
    try:
        return ModelConfig.from_hf(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: config.json: {str(error).removeprefix('config.json: ')}") from None


def read_header(file: Path, *, ignored: Collection[str] = ()) -> dict[str, Entry]:
    """Reads the header of a safetensors file, but for the tensors named in `ignored`.

    Raises:
        ValueError: the file is not a whole safetensors file, or a tensor's dtype is not supported.
    """
    header, size = _header_bytes(file), file.stat().st_size
    start = 8 + len(header)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        entries = {name: _entry(file, name, start, value) for name, value in tensors.items() if name not in ignored}
        spans = sorted(value["data_offsets"] for value in tensors.values())
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file}: not a safetensors file, or cut off in its header; download it again") from None
    end = 0
    for first, last in spans:
        if first != end:
            raise ValueError(f"{file}: its header leaves holes between tensors; download it again")
        end = last
    if start + end != size:
        raise ValueError(f"{file}: {size} bytes where its header says {start + end}; download it again")
    return entries


def _header_bytes(file: Path) -> bytes:
    problem = describe_missing(file)
    if problem is not None:
        raise ValueError(f"{file}: {problem}")
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_LFS))
            stream.seek(8)
            length = int.from_bytes(start[:8], "little")
            # A length past the end is that of some other file's first bytes: nothing is allocated for it.
            header = stream.read(length) if length <= min(file.stat().st_size, _HEADER_LIMIT) else b""
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; make it readable") from None
    if not start:
        raise ValueError(f"{file}: the file is empty; download it again")
    if start == _LFS:
        raise ValueError(f"{file}: a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    return header


def _entry(file: Path, name: str, start: int, value: Mapping) -> Entry:
    shape, (first, last) = tuple(value["shape"]), value["data_offsets"]
    dtype = _DTYPES.get(value["dtype"])
    if dtype is None:
        raise ValueError(
            f"{file}: tensor {name} has dtype {value['dtype']}; supported are {', '.join(_DTYPES)}; use an unquantised "
            "checkpoint, or a GGUF file"
        )
    if last - first != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{file}: tensor {name} has {last - first} bytes, which is not its shape {shape}")
    return Entry(file, dtype, shape, start + first)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: one, or the shards of an index.

    Raises:
        ValueError: there are none, or not all of them; one line with the remedy.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists() or single.is_symlink():
        return (single,)
    if index.exists():
        return _shards(index)
    present = sorted(folder.iterdir())
    files = tuple(file for file in present if file.suffix == ".safetensors")
    if len(files) == 1:
        return files
    if files:
        raise ValueError(f"{folder}: {len(files)} safetensors files and no {_INDEX}; download the model again")
    pickles = [file.name for file in present if file.suffix in _PICKLES]
    if pickles:
        raise ValueError(
            f"{folder}: holds {pickles[0]}, and only safetensors are read (a pickle can run code); use a revision with "
            "safetensors, or convert it once with torch.load and safetensors.torch.save_file"
        )
    raise ValueError(
        f"{folder}: no {_SINGLE} or {_INDEX}, and only safetensors are read; use a model or revision that has them (of "
        "a repository of GGUF files, give the path of a .gguf file)"
    )


def _shards(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index}: {outside[0]!r} is not the name of a file in this folder; download it again")
    missing = [name for name in names if not os.path.lexists(index.parent / name)]
    if missing:
        raise ValueError(f"{index.parent}: missing {', '.join(missing)}, which {index.name} names; download them")
    return tuple(index.parent / name for name in names)
