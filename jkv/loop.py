"""The host's side of decoding: pads prompts to length buckets, keeps one block in flight, stops when all rows end.

The host looks at block n while block n + 1 runs, so the device never waits for it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.engine import Engine, Output, Request, State, compact_store
from jkv.models.decoder import join
from jkv.prompt import find_nonfinite

SHORTEST_BUCKET = 32


@dataclass
class Programs:
    """Compiled programs of one model, so that each is compiled once and its seconds are known.

    Attributes:
        seconds: spent on compiling so far.
        names: programs compiled so far, in order.
    """

    seconds: float = 0.0
    names: list[str] = field(default_factory=list)
    _compiled: dict[Any, Any] = field(default_factory=dict, repr=False)

    def compile(self, function: Any, static: Any, *args: Any, **options: Any) -> Any:
        """The compiled program of a jitted function whose first argument and `options` are static."""
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(args))
        key = (function, static, tuple(options.items()), shapes)
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = function.lower(static, *args, **options).compile()
            self.seconds += time.perf_counter() - start
            self.names.append(function.__name__)
        return self._compiled[key]

    def call(self, function: Any, static: Any, *args: Any, **options: Any) -> Any:
        """Calls that program, compiling it if need be."""
        return self.compile(function, static, *args, **options)(*args)


def bucket(length: int) -> int:
    """The padded length of a prompt of `length` tokens: a power of two, at least `SHORTEST_BUCKET`."""
    return max(SHORTEST_BUCKET, 1 << max(length - 1, 0).bit_length())


@dataclass
class Batch:
    """One batch from its prompts to the last token of its last row.

    Attributes:
        engine, weights, programs, request: what to run.
        prompts: token ids of each row; an empty one is an idle row.
        limits: tokens to sample at most, for each row.
        rows: id of each row, which its random keys are folded from.
        on_kept: called with the number of tokens decoded and the text positions held, int32 `[L, B, H, C]`, after
            the prompt and after every compaction.
        prefill_seconds, decode_seconds: without compiling.
    """

    engine: Engine
    weights: nnx.State
    programs: Programs
    request: Request
    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    rows: Sequence[int]
    on_kept: Callable[[int, np.ndarray], None] | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _stopped: set[int] = field(default_factory=set)
    _drawn: list[np.ndarray] = field(default_factory=list)

    def stop(self, row: int) -> None:
        """Ends a row that the caller wants no more tokens of."""
        self._stopped.add(row)

    def blocks(self) -> Iterator[np.ndarray]:
        """Runs the batch: yields sampled tokens int32 `[B, S]` block by block, -1 where a row has ended.

        Raises:
            ValueError: a logit is not a finite number; the message names the step and the part of the model.
        """
        start, compiling = time.perf_counter(), self.programs.seconds
        state, out = self._prefill()
        first = self._fetch(out, 0)
        self.prefill_seconds = time.perf_counter() - start - (self.programs.seconds - compiling)
        self._report(state, 0)
        yield first
        if np.all(out.done):
            return
        # Before the clock starts, and before anything runs that compiling would compete with.
        options = {"steps": self.engine.steps}
        self.programs.compile(Engine.decode, self.engine, self.weights, state, self.request, **options)
        if self.engine.policy.interval:
            for index, store in enumerate(state.stores):
                self.programs.compile(compact_store, self.engine.at(index).policy, store)
        start = time.perf_counter()
        try:
            yield from self._decode(state)
        finally:
            self.decode_seconds = time.perf_counter() - start

    def _decode(self, state: State) -> Iterator[np.ndarray]:
        engine, steps = self.engine, self.engine.steps
        running: tuple[int, Output] | None = None
        for index in range(-(-(max(self.limits) - 1) // steps)):
            state = self._end_stopped(state)
            state, out = self.programs.call(Engine.decode, engine, self.weights, state, self.request, steps=steps)
            decoded = (index + 1) * steps
            if engine.policy.interval and decoded % engine.policy.interval == 0:
                state = engine.compact(state, call=self.programs.call)
                self._report(state, decoded)
            if running is not None:
                yield self._fetch(running[1], running[0])
                if np.all(running[1].done):
                    return
            running = (1 + index * steps, out)
        if running is not None:
            yield self._fetch(running[1], running[0])

    def _prefill(self) -> tuple[State, Output]:
        width = bucket(max(len(prompt) for prompt in self.prompts))
        tokens = np.zeros((len(self.prompts), width), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        length = np.array([len(prompt) for prompt in self.prompts], np.int32)
        arrays = (tokens, length, np.array(self.limits, np.int32), np.array(self.rows, np.uint32))
        return self.engine.prefill(self.weights, *arrays, self.request, call=self.programs.call)

    def _end_stopped(self, state: State) -> State:
        if not self._stopped:
            return state
        stopped = np.zeros(len(self.prompts), bool)
        stopped[list(self._stopped)] = True
        return replace(state, done=state.done | jnp.asarray(stopped))

    def _report(self, state: State, decoded: int) -> None:
        if self.on_kept is not None:
            positions = [self.engine.at(i).policy.positions(store) for i, store in enumerate(state.stores)]
            # A copy: while the host sees a buffer, the next block would have to leave it alone.
            self.on_kept(decoded, np.stack([np.asarray(jnp.copy(x)) for x in positions]))

    def _fetch(self, out: Output, step: int) -> np.ndarray:
        tokens = np.asarray(out.tokens)
        finite = np.asarray(out.finite)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            drawn = np.concatenate([*self._drawn, tokens[:, :column]], axis=1)[row]
            text = jnp.asarray([[*self.prompts[row], *drawn]], jnp.int32)
            part = find_nonfinite(join(self.engine.config, self.weights), text)
            raise ValueError(
                f"non-finite logits at step {step + column} of row {self.rows[row]} ({part}); the weights hold "
                "infinite or NaN values, or overflow in this dtype: check the checkpoint, or try --dtype float32"
            )
        self._drawn.append(tokens)
        return tokens
