"""The compile gate: reading compiled programs, its limits, and that it refuses what it must."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench import compile_gate
from bench.apart import Outcome, run_apart
from bench.compile_gate import MIB, format_markdown, judge
from bench.compiled import Compiled, argument_names
from bench.gate_figures import Figures
from bench.gate_rows import Row
from bench.hlo import Shape, parse_module
from bench.kernel_stats import Kernel, find_ptxas, read_assembly, read_launches
from bench.traffic import Traffic, read_traffic

ROOT = Path(__file__).parent.parent
BLOCK = 4 * 64 * 8 * 2  # bytes of bf16[4,64,8]

# A block of 16 steps over a donated cache: each appends a slot, reads one block of the cache, and sums it up.
PROGRAM = """\
HloModule jit_block, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%append (param_0: bf16[4,64,8], param_1: f32[4,1,8], param_2: s32[]) -> bf16[4,64,8] {
  %param_0 = bf16[4,64,8]{2,1,0} parameter(0)
  %param_1 = f32[4,1,8]{2,1,0} parameter(1)
  %convert.1 = bf16[4,1,8]{2,1,0} convert(%param_1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update.1 = bf16[4,64,8]{2,1,0} dynamic-update-slice(%param_0, %convert.1, %zero, %param_2, %zero)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%read (param_0: bf16[4,64,8], param_1: s32[]) -> f32[4,1,8] {
  %param_0 = bf16[4,64,8]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice.1 = bf16[4,16,8]{2,1,0} dynamic-slice(%param_0, %zero, %param_1, %zero), dynamic_slice_sizes={4,16,8}
  %wide = f32[4,16,8]{2,1,0} convert(%slice.1)
  %sum.1 = f32[4,8]{1,0} reduce(%wide, %zero), dimensions={1}, to_apply=%add
  ROOT %out = f32[4,1,8]{2,1,0} bitcast(%sum.1)
}

%body (arg: (bf16[4,64,8], f32[4,1,8], s32[])) -> (bf16[4,64,8], f32[4,1,8], s32[]) {
  %arg = (bf16[4,64,8]{2,1,0}, f32[4,1,8]{2,1,0}, /*index=2*/s32[]) parameter(0)
  %k = bf16[4,64,8]{2,1,0} get-tuple-element(%arg), index=0
  %x = f32[4,1,8]{2,1,0} get-tuple-element(%arg), index=1
  %i = s32[] get-tuple-element(%arg), index=2
  %append.1 = bf16[4,64,8]{2,1,0} fusion(%k, %x, %i), kind=kLoop, calls=%append
  %read.1 = f32[4,1,8]{2,1,0} fusion(%append.1, %i), kind=kInput, calls=%read
  ROOT %next = (bf16[4,64,8]{2,1,0}, f32[4,1,8]{2,1,0}, s32[]) tuple(%append.1, %read.1, %i)
}

%condition (arg.1: (bf16[4,64,8], f32[4,1,8], s32[])) -> pred[] {
  %arg.1 = (bf16[4,64,8]{2,1,0}, f32[4,1,8]{2,1,0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=2
  %end = s32[] constant(16)
  ROOT %less = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (k.1: bf16[4,64,8], x.1: f32[4,1,8]) -> (bf16[4,64,8], f32[4,1,8]) {
  %k.1 = bf16[4,64,8]{2,1,0} parameter(0), metadata={op_name="stores[0].k"}
  %x.1 = f32[4,1,8]{2,1,0} parameter(1), metadata={op_name="weights[\\'layers\\'][0].value"}
  %start = s32[] constant(0)
  %given = (bf16[4,64,8]{2,1,0}, f32[4,1,8]{2,1,0}, s32[]) tuple(%k.1, %x.1, %start)
  %loop = (bf16[4,64,8], f32[4,1,8], s32[]) while(%given), condition=%condition, body=%body, ROUNDS
  %k.2 = bf16[4,64,8]{2,1,0} get-tuple-element(%loop), index=0
  %x.2 = f32[4,1,8]{2,1,0} get-tuple-element(%loop), index=1
  ROOT %out.1 = (bf16[4,64,8]{2,1,0}, f32[4,1,8]{2,1,0}) tuple(%k.2, %x.2)
}
""".replace("ROUNDS", 'backend_config={"known_trip_count":{"n":"16"}}')


def read(text: str, *, added_to: tuple[int, ...] = ()) -> Traffic:
    """The traffic of a program's text."""
    return read_traffic(parse_module(text), added_to=frozenset(added_to))


def copies(text: str, *, runs: int = 16) -> list[str]:
    """The caches among the arguments that a program copies in one of its runs, by name."""
    module = parse_module(text)
    caches = {n: name for n, name in argument_names(module).items() if name in ("stores[0].k", "cache")}
    sizes = {number: module.entry.parameters[number].size for number in caches}
    return [caches[copy.argument] for copy in read_traffic(module).copies(sizes, runs=runs)]


def steps(traffic: Traffic) -> dict[str, tuple[int, float, float]]:
    """Rounds, bytes read and written by instruction."""
    return {step.instruction.name: (step.times, step.read, step.written) for step in traffic.steps}


def test_program_is_parsed():
    module = parse_module(PROGRAM)
    assert module.entry.name == "main" and module.donated == {0}
    assert argument_names(module) == {0: "stores[0].k", 1: "weights['layers'][0].value"}
    loop = module.entry.by_name["loop"]
    assert (loop.trip_count, loop.called("body"), loop.called("condition")) == (16, "body", "condition")
    assert loop.shapes == (Shape("bf16", (4, 64, 8)), Shape("f32", (4, 1, 8)), Shape("s32", ()))
    assert Shape("f8e4m3fn", (3,)).nbytes == Shape("pred", (3,)).nbytes == 3 and Shape("s4", (3,)).nbytes == 2
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module("module @jit_f {")


def test_updates_and_slices_cost_what_they_touch():
    index = 4  # bytes
    slot, block, row = 4 * 8 * 2, BLOCK // 4, 4 * 8 * 4
    assert steps(read(PROGRAM)) == {
        "less": (16, 2 * index, 1),
        "append.1": (16, row + index, slot),
        "read.1": (16, block + index, row),
    }
    assert read(PROGRAM).launches == 48
    assert copies(PROGRAM) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ((", input_output_alias={ {0}: (0, {}, may-alias) }", ""), "the caller keeps its cache"),
        (("fusion(%append.1, %i), kind=kInput", "fusion(%k, %i), kind=kInput"), "the cache is read after it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_update_that_cannot_be_in_place_is_a_copy(change: tuple[str, str], why: str):
    text = PROGRAM.replace(*change)
    assert steps(read(text))["append.1"] == (16, 4 * 8 * 4 + 4 + BLOCK, BLOCK)
    assert copies(text) == ["stores[0].k"]


def test_large_slice_that_is_written_is_a_copy():
    sliced = PROGRAM.replace("  %sum.1 = f32[4,8]{1,0} reduce(%wide, %zero), dimensions={1}, to_apply=%add\n", "")
    sliced = sliced.replace("bitcast(%sum.1)", "bitcast(%wide)")
    assert copies(sliced.replace("ROOT %out = f32[4,1,8]", "ROOT %out = f32[4,16,8]")) == ["stores[0].k"]


def test_copy_of_an_argument_is_found_behind_loops_and_bitcasts():
    text = PROGRAM.replace(
        "  %read.1 =",
        "  %cast = bf16[256,8]{1,0} bitcast(%append.1)\n  %copy.1 = bf16[256,8]{0,1} copy(%cast)\n  %read.1 =",
    )
    assert steps(read(text))["copy.1"] == (16, BLOCK, BLOCK)
    assert copies(text) == ["stores[0].k"]


def test_loop_of_unknown_length_walks_once_over_what_it_slices():
    traffic = read(PROGRAM.replace('"known_trip_count":{"n":"16"}', ""))
    assert traffic.open_loops == ["loop"]
    assert steps(traffic)["read.1"][0] == 4


def test_loop_that_stands_for_an_if_runs_once():
    text = PROGRAM.replace('"known_trip_count":{"n":"16"}', "").replace("s32[]) tuple(%append.1, %read.1, %i)", "X")
    text = text.replace("X", "s32[]) tuple(%append.1, %read.1, %off)").replace(
        "  %append.1 = ", "  %off = pred[] constant(false)\n  %append.1 = "
    )
    text = text.replace("  ROOT %less = pred[] compare(%i.1, %end), direction=LT", "  ROOT %less = s32[] copy(%i.1)")
    traffic = read(text)
    assert traffic.open_loops == [] and steps(traffic)["append.1"][0] == 1


def test_kernel_counts_operands_once_and_results_in_their_buffers_not_at_all():
    call = (
        '  %append.1 = (f32[4,1,8]{2,1,0}, bf16[4,64,8]{2,1,0}) custom-call(%x, %k), custom_call_target="kernel", '
        "output_to_operand_aliasing={{1}: (1, {})}\n"
        "  %moved = bf16[4,64,8]{2,1,0} get-tuple-element(%append.1), index=1\n"
    )
    old = "  %append.1 = bf16[4,64,8]{2,1,0} fusion(%k, %x, %i), kind=kLoop, calls=%append\n"
    text = PROGRAM.replace(old, call).replace("fusion(%append.1, %i)", "fusion(%moved, %i)")
    text = text.replace("tuple(%append.1, %read.1", "tuple(%moved, %read.1")
    assert steps(read(text))["append.1"] == (16, BLOCK + 128, 128)
    assert steps(read(text, added_to=(0,)))["append.1"] == (16, 128, 128)
    assert copies(text) == []
    # What follows the kernel still knows the cache.
    assert copies(
        text.replace("%moved, %read.1, %i)", "%moved, %copy.1, %i)").replace(
            "  ROOT %next", "  %copy.1 = bf16[4,64,8]{2,1,0} copy(%moved)\n  ROOT %next"
        )
    ) == ["stores[0].k"]


def test_programs_of_this_jax_are_read():
    """Whatever the release, a matrix product is counted, and an update is in place or a copy."""
    x, w = jnp.zeros((8, 256)), jnp.zeros((256, 512))
    module = parse_module(jax.jit(jnp.matmul).lower(x, w).compile().as_text() or "")
    least = 4 * (8 * 256 + 256 * 512 + 8 * 512)
    assert least <= read_traffic(module).nbytes < 2 * least

    def update(cache: jax.Array, i: jax.Array) -> jax.Array:
        return cache.at[i].set(1.0)

    for donate, copied in ((), ["cache"]), ((0,), []):
        text = jax.jit(update, donate_argnums=donate).lower(w, jnp.int32(3)).compile().as_text() or ""
        assert copies(text, runs=1) == copied


def test_dump_is_read():
    launches = """\
013: kCustomKernel [source | sink] gemm_fusion_dot_4 grid: [96, 2, 1] threads: [64, 1, 1]  shared_memory: 768 bytes
   017: kCopy         [source        | next=018 (1) ] kCopy
   001: kKernel [source | sink] select_top grid: [8, 1, 1] threads: [128, 1, 1]
"""
    assert read_launches(launches) == [("gemm_fusion_dot_4", 192, 64, 768), ("select_top", 8, 128, 0)]
    assembly = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'product' for 'sm_90a'
ptxas info    : Function properties for product
    40 bytes stack frame, 36 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compiling entry function 'copy' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""
    assert read_assembly(assembly) == {"product": (255, 60, 2048), "copy": (10, 0, 0)}


DECODE = Row(gpu="a100", program="decode", model="qwen-7b", policy="full", shape="b16-full16k")
GOOD = Figures(
    temp=100 * MIB,
    logits=50 * MIB,
    donated=1000,
    cache=1000,
    launches=400,
    per_layer=12.0,
    moved=1.1e9,
    floor=1e9,
    program=Compiled(temp=0, donated=1000, output=1000, arguments={}, launches=400, moved=1e9),
)
KERNEL = Kernel(name="compact", grid=1, threads=128, shared=166912, registers=255, spilled=0)


def refuse(**changes: object) -> tuple[str, ...]:
    """What the gate says about a decode step that is good but for some figures, of itself or of its program."""
    own = {name: value for name, value in changes.items() if hasattr(GOOD, name)}
    program = replace(GOOD.program, **{name: value for name, value in changes.items() if name not in own})
    return judge(Outcome(DECODE, replace(GOOD, **own, program=program))).problems


def test_good_step_passes():
    assert refuse() == refuse(kernels=(KERNEL,), called=("compact",)) == ()
    assert refuse(kernels=(replace(KERNEL, name="loop_add_fusion", spilled=8),)) == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"copies": ("k (100%) by copy.1",)}, "copies k"),
        ({"donated": 999}, "takes over"),
        ({"temp": 115 * MIB}, "65.0 MiB beside its logits"),
        ({"moved": 1.11e9}, "1.11 times the floor"),
        ({"per_layer": 12.5}, "12.5 kernels a layer"),
        ({"open_loops": ("while.3",)}, "waits for while.3"),
        ({"unread": ("decode_attention",)}, "decode_attention could not be read"),
        ({"kernels": (replace(KERNEL, spilled=8),), "called": ("compact",)}, "compact spills 8 bytes"),
        ({"kernels": (replace(KERNEL, shared=166913),)}, "166913 bytes of shared memory"),
    ],
)
def test_each_limit_refuses(changes: dict[str, object], problem: str):
    (found,) = refuse(**changes)
    assert problem in found


def test_control_passes_only_if_it_is_refused_for_its_reason():
    control = Row(gpu="h200", program="control: kernel that spills")
    program = replace(GOOD.program, kernels=(replace(KERNEL, spilled=8),), called=("compact",))
    spilling = replace(GOOD, program=program)
    assert judge(Outcome(control, spilling)).problems == ()
    assert "should have been refused" in judge(Outcome(control, GOOD)).problems[0]
    assert "should have been refused" in judge(Outcome(control, None, "ImportError: no such module")).problems[0]


def test_operation_without_a_kernel_is_refused_unless_xla_was_asked_for():
    row = Row(gpu="a100", program="select_top", model="qwen-7b", shape="b1-k2048")
    called = replace(GOOD, program=replace(GOOD.program, called=("select_top",)))
    assert judge(Outcome(row, GOOD)).problems == ("calls no kernel of its own",)
    assert judge(Outcome(row, called)).problems == ()
    assert judge(Outcome(replace(row, implementation="xla"), GOOD)).problems == ()


def test_table_has_every_row_and_its_problems():
    table = format_markdown([judge(Outcome(DECODE, GOOD)), judge(Outcome(DECODE, None, "its process died"))])
    assert table.count("| decode | qwen-7b | full | b16-full16k |") == 2
    assert "| 12 | 1.100 |" in table and "its process died" in table


def test_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_gate, "RESULTS", tmp_path)
    program = replace(GOOD.program, kernels=(KERNEL, replace(KERNEL, name="loop_add_fusion")), called=("compact",))
    outcomes = Outcome(DECODE, replace(GOOD, program=program)), Outcome(DECODE, None, "its process died")
    compile_gate.write_results([judge(outcome) for outcome in outcomes], ["--quick"])
    good, bad = json.loads((tmp_path / "compile_gate.json").read_text())["rows"]
    assert (good["program"], good["temp"], good["ratio"], good["problems"]) == ("decode", 100 * MIB, 1.1, [])
    assert [kernel["name"] for kernel in good["kernels"]] == ["compact"]
    assert bad["problems"] == ["its process died"]
    assert "2 rows, 1 refused" in (tmp_path / "compile_gate.md").read_text()


def test_errors_stay_with_their_item():
    outcomes = {o.item: o for o in run_apart(math.sqrt, [4.0, -1.0, 9.0], processes=1, seconds=60)}
    assert (outcomes[4.0].value, outcomes[9.0].value) == (2.0, 3.0)
    assert outcomes[-1.0].value is None and "ValueError" in outcomes[-1.0].error


@pytest.mark.parametrize("fresh", [False, True])
def test_items_share_a_process_unless_each_is_to_have_its_own(fresh: bool):
    outcomes = run_apart(os.readlink, ["/proc/self", "/proc/self"], processes=1, seconds=60, fresh=fresh)
    assert len({outcome.value for outcome in outcomes}) == 1 + fresh


def test_process_that_dies_costs_one_item():
    abort, nothing = signal.SIGABRT, signal.SIGCHLD
    outcomes = [(o.item, o.error) for o in run_apart(signal.raise_signal, [abort, nothing], processes=1, seconds=60)]
    assert outcomes[0] == (abort, "its process was ended by SIGABRT: it said nothing") and outcomes[1] == (nothing, "")


def test_item_that_takes_too_long_is_ended():
    (outcome,) = run_apart(time.sleep, [600.0], processes=1, seconds=1)
    assert outcome.error == "took more than 1 s"


needs_compiler = pytest.mark.skipif(
    (not importlib.util.find_spec("jax_plugins") or not importlib.util.find_spec("jax_plugins.xla_cuda13"))
    or find_ptxas() is None,
    reason="needs the gate extra (jax-cuda13-plugin, jax-cuda13-pjrt) and ptxas",
)


def run_gate(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command; the tests' own compiler flags are for CPU."""
    command = [sys.executable, "-m", "bench.compile_gate", "--jobs", "1", *words]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@needs_compiler
def test_gate_refuses_its_controls():
    done = run_gate("--only", "control")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 4


@needs_compiler
def test_gate_fails_on_a_copy_and_names_the_row():
    done = run_gate("--implementation", "xla", "--only", "a100", "compact smollm2", "b1-k2048")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "REFUSED a100 compact smollm2-135m b1-k2048" in done.stdout and "copies arrays[0]" in done.stdout
