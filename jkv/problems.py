"""Problems with answers: from a JSONL file, or a data set of the Hugging Face hub; and the papers' prompts for them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jkv.jsonl import read_rows

PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "expected_answer", "final_answer", "target")
GSM8K_MARK = "####"  # before the answer, at the end of a solution


@dataclass(frozen=True)
class Problem:
    """A problem and its answer, in LaTeX or plain."""

    id: str | int
    text: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How a paper asks and draws.

    Attributes:
        system: system message of the chat; None is none.
        template: what the problem is put into, at `{problem}`.
        temperature, top_p, max_new_tokens: of the sampling.
    """

    system: str | None = None
    template: str = "{problem}"
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 32768

    def ask(self, problem: Problem, *, chat: bool) -> str:
        """The prompt of a problem; without a chat, the system message stands before it."""
        text = self.template.replace("{problem}", problem.text)
        return text if chat or self.system is None else f"{self.system}\n\n{text}"


_BOX = "put your final answer within \\boxed{}."
PRESETS = {
    "gkv": Preset(system=f"Please reason step by step, and {_BOX}"),
    "deepseek": Preset(template=f"{{problem}}\nPlease reason step by step, and {_BOX}"),
    "plain": Preset(),
}


def read_problems(source: str) -> list[Problem]:
    """Problems of a JSONL file, or of a data set of the hub as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT.

    A line has the problem in "problem", "question" or "prompt", and the answer in "answer"; of an answer in the manner
    of GSM8K counts what stands after "####". Upper case in the names of keys makes no difference.

    Raises:
        ValueError: there is no such source, a line has no problem or no answer, or two have the same id.
    """
    path = Path(source)
    if path.is_file():
        rows: Iterable[tuple[str, Any]] = ((f"{path}:{number}", row) for number, row in read_rows(path, "problems"))
    elif path.suffix in (".jsonl", ".json") or source.startswith((".", "/")):
        raise ValueError(f"problems file {source}: there is no such file")
    else:
        rows = _read_hub(source)
    found: dict[str | int, Problem] = {}
    for number, (where, row) in enumerate(rows, 1):
        problem = _make_problem(where, number, row)
        if problem.id in found:
            raise ValueError(f"{where}: id {problem.id!r} is that of an earlier problem; ids must differ")
        found[problem.id] = problem
    if not found:
        raise ValueError(f"{source} has no problems")
    return list(found.values())


def _read_hub(source: str) -> Iterator[tuple[str, Any]]:
    if find_spec("datasets") is None:
        raise ValueError(
            f"{source} is no file, and data sets of the hub need the package datasets; pip install datasets"
        )
    import datasets  # pyright: ignore[reportMissingImports]

    name, *parts = source.split(":")
    config, split = (parts[0] if len(parts) > 1 else None, parts[-1] if parts else "test")
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of many kinds, one for each thing that can be wrong with a hub
        raise ValueError(
            f"data set {source} cannot be loaded ({error}); give NAME:SPLIT or NAME:CONFIG:SPLIT"
        ) from None
    for number, row in enumerate(rows, 1):
        yield f"{source}:{number}", row


def _make_problem(where: str, number: int, row: Any) -> Problem:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: must be an object with a problem and its answer")
    known = {str(key).lower(): value for key, value in row.items()}
    text = next((known[key] for key in PROBLEM_KEYS if isinstance(known.get(key), str) and known[key].strip()), None)
    answer = next((known[key] for key in ANSWER_KEYS if known.get(key) not in (None, "")), None)
    if text is None or not isinstance(answer, str | int | float):
        raise ValueError(f"{where}: needs a text in 'problem' or 'question', and an 'answer'")
    identity = next((known[key] for key in ("id", "unique_id") if isinstance(known.get(key), str | int)), number)
    return Problem(identity, text, str(answer).rpartition(GSM8K_MARK)[2].strip())
