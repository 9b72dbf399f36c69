"""The policies that `bench.recall` measures, each at budgets by which they read about as many tokens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jkv
from jkv.policies import Evict, Policy, describe, get_policy
from jkv.policies.shadowkv import ShadowKV
from jkv.policies.specontext import SpeContext


@dataclass(frozen=True)
class Case:
    """A policy at a budget.

    Attributes:
        name: as it was asked for.
        fields: its text form with what the budget makes of it.
        budget: tokens that a step should read.
        policy: ready for the model.
        brought: its arrays.
    """

    name: str
    fields: str
    budget: int
    policy: Policy
    brought: Any


def make_cases(llm: jkv.LLM, names: Sequence[str], budgets: Sequence[int], steps: int) -> tuple[list[Case], list[str]]:
    """Every policy at every budget that it can have, and what is left out and why.

    Raises:
        ValueError: a policy can have none of them.
    """
    cases, left_out = [], []
    for name in names:
        refused: list[ValueError] = []
        for budget in budgets:
            fields = fit(name, budget, steps)
            try:
                policy = llm.prepare(fields)
                cases.append(Case(name, fields, budget, policy, policy.bring(llm.checkpoint.config, llm.dtype)))
            except ValueError as error:
                refused.append(error)
                left_out.append(f"{name} at {budget}: {error}")
        if len(refused) == len(budgets):
            raise refused[-1]
    return cases, left_out


def fit(name: str, budget: int, steps: int) -> str:
    """The text form of a policy with the fields by which a step reads `budget` tokens, in the mean over the steps.

    Raises:
        ValueError: the budget is already given.
    """
    policy = get_policy(name)
    known, given = dict(describe(policy)), set(re.findall(r"[:,]\s*(\w+)\s*=", name))
    if "budget" not in known:
        return name
    if "budget" in given:
        raise ValueError(f"--policies {name}: leave the budget out, --budgets gives it")
    decoded = (min(steps, policy.interval or steps) + 1) // 2
    sizes = {"budget": budget}
    if isinstance(policy, Evict):
        sizes["budget"] = max(budget - decoded, 1)
    elif isinstance(policy, SpeContext):
        sizes["recent"] = min(known["recent"], max(budget // 4, 1))
    elif isinstance(policy, ShadowKV):
        rest = max(budget - policy.local * policy.chunk - decoded, 0)
        # The default budget and its outliers are as 16 to 3.
        sizes["outliers"] = policy.outliers if "outliers" in given else rest * 3 // 16 // policy.chunk
        sizes["budget"] = rest // policy.chunk * policy.chunk - sizes["outliers"] * policy.chunk
    changes = [f"{key}={value}" for key, value in sizes.items() if key not in given and value != known[key]]
    return name + (("," if ":" in name else ":") + ",".join(changes) if changes else "")
