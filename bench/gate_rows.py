"""What the compile gate looks at: one row for each program and GPU, and the engine's calls that make the programs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.engines import (
    DTYPE,
    LONGEST_TEXT,
    make_engine,
    make_policy,
    make_request,
    prefill_shapes,
    shape_of_call,
)
from bench.gate_operations import OPERATIONS
from bench.gpu_target import Target
from bench.models import MODELS
from bench.paper_rows import paper_caches, selecting_shapes
from jkv.engine import Engine
from jkv.memory import abstract_weights
from jkv.policies import Evict, get_policy
from jkv.policies.registry import names
from pallas_kernels import dispatch, shapes

RUNS = paper_caches() | shapes.RUNS
SELECTING = selecting_shapes() | shapes.SELECTED.keys()  # of which a step reads a part
PROMPTS = {"b8-t2048": (8, 2048), "b1-t16384": (1, 16384)}  # rows, tokens
FULL_CACHES = ("b16-full16k", "b4-full34k")
SELECT_CACHES = ("b16-32k2k", "b32-2k16k", "b32-2k32k", "b16-16k2k", "b1-32k2k")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program for one GPU.

    Attributes:
        gpu: of `gpu_target.TARGETS`.
        program: "decode", "read_layer", "compact_store" or "admit", as the engine calls them; or one of
            `gate_operations.OPERATIONS` or of `gate_controls.CONTROLS`.
        model: of `models.MODELS`; of `shapes.MODELS` for an operation.
        policy: its name; empty for an operation.
        shape: of `RUNS`; of `PROMPTS` for read_layer.
        implementation: as a user gives it; None is what runs there without being asked for.
    """

    gpu: str
    program: str
    model: str = ""
    policy: str = ""
    shape: str = ""
    implementation: str | None = None

    def __str__(self) -> str:
        """The row's name."""
        return " ".join(filter(None, (self.gpu, self.program, self.model, self.policy, self.shape)))


class Call(NamedTuple):
    """A call of a jitted function whose first argument is static, with arrays as shapes."""

    function: Any
    static: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def all_rows(implementation: str | None) -> Iterator[Row]:
    """Every operation in every size, and every program of every model, policy and GPU."""
    for gpu in ("a100", "h100", "h200"):
        for row in operation_rows(gpu, shapes.MODELS, shapes.CACHES):
            yield replace(row, implementation=implementation)
        for model in MODELS:
            for policy in names():
                for row in policy_rows(gpu, model, policy, caches=("b128-k512", "b1-k2048"), prompts=PROMPTS):
                    yield replace(row, implementation=implementation)


def quick_rows(implementation: str | None) -> Iterator[Row]:
    """The part that any change may break: sizes at the ends, policies that differ in kind, two architectures."""
    rows = []
    for gpu, model in (("a100", "qwen-7b"), ("h200", "llama-8b")):
        rows += operation_rows(gpu, (model,), ("b128-k512", "b1-k2048", "b16-full16k"))
    quick = {"qwen-7b": ("full", "gkv", "h2o"), "llama-8b": ("gkv", "quest"), "qwen3-8b": ("h2o", "specontext")}
    for model, policies in quick.items():
        for policy in policies:
            rows += policy_rows("h200", model, policy, caches=("b64-k1024",), prompts=())
    for policy in ("full", "rkv"):
        rows += policy_rows("a100", "qwen-7b", policy, caches=("b1-k2048",), prompts=("b8-t2048",))
    return (replace(row, implementation=implementation) for row in rows)


def operation_rows(gpu: str, models: Iterable[str], caches: Iterable[str]) -> Iterator[Row]:
    """Every operation in some sizes of `shapes`."""
    for program in OPERATIONS:
        for model in models:
            for cache in caches:
                yield Row(gpu=gpu, program=program, model=model, shape=cache)


def policy_rows(gpu: str, model: str, policy: str, *, caches: Sequence[str], prompts: Iterable[str]) -> Iterator[Row]:
    """The programs of one model and policy; one that does not evict has caches of its own, few if `caches` are few."""
    known = get_policy(policy)
    if policy == "full":
        caches = FULL_CACHES[: len(caches)]
    elif not isinstance(known, Evict):
        caches = SELECT_CACHES if len(caches) > 1 and "@" not in policy else SELECT_CACHES[:1]
    for cache in caches:
        yield Row(gpu=gpu, program="decode", model=model, policy=policy, shape=cache)
        if known.interval:
            yield Row(gpu=gpu, program="compact_store", model=model, policy=policy, shape=cache)
    yield Row(gpu=gpu, program="admit", model=model, policy=policy, shape=caches[0])
    for prompt in prompts:
        yield Row(gpu=gpu, program="read_layer", model=model, policy=policy, shape=prompt)


def engine_call(row: Row, target: Target, layers: int) -> Call:
    """The call of the row's function that the engine makes when it runs the row's policy on a model so deep."""
    config = replace(MODELS[row.model], num_layers=layers)
    batch, length, engine = _make_engine(row, target, config)
    weights = abstract_weights(config, DTYPE)
    calls: dict[str, Call] = {}

    def call(function: Any, static: Any, *args: Any, **options: Any) -> Any:
        calls.setdefault(function.__name__, Call(function, static, args, options))
        return shape_of_call(function, static, *args, **options)

    state = prefill_shapes(engine, weights, batch, length, call)
    if row.program == "decode":
        call(Engine.decode, engine, weights, state, make_request(), steps=engine.steps)
    elif row.program == "compact_store":
        engine.compact(state, call=call)
    elif row.program == "admit":
        fresh = prefill_shapes(engine, weights, 1, length, call)
        call(Engine.admit, engine, state, fresh, jax.ShapeDtypeStruct((), jnp.int32))
    return calls[row.program]


def _make_engine(row: Row, target: Target, config: Any) -> tuple[int, int, Engine]:
    """Rows, tokens of the prompts, and the engine."""
    cache = RUNS.get(row.shape)
    policy = make_policy(row.policy, cache)
    batch, length = (cache.batch, cache.prompt) if cache else PROMPTS[row.shape]
    evicts = isinstance(policy, Evict)
    implementation = dispatch.plan_for(policy.implementation or row.implementation, target.gpu)
    longest = cache.capacity if cache and not evicts else LONGEST_TEXT
    return batch, length, make_engine(config, policy, implementation, prompt=length, longest=longest)
