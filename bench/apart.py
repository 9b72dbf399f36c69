"""Runs a function on many items in processes of its own, so that a process that dies costs one item."""

import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Outcome(Generic[Item, Value]):
    """What became of one item: a value, or why there is none."""

    item: Item
    value: Value | None
    error: str = ""


def run_apart(
    function: Callable[[Item], Value],
    items: Sequence[Item],
    *,
    processes: int,
    seconds: float,
    fresh: bool = False,
) -> Iterator[Outcome[Item, Value]]:
    """Yields the outcome of every item as it comes.

    Args:
        function: of a module that can be imported; called with one item after the other in each process.
        items: what it is called with.
        processes: how many there are at once.
        seconds: how long one item may take before its process is ended.
        fresh: a new process for every item.
    """
    waiting: SimpleQueue[Item] = SimpleQueue()
    done: SimpleQueue[Outcome[Item, Value]] = SimpleQueue()
    for item in items:
        waiting.put(item)
    for _ in range(min(processes, len(items))):
        threading.Thread(target=_feed, args=(function, waiting, done, seconds, fresh), daemon=True).start()
    for _ in items:
        yield done.get()


def _feed(function: Callable[[Any], Any], waiting: Any, done: Any, seconds: float, fresh: bool) -> None:
    worker: _Worker | None = None
    with suppress(Empty):
        while True:
            item = waiting.get_nowait()
            try:
                worker = worker or _Worker(function)
                outcome = worker.run(item, seconds)
            except Exception as error:
                outcome = Outcome(item, None, f"the worker did not start: {error}")
            done.put(outcome)
            if worker is not None and (fresh or not worker.process.is_alive()):
                worker.end()
                worker = None
    if worker is not None:
        worker.end()


class _Worker:
    """A process that waits for items, and what it writes to stderr."""

    def __init__(self, function: Callable[[Any], Any]):
        context = multiprocessing.get_context("spawn")
        self.stderr = tempfile.NamedTemporaryFile("r", errors="replace", suffix=".log")  # noqa: SIM115
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, theirs, self.stderr.name), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, item: Any, seconds: float) -> Outcome[Any, Any]:
        """Has the process work on an item, and ends it when that takes too long."""
        try:
            self.pipe.send(item)
            if self.pipe.poll(seconds):
                return Outcome(item, *self.pipe.recv())
            self.process.kill()
            self.process.join()
            return Outcome(item, None, f"took more than {seconds:.0f} s")
        except (EOFError, OSError):
            self.process.join()
            return Outcome(item, None, f"{_name_exit(self.process.exitcode)}: {self._last_words()}")

    def end(self) -> None:
        """Lets the process come to its end, and forgets what it said."""
        self.pipe.close()
        self.process.join()
        self.stderr.close()

    def _last_words(self) -> str:
        text = self.stderr.read().strip()
        lines = text.splitlines()
        # A compiler that aborts says why before it prints its stack.
        reasons = [line for line in lines if "ERROR" in line or "rror:" in line or "fatal" in line.lower()]
        return " ".join((reasons or lines[-1:] or ["it said nothing"])[-1].split())[:300]


def _serve(function: Callable[[Any], Any], pipe: Connection, stderr: str) -> None:
    """Works on items until there are no more."""
    with Path(stderr).open("w") as said:
        os.dup2(said.fileno(), 2)
    with suppress(EOFError, OSError):
        while True:
            item = pipe.recv()
            try:
                answer = function(item), ""
            except Exception as error:
                traceback.print_exc()
                answer = None, " ".join(f"{type(error).__name__}: {error}".split())[:500]
            pipe.send(answer)


def _name_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}"
