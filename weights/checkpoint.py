"""Converted checkpoints: Orbax, with what a run needs beside the parameters.

A folder written here holds checkpoint.json and one data folder, which checkpoint.json names::

    OUT/checkpoint.json                 format, dtype, config, generation config, source
    OUT/data-1f3c9a20/parameters/       Orbax: one parameter a folder
    OUT/data-1f3c9a20/tokenizer.json    and the other tokenizer files

Everything is first written to a folder beside OUT, which is then renamed to OUT. Where OUT is a checkpoint already, the
new data folder is moved into it and checkpoint.json replaced in one step: whenever the writer dies, OUT is the old
checkpoint or the new one.

Parameters are stored as plain, uncompressed Zarr: Orbax restores them, and `weights.zarr` maps them into memory.
"""

import dataclasses
import errno
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax import Array

from jkv.config import ModelConfig, RopeConfig
from weights.source import TOKENIZER_FILES, Checkpoint, content_hash, read_json
from weights.zarr import ZarrReader

METADATA = "checkpoint.json"
FORMAT = "jkv-orbax"
VERSION = 1
"""Of the layout, and of what the readers make of a source: raise it when either changes, and caches are made anew."""

_PARAMETERS = "parameters"
_MARGIN = 1 << 20  # bytes of disk for everything beside the parameters
_PAUSE = 0.2  # seconds in which writes beside one that failed come to their end, so that what is removed stays so


def save_orbax(
    arrays: Mapping[str, Array], folder: Path, *, source: Checkpoint, dtype: str, overwrite: bool = False
) -> None:
    """Writes a checkpoint; `folder` is as it was until all of the new one is on disk.

    Args:
        arrays: parameters by path, on any devices, sharded or not.
        folder: to make, with its parents.
        source: the checkpoint that the parameters come from.
        dtype: the parameters' dtype name.
        overwrite: replace a checkpoint that is there.

    Raises:
        ValueError: the folder exists (with `overwrite`: and is something else than a checkpoint), or it cannot be
            written; one line with the remedy.
    """
    folder = folder.expanduser().resolve()
    check_target(folder, overwrite=overwrite)
    data = f"data-{secrets.token_hex(4)}"
    staging = folder.parent / f".{folder.name}.{data}.partial"
    try:
        (staging / data).mkdir(parents=True)
        _check_space(staging, sum(array.nbytes for array in arrays.values()) + _MARGIN)
        _write_arrays(arrays, staging / data / _PARAMETERS)
        _copy_tokenizer(source, staging / data)
        _write_metadata(staging / METADATA, _metadata(source, dtype=dtype, data=data))
        _publish(staging, folder, data)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror or error}); free some space or choose another place; what "
            "was there is unchanged"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuses a folder that `save_orbax` would not write.

    Raises:
        ValueError: it exists, or is not a checkpoint when it is to be overwritten.
    """
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{folder}: exists already; choose another folder, or --overwrite it")
    if not (folder / METADATA).is_file():
        raise ValueError(f"{folder}: not a converted checkpoint, so it is not overwritten; choose another folder")


def open_orbax(folder: Path, *, name: str) -> Checkpoint:
    """Opens a folder written by `save_orbax`.

    Raises:
        ValueError: of another version, or incomplete; one line with the remedy.
    """
    file = folder / METADATA
    values = read_json(file)
    if (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"{file}: format {values.get('format')!r}, version {values.get('version')!r}; only {FORMAT!r}, version "
            f"{VERSION}, is read; convert the model again"
        )
    try:
        data, source = folder / values["data"], values["source"]
        config = dict(values["config"])
        config |= {"rope": RopeConfig(**config["rope"]), "eos_ids": tuple(config["eos_ids"])}
        reader = ZarrReader(data / _PARAMETERS)
        return Checkpoint(
            name=name,
            path=folder,
            files=reader.files(),
            format="orbax",
            config=ModelConfig(**config),
            generation=values["generation"],
            tokenizer=data if (data / "tokenizer.json").exists() else None,
            dtype=values["dtype"],
            revision=source["revision"],
            tensors=reader,
            sha256=source["sha256"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: a key is missing or unknown ({error}); convert the model again") from None


def _write_arrays(arrays: Mapping[str, Array], folder: Path) -> None:
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with _quiet_absl(), ocp.Checkpointer(handler) as checkpointer:
        try:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))
        except ValueError as error:  # how tensorstore reports what the disk says
            time.sleep(_PAUSE)
            full = "No space left" in str(error)
            raise OSError("no space left" if full else str(error).splitlines()[0]) from error


@contextmanager
def _quiet_absl() -> Iterator[None]:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # it logs what it raises too, with a traceback a thread
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(errno.ENOSPC, f"no space left: {size / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
    if hasattr(os, "posix_fallocate"):  # which runs into quotas and limits too
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)


def _copy_tokenizer(source: Checkpoint, folder: Path) -> None:
    if source.tokenizer is None:
        return
    for name in TOKENIZER_FILES:
        file = source.tokenizer / name
        if file.exists():
            shutil.copyfile(file, folder / name)


def _metadata(source: Checkpoint, *, dtype: str, data: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "data": data,
        "dtype": dtype,
        "config": dataclasses.asdict(source.config),
        "generation": dict(source.generation),
        "source": {
            "name": source.name,
            "format": source.format,
            "dtype": source.dtype,
            "revision": source.revision,
            "sha256": content_hash(source),
        },
    }


def _write_metadata(file: Path, values: Mapping[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(values, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _publish(staging: Path, folder: Path, data: str) -> None:
    if not (folder / METADATA).exists():
        staging.rename(folder)
        return
    (staging / data).rename(folder / data)
    (staging / METADATA).replace(folder / METADATA)
    for old in folder.glob("data-*"):
        if old.name != data:
            shutil.rmtree(old, ignore_errors=True)
