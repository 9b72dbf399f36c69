"""The text of a compiled XLA program, as computations of instructions."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_ALIAS = re.compile(r"\{([\d,\s]*)\}: \((\d+), \{[\d,\s]*\}")


@dataclass(frozen=True)
class Shape:
    """An array's element type and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Of one element."""
        known = BITS.get(self.dtype)
        # s32, u8, f8e4m3fn, ...: the number after the first letters.
        return known if known is not None else int(re.findall(r"\d+", self.dtype)[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return -(-self.size * self.bits // 8)

    def __str__(self) -> str:
        """As in the program's text."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        shapes: what it gives; several for a tuple, whose nesting is lost.
        operands: names.
        literal: what stands in the brackets, which is a parameter's number and a constant's value.
        attributes: everything after the brackets.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of everything that it gives."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def size(self) -> int:
        """Elements of everything that it gives."""
        return sum(shape.size for shape in self.shapes)

    def called(self, attribute: str) -> str | None:
        """Name of the computation in an attribute such as `calls` or `body`."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def branches(self) -> list[str]:
        """Computations of a `conditional`."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        names = (
            _NAME.findall(found[1]) if found else [self.called("true_computation"), self.called("false_computation")]
        )
        return [name for name in names if name]

    @property
    def index(self) -> int:
        """Of a `get-tuple-element`."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found[1]) if found else 0

    @property
    def trip_count(self) -> int | None:
        """Rounds of a `while` where XLA knows them."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """Of a `custom-call`."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def aliases(self) -> dict[int, int]:
        """Which output of a `custom-call` lies in which operand's buffer."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\}\))\}", self.attributes)
        pairs = _ALIAS.findall(found[1]) if found else ()
        return {int(output or 0): int(operand) for output, operand in pairs}


@dataclass
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @cached_property
    def position(self) -> dict[str, int]:
        """Where each instruction stands."""
        return {instruction.name: i for i, instruction in enumerate(self.instructions)}

    @property
    def root(self) -> Instruction:
        """What the computation gives."""
        return next(instruction for instruction in self.instructions if instruction.root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}


@dataclass
class Module:
    """A program.

    Attributes:
        donated: numbers of the parameters whose buffers results take over.
    """

    computations: dict[str, Computation]
    entry: Computation
    donated: frozenset[int]


def parse_module(text: str) -> Module:
    """Reads a program as `Compiled.as_text` gives it.

    Raises:
        ValueError: there is no entry computation in the text.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _without_comments(text):
        if line.endswith("{") and line.startswith(("%", "ENTRY")):
            current = Computation(line.removeprefix("ENTRY ").split(" ")[0].split("(")[0].lstrip("%"))
            computations[current.name] = current
            entry = current if line.startswith("ENTRY") else entry
        elif line == "}":
            current = None
        elif current is not None and " = " in line:
            current.instructions.append(_parse_instruction(line.strip()))
    if entry is None:
        raise ValueError("the text has no ENTRY computation; it must be an HLO program")
    header = text.partition("\n")[0]
    alias = re.search(r"input_output_alias=\{(.*?\))\s*\}", header)
    donated = frozenset(int(number) for _, number in _ALIAS.findall(alias[1])) if alias else frozenset()
    return Module(computations, entry, donated)


def _without_comments(text: str) -> Iterator[str]:
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        yield line.rstrip()


def _parse_instruction(line: str) -> Instruction:
    root = line.startswith("ROOT ")
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = start + _closing(rest[start:])
    literal = rest[start + 1 : end - 1]
    opcode = rest[:start]
    return Instruction(
        name=name.lstrip("%"),
        opcode=opcode,
        shapes=tuple(parse_shapes(kind)),
        operands=() if opcode in ("constant", "parameter") else tuple(_NAME.findall(literal)),
        literal=literal,
        attributes=rest[end:],
        root=root,
    )


def parse_shapes(text: str) -> Iterator[Shape]:
    """The arrays of a type, flat."""
    for dtype, dims in _ARRAY.findall(text):
        yield Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))


def _closing(text: str) -> int:
    """One past the bracket that closes the one at the beginning."""
    depth = quoted = 0
    for i, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character == "(") - (character == ")")
            if not depth:
                return i + 1
    raise ValueError(f"unbalanced brackets: {text[:80]}")


def skip(computation: Computation, instruction: Instruction, opcodes: str) -> Instruction:
    """What an instruction is made from by such opcodes alone."""
    while instruction.opcode in opcodes.split():
        instruction = computation.by_name[instruction.operands[0]]
    return instruction
