"""Which implementation of an operation runs: the table of them, and the rule that picks one.

Every operation has a jnp `reference`, which is its specification and the implementation "xla". The kernel backends are
imported when they are asked for, so that one which a release of jax no longer has is missing alone.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

Name = Literal["xla", "triton", "mosaic", "cudnn", "eager"]

# What each operation has beside its reference; each is the module of that name in the operation's folder.
KERNELS: dict[str, tuple[Name, ...]] = {
    "decode_attention": ("triton", "mosaic", "cudnn", "eager"),
    "prefill_attention": ("cudnn",),
    "window_scores": ("triton",),
    "key_redundancy": ("triton",),
    "select_top": ("triton",),
    "compact": ("triton",),
    "rms_norm": ("triton",),
    "gather_attention": ("triton",),
    "page_scores": ("triton",),
    "lowrank_attention": ("triton",),
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the tiles of a kernel are chosen for.

    Attributes:
        capability: compute capability, 80 for 8.0.
        cores: streaming multiprocessors.
        shared_memory: bytes that one block of threads may take.
    """

    capability: int
    cores: int
    shared_memory: int


SHARED_MEMORY = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}
SMALLEST_SHARED_MEMORY = 101376
A100 = Gpu(capability=80, cores=108, shared_memory=SHARED_MEMORY[80])
H100 = H200 = Gpu(capability=90, cores=132, shared_memory=SHARED_MEMORY[90])


@dataclass(frozen=True)
class Implementation:
    """One way to run the operations: a static, hashable value.

    Attributes:
        name: "xla" (the reference) or another implementation.
        elsewhere: what runs an operation that `name` does not have, the first that it has; none refuses it.
        gpu: what the kernels are compiled for.
        interpret: run the kernels on CPU instead, slowly, to check their numbers.
    """

    name: Name = "xla"
    elsewhere: tuple[Name, ...] = ()
    gpu: Gpu = A100
    interpret: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a name that does not exist."""
        if self.name not in get_args(Name):
            raise ValueError(f"implementation {self.name!r} does not exist; choose from {', '.join(get_args(Name))}")


XLA = Implementation()


def choose(name: str | None, device: Any, dtype: str) -> Implementation:
    """The implementation for programs that run on `device`; without a name, the quickest one there.

    Raises:
        ValueError: the named one does not exist or cannot run there.
    """
    if device.platform != "gpu":
        chosen = Implementation(name or "xla")  # pyright: ignore[reportArgumentType]
        if chosen.name not in ("xla", "eager"):
            raise ValueError(f"implementation {name!r} needs an NVIDIA GPU, and jax finds {device.platform}; use xla")
        return replace(chosen, elsewhere=("xla",))
    if name in ("mosaic", "cudnn") and dtype == "float32":
        raise ValueError(f"implementation {name!r} takes half precision only; choose dtype bfloat16, or triton or xla")
    capability = round(float(device.compute_capability) * 10)
    shared_memory = SHARED_MEMORY.get(capability, SMALLEST_SHARED_MEMORY)
    gpu = Gpu(capability=capability, cores=device.core_count, shared_memory=shared_memory)
    elsewhere: tuple[Name, ...] = ("triton", "xla") if dtype == "float32" else ("triton", "cudnn", "xla")
    if name is None and not _is_there("triton"):
        return Implementation("xla", gpu=gpu)
    chosen = Implementation(name or "triton", elsewhere=elsewhere, gpu=gpu)  # pyright: ignore[reportArgumentType]
    for op in KERNELS:
        find(op, chosen)  # refuses what this release of jax does not have
    return chosen


def plan_for(name: str | None, gpu: Gpu) -> Implementation:
    """What `choose` gives on another GPU, for programs that are looked at and not run.

    XLA stands in for cuDNN, which cannot be asked for a program where there is no GPU.

    Raises:
        ValueError: as `choose`.
    """
    return Implementation(name or "triton", elsewhere=("triton", "xla"), gpu=gpu)  # pyright: ignore[reportArgumentType]


def _is_there(name: Name) -> bool:
    try:
        return all(find(op, Implementation(name)) for op, kernels in KERNELS.items() if name in kernels)
    except ValueError:
        return False


def run(op: str, implementation: Implementation | str, *arrays: Any, **static: Any) -> Any:
    """Runs an operation."""
    if isinstance(implementation, str):
        implementation = Implementation(implementation)  # pyright: ignore[reportArgumentType]
    return find(op, implementation)(*arrays, **static)


def find(op: str, implementation: Implementation) -> Callable[..., Any]:
    """The function that runs an operation; it takes what the operation takes, except for `implementation`.

    Raises:
        ValueError: there is none.
    """
    there = ("xla", *KERNELS[op])
    wanted = (implementation.name, *implementation.elsewhere)
    name = next((name for name in wanted if name in there), None)
    if name is None:
        raise ValueError(f"{op} has no implementation {implementation.name!r}; it has {', '.join(there)}")
    if name == "xla":
        return getattr(importlib.import_module(f"pallas_kernels.{op}.reference"), op)
    try:
        module = importlib.import_module(f"pallas_kernels.{op}.{name}")
    except ImportError as error:
        raise ValueError(f"{op}: implementation {name!r} is not in this release of jax ({error}); use xla") from error
    return partial(getattr(module, op), implementation=implementation)
