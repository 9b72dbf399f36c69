"""Traces of what a run's caches have kept: one file, from which `jkv.show` draws."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from jkv.policies import describe
from jkv.run import Result, Run
from jkv.text import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Trace:
    """What each layer and head of each row has kept, after the prompt and after every compaction.

    Attributes:
        policy: its name and fields.
        steps: decoded tokens at each record, int32 `[N]`.
        kept: text positions held, int32 `[N, L, B, H, S]`, -1 where empty; a row that has ended stays as it was.
        prompt_ids, new_ids: token ids, int32 `[B, T]`, -1 after the end.
        pieces: text that each token of prompt and answer adds, `[B, T]`.
    """

    policy: str
    steps: np.ndarray
    kept: np.ndarray
    prompt_ids: np.ndarray
    new_ids: np.ndarray
    pieces: np.ndarray

    def lengths(self, row: int) -> tuple[int, int]:
        """Tokens of a row's prompt and of its answer."""
        return int((self.prompt_ids[row] >= 0).sum()), int((self.new_ids[row] >= 0).sum())

    def tokens(self, row: int) -> list[str]:
        """The pieces of a row's text."""
        return [str(piece) for piece in self.pieces[row][: sum(self.lengths(row))]]

    def births(self, row: int) -> np.ndarray:
        """The first record at which each token was in the text, `[T]`; N for those after the last record."""
        prompt, new = self.lengths(row)
        # The last token drawn is never fed, so it has no place in the cache.
        seen = prompt + np.minimum(self.steps, max(new - 1, 0))
        return np.searchsorted(seen, np.arange(prompt + new), side="right")

    def drops(self, row: int) -> np.ndarray:
        """The first record at which each token was no longer held, `[L, H, T]`; N for those held to the end."""
        count, layers, _, heads, _ = self.kept.shape
        births = self.births(row)
        drops = np.broadcast_to(births, (layers, heads, len(births))).copy()
        for index in range(count):
            layer, head, slot = np.nonzero(self.kept[index, :, row] >= 0)
            drops[layer, head, self.kept[index, layer, row, head, slot]] = index + 1
        return drops


def save_trace(path: Path, run: Run, kept: Mapping[int, Sequence[np.ndarray]], results: Sequence[Result]) -> None:
    """Saves a trace.

    Args:
        path: the .npz file.
        run: the run, after its end.
        kept: positions `[L, H, S]` of each row, after its prompt and after every compaction.
        results: the rows' answers.
    """
    ordered = sorted(results, key=lambda result: (result.prompt, result.sample))
    rows = [kept[result.prompt * run.samples + result.sample] for result in ordered]
    count = max(map(len, rows))
    texts = [(run.prompts[result.prompt], result.tokens) for result in ordered]
    pieces = [_cut(run.llm.tokenizer, [*prompt, *new]) for prompt, new in texts]
    longest = max(map(len, pieces))
    np.savez_compressed(
        path,
        policy=np.array(f"{type(run.policy).__name__}: " + ", ".join(f"{k} {v}" for k, v in describe(run.policy))),
        steps=np.arange(count, dtype=np.int32) * run.policy.interval,
        kept=np.stack([np.stack([*row, *[row[-1]] * (count - len(row))]) for row in rows], axis=2),
        prompt_ids=_pad([prompt for prompt, _ in texts]),
        new_ids=_pad([new for _, new in texts]),
        pieces=np.array([[*row, *[""] * (longest - len(row))] for row in pieces]),
    )


def read_trace(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        ValueError: there is no such file, or it is none of `save_trace`.
    """
    names = ("policy", "steps", "kept", "prompt_ids", "new_ids", "pieces")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in names}
    except OSError as error:
        raise ValueError(f"trace {path}: {error.strerror or error}; write one with --trace-kept") from None
    except (BadZipFile, KeyError, ValueError, EOFError, TypeError) as error:
        raise ValueError(f"{path} is no trace of kept positions ({error}); write one with --trace-kept") from None
    trace = Trace(str(found.pop("policy")), **found)
    rows = {len(trace.prompt_ids), len(trace.new_ids), len(trace.pieces)}
    if trace.kept.ndim != 5 or {trace.kept.shape[2]} != rows or len(trace.kept) != len(trace.steps):
        raise ValueError(f"{path} is no trace of kept positions (its arrays do not fit); write one with --trace-kept")
    return trace


def share_held(trace: Trace, row: int) -> np.ndarray:
    """Share of the layers and heads that hold each token at each record, `[N, T]`; NaN before it was in the text."""
    births, drops = trace.births(row), trace.drops(row)
    record = np.arange(len(trace.steps))[:, None]
    held = (drops[None] > record[:, None, None]).mean(axis=(1, 2))
    return np.where(births <= record, held, math.nan)


def _cut(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character of several tokens comes with the last of them."""
    decoder = StreamDecoder(tokenizer)
    return [
        tokenizer.decode([int(i)], skip_special=False) if int(i) in tokenizer.special_ids else decoder.push([int(i)])
        for i in ids
    ]


def _pad(rows: Sequence[Sequence[int]]) -> np.ndarray:
    padded = np.full((len(rows), max(len(row) for row in rows)), -1, np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
