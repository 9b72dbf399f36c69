"""What ``--dry-run`` prints: the bytes of a run before anything is loaded, whether they fit, and what would."""

from collections.abc import Callable
from dataclasses import replace

from jkv.engine import Engine
from jkv.memory import largest_batch, largest_budget, longest_answer, measure_programs, total_memory
from jkv.plan import describe_plan, describe_programs, format_bytes, make_plan
from jkv.policies import get_policy
from jkv.run import Run


def describe_run(run: Run, *, name: str, memory: int) -> str:
    """The bytes of the very run that would be started.

    Args:
        run: its weights may be shapes.
        name: of the policy, as the user gave it.
        memory: bytes that it may take.
    """
    plan, engine = run.stats.plan, run.engine
    baseline = replace(engine, policy=get_policy("full"))
    sizes = {"batch": plan.batch, "length": plan.length, "dtype": run.llm.dtype}
    full = make_plan(engine.config, baseline.policy, engine.spec, **sizes)
    where = {"batch": run.slots, "prompt": run.padded_prompt, "platform": run.llm.platform}
    refills = len(run.rows) > run.slots
    programs, of_full = (measure_programs(each, **where, refills=refills) for each in (engine, baseline))
    total = total_memory(programs)
    verdict = "fits" if total <= memory else "does not fit"
    lines = [
        describe_plan(plan, full, (total, total_memory(of_full)), name=name),
        describe_programs(programs),
        f"{verdict} in {format_bytes(memory)}" + ("" if total <= memory else f"; {_find_remedies(run, memory)}"),
    ]
    return "\n".join(lines)


def _find_remedies(run: Run, memory: int) -> str:
    """What would fit, if one thing is changed and all else is as it is."""
    engine, longest = run.engine, max(map(len, run.prompts), default=0)
    where = {"prompt": run.padded_prompt, "memory": memory, "platform": run.llm.platform}
    room = min(run.config.max_new_tokens, engine.config.max_position - longest)

    def for_answers(new: int) -> Engine:
        return run.llm.engine(run.policy, engine.sampling, max_len=longest + new, max_new=new, max_prompt=longest)

    finders: dict[str, Callable[[], int]] = {
        "--slots": lambda: largest_batch(engine, **where, refills=True),
        "--max-new-tokens": lambda: longest_answer(for_answers, batch=run.slots, most=room, **where),
        "a budget of": lambda: largest_budget(engine, batch=run.slots, **where),
    }
    found = {option: find() for option, find in finders.items()}
    fitting = [f"{option} {value}" for option, value in found.items() if value]
    return f"one of these would: {', '.join(fitting)}" if fitting else "nor would a single row of it"
