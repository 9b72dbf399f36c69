"""The host's side of decoding: pads prompts to length buckets, gives slots to rows, keeps one block in flight.

The host looks at block n while block n + 1 runs, so the device never waits for it.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkv.engine import Engine, Output, Request, State, compact_store
from jkv.models.decoder import join
from jkv.prompt import find_nonfinite

SHORTEST_BUCKET = 32
MOST_TOGETHER = 2**15  # tokens of prompts that are read at once, padding included


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


def reads_together(rows: int, length: int) -> bool:
    """Whether the first prompts are read as one batch, as `rows` of `length` tokens, and not one after the other.

    Together they are read sooner if they are short; what long ones need for themselves would be most of the memory.
    """
    return rows * length <= MOST_TOGETHER


@dataclass(frozen=True)
class Row:
    """One text to decode.

    Attributes:
        id: what its random keys are folded from.
        prompt: token ids.
        limit: tokens to sample at most.
    """

    id: int
    prompt: Sequence[int]
    limit: int


OnKept = Callable[[Row, int, np.ndarray], None]


class Drawn(NamedTuple):
    """Tokens that a row has just sampled, int32 `[S]`; fewer than a block's steps where it ended inside."""

    row: Row
    tokens: np.ndarray


@dataclass
class _Occupant:
    """A row in its slot; `sampled` counts what everything that was started will have drawn, if the row does not end."""

    row: Row
    sampled: int = 1
    ended: bool = False
    drawn: list[np.ndarray] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return not self.ended and self.sampled < self.row.limit


class _Started(NamedTuple):
    """A program that was started, and the rows that it draws for; None where a slot is idle."""

    out: Output
    occupants: tuple[_Occupant | None, ...]
    prefills: bool


