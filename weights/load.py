"""Makes a decoder's parameters: from a checkpoint, tensor by tensor, or at random."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jkv.config import DTYPES, ModelConfig
from jkv.models.decoder import Decoder
from weights.names import Part, assign
from weights.source import Checkpoint, TensorReader

_ALIGNMENT = 64  # bytes: on CPU, jax takes a host array that starts at a multiple of it over without a copy
_RANDOM_BLOCK = 1_000_003  # numbers


def resolve_dtype(checkpoint: Checkpoint, dtype: str = "auto") -> str:
    """Dtype name that `dtype` stands for with this checkpoint.

    Raises:
        ValueError: no such dtype.
    """
    if dtype == "auto":
        return checkpoint.dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose auto, {', '.join(DTYPES)}")
    return dtype


def load_parameters(checkpoint: Checkpoint, dtype: str = "auto") -> Decoder:
    """Reads a checkpoint's weights into a decoder on the default device.

    Each tensor is read, cast and put on the device before the next is read: host memory holds one parameter beside
    what the device holds. On CPU a converted checkpoint of the same dtype is not even copied: its files are mapped.

    Args:
        checkpoint: from `weights.open_checkpoint`.
        dtype: of the parameters; "auto" is the checkpoint's own.

    Raises:
        ValueError: tensors and config do not fit together (all such tensors in one line), or a number is too large for
            float16.
    """
    config, tensors = checkpoint.config, checkpoint.tensors

    def read_all(wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        parts = assign(
            {path: spec.shape for path, spec in wanted.items()},
            tensors,
            config,
            name=checkpoint.name,
            stacked=checkpoint.format == "orbax",
        )
        return {path: _put(_read(tensors, parts[path], spec)) for path, spec in wanted.items()}

    return _build(config, resolve_dtype(checkpoint, dtype), read_all)


def random_parameters(config: ModelConfig, *, dtype: str = "float32", seed: int = 0) -> Decoder:
    """A decoder of random weights on the default device, for measuring speed and memory without a checkpoint.

    Args:
        config: the model's sizes.
        dtype: of the parameters.
        seed: of the weights.
    """
    # One block of numbers, repeated from another place in every parameter: drawing each number takes ten times as long
    # on CPU. The block's length is prime, so that the rows of a matrix do not repeat.
    rng = np.random.default_rng(seed)
    block = jax.device_put(rng.standard_normal(_RANDOM_BLOCK, np.float32))

    def draw_all(wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        starts = rng.integers(_RANDOM_BLOCK, size=len(wanted))
        return {
            path: _repeat(block, start, *_moments(path, spec), shape=spec.shape, dtype=spec.dtype)
            for start, (path, spec) in zip(starts, wanted.items(), strict=True)
        }

    return _build(config, dtype, draw_all)


def parameter_arrays(model: nnx.Module) -> dict[str, Array]:
    """Parameters of a module by path, as in "layers.0.qkv.kernel"."""
    return {_path(keys): leaf[...] for keys, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _build(
    config: ModelConfig, dtype: str, make: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, Array]]
) -> Decoder:
    graph, state = nnx.split(Decoder(config, dtype=dtype))
    leaves = [(keys, leaf) for keys, leaf in nnx.to_flat_state(state)]
    arrays = make({_path(keys): leaf.get_value() for keys, leaf in leaves})
    return nnx.merge(graph, nnx.from_flat_state([(keys, leaf.replace(arrays[_path(keys)])) for keys, leaf in leaves]))


def _path(keys: tuple) -> str:
    return ".".join(map(str, keys))


def _read(tensors: TensorReader, parts: Sequence[Part], spec: jax.ShapeDtypeStruct) -> np.ndarray:
    dtype = np.dtype(spec.dtype)
    if len(parts) == 1:
        tensor = tensors.read(parts[0].tensor)
        if tensor.dtype == dtype:
            return tensor
    whole, row = _aligned_empty(spec.shape, dtype), 0
    with np.errstate(over="ignore"):  # found below, by name
        for part in parts:
            rows = slice(row, row + part.shape[0])
            whole[rows] = tensors.read(part.tensor)
            if dtype == np.float16 and np.isinf(whole[rows]).any():
                raise ValueError(
                    f"tensor {part.tensor} has numbers too large for float16; choose dtype bfloat16 or float32"
                )
            row = rows.stop
    return whole


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _put(array: np.ndarray) -> Array:
    # Waiting keeps host memory at one parameter where transfers are slower than reading.
    return jax.block_until_ready(jax.device_put(array))


def _moments(path: str, spec: jax.ShapeDtypeStruct) -> tuple[float, float]:
    """Mean and standard deviation that keep activations near one."""
    match path.rsplit(".", 1)[-1]:
        case "scale":
            return 1.0, 0.1
        case "bias":
            return 0.0, 0.1
        case "kernel":
            return 0.0, spec.shape[-1] ** -0.5
    return 0.0, 1.0


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _repeat(block: Array, start: int, mean: float, spread: float, *, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    size = math.prod(shape)
    turned = (jnp.roll(block, start) * spread + mean).astype(dtype)
    return jnp.broadcast_to(turned, (-(-size // block.size), block.size)).reshape(-1)[:size].reshape(shape)
