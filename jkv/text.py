"""Strings around the model: the tokenizer, incremental detokenising, stop strings, reasoning."""

import re
from collections.abc import Iterable, Sequence

from jkv.tokenizer import Tokenizer, load_tokenizer

__all__ = ["StopChecker", "StreamDecoder", "Tokenizer", "load_tokenizer", "split_reasoning"]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StreamDecoder:
    """Turns ids into text piece by piece; the pieces joined are `tokenizer.decode` of all ids at once.

    A piece never holds part of a character, nor a replacement character that a later id could still change.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        decoder = tokenizer.backend.decoder
        # A run of byte tokens decodes as one: one bad byte turns all of it into replacement characters.
        self._runs_of_bytes = decoder is not None and b'"ByteFallback"' in decoder.__getstate__()
        self._context: list[int] = []  # ids given out before, for decoders that treat the start of a text apart
        self._pending: list[int] = []  # ids after the context, not all given out
        self._run: list[int] = []  # byte tokens after those
        self._given = 0  # characters given out of the text of context + pending

    def push(self, ids: Iterable[int]) -> str:
        """Takes further ids and returns the text that is now certain, perhaps none."""
        for i in ids:
            token = self._tokenizer.backend.id_to_token(i)
            if token is None or i in self._tokenizer.special_ids:
                continue
            self._run.append(i)
            if not (self._runs_of_bytes and _BYTE_TOKEN.fullmatch(token)):
                self._pending += self._run
                self._run = []
        text = self._decode_window()
        certain = text.removesuffix(_REPLACEMENT)  # only the last one can be an unfinished character
        piece, self._given = certain[self._given :], len(certain)
        if certain == text:
            self._start_window()
        return piece

    def flush(self) -> str:
        """Returns what was held back, at the end of the ids."""
        self._pending += self._run
        self._run = []
        text = self._decode_window()
        piece, self._given = text[self._given :], len(text)
        return piece

    def _decode_window(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)

    def _start_window(self) -> None:
        length = len(self._tokenizer.decode(self._pending))
        if length:  # else the start of the text, which the decoder may still strip, goes on
            self._context, self._pending, self._given = self._pending, [], length


class StopChecker:
    """Ends a text before the first stop string to be completed, however the text is cut into pieces.

    Raises:
        ValueError: a stop string is empty, or `stops` is a single string.
    """

    def __init__(self, stops: Sequence[str]):
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop strings must be a list of non-empty strings, not {stops!r}")
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Takes a piece of text; returns the text to show and whether a stop string has been met.

        What could be the beginning of a stop string is held back; the stop string and all after it are dropped.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        self._stopped = bool(found)
        shown = min(found)[1] if found else len(text) - self._count_held(text)
        self._held = "" if found else text[shown:]
        return text[:shown], self._stopped

    def flush(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _count_held(self, text: str) -> int:
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        tails = (text[len(text) - count :] for count in range(longest, 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stops)), 0)


def split_reasoning(
    text: str, start: str = "<think>", end: str = "</think>", *, open: bool = False, truncated: bool = False
) -> tuple[str | None, str | None]:
    """Splits a reasoning model's text into (reasoning, answer); every character but the markers is in one of them.

    Args:
        text: what the model wrote. Reasoning ends at the first `end`, whether or not the text has a `start`.
        start: marker before the reasoning; many chat templates write it, so that the text lacks it.
        end: marker after the reasoning.
        open: whether the prompt ended inside the reasoning, after `start`.
        truncated: whether the model was stopped by the token limit.

    Returns:
        None for a part that has no place in the text: no reasoning without a marker (unless `open` and `truncated`),
        and no answer before the reasoning has ended.
    """
    thought, ended, answer = text.partition(end)
    before, started, inside = thought.partition(start)
    if ended:
        return (inside, before + answer) if started else (thought, answer)
    if started:
        return inside, before or None
    return (text, None) if open and truncated else (None, text)