@dataclass
class Scheduler:
    """Decodes rows in a fixed number of slots: whenever a row ends, its slot is given to the next one.

    Slots are filled together at first, unless the prompts are long. Later a row is read alone, between two blocks, and
    written into its slot in place; the rows beside it do not notice.

    Attributes:
        engine, weights, programs, request: what to run.
        rows: the rows, in the order in which they are given slots.
        slots: rows decoded together.
        on_kept: called with a row, the number of tokens that it has decoded, and the text positions held of it, int32
            `[L, H, C]`, after its prompt and after every compaction.
        prefill_seconds, decode_seconds: without compiling.
    """

    engine: Engine
    weights: nnx.State
    programs: Programs
    request: Request
    rows: Iterable[Row]
    slots: int
    on_kept: OnKept | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _occupants: list[_Occupant | None] = field(default_factory=list)
    _stopped: set[int] = field(default_factory=set)
    _started: deque[_Started] = field(default_factory=deque)
    _clock: float = 0.0

    def stop(self, row: Row) -> None:
        """Ends a row that the caller wants no more tokens of."""
        for index, occupant in enumerate(self._occupants):
            if occupant is not None and occupant.row is row and occupant.live:
                self._stopped.add(index)
        # Its slot may be another's already while its last block runs.
        for occupant in itertools.chain(self._occupants, *(started.occupants for started in self._started)):
            if occupant is not None and occupant.row is row:
                occupant.ended = True

    def run(self) -> Iterator[Drawn]:
        """Runs the rows to their ends.

        Raises:
            ValueError: a logit is not a finite number; the message names the step and the part of the model.
        """
        self._clock = self._now()
        waiting = iter(self.rows)
        first = list(itertools.islice(waiting, self.slots))
        if not first:
            return
        if not reads_together(self.slots, bucket(max(len(row.prompt) for row in first))):
            first, waiting = [], itertools.chain(first, waiting)
        occupants = [_Occupant(row) for row in first]
        self._occupants = [*occupants, *[None] * (self.slots - len(occupants))]
        state = self._prefill(self._occupants)
        yield from self._fetch()
        self._report(state, self._occupants)
        if not first or any(occupant.live for occupant in occupants):
            self._compile(state)
        while True:
            state = self._refill(state, waiting)
            live = np.array([occupant is not None and occupant.live for occupant in self._occupants])
            if live.any():
                state = self._decode(self._end_stopped(state), live)
            elif not self._started:
                return
            # One block stays in flight while the host looks at what ran before it.
            while len(self._started) > live.any():
                yield from self._fetch()

    def _compile(self, state: State) -> None:
        """Compiles before the clock starts, and before anything runs that compiling would compete with."""
        options = {"steps": self.engine.steps}
        self.programs.compile(Engine.decode, self.engine, self.weights, state, self.request, **options)
        if self.engine.policy.interval:
            for index, store in enumerate(state.stores):
                self.programs.compile(compact_store, self.engine.at(index).policy, store, state.done)

    def _prefill(self, occupants: Sequence[_Occupant | None]) -> State:
        rows = [Row(0, (), 0) if occupant is None else occupant.row for occupant in occupants]
        tokens = np.zeros((len(rows), bucket(max(len(row.prompt) for row in rows))), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row.prompt)] = row.prompt
        length = np.array([len(row.prompt) for row in rows], np.int32)
        limit, ids = np.array([row.limit for row in rows], np.int32), np.array([row.id for row in rows], np.uint32)
        arrays = (tokens, length, limit, ids)
        state, out = self.engine.prefill(self.weights, *arrays, self.request, call=self.programs.call)
        self._started.append(_Started(out, tuple(occupants), prefills=True))
        return state

    def _refill(self, state: State, waiting: Iterator[Row]) -> State:
        """Gives the slots of rows that have ended to the next rows."""
        for index, occupant in enumerate(self._occupants):
            if (occupant is None or not occupant.live) and (row := next(waiting, None)) is not None:
                self._occupants[index] = occupant = _Occupant(row)
                self._stopped.discard(index)
                fresh = self._prefill([occupant])
                self._report(fresh, [occupant])
                state = self.programs.call(Engine.admit, self.engine, state, fresh, np.int32(index))
        return state

    def _decode(self, state: State, live: np.ndarray) -> State:
        engine, steps = self.engine, self.engine.steps
        state, out = self.programs.call(Engine.decode, engine, self.weights, state, self.request, steps=steps)
        self._started.append(_Started(out, tuple(self._occupants), prefills=False))
        ends = np.zeros(self.slots, bool)
        for index in np.flatnonzero(live):
            occupant = self._occupants[index]
            assert occupant is not None
            occupant.sampled += steps
            ends[index] = engine.policy.interval and (occupant.sampled - 1) % engine.policy.interval == 0
        if ends.any():
            state = engine.compact(state, ends, call=self.programs.call)
            self._report(state, [o if end else None for o, end in zip(self._occupants, ends, strict=True)])
        return state

    def _end_stopped(self, state: State) -> State:
        if not self._stopped:
            return state
        stopped = np.zeros(self.slots, bool)
        stopped[list(self._stopped)] = True
        self._stopped.clear()
        return replace(state, done=state.done | jnp.asarray(stopped))

    def _report(self, state: State, occupants: Sequence[_Occupant | None]) -> None:
        if self.on_kept is None:
            return
        positions = [self.engine.at(i).policy.positions(store) for i, store in enumerate(state.stores)]
        # A copy: while the host sees a buffer, the next block would have to leave it alone.
        positions = np.stack([np.asarray(jnp.copy(x)) for x in positions])
        for index, occupant in enumerate(occupants):
            if occupant is not None:
                self.on_kept(occupant.row, occupant.sampled - 1, positions[:, index])

    def _fetch(self) -> Iterator[Drawn]:
        """Waits for the program that was started first, and gives what it drew."""
        out, occupants, prefills = self._started.popleft()
        tokens, finite, done = (np.asarray(x) for x in (out.tokens, out.finite, out.done))
        now = self._now()
        if prefills:
            self.prefill_seconds += now - self._clock
        else:
            self.decode_seconds += now - self._clock
        self._clock = now
        for index, occupant in enumerate(occupants):
            # A row that its caller has stopped goes on until the device hears of it.
            if occupant is None or occupant.ended:
                continue
            if not finite[index].all():
                raise self._describe_nonfinite(occupant, tokens[index], int(np.argmin(finite[index])))
            occupant.ended = bool(done[index])
            drawn = tokens[index][tokens[index] >= 0]
            occupant.drawn.append(drawn)
            yield Drawn(occupant.row, drawn)

    def _describe_nonfinite(self, occupant: _Occupant, tokens: np.ndarray, column: int) -> ValueError:
        row, drawn = occupant.row, np.concatenate([*occupant.drawn, tokens[:column]])
        text = jnp.asarray([[*row.prompt, *drawn]], jnp.int32)
        part = find_nonfinite(join(self.engine.config, self.weights), text)
        return ValueError(
            f"non-finite logits at step {len(drawn)} of row {row.id} ({part}); the weights hold "
            "infinite or NaN values, or overflow in this dtype: check the checkpoint, or try --dtype float32"
        )

    def _now(self) -> float:
        """A clock that stands still while programs are compiled, seconds."""
        return time.perf_counter() - self.programs.seconds
