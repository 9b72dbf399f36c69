"""What one run of a compiled program launches, reads, writes and copies, counted from its text.

Every instruction that is a kernel or a copy counts once for each round of its loops. It reads what its result needs of
each operand, so a slice costs the slice, and writes its result, so an update in place costs the update. A kernel of
ours counts each operand once and each result once; a result in an operand's buffer is that operand, and free where the
kernel is known to do no more than add to it. What a kernel reads by index the text does not tell, and has to be given.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from bench.effects import read_effect
from bench.hlo import Computation, Instruction, Module, skip

# Instructions that launch nothing.
FREE = {
    "add-dependency",
    "after-all",
    "async-done",
    "async-update",
    "bitcast",
    "constant",
    "copy-done",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
# A program that moves a smaller part of an argument has not copied it.
COPIED_PART = 0.25


@dataclass(frozen=True)
class Copy:
    """An argument of which a large part is written a second time.

    Attributes:
        argument: its number.
        instruction: name and result of what writes it.
        part: of the argument's elements, in one run of the program.
    """

    argument: int
    instruction: str
    part: float


@dataclass(frozen=True)
class Step:
    """One instruction that does something, and how often.

    Attributes:
        times: rounds of the loops around it.
        read, written: bytes of one round.
        moved: elements that one round writes again, by number of the argument that they come from.
    """

    instruction: Instruction
    times: int
    read: float
    written: float
    moved: dict[int, float]


@dataclass
class Traffic:
    """The sums over one run of a program.

    Attributes:
        open_loops: loops whose number of rounds the program finds out while it runs, for which the host waits; they
            are taken to walk once over what they slice.
    """

    steps: list[Step] = field(default_factory=list)
    open_loops: list[str] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Kernels and copies."""
        return sum(step.times for step in self.steps)

    @property
    def nbytes(self) -> float:
        """Bytes read and written."""
        return sum(step.times * (step.read + step.written) for step in self.steps)

    def copies(self, sizes: dict[int, int], *, runs: int = 1) -> list[Copy]:
        """Copies of the arguments in `sizes` (elements by number), in one of the `runs` that the program makes."""
        found = []
        for step in self.steps:
            for argument, moved in step.moved.items():
                part = moved * step.times / runs / sizes[argument] if argument in sizes else 0.0
                if part >= COPIED_PART:
                    name = f"{step.instruction.name} {step.instruction.opcode} {step.instruction.shapes[0]}"
                    found.append(Copy(argument, name, round(part, 2)))
        return found


def read_traffic(
    module: Module, *, added_to: frozenset[int] = frozenset(), reads: Mapping[str, float] = MappingProxyType({})
) -> Traffic:
    """Counts one run of a program.

    Args:
        module: the program.
        added_to: numbers of the arguments of which kernels that update them change a few elements.
        reads: bytes that kernels read, by the name of those that read by index.
    """
    return _Reader(module, added_to, reads).read()


Origins = dict[str, list[int | None]]


