"""What a policy's answers to problems are worth: verdicts on an answers file, and the numbers that papers report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jkv.comparison import mean_and_error
from jkv.grading import Grade, Grader, last_box, majority
from jkv.problems import Problem


@dataclass(frozen=True, kw_only=True)
class Verdict(Grade):
    """The verdict on one answer to a problem.

    Attributes:
        id, sample: which problem it answers, and which of its samples it is.
        expected: the right answer.
        truncated: whether it was cut off, by the token limit or before its reasoning had ended. Such an answer counts
            if it has a box after the reasoning, and is wrong otherwise.
        prompt_tokens, new_tokens: of the text.
    """

    id: str | int
    sample: int
    expected: str
    truncated: bool
    prompt_tokens: int
    new_tokens: int


def judge(problems: Sequence[Problem], lines: Sequence[Mapping[str, Any]], thinking: bool) -> Iterator[Verdict]:
    """Verdicts on the lines of an answers file, in the order of problems and samples.

    Args:
        problems: all that were asked.
        lines: as `jkv.generate` writes them, in any order.
        thinking: whether the prompts ended inside the reasoning, so that a text without its end has no answer.
    """
    place = {problem.id: index for index, problem in enumerate(problems)}
    with Grader() as grader:
        for line in sorted(lines, key=lambda line: (place[line["id"]], line["sample"])):
            problem, answer = problems[place[line["id"]]], line["answer"]
            if thinking and line["reasoning"] is None:
                answer = None
            cut_off = line["finish_reason"] == "length" or answer is None
            if cut_off and answer is not None and last_box(answer) is None:
                answer = None  # its last number may be any
            grade = grader.grade(answer, problem.answer)
            yield Verdict(
                **{spec.name: getattr(grade, spec.name) for spec in fields(Grade)},
                id=problem.id,
                sample=line["sample"],
                expected=problem.answer,
                truncated=cut_off,
                prompt_tokens=line["prompt_tokens"],
                new_tokens=line["new_tokens"],
            )


def summarize(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The numbers of an evaluation; every problem has equally many samples.

    Returns:
        pass_at_1: mean over samples, then problems, with its standard error over problems (None with a single one);
        maj_at_N: share of problems whose most frequent value is right, with several samples; the counts of answers,
        of those cut off, of those without a value and of those that took too long to grade; pass_at_1 of the answers
        that were not cut off; and the mean number of new tokens.
    """
    groups: dict[str | int, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.id, []).append(verdict)
    samples = len(verdicts) // len(groups)
    votes = [majority(group) for group in groups.values()]
    correct = np.array([[verdict.correct for verdict in group] for group in groups.values()], float)
    pass_at_1, error = mean_and_error(correct)
    ended = [verdict.correct for verdict in verdicts if not verdict.truncated]
    return {
        "problems": len(groups),
        "samples": samples,
        "pass_at_1": pass_at_1,
        "pass_at_1_error": error,
        **({f"maj_at_{samples}": float(np.mean(votes))} if samples > 1 else {}),
        "pass_at_1_ended": float(np.mean(ended)) if ended else None,
        "answers": len(verdicts),
        "truncated": sum(verdict.truncated for verdict in verdicts),
        "no_value": sum(verdict.value is None for verdict in verdicts),
        "timed_out": sum(verdict.timed_out for verdict in verdicts),
        "new_tokens": float(np.mean([verdict.new_tokens for verdict in verdicts])),
    }
