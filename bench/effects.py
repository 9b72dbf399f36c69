"""What one instruction of a program reads, writes, and moves from its operands to its results."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.hlo import Computation, Instruction, Module, skip

# Instructions whose results are no longer the elements of their operands.
REDUCING = {"compare", "convolution", "custom-call", "dot", "reduce", "reduce-window"}
SLICING = {"dynamic-slice", "gather", "slice"}


@dataclass
class Effect:
    """What one instruction does: elements needed of each operand, and what becomes of its results.

    Attributes:
        needed: elements by operand number.
        in_place: operand number by result number.
        written: elements by result number.
        carried: numbers of the operands whose elements a result holds, by result number.
    """

    needed: dict[int, float] = field(default_factory=dict)
    in_place: dict[int, int] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)
    carried: dict[int, set[int]] = field(default_factory=dict)


def read_effect(instruction: Instruction, operands: Sequence[Instruction], module: Module) -> Effect:
    """What an instruction that launches something does with its operands."""
    if instruction.opcode in ("custom-call", "sort"):
        aliases = instruction.aliases
        return Effect(
            needed={i: operand.size for i, operand in enumerate(operands)},
            in_place={output: operand for output, operand in aliases.items()},
            written={i: 0 if i in aliases else shape.size for i, shape in enumerate(instruction.shapes)},
            carried={i: set() for i in range(len(instruction.shapes))},
        )
    if instruction.opcode == "fusion":
        return read_fusion(module.computations[instruction.called("calls") or ""])
    return read_fusion(_as_fusion(instruction, operands))


def read_fusion(fusion: Computation) -> Effect:
    """What a fusion does with its parameters."""
    root = fusion.root
    results = [fusion.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    numbers = {parameter.name: number for number, parameter in fusion.parameters.items()}
    effect, needed = Effect(), dict.fromkeys(fusion.by_name, 0.0)
    carried = _carried(fusion, numbers)
    updates = set()
    shapes = [(result, shape) for result in results for shape in result.shapes]
    for i, (result, shape) in enumerate(shapes):
        update = skip(fusion, result, "bitcast")
        effect.written[i], effect.carried[i] = shape.size, set(carried[result.name])
        needed[result.name] = result.size
        if update.opcode in ("dynamic-update-slice", "scatter"):
            target = skip(fusion, fusion.by_name[update.operands[0]], "bitcast")
            if target.opcode == "parameter":
                updates.add(update.name)
                new = _update_operand(update, fusion)
                effect.in_place[i] = numbers[target.name]
                effect.written[i], effect.carried[i] = new.size, set(carried[new.name])
    for instruction in reversed(fusion.instructions):
        count = needed[instruction.name]
        for i, name in enumerate(instruction.operands if count else ()):
            operand = fusion.by_name[name]
            more = (
                0.0 if not i and instruction.name in updates else _operand_need(instruction, i, operand, fusion, count)
            )
            needed[name] = min(needed[name] + more, operand.size)
    effect.needed = {number: needed[name] for name, number in numbers.items()}
    return effect


def _carried(fusion: Computation, numbers: dict[str, int]) -> dict[str, set[int]]:
    """The parameters whose elements each instruction's result holds, not summed up."""
    carried: dict[str, set[int]] = {}
    for instruction in fusion.instructions:
        if instruction.opcode == "parameter":
            carried[instruction.name] = {numbers[instruction.name]}
        elif instruction.opcode in REDUCING:
            carried[instruction.name] = set()
        else:
            values = instruction.operands[:1] if instruction.opcode in SLICING else instruction.operands
            carried[instruction.name] = set().union(*(carried[name] for name in values))
    return carried


def _operand_need(user: Instruction, number: int, operand: Instruction, fusion: Computation, count: float) -> float:
    """Elements of an operand that `count` elements of its user's result need."""
    match user.opcode:
        case opcode if opcode in SLICING:
            return count if number == 0 else operand.size
        case "dynamic-update-slice" | "scatter" if number == 0:
            return max(count - _update_operand(user, fusion).size, 0.0)
        case "dynamic-update-slice" | "scatter" | "dot" | "convolution" | "sort" | "custom-call" | "fusion":
            return operand.size
        case "reduce" | "reduce-window" if number == 0:
            return operand.size * count / max(user.size, 1)
        case "tuple":
            return operand.size
    return count


def _update_operand(update: Instruction, fusion: Computation) -> Instruction:
    """The new values of a `dynamic-update-slice`, or of a `scatter` into one array."""
    return fusion.by_name[update.operands[1 if update.opcode == "dynamic-update-slice" else 2]]


def _as_fusion(instruction: Instruction, operands: Sequence[Instruction]) -> Computation:
    """An instruction by itself, in the form of a fusion."""
    parameters = [
        replace(operand, opcode="parameter", literal=str(i), operands=(), attributes="", root=False, name=f"p{i}")
        for i, operand in enumerate(operands)
    ]
    alone = replace(instruction, operands=tuple(p.name for p in parameters), root=True)
    return Computation(instruction.name, [*parameters, alone])
