"""What a row of the compile gate takes on its GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from bench.compiled import ADDED_TO, Compiled, compile_lowered
from bench.gate_controls import CONTROLS
from bench.gate_operations import OPERANDS, OPERATIONS, make_operation
from bench.gate_rows import DTYPE, RUNS, SELECTING, Row, engine_call
from bench.gpu_target import TARGETS, Target, lower_for, mosaic_for, place, trace_for
from bench.models import MODELS
from jkv.engine import Engine
from jkv.memory import abstract_weights, nbytes
from jkv.workspace import workspace
from pallas_kernels import shapes
from pallas_kernels.dispatch import plan_for

# Two depths of a model: what a layer adds is their difference, and the real model is as much deeper.
DEPTHS = (2, 4)
CACHE = r"\b(store|stores\[\d+\])\.((exact\.)?[kv]|a)$"
SUMS = r"\.extra\['mass'\]$"  # which each step adds to: read and written
WEIGHTS = r"^weights\b"
READ = rf"^(?!.*{ADDED_TO})"  # of an operation's arguments, those that it needs in full
MATRICES = r"^weights\b.*\['kernel'\]"  # the others are small, or looked up row by row


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run of a row's program; for a decode block one step, of the model at its whole depth.

    Attributes:
        temp: bytes of workspace.
        logits: bytes of them that the logits are.
        donated, cache: bytes of the arguments that were taken over, and of those that must be.
        launches: kernels and copies.
        per_layer: of them, what one more layer adds; None where there are no layers.
        moved, floor: bytes moved, and the least that would have to be.
        predicted: bytes at the fullest by `jkv.workspace`, over those of the program, all weights of its model
            included; None of a single operation.
        program: the program that was compiled, of the larger of `DEPTHS`.
    """

    temp: int
    logits: int = 0
    donated: int
    cache: int
    launches: int
    per_layer: float | None = None
    moved: float
    floor: float
    predicted: float | None = None
    program: Compiled

    @property
    def ratio(self) -> float:
        """Bytes moved over the floor."""
        return self.moved / self.floor


def measure(row: Row) -> Figures:
    """Compiles the program of a row and reads it."""
    target = TARGETS[row.gpu]
    with mosaic_for(target) if row.implementation == "mosaic" else nullcontext():
        return _measure(row, target)


def _measure(row: Row, target: Target) -> Figures:
    if row.program == "decode":
        return _measure_decode(row, target)
    if row.program in CONTROLS:
        return _figures(compile_lowered(CONTROLS[row.program].lower(target), target, watched=OPERANDS), OPERANDS)
    if row.program in OPERATIONS:
        return _measure_operation(row, target)
    if row.program == "admit":  # one row is read and written, in place
        program, predicted = _compile_call(row, target, 1, rf"^state\..*{CACHE}")
        floor = 2 * program.size(r"^fresh\b")
        return replace(_figures(program, rf"^state\..*{CACHE}"), floor=floor, predicted=predicted)
    watched = MATRICES if row.program == "read_layer" else CACHE
    program, predicted = _compile_call(row, target, 1, watched)
    return replace(_figures(program, watched if row.program == "compact_store" else None), predicted=predicted)


def _figures(program: Compiled, donated: str | None) -> Figures:
    """The figures of a program by itself, which cannot do without its arguments and results."""
    return Figures(
        temp=program.temp,
        donated=program.donated,
        cache=program.size(donated) if donated else 0,
        launches=program.launches,
        moved=program.moved,
        floor=program.size(READ) + program.output - program.donated,
        program=program,
    )


def _measure_operation(row: Row, target: Target) -> Figures:
    implementation = plan_for(row.implementation, target.gpu)
    operation = make_operation(row.program, shapes.MODELS[row.model], RUNS[row.shape], implementation)
    jitted = jax.jit(operation.function, donate_argnums=operation.donated)
    program = compile_lowered(lower_for(target, jitted, *place(operation.args, target)), target, watched=OPERANDS)
    return _figures(program, OPERANDS if operation.donated else None)


