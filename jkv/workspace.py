"""The workspace that a program takes at its peak, from its jaxpr: nothing is compiled.

A compiler fuses what is computed number by number into what reads it, so that only some results of a program are ever
in memory: those of matrix products, sums, sorts, loops and kernels, those that such an operation takes whole, and those
that several read and that are no larger than what they are made from. Each of them lives from where it is made to where
it is last read, an update is in place where nothing reads the old value later, and a loop holds what it carries once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Results that are the operand under another shape.
VIEWS = {"reshape", "squeeze", "expand_dims", "bitcast_convert_type"}
# Results that are a part of the operand.
PARTS = {"slice", "dynamic_slice", "split", "gather"}
# Read their operands as they are computed, and have a result in memory.
SUMS = {
    "argmax",
    "argmin",
    "reduce",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_sum",
    "reduce_window_max",
}
# Take whole operands, and have results in memory.
WHOLE = {
    "cond",
    "conv_general_dilated",
    "cumlogsumexp",
    "cummax",
    "cumprod",
    "cumsum",
    "dot_general",
    "eigh",
    "optimization_barrier",
    "pallas_call",
    "random_bits",
    "scan",
    "sort",
    "top_k",
    "while",
}
# cuDNN's attention is whole, too.
LIBRARY = "dot_product_attention"
# Write a part of their first operand, in place where nothing reads it later.
UPDATES = ("dynamic_update_slice", "scatter")


@dataclass(eq=False)
class Buffer:
    """Bytes in memory from the operation `start` to the last that reads them, `end`.

    Attributes:
        size: bytes.
        taken: bytes of them that are workspace: none of an argument or of a result.
        fixed: whether nothing may overwrite it.
    """

    size: int
    start: int
    taken: int
    fixed: bool = False
    end: int = -1


@dataclass
class Value:
    """A result: in a buffer, or computed where it is read from what is in `sources`."""

    size: int
    buffer: Buffer | None = None
    sources: tuple[Buffer, ...] = ()

    @property
    def read(self) -> tuple[Buffer, ...]:
        """What has to be in memory to compute it."""
        return (self.buffer,) if self.buffer else self.sources


@dataclass
class Operation:
    """One primitive of the program, calls opened up; operands and results are numbers of values."""

    equation: Any
    operands: list[int]
    results: list[int]

    @property
    def name(self) -> str:
        """The primitive's."""
        return self.equation.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's."""
        return self.equation.params

    @property
    def joins(self) -> bool:
        """Whether it is a product of matrices that have several axes for their rows or columns."""
        if self.name != "dot_general":
            return False
        contracted, batch = self.params["dimension_numbers"]
        sides = zip(self.equation.invars, contracted, batch, strict=True)
        return any(atom.aval.ndim - len(over) - len(along) > 1 for atom, over, along in sides)

    @property
    def sums(self) -> bool:
        """Whether it reads operands as they are computed, and has a result in memory."""
        return self.name in SUMS

    @property
    def updates(self) -> bool:
        """Whether it writes a part of its first operand."""
        return self.name.startswith(UPDATES)

    @property
    def fuses(self) -> bool:
        """Whether its result is computed where it is read."""
        return not (self.name in WHOLE or self.name.startswith(LIBRARY) or self.sums or self.updates)


def workspace(
    closed: ClosedJaxpr, donated: Sequence[bool], *, platform: str, carried: Sequence[int] | None = None
) -> int:
    """Bytes that a program needs beside its arguments and results, donated buffers counted once.

    Args:
        closed: the program.
        donated: which of its arguments it may overwrite.
        platform: what it is compiled for, as jax calls it: "cpu" or "cuda".
        carried: of a loop's body, the number of the argument that each result is written to, -1 where it is none;
            None where each goes to the first donated argument of its shape.
    """
    return _Reader(closed, donated, platform, carried).peak()


