"""Registers, shared memory and spills of a compiled program's kernels, read from what XLA dumps.

The dump has every kernel in PTX, which the assembler `ptxas` is asked about, and the list of launches.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DUMP_OPTIONS = {"xla_dump_emitter_re": "ptx"}  # newer releases dump no PTX without it
_LAUNCH = re.compile(
    r"^\s*\d+: k(?:CustomKernel|Kernel)\s+\[[^\]]*\]\s+(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]"
)
_SHARED = re.compile(r"shared_memory: (\d+)")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a program.

    Attributes:
        grid: blocks of threads; None where that is not known.
        threads: of a block; None likewise.
        shared: bytes of shared memory of a block; None likewise.
        registers: of a thread.
        spilled: bytes that a thread stores to and loads from memory for want of registers.
    """

    name: str
    grid: int | None = None
    threads: int | None = None
    shared: int | None = None
    registers: int
    spilled: int


def find_ptxas() -> str | None:
    """The assembler: of the CUDA toolkit, or of the package nvidia-cuda-nvcc."""
    found = shutil.which("ptxas")
    spec = None if found else find_spec("nvidia")
    places = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    wheels = (path for place in places for path in sorted(Path(place).glob("*/bin/ptxas")))
    return found or next((str(path) for path in wheels), None)


def read_kernels(dump: Path, architecture: str) -> tuple[list[Kernel], list[str]]:
    """The kernels of the one program that was dumped into a folder, and the names of those that stayed unknown.

    Raises:
        ValueError: no assembler was found, or it refused a kernel.
    """
    ptxas = find_ptxas()
    if ptxas is None:
        raise ValueError("ptxas is not on PATH; install the CUDA toolkit or the package nvidia-cuda-nvcc")
    assembled: dict[str, tuple[int, int, int]] = {}
    for path in sorted(dump.glob("*.ptx")):
        assembled |= _assemble(ptxas, path, architecture)
    kernels, unknown = {}, []
    for path in dump.glob("*.thunk_sequence.txt"):
        for name, grid, threads, shared in read_launches(path.read_text()):
            if name in assembled:
                registers, spilled, static = assembled[name]
                kernels[name] = Kernel(
                    name=name,
                    grid=grid,
                    threads=threads,
                    shared=max(shared, static),
                    registers=registers,
                    spilled=spilled,
                )
            elif name not in unknown:
                unknown.append(name)
    return list(kernels.values()), unknown


def read_printed(text: str) -> list[Kernel]:
    """Kernels of Mosaic, which XLA does not dump, from what the assembler said while they were compiled.

    They take their shared memory at the launch; Mosaic itself refuses what is more than the GPU has.
    """
    found = read_assembly(text).items()
    return [Kernel(name=name, registers=registers, spilled=spilled) for name, (registers, spilled, _) in found]


def read_launches(text: str) -> list[tuple[str, int, int, int]]:
    """Name, blocks, threads and bytes of shared memory of each launch in XLA's list of thunks."""
    found = []
    for line in text.splitlines():
        match, shared = _LAUNCH.match(line), _SHARED.search(line)
        if match:
            blocks, threads = (_product(part) for part in match.group(2, 3))
            found.append((match[1], blocks, threads, int(shared[1]) if shared else 0))
    return found


def read_assembly(text: str) -> dict[str, tuple[int, int, int]]:
    """Registers, spilled bytes and static shared memory by kernel, from what ``ptxas -v`` says."""
    found = {}
    for part in text.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        static = re.search(r"(\d+) bytes smem", part)
        if registers and spills:
            spilled = int(spills[1]) + int(spills[2])
            found[part.partition("'")[0]] = int(registers[1]), spilled, int(static[1]) if static else 0
    return found


def _assemble(ptxas: str, path: Path, architecture: str) -> dict[str, tuple[int, int, int]]:
    if ".version" not in path.read_text():  # what stands in for a kernel that has been compiled before
        return {}
    command = [ptxas, "-v", f"-arch={architecture}", str(path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ptxas refused {path.name}: {done.stderr.strip()[-300:]}")
    return read_assembly(done.stderr)


def _product(text: str) -> int:
    product = 1
    for number in text.split(","):
        product *= int(number)
    return product