def _compile_call(row: Row, target: Target, layers: int, watched: str) -> tuple[Compiled, float]:
    """The program, and the bytes that are predicted over those that it takes at its fullest."""
    call = engine_call(row, target, layers)
    traced = trace_for(target, call.function, call.static, *place(call.args, target), **call.options)
    donated = [argument.donated for argument in jax.tree.leaves(traced.args_info)]
    reads = bytes_by_index(row, call.static) if row.program == "decode" else {}
    program = compile_lowered(traced.lower(), target, watched=watched, runs=call.options.get("steps", 1), reads=reads)
    own = program.size(WEIGHTS)
    # A single layer is read beside all the others.
    others = nbytes(abstract_weights(MODELS[row.model], DTYPE)) - own if own and layers == 1 else 0
    held = sum(program.arguments.values()) + program.output - program.donated + others
    return program, (held + workspace(traced.jaxpr, donated, platform="cuda")) / (held + program.temp)


def bytes_by_index(row: Row, engine: Engine) -> dict[str, float]:
    """What the kernels that read by index read of one layer in a step: keys and values of what the policy reads."""
    if row.shape not in SELECTING:
        return {}
    spec, cache = engine.spec, RUNS[row.shape]
    read = dict(engine.at(engine.config.num_layers - 1).policy.tokens_read(spec, cache.capacity))
    vector = cache.batch * spec.num_kv_heads * spec.vector_bytes
    made = read.pop("selected") if row.policy.startswith("shadowkv") else 0
    rank = min(getattr(engine.policy, "rank", 0), spec.num_kv_heads * spec.head_dim)
    return {
        "gather_attention": 2 * vector * sum(read.values()),
        "lowrank_attention": vector * (made * (1 + rank / spec.head_dim) + rank),
    }


def bytes_read(row: Row, target: Target) -> int:
    """What the policy has to read of all layers' stores in a step."""
    config, cache = MODELS[row.model], RUNS[row.shape]
    engine = engine_call(row, target, config.num_layers).static
    of_layers = (engine.at(layer).policy for layer in range(config.num_layers))
    return cache.batch * sum(policy.bytes_read(engine.spec, cache.capacity) for policy in of_layers)


def _measure_decode(row: Row, target: Target) -> Figures:
    config, batch = MODELS[row.model], RUNS[row.shape].batch
    (small, _), (large, predicted) = (_compile_call(row, target, layers, f"{CACHE}|{MATRICES}") for layers in DEPTHS)

    def per_layer(figure: Callable[[Compiled], float]) -> float:
        return (figure(large) - figure(small)) / (DEPTHS[1] - DEPTHS[0])

    def at_depth(figure: Callable[[Compiled], float]) -> float:
        return figure(large) + (config.num_layers - DEPTHS[1]) * per_layer(figure)

    itemsize = jnp.dtype(DTYPE).itemsize
    unread = 0 if config.tie_embeddings else (config.vocab_size - batch) * config.hidden_size * itemsize
    appended = 2 * batch * config.num_kv_heads * config.head_dim * itemsize
    return Figures(
        temp=round(at_depth(lambda p: p.temp)),
        logits=batch * config.vocab_size * 4,
        donated=round(at_depth(lambda p: p.donated)),
        cache=round(at_depth(lambda p: p.size(CACHE))),
        launches=round(at_depth(lambda p: p.launches)),
        per_layer=per_layer(lambda p: p.launches),
        moved=at_depth(lambda p: p.moved),
        floor=at_depth(lambda p: p.size(WEIGHTS) + 2 * p.size(SUMS))
        + bytes_read(row, target)
        - unread
        + config.num_layers * appended,
        predicted=predicted,
        # Kernels of Mosaic tell of themselves when they are compiled first.
        program=replace(
            large,
            called=tuple(dict.fromkeys((*small.called, *large.called))),
            kernels=tuple({kernel.name: kernel for kernel in (*small.kernels, *large.kernels)}.values()),
            unread=(*small.unread, *(name for name in large.unread if "mosaic" not in name)),
        ),
    )
