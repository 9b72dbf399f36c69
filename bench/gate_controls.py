"""Programs that the compile gate must refuse, which shows that it can."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bench.gpu_target import Target, lower_for, place


@dataclass(frozen=True)
class Control:
    """One such program.

    Attributes:
        lower: lowers it for a GPU.
        gpu: the GPU.
        refused_for: pattern of what the gate has to say about it.
    """

    lower: Callable[[Target], Any]
    gpu: str
    refused_for: str


def _lower_scan(target: Target) -> Any:
    """A scan over layers with their caches as scanned arrays, which copies every one of them."""

    @jax.jit(donate_argnames=("k",))
    def step(k: jax.Array, slot: jax.Array) -> Any:
        def layer(x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            cache = cache.at[:, slot].set(x)
            return jnp.sum(cache, axis=1), cache

        return lax.scan(layer, jnp.zeros((k.shape[1], k.shape[3]), k.dtype), k)

    args = jax.ShapeDtypeStruct((4, 8, 4096, 128), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
    return lower_for(target, step, *place(args, target))


def _lower_kept(target: Target) -> Any:
    """An update of a cache that the caller keeps."""

    @jax.jit
    def step(k: jax.Array, slot: jax.Array) -> jax.Array:
        return k.at[:, slot].set(1.0)

    args = jax.ShapeDtypeStruct((8, 4096, 128), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
    return lower_for(target, step, *place(args, target))


def _lower_product(rows: int, depth: int, *, warps: int, stages: int) -> Callable[[Target], Any]:
    """A product of rows with each block of a cache, in a kernel that keeps `rows` times 128 sums in registers."""

    def kernel(q_ref: Any, k_ref: Any, out_ref: Any) -> None:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            block = plgpu.load(k_ref.at[pl.ds(i * depth, depth), :])
            weights = plgpu.load(q_ref.at[:, pl.ds(i * depth, depth)])
            return total + plgpu.dot(weights, block)

        total = lax.fori_loop(0, k_ref.shape[0] // depth, add, jnp.zeros(out_ref.shape, jnp.float32))
        plgpu.store(out_ref.at[...], total)

    @jax.jit
    def product(q: jax.Array, k: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rows, k.shape[1]), jnp.float32),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            name="product",
        )(q, k)

    def lower(target: Target) -> Any:
        args = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)
        return lower_for(target, product, *place(args, target))

    return lower


CONTROLS = {
    "control: scan over caches": Control(_lower_scan, "h200", "copies k"),
    "control: cache not donated": Control(_lower_kept, "a100", "copies k"),
    "control: kernel that spills": Control(_lower_product(256, 64, warps=1, stages=1), "h200", "spills"),
    "control: too much shared memory": Control(_lower_product(128, 128, warps=8, stages=4), "a100", "[Ss]hared memory"),
}