class _Reader:
    """Gives every value that is in memory a buffer, and adds up what is there at once."""

    def __init__(self, closed: ClosedJaxpr, donated: Sequence[bool], platform: str, carried: Sequence[int] | None):
        self.platform = platform
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        self.inner: dict[int, int] = {}  # workspace of a loop's body, by operation
        self.reuses: list[tuple[Buffer, Buffer, int]] = []  # a buffer, the one it may take over, and when
        jaxpr = closed.jaxpr
        arguments = [self._new(var.aval) for var in jaxpr.invars]
        self.results = self._open(jaxpr, dict(zip(jaxpr.invars, arguments, strict=True)))
        for number, donate in zip(arguments, donated, strict=True):
            self.values[number].buffer = self._hold(self.values[number].size, 0, taken=False, fixed=not donate)
        self.shared = self._find_shared()
        for index, operation in enumerate(self.operations):
            self._place(index, operation)
        self._place_results(arguments, donated, carried)

    def peak(self) -> int:
        """Most bytes taken at once."""
        for buffer, old, index in self.reuses:
            if old.end == index and old.size >= buffer.size and not old.fixed:
                # The same bytes under another name.
                buffer.taken, old.end = min(buffer.taken, old.taken), index - 1
        ends = len(self.operations) + 1
        change = [0] * (ends + 2)
        for buffer in self.buffers:
            if buffer.end >= buffer.start:
                change[buffer.start] += buffer.taken
                change[buffer.end + 1] -= buffer.taken
        most = now = 0
        for index in range(ends + 1):
            now += change[index]
            most = max(most, now + self.inner.get(index, 0))
        return most

    def _new(self, aval: Any) -> int:
        self.values.append(Value(aval.size * aval.dtype.itemsize))
        return len(self.values) - 1

    def _hold(self, size: int, start: int, *, taken: bool = True, fixed: bool = False) -> Buffer:
        self.buffers.append(Buffer(size, start, size if taken else 0, fixed, start))
        return self.buffers[-1]

    def _open(self, jaxpr: Jaxpr, known: dict[Any, int]) -> list[int]:
        """Lists the operations of a program and of those it calls; the numbers of its results."""
        for var in jaxpr.constvars:
            known.setdefault(var, self._new(var.aval))

        def number(atom: Any) -> int:
            return self._new(atom.aval) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands = [number(atom) for atom in equation.invars]
            called = called_jaxpr(equation)
            if called is None:
                results = [self._new(var.aval) for var in equation.outvars]
                self.operations.append(Operation(equation, operands, results))
            else:
                results = self._open(called, dict(zip(called.invars, operands, strict=True)))
            known.update(zip(equation.outvars, results, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def _find_shared(self) -> set[int]:
        """Values that could fuse and are in memory all the same.

        They are less than what they are made from, and are read in several places or are but a small part of it.
        """
        roots: dict[int, frozenset[int]] = {}
        for operation in self.operations:
            made_from = frozenset().union(*(roots.get(number, {number}) for number in operation.operands))
            roots |= {number: made_from if operation.fuses else frozenset((number,)) for number in operation.results}
        shared: set[int] = set()
        readers = {number: {len(self.operations)} for number in self.results}
        for index, operation in reversed(list(enumerate(self.operations))):
            reading = {index}
            if operation.fuses and operation.name not in VIEWS:
                size = max(self.values[number].size for number in operation.results)
                whole = sum(self.values[root].size for root in roots[operation.results[0]])
                reading = set().union(*(readers.get(number, ()) for number in operation.results))
                if (len(reading) > 1 and 1.5 * size <= whole) or (operation.name in PARTS and 2 * size <= whole):
                    shared.update(operation.results)
                    reading = {index}
            elif operation.fuses:
                reading = set().union(*(readers.get(number, ()) for number in operation.results))
            for number in operation.operands:
                readers.setdefault(number, set()).update(reading)
        return shared

    def _read(self, number: int, index: int) -> tuple[Buffer, ...]:
        """Keeps what a value is computed from until an operation."""
        for buffer in self.values[number].read:
            buffer.end = max(buffer.end, index)
        return self.values[number].read

    def _write(self, number: int, index: int, sources: Sequence[Buffer] = ()) -> Buffer:
        """Gives a value a buffer, which may be one of `sources` if nothing reads that later."""
        value = self.values[number]
        value.buffer = self._hold(value.size, index)
        self.reuses += ((value.buffer, old, index) for old in sources if old.size == value.size)
        return value.buffer

    def _settle(self, number: int, index: int) -> Buffer:
        """The buffer of a value that an operation takes whole."""
        sources = self._read(number, index)
        return self.values[number].buffer or self._write(number, index, sources)

    def _place(self, index: int, operation: Operation) -> None:
        operands, results = operation.operands, operation.results
        if not any(self.values[number].size for number in results):
            return
        if operation.name in VIEWS:
            for operand, result in zip(operands, results, strict=True):
                self.values[result].buffer = self.values[operand].buffer
                self.values[result].sources = self.values[operand].sources
        elif operation.fuses and self.shared.isdisjoint(results):
            made_from = tuple(dict.fromkeys(buffer for number in operands for buffer in self.values[number].read))
            for result in results:
                self.values[result].sources = made_from
        elif operation.fuses or operation.sums:
            # On CPU a sum is taken in two steps, of what is in memory.
            if operation.sums and self.platform == "cpu" and len(results) == 1:
                self._settle(operands[0], index)
            sources = [buffer for number in operands for buffer in self._read(number, index)]
            for result in results:
                self._write(result, index, sources)
        elif operation.updates:
            for number in operands[1:]:
                self._read(number, index)
            self._write(results[0], index, [self._settle(operands[0], index)])
        else:
            self._place_whole(index, operation)

    def _place_whole(self, index: int, operation: Operation) -> None:
        held = [self._settle(number, index) for number in operation.operands]
        carried: dict[int, int] = {}  # results that take the buffer of an operand
        params = operation.params
        match operation.name:
            case "while":
                consts = params["cond_nconsts"] + params["body_nconsts"]
                carried = {i: consts + i for i in range(len(operation.results))}
                self.inner[index] = self._inside(params["body_jaxpr"], params["body_nconsts"], len(carried))
            case "scan":
                consts, carries = params["num_consts"], params["num_carry"]
                carried = {i: consts + i for i in range(carries)}
                self.inner[index] = self._inside(params["jaxpr"], consts, carries)
            case "cond":
                self.inner[index] = max(
                    workspace(branch, [False] * len(branch.jaxpr.invars), platform=self.platform)
                    for branch in self._branches(params)
                )
            case "optimization_barrier":
                carried = {i: i for i in range(len(held))}
            case "pallas_call":
                carried = {result: operand for operand, result in params["input_output_aliases"]}
        for place, number in enumerate(operation.results):
            buffer = self._write(number, index, [held[carried[place]]] if place in carried else ())
            # A product of joined axes has another shape in memory on CPU, and what reads it no place in it.
            buffer.fixed = operation.joins and self.platform == "cpu"

    def _branches(self, params: dict[str, Any]) -> Sequence[ClosedJaxpr]:
        """Those that may run: where the platform decides, its own."""
        platforms = params.get("branches_platforms")
        if platforms is None:
            return params["branches"]
        own = [i for i, names in enumerate(platforms) if names and self.platform in names]
        return [params["branches"][own[0] if own else platforms.index(None)]]

    def _inside(self, body: ClosedJaxpr, consts: int, carries: int) -> int:
        """Workspace of a loop's body, which overwrites what it carries."""
        count = len(body.jaxpr.invars)
        donated = [consts <= i < consts + carries for i in range(count)]
        carried = [consts + i if i < carries else -1 for i in range(len(body.jaxpr.outvars))]
        return workspace(body, donated, platform=self.platform, carried=carried)

    def _place_results(self, arguments: Sequence[int], donated: Sequence[bool], carried: Sequence[int] | None) -> None:
        """Results are no workspace; but one is where the argument whose buffer it goes to is still read."""
        last, free = len(self.operations), [i for i, donate in enumerate(donated) if donate]
        for place, number in enumerate(self.results):
            if carried is not None:
                target = carried[place] if carried[place] >= 0 else None
                if target is None:  # a slice of what the loop gives, written as it is computed
                    self._read(number, last)
                    continue
            else:
                target = next((i for i in free if self.values[arguments[i]].size == self.values[number].size), None)
                if target is not None:
                    free.remove(target)
            buffer = self._settle(number, last)
            if target is None:
                buffer.taken = 0
                continue
            argument = self.values[arguments[target]].buffer
            assert argument is not None
            if buffer is not argument and (argument.end < buffer.start):
                buffer.taken = 0


def called_jaxpr(equation: Any) -> Jaxpr | None:
    """The program that an equation calls as it stands, None where it is a primitive."""
    name = equation.primitive.name
    if name in WHOLE | SUMS or name.startswith((*UPDATES, LIBRARY)):
        return None
    for value in equation.params.values():
        jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(jaxpr, Jaxpr) and len(jaxpr.invars) == len(equation.invars):
            return jaxpr
    return None
