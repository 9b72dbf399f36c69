"""What a program compiled for a GPU takes: memory, traffic, copies of its arguments, launches, kernels."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.gpu_target import Target
from bench.hlo import Module, parse_module
from bench.kernel_stats import DUMP_OPTIONS, Kernel, read_kernels, read_printed
from bench.traffic import Copy, Traffic, kernel_name, read_traffic

# The sum of a matrix product is not split and added up by a second kernel: whether that pays, XLA finds out on a GPU by
# trying, and would guess here.
PRODUCTS = {"xla_gpu_experimental_force_split_k": 1}
# Arguments of which a step changes one slot or one token.
ADDED_TO = r"\b(pos|window)$"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The figures of one run of a program.

    Attributes:
        temp: bytes of workspace.
        donated: bytes of arguments whose buffers results take over.
        output: bytes of the results, donated buffers included.
        arguments: bytes by name of the argument.
        launches: kernels and copies.
        moved: bytes read and written.
        copies: of the arguments asked about, as text.
        open_loops: loops whose length the host waits for.
        heaviest: the instructions that move the most, as text.
        called: names of those that are not XLA's own.
        unread: kernels whose registers stayed unknown.
    """

    temp: int
    donated: int
    output: int
    arguments: dict[str, int]
    launches: int
    moved: float
    copies: tuple[str, ...] = ()
    open_loops: tuple[str, ...] = ()
    heaviest: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    called: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def size(self, pattern: str) -> int:
        """Bytes of the arguments whose names match."""
        return sum(nbytes for name, nbytes in self.arguments.items() if re.search(pattern, name))


def compile_lowered(
    lowered: Any,
    target: Target,
    *,
    watched: str,
    runs: int = 1,
    reads: Mapping[str, float] = MappingProxyType({}),
) -> Compiled:
    """Compiles a program and reads it.

    Args:
        lowered: as `gpu_target.lower_for` gives it.
        target: the GPU.
        watched: pattern of the names of the arguments, such as ``state.stores[0].k``, that must not be copied.
        runs: how many times the program does what one run of it is meant to be, such as the steps of a block.
        reads: bytes that kernels read by index, by name of the kernel.

    Raises:
        ValueError: no argument is called like that.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as printed:
        with _stdout_to(printed.fileno()):
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **DUMP_OPTIONS, **PRODUCTS})
        kernels, unread = read_kernels(Path(folder), target.architecture)
        printed.seek(0)
        kernels += read_printed(printed.read())
    memory = compiled.memory_analysis()
    module = parse_module(compiled.as_text())
    names = argument_names(module)
    numbers = [number for number, name in names.items() if re.search(watched, name)]
    if not numbers:
        raise ValueError(f"no argument matches {watched!r}; the program has {', '.join(names.values())}")
    added_to = frozenset(number for number, name in names.items() if re.search(ADDED_TO, name))
    traffic = read_traffic(module, added_to=added_to, reads=reads)
    called = called_kernels(traffic)
    known = [kernel.name for kernel in kernels]
    unread += [name for name in called if not any(name in other for other in known)]
    copies = traffic.copies({n: module.entry.parameters[n].size for n in numbers}, runs=runs)
    heaviest = sorted(traffic.steps, key=lambda step: -step.times * (step.read + step.written))
    return Compiled(
        temp=memory.temp_size_in_bytes,
        donated=memory.alias_size_in_bytes,
        output=memory.output_size_in_bytes,
        arguments={names[number]: parameter.nbytes for number, parameter in module.entry.parameters.items()},
        launches=round(traffic.launches / runs),
        moved=traffic.nbytes / runs,
        copies=tuple(describe_copies(copies, names)),
        open_loops=tuple(traffic.open_loops),
        heaviest=tuple(
            f"{step.times * (step.read + step.written) / runs / 2**20:.1f} MiB {step.instruction.name}"
            for step in heaviest[:8]
        ),
        kernels=tuple(kernels),
        called=tuple(other for other in known if any(name in other for name in called)),
        unread=tuple(unread),
    )


def called_kernels(traffic: Traffic) -> list[str]:
    """Names of the kernels that the program calls, other than XLA's own."""
    names = (kernel_name(step.instruction) for step in traffic.steps)
    return list(dict.fromkeys(name for name in names if name))


def argument_names(module: Module) -> dict[int, str]:
    """Names of the program's arguments by number, as the function's signature has them."""
    names = {}
    for number, parameter in module.entry.parameters.items():
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', parameter.attributes)
        names[number] = found[1].replace("\\'", "'") if found else f"argument {number}"
    return names


def describe_copies(copies: Sequence[Copy], names: dict[int, str]) -> list[str]:
    """One line for each argument that is copied."""
    return [f"{names[copy.argument]} ({copy.part:.0%}) by {copy.instruction}" for copy in copies]


@contextmanager
def _stdout_to(descriptor: int) -> Iterator[None]:
    """Sends what the compiler prints, beneath Python, to another file descriptor."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(descriptor, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
