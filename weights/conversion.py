"""Conversion of a model to a checkpoint that loads quickly, asked for or cached."""

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import platformdirs

from weights.checkpoint import VERSION, check_target, open_orbax, save_orbax
from weights.load import load_parameters, parameter_arrays, resolve_dtype
from weights.source import Checkpoint, content_hash

CACHE_LIMIT = 4 << 30
"""Bytes: larger conversions are made only when asked for."""

logger = logging.getLogger(__name__)


def convert(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    report: Callable[[str], None] = logger.info,
) -> None:
    """Loads a checkpoint and writes it as an Orbax checkpoint.

    Args:
        checkpoint: from `open_checkpoint`.
        folder: to make.
        dtype: of the stored parameters; "auto" is the checkpoint's own.
        overwrite: replace a converted checkpoint that is there; until the new one is whole, the old one stays.
        report: is told of each step in a line.

    Raises:
        ValueError: the weights do not fit the config, or the folder exists or cannot be written.
    """
    check_target(folder.expanduser(), overwrite=overwrite)
    dtype = resolve_dtype(checkpoint, dtype)
    revision = f" at {checkpoint.revision}" if checkpoint.revision else ""
    report(f"reading {checkpoint.path}{revision} ({checkpoint.size / 1e6:.1f} MB, {checkpoint.dtype})")
    arrays = parameter_arrays(load_parameters(checkpoint, dtype))
    size = sum(array.nbytes for array in arrays.values())
    report(f"writing {folder} ({size / 1e6:.1f} MB, {dtype})")
    save_orbax(arrays, folder, source=checkpoint, dtype=dtype, overwrite=overwrite)


def cached(checkpoint: Checkpoint, dtype: str = "auto") -> Checkpoint:
    """The same model with its weights in the user's cache, where they are converted once; only GGUF gains by it.

    Args:
        checkpoint: from `open_checkpoint`; anything but GGUF is returned as it is, and so is a model of more than
            `CACHE_LIMIT` bytes.
        dtype: of the parameters that will be loaded.

    Returns:
        A checkpoint for `load_parameters` with the same dtype, or, where the cache cannot be written, `checkpoint`.
    """
    dtype = resolve_dtype(checkpoint, dtype)
    tensors = checkpoint.tensors
    size = sum(math.prod(tensors.shape(name)) for name in tensors.names()) * np.dtype(dtype).itemsize
    if checkpoint.format != "gguf" or size > CACHE_LIMIT:
        return checkpoint
    source = dataclasses.replace(checkpoint, sha256=content_hash(checkpoint))
    folder = platformdirs.user_cache_path("jkv") / "checkpoints" / f"{source.sha256}-{dtype}-{VERSION}"
    try:
        converted = open_orbax(folder, name=checkpoint.name)
    except ValueError:  # not there, or broken
        try:
            convert(source, folder, dtype=dtype, overwrite=True)
            converted = open_orbax(folder, name=checkpoint.name)
        except (OSError, ValueError) as error:
            logger.warning("the converted model is not cached: %s", error)
            return checkpoint
    return dataclasses.replace(source, format="orbax", tensors=converted.tensors)
