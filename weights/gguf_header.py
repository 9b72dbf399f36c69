"""Reads the header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, tensor table.

The gguf package's own reader makes several Python objects for every vocabulary entry, which takes seconds for a real
model. Here the file is mapped, string arrays are stepped over, and a value is decoded only when it is asked for.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        shape: rows first, as numpy has it; in numbers, not in stored bytes.
        type_id: ggml's number of the stored type.
        start: first byte in the file.
    """

    shape: tuple[int, ...]
    type_id: int
    start: int


@dataclass(frozen=True, kw_only=True)
class _Field:
    type_id: int
    start: int
    stop: int


class GgufHeader:
    """Metadata and tensor table of one memory-mapped file.

    Attributes:
        path: the file.
        data: the whole file, uint8 `[bytes]`, read-only; a page is read from disk when it is touched.
        tensors: tensor entries by name.
    """

    def __init__(self, path: Path):
        """Maps `path` and walks its header.

        Raises:
            ValueError: not a GGUF file, one of another byte order or version, a damaged or truncated one, or one part
                of a split model.
        """
        self.path = path
        self._map = _map_file(path)
        self.data = np.frombuffer(self._map, np.uint8)
        self._fields: dict[str, _Field] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            self._walk()
        except (struct.error, UnicodeDecodeError, OverflowError):
            raise self.error("the header is damaged or cut short; download the file again") from None
        parts = self.number("split.count", 1)
        if parts > 1:
            raise self.error(
                f"this is one of {parts} parts of a split model; join them first (llama-gguf-split --merge)"
            )

    def error(self, message: str) -> ValueError:
        """A ValueError that names this file."""
        return ValueError(f"{self.path}: {message}")

    def keys(self) -> tuple[str, ...]:
        """Names of the metadata."""
        return tuple(self._fields)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key`: a number, bool or str; an array as a numpy array or a list of str; `default` when absent."""
        field = self._fields.get(key)
        if field is None:
            return default
        if field.type_id != _ARRAY:
            return self._scalar(field.type_id, field.start)
        type_id, count = struct.unpack_from("<IQ", self._map, field.start)
        if type_id != _STRING:
            return np.frombuffer(self._map, _SCALARS[type_id], count, field.start + 12)
        return self._strings(field.start + 12, count)

    def number(self, key: str, default: Any = None) -> Any:
        """Value of `key` as `get` has it; of an array with one entry a layer, the entry that they all are.

        Raises:
            ValueError: the value is no number, or the entries differ.
        """
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.size:
            if (value != value[0]).any():
                raise self.error(f"{key} differs from layer to layer, which is not supported")
            value = value[0].item()
        if value is not None and not isinstance(value, int | float):
            raise self.error(f"{key} is {value!r}, not a number; the file is damaged")
        return value

    def stored(self, key: str) -> bytes:
        """The bytes of `key`'s value as they stand in the file."""
        field = self._fields[key]
        return self._map[field.start : field.stop]

    def _walk(self) -> None:
        version, tensors, fields = struct.unpack_from("<IQQ", self._map, 4)
        if version & 0xFFFF == 0:
            raise self.error("a big-endian GGUF file, which is not supported; use the little-endian one")
        if version not in (2, 3):
            raise self.error(f"GGUF version {version} is not supported; versions 2 and 3 are")
        position = 24
        for _ in range(fields):
            key, position = self._string(position)
            (type_id,) = struct.unpack_from("<I", self._map, position)
            stop = self._skip(type_id, position + 4)
            self._fields[key] = _Field(type_id=type_id, start=position + 4, stop=stop)
            position = stop
        entries = []
        for _ in range(tensors):
            entry, position = self._tensor_entry(position)
            entries.append(entry)
        alignment = int(self.number("general.alignment", 32)) or 1
        base = -(-position // alignment) * alignment
        for name, shape, type_id, offset in entries:
            if name in self.tensors:
                raise self.error(f"two tensors are named {name!r}; convert the model again")
            self.tensors[name] = TensorEntry(shape=shape, type_id=type_id, start=base + offset)

    def _tensor_entry(self, position: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, position = self._string(position)
        (rank,) = struct.unpack_from("<I", self._map, position)
        numbers = struct.unpack_from(f"<{rank}QIQ", self._map, position + 4)
        shape, (type_id, offset) = numbers[:rank][::-1], numbers[rank:]
        return (name, shape, type_id, offset), position + 4 + 8 * rank + 12

    def _skip(self, type_id: int, position: int) -> int:
        """The position after a value; raises struct.error when that is past the end."""
        if type_id == _STRING:
            position += 8 + _LENGTH.unpack_from(self._map, position)[0]
        elif type_id == _ARRAY:
            type_id, count = struct.unpack_from("<IQ", self._map, position)
            position += 12
            if type_id == _STRING:
                read, data = _LENGTH.unpack_from, self._map
                for _ in range(count):
                    position += 8 + read(data, position)[0]
            else:
                position += count * self._width(type_id)
        else:
            position += self._width(type_id)
        if position > len(self._map):
            raise struct.error
        return position

    def _width(self, type_id: int) -> int:
        if type_id not in _SCALARS:
            raise self.error(f"metadata of type {type_id} cannot be read; the file is damaged or of a newer format")
        return np.dtype(_SCALARS[type_id]).itemsize

    def _scalar(self, type_id: int, position: int) -> Any:
        if type_id == _STRING:
            return self._strings(position, 1)[0]
        return np.frombuffer(self._map, _SCALARS[type_id], 1, position)[0].item()

    def _strings(self, position: int, count: int) -> list[str]:
        found = []
        try:
            for _ in range(count):
                text, position = self._string(position)
                found.append(text)
        except UnicodeDecodeError:
            raise self.error("a text in the metadata is not UTF-8; convert the model again") from None
        return found

    def _string(self, position: int) -> tuple[str, int]:
        start = position + 8
        stop = start + _LENGTH.unpack_from(self._map, position)[0]
        if stop > len(self._map):
            raise struct.error
        return self._map[start:stop].decode("utf-8"), stop


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            start = file.read(24)
            if not start:
                raise ValueError(f"{path}: an empty file; download it again")
            if start.startswith(b"version https://git-lfs"):
                raise ValueError(f"{path}: a Git LFS pointer, not the model; fetch the file itself (git lfs pull)")
            if not start.startswith(b"GGUF"):
                raise ValueError(f"{path}: not a GGUF file (its first bytes are {start[:4]!r}); give a .gguf model")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as failure:
        raise ValueError(f"{path}: cannot be read ({failure.strerror}); give the path of a .gguf file") from None
