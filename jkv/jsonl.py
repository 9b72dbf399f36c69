"""Prompts from a JSONL file, answers into one that a killed run resumes from, and files that are whole or not there."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGINNING = b'{"id": '  # of every line that `Answers` writes
PROMPT_KEYS = ("prompt", "messages", "problem", "question")


@dataclass(frozen=True)
class Item:
    """One line of a prompts file: its id (the line number where the line has none) and its text or messages."""

    id: str | int
    prompt: str | Sequence[Mapping[str, Any]]


def read_prompts(path: Path) -> list[Item]:
    """Reads prompts, one JSON object a line; empty lines are skipped.

    An object has "prompt", "problem" or "question" (a text) or "messages" (a chat), and may have "id".

    Raises:
        ValueError: the file cannot be read, or a line is not such an object; the message names file and line.
    """
    items: dict[str | int, Item] = {}
    for number, row in read_rows(path, "prompts"):
        item = _make_item(f"{path}:{number}", number, row)
        if item.id in items:
            raise ValueError(f"{path}:{number}: id {item.id!r} is that of an earlier line; ids must differ")
        items[item.id] = item
    if not items:
        raise ValueError(f'prompts file {path} has no prompts; write one JSON object a line, as {{"prompt": "..."}}')
    return list(items.values())


def read_rows(path: Path, kind: str) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file's lines, each with the number of its line; empty lines are skipped.

    Raises:
        ValueError: the file, which holds what `kind` says, cannot be read, or a line is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{kind} file {path}: {error.strerror}; give the path of a JSONL file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{kind} file {path} is not UTF-8 ({error}); save it as UTF-8") from None
    # JSON may hold every other line end that str.splitlines knows.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg}); write one object a line") from None


class Answers:
    """Appends answers to a JSONL file, and knows which of them an earlier run has written."""

    def __init__(self, path: Path, settings: str):
        """Opens or creates the file; a last line that was cut off by a kill is removed.

        Args:
            path: the answers file.
            settings: short text that stands for model, policy and sampling; it is written into every line.

        Raises:
            ValueError: the file cannot be written, is not an answers file, or was written under other settings.
        """
        self.path, self.settings = path, settings
        self.done: set[tuple[str | int, int]] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ValueError(f"answers file {path}: {error.strerror}; give another --output") from None
        try:
            self._read()
        except ValueError:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line.startswith(BEGINNING[: len(line)]):
                break
            try:
                row = json.loads(line)
                key, settings = (row["id"], row["sample"]), row["settings"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.path}:{number} is not an answer of jkv; give another --output") from None
            if settings != self.settings:
                raise ValueError(
                    f"{self.path} holds answers drawn with other settings ({settings}, now {self.settings}); "
                    "give another --output"
                )
            self.done.add(key)
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, 2)

    def write(self, id: str | int, sample: int, **fields: Any) -> None:
        """Appends one answer, which a kill can no longer lose when this returns."""
        row = {"id": id, "sample": sample, **fields, "settings": self.settings}
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines of an answers file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_whole(path: Path, text: str) -> None:
    """Writes a text file, which is there whole or as it was before."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _make_item(where: str, number: int, row: Any) -> Item:
    key = next((key for key in PROMPT_KEYS if isinstance(row, dict) and row.get(key)), None)
    if key is None or not isinstance(row[key], list if key == "messages" else str) or not str(row[key]).strip():
        raise ValueError(f"{where}: needs a text in 'prompt', 'problem' or 'question', or a list in 'messages'")
    id = row.get("id", number)
    if not isinstance(id, str | int):
        raise ValueError(f"{where}: id {id!r} must be a text or a whole number")
    return Item(id=id, prompt=row[key])