class _Reader:
    """Walks the computations that run, and follows where each buffer comes from."""

    def __init__(self, module: Module, added_to: frozenset[int], reads: Mapping[str, float]):
        self.module = module
        self.added_to = added_to
        self.reads = reads
        self.traffic = Traffic()

    def read(self) -> Traffic:
        """The whole program."""
        numbers: dict[int, list[int | None]] = {number: [number] for number in self.module.entry.parameters}
        self._walk(self.module.entry, numbers, 1)
        return self.traffic

    def _walk(self, computation: Computation, arguments: dict[int, list[int | None]], times: int) -> list[int | None]:
        origins: Origins = {}
        for instruction in computation.instructions:
            origins[instruction.name] = self._visit(instruction, computation, origins, arguments, times)
        return origins[computation.root.name]

    def _visit(
        self,
        instruction: Instruction,
        computation: Computation,
        origins: Origins,
        arguments: dict[int, list[int | None]],
        times: int,
    ) -> list[int | None]:
        """Counts an instruction: where each of its results comes from."""
        given = [origins[name] for name in instruction.operands]
        nowhere: list[int | None] = [None] * len(instruction.shapes)
        match instruction.opcode:
            case "parameter":
                known = arguments.get(int(instruction.literal), nowhere)
                return known if len(known) == len(nowhere) else nowhere
            case "tuple":
                return [origin for part in given for origin in part]
            case "get-tuple-element":
                return [given[0][instruction.index]] if instruction.index < len(given[0]) else nowhere
            case "bitcast" | "opt-barrier" | "copy-done" | "async-done":
                return given[0] if len(given[0]) == len(nowhere) else nowhere
            case "while":
                self._walk_loop(instruction, given[0], times)
                return given[0]
            case "call" | "async-start":
                called = self.module.computations[instruction.called("to_apply") or instruction.called("calls") or ""]
                return self._walk(called, dict(enumerate(given)), times)
            case "conditional":
                return self._walk_branches(instruction, given, times)
            case opcode if opcode in FREE:
                return nowhere
        return self._count(instruction, computation, given, times)

    def _walk_loop(self, loop: Instruction, given: list[int | None], times: int) -> None:
        body = self.module.computations[loop.called("body") or ""]
        condition = self.module.computations[loop.called("condition") or ""]
        rounds = loop.trip_count
        if rounds is None:
            rounds = 1
            if not runs_once(condition, body):
                self.traffic.open_loops.append(loop.name)
                rounds = max(self._slices(body), default=1)
        self._walk(condition, {0: given}, times * rounds)
        self._walk(body, {0: given}, times * rounds)

    def _slices(self, computation: Computation) -> Iterator[int]:
        """How many slices make up the operand of each slice in a computation."""
        for instruction in computation.instructions:
            if instruction.opcode == "dynamic-slice":
                yield -(-computation.by_name[instruction.operands[0]].size // max(instruction.size, 1))
            called = instruction.called("calls")
            if called and instruction.opcode == "fusion":
                yield from self._slices(self.module.computations[called])

    def _walk_branches(self, instruction: Instruction, given: list[list[int | None]], times: int) -> list[int | None]:
        """Counts the branch that moves the most."""
        best, kept = Traffic(), self.traffic
        for number, name in enumerate(instruction.branches):
            self.traffic = Traffic()
            self._walk(self.module.computations[name], {0: given[number + 1]}, times)
            best = max(best, self.traffic, key=lambda traffic: traffic.nbytes)
        self.traffic = kept
        kept.steps += best.steps
        kept.open_loops += best.open_loops
        return [None] * len(instruction.shapes)

    def _count(
        self, instruction: Instruction, computation: Computation, given: list[list[int | None]], times: int
    ) -> list[int | None]:
        operands = [computation.by_name[name] for name in instruction.operands]
        effect = read_effect(instruction, operands, self.module)
        for result, operand in list(effect.in_place.items()):
            if not self._may_overwrite(computation, instruction, operand, given[operand]):
                # The update becomes a copy of everything.
                del effect.in_place[result]
                effect.needed[operand] = effect.written[result] = instruction.shapes[result].size
                effect.carried[result].add(operand)
        if instruction.opcode == "custom-call":
            for operand in effect.in_place.values():
                if given[operand][0] in self.added_to:
                    effect.needed[operand] = 0
        read = sum(effect.needed.get(i, 0) * operand.shapes[0].bits / 8 for i, operand in enumerate(operands))
        read = self.reads.get(kernel_name(instruction) or "", read)
        written = sum(effect.written[i] * shape.bits / 8 for i, shape in enumerate(instruction.shapes))
        moved: dict[int, float] = {}
        for result, carried in effect.carried.items():
            for operand in carried:
                origin = given[operand][0] if given[operand] else None
                if origin is not None:
                    moved[origin] = moved.get(origin, 0) + min(effect.written[result], effect.needed.get(operand, 0))
        self.traffic.steps.append(Step(instruction, times, read, written, moved))
        return [given[effect.in_place[i]][0] if i in effect.in_place else None for i in range(len(instruction.shapes))]

    def _may_overwrite(
        self, computation: Computation, instruction: Instruction, operand: int, origin: list[int | None]
    ) -> bool:
        """Whether an operand's buffer is free to be updated: no caller keeps it, and nothing reads it later."""
        if origin[0] is not None and origin[0] not in self.module.donated:
            return False
        position = computation.position
        names = [instruction.operands[operand]]
        for name in names:
            source = computation.by_name[name]
            if source.opcode == "bitcast" and source.operands[0] not in names:
                names.append(source.operands[0])
            for user in computation.users.get(name, ()):
                if user.opcode == "bitcast" and user.name not in names:
                    names.append(user.name)
                elif user.opcode not in FREE and position[user.name] > position[instruction.name]:
                    return False
        return True


def kernel_name(call: Instruction) -> str | None:
    """The name of a kernel that is not XLA's own."""
    if "triton" in call.target:
        found = re.search(r'\bname = "([^"]+)"', call.attributes)
        return found[1] if found else call.name
    return "mosaic" if "mosaic" in call.target else None


def runs_once(condition: Computation, body: Computation) -> bool:
    """Whether a loop asks for a flag that its body clears."""
    flag = skip(condition, condition.root, "copy bitcast")
    if flag.opcode != "get-tuple-element" or body.root.opcode != "tuple":
        return False
    value = skip(body, body.by_name[body.root.operands[flag.index]], "copy bitcast broadcast")
    return value.opcode == "constant" and value.literal == "false"
