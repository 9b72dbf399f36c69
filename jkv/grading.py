"""Grades answers to mathematical problems by math-verify, in a process of its own with a time limit."""

import multiprocessing
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 10.0
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The verdict on an answer.

    Attributes:
        correct: whether it equals the expected one.
        extracted: the part of the answer that counts, as text; None where there is none.
        value: what the answer was read as, for votes; None where nothing could be read.
        timed_out: whether it took too long to find out.
    """

    correct: bool
    extracted: str | None = None
    value: str | None = None
    timed_out: bool = False


def last_box(text: str) -> str | None:
    r"""The last ``\boxed{...}`` of a text whose braces close, with its command; None where there is none."""
    for found in reversed(list(BOX.finditer(text))):
        depth = 0
        for place in range(found.end() - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            if depth == 0:
                return text[found.start() : place + 1]
    return None


@dataclass
class Grader:
    """Grades one answer after the other. A process that does not answer in time is ended, whatever it is doing.

    Use it in a `with` statement. Needs the extra `eval` (math-verify).

    Attributes:
        seconds: for one answer.
    """

    seconds: float = SECONDS
    _process: Any = field(default=None, repr=False)
    _pipe: Connection | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError where math-verify is not installed."""
        if find_spec("math_verify") is None:
            raise ValueError("grading needs math-verify; pip install 'jkv[eval]'")

    def __enter__(self) -> "Grader":
        """Starts nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        self._stop()

    def grade(self, answer: str | None, expected: str) -> Grade:
        r"""The verdict on an answer, of which the last ``\boxed{...}`` counts, or all of it where there is none.

        Args:
            answer: what stands after the reasoning; None where the reasoning never ended, which is wrong.
            expected: the right answer, in LaTeX or plain.
        """
        if answer is None:
            return Grade(correct=False)
        extracted = last_box(answer) or answer
        pipe = self._start()
        pipe.send((extracted, expected))
        try:
            if pipe.poll(self.seconds):
                correct, value = pipe.recv()
                return Grade(correct=correct, extracted=extracted, value=value)
        except EOFError:
            pass  # it died: of memory, or of too deep an expression
        self._stop()
        return Grade(correct=False, extracted=extracted, timed_out=True)

    def _start(self) -> Connection:
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
            self._pipe.recv()  # once its imports are done: they are no part of an answer's time
        return self._pipe

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # that it has no limit of its own
    pipe.send("ready")
    while True:
        try:
            extracted, expected = pipe.recv()
        except EOFError:
            return
        found = parse(extracted, parsing_timeout=0)
        gold = parse(expected if "\\boxed" in expected or "$" in expected else f"${expected}$", parsing_timeout=0)
        correct = bool(found and gold and verify(gold, found, timeout_seconds=0))
        pipe.send((correct, str(found[0]) if found else None))


def majority(grades: Sequence[Grade]) -> bool:
    """Whether the value that most of a problem's answers have is correct; of equally many, the first that was given.

    All correct answers have one value, however they are written.
    """
    values = [(grade.correct, not grade.correct and grade.value) for grade in grades if grade.value is not None]
    return bool(values) and max(dict.fromkeys(values), key=values.count)[0]
