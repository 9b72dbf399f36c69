"""Compiling for a GPU on a machine that has none."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import A100, H100, H200, Gpu


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU as its data sheet gives it.

    Attributes:
        gpu: what the kernels' tiles are chosen for.
        name: as the driver reports it.
        bandwidth: bytes of memory a second.
        memory, l2: bytes.
        float_units: float32 units of a core.
        clock: GHz.
        architecture: of the assembler.
    """

    gpu: Gpu
    name: str
    bandwidth: float
    memory: int
    l2: int
    float_units: int
    clock: float
    architecture: str


_HOPPER = Target(
    gpu=H200,
    name="NVIDIA H200 141GB HBM3e",
    bandwidth=4.8e12,
    memory=151397597184,
    l2=50 << 20,
    float_units=128,
    clock=1.98,
    architecture="sm_90a",
)
TARGETS = {
    "a100": Target(
        gpu=A100,
        name="NVIDIA A100-SXM4-80GB",
        bandwidth=2.039e12,
        memory=85100068864,
        l2=40 << 20,
        float_units=64,
        clock=1.41,
        architecture="sm_80",
    ),
    "h100": replace(_HOPPER, gpu=H100, name="NVIDIA H100 80GB HBM3", bandwidth=3.352e12, memory=84942979072),
    "h200": _HOPPER,
}


def describe_target(target: Target) -> str:
    """The text form of XLA's `GpuTargetConfigProto`."""
    gpu = target.gpu
    major, minor = divmod(gpu.capability, 10)
    feature = "ACCELERATED_FEATURES" if target.architecture.endswith("a") else "NONE"
    return f"""
gpu_device_info {{
  name: "{target.name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  core_count: {gpu.cores}
  fpus_per_core: {target.float_units}
  clock_rate_ghz: {target.clock}
  memory_bandwidth: {target.bandwidth:.0f}
  device_memory_size: {target.memory}
  l2_cache_size: {target.l2}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory}
  shared_memory_per_core: {gpu.shared_memory + 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{target.name}"
"""


@functools.lru_cache
def mesh_of(target: Target) -> Mesh:
    """A mesh of one such GPU."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=describe_target(target), topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("gpu",))


def place(tree: Any, target: Target) -> Any:
    """The shapes of a tree's arrays as they would lie on the GPU."""
    sharding = NamedSharding(mesh_of(target), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def device_of(target: Target) -> Any:
    """The GPU of `mesh_of`, which programs can be compiled for and not run on."""
    return mesh_of(target).devices.flat[0]


def lower_for(target: Target, function: Any, *args: Any, **options: Any) -> Any:
    """Lowers a jitted function as its call on the GPU would; arrays are given as shapes, static values as they are."""
    return trace_for(target, function, *args, **options).lower()


def trace_for(target: Target, function: Any, *args: Any, **options: Any) -> Any:
    """Traces it alone."""
    with jax.sharding.use_abstract_mesh(mesh_of(target).abstract_mesh):
        return function.trace(*args, **options)


@contextmanager
def mosaic_for(target: Target) -> Iterator[None]:
    """Has Mosaic compile for this GPU: it asks the machine's own, and takes a Hopper where there is none."""
    from jax.experimental.mosaic.gpu import core, utils

    capability = divmod(target.gpu.capability, 10)
    with (
        mock.patch.object(utils, "_infer_arch", lambda: capability),
        mock.patch.object(core, "_SMEM_SIZE_BOUND", target.gpu.shared_memory),
    ):
        yield
