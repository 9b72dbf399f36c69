"""A run over prompts: how answers are drawn, what comes of them, and what they took."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jkv.engine import Request
from jkv.loop import OnKept, Row, Scheduler, bucket
from jkv.memory import largest_batch
from jkv.plan import Plan, format_bytes, make_plan, memory_limit
from jkv.policies import Policy
from jkv.sampling import Sampling, check_seed, seed_words
from jkv.text import StopChecker, StreamDecoder, split_reasoning

if TYPE_CHECKING:
    from jkv.api import LLM


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Sampling):
    """How an answer is drawn and where it ends.

    Attributes:
        max_new_tokens: tokens of an answer at most.
        seed: of the random draws; a row's draws depend on it, the row and the step alone.
        stop: texts that end an answer and are left out of it.
        ignore_eos: decode on after an end-of-text token, up to `max_new_tokens`.
    """

    max_new_tokens: int = 512
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError when a value is out of range."""
        super().__post_init__()
        check_seed(self.seed)
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r} must be a whole number of at least 1")
        if not isinstance(self.stop, tuple):
            raise ValueError(f"stop={self.stop!r} must be a tuple of texts, as in ('END',)")
        if not all(self.stop):
            raise ValueError("a stop string is empty; leave it out")

    @property
    def sampling(self) -> Sampling:
        """The part that a compiled program depends on."""
        return Sampling(**{spec.name: getattr(self, spec.name) for spec in fields(Sampling)})


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text that one row has just gained. `prompt` and `sample` count from 0."""

    prompt: int
    sample: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished answer.

    Attributes:
        prompt, sample: which prompt it answers and which of its samples it is, from 0.
        text: the answer, reasoning included.
        reasoning, answer: `text` split at the end of its reasoning; reasoning is None where there is none, answer is
            None where the reasoning never ended.
        tokens: ids drawn, the end-of-text token included.
        prompt_tokens: length of the prompt.
        finish_reason: "stop" (end-of-text token or stop string) or "length".
    """

    prompt: int
    sample: int
    text: str
    reasoning: str | None
    answer: str | None
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str


@dataclass
class Stats:
    """What a run took. Seconds of compiling are never inside the others.

    Attributes:
        prompt_tokens, new_tokens: of all rows that have ended.
        prefill_seconds, decode_seconds, compile_seconds: summed over all rows.
        first_token_at: when the first token was there, in seconds since the epoch; None before.
        longest_text: tokens of the longest text, prompt and answer together.
        decoded_tokens: new tokens without the first of each row, which prefill draws.
        plan: bytes held and read, of all slots.
    """

    plan: Plan
    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    first_token_at: float | None = None
    longest_text: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens by decode seconds; None when only first tokens were drawn."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens and self.decode_seconds else None

    def report(self) -> dict[str, float | int | dict[str, int] | None]:
        """The numbers as plain values; tokens per second can be recomputed from the others."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "decoded_tokens": self.decoded_tokens,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "compile_seconds": self.compile_seconds,
            "tokens_per_second": self.tokens_per_second,
            "weight_bytes": self.plan.weights,
            "kv_bytes_held": self.plan.kv_held,
            "metadata_bytes_held": self.plan.metadata_held,
            "kv_bytes_read_per_token": self.plan.kv_read,
            "tokens_read_per_step": self.plan.tokens_read,
        }


@dataclass
class Run:
    """A run over prompts: iterating yields `Piece`s as text grows and a `Result` as each row ends."""

    llm: "LLM"
    prompts: Sequence[Sequence[int]]
    policy: Policy
    config: GenerationConfig
    samples: int
    most_slots: int | None
    rows: Sequence[int]
    memory: int | None = None
    on_kept: OnKept | None = None

    def __post_init__(self) -> None:
        """Sizes the cache for the longest of the prompts."""
        longest = max((len(prompt) for prompt in self.prompts), default=0)
        length = min(longest + self.config.max_new_tokens, self.llm.checkpoint.config.max_position)
        self.engine = self.llm.engine(
            self.policy,
            self.config.sampling,
            max_len=length,
            max_new=self.config.max_new_tokens,
            max_prompt=longest,
        )
        self.padded_prompt = bucket(longest)
        self.slots = min(self.most_slots or self._fitting_slots(), max(len(self.rows), 1))
        self.stats = Stats(
            plan=make_plan(
                self.llm.checkpoint.config,
                self.policy,
                self.engine.spec,
                batch=self.slots,
                length=length,
                dtype=self.llm.dtype,
            )
        )

    def _fitting_slots(self) -> int:
        memory = self.memory or memory_limit()
        fits = largest_batch(
            self.engine,
            prompt=self.padded_prompt,
            memory=memory,
            platform=self.llm.platform,
            refills=True,
            most=max(len(self.rows), 1),
        )
        if not fits:
            raise ValueError(
                f"not even one row fits in {format_bytes(memory)}; lower the policy's budget or max_new_tokens"
            )
        return fits

    def limit(self, prompt: int) -> int:
        """Tokens that the answer to a prompt may have: what the text may be long in all is the model's to say."""
        return min(self.config.max_new_tokens, self.llm.checkpoint.config.max_position - len(self.prompts[prompt]))

    def thinks(self, prompt: int) -> bool:
        """Whether a prompt ends inside the reasoning, as some chat templates make it."""
        tail = self.llm.tokenizer.decode(self.prompts[prompt][-8:], skip_special=False)
        return tail.rstrip().endswith("<think>")

    def __iter__(self) -> Iterator[Piece | Result]:
        """Runs the rows, each in the slot that is free first."""
        eos = () if self.config.ignore_eos else self.llm.eos_ids
        scheduler = Scheduler(
            engine=self.engine,
            weights=self.llm.weights,
            programs=self.llm.programs,
            request=Request(
                jnp.asarray(seed_words(self.config.seed)),
                jnp.asarray(_pad_eos(eos), jnp.int32),
                self.llm.bring(self.policy),
            ),
            rows=(self._row(row) for row in self.rows),
            slots=self.slots,
            on_kept=self.on_kept,
        )
        writers: dict[int, _Writer] = {}
        compiling = self.llm.programs.seconds
        try:
            for row, tokens in scheduler.run():
                self.stats.first_token_at = self.stats.first_token_at or time.time()
                if row.id not in writers:
                    writers[row.id] = _Writer(self, row, eos)
                writer = writers[row.id]
                yield from writer.push(tokens.tolist())
                if writer.finish_reason is not None:
                    scheduler.stop(row)
                    yield self._count(writers.pop(row.id))
        finally:
            self.stats.prefill_seconds = scheduler.prefill_seconds
            self.stats.decode_seconds = scheduler.decode_seconds
            self.stats.compile_seconds = self.llm.programs.seconds - compiling

    def _row(self, row: int) -> Row:
        prompt = row // self.samples
        return Row(row, self.prompts[prompt], self.limit(prompt))

    def _count(self, writer: "_Writer") -> Result:
        result = writer.result()
        self.stats.prompt_tokens += result.prompt_tokens
        self.stats.new_tokens += len(result.tokens)
        self.stats.decoded_tokens += len(result.tokens) - 1
        self.stats.longest_text = max(self.stats.longest_text, result.prompt_tokens + len(result.tokens))
        return result


class _Writer:
    """Turns one row's tokens into text, and notices where the answer ends."""

    def __init__(self, run: Run, row: Row, eos: Sequence[int]):
        self.run, self.row, self.eos = run, row, frozenset(eos)
        self.prompt, self.sample = divmod(row.id, run.samples)
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.decoder, self.stop = StreamDecoder(run.llm.tokenizer), StopChecker(run.config.stop)

    def push(self, tokens: Sequence[int]) -> Iterator[Piece]:
        """Takes the row's next tokens; sets `finish_reason` when the answer has ended."""
        for token in tokens:
            self.tokens.append(token)
            text, stopped = self.stop.push(self.decoder.push([token]))
            ended = token in self.eos or len(self.tokens) >= self.row.limit
            if stopped or token in self.eos:
                self.finish_reason = "stop"
            elif ended:
                self.finish_reason = "length"
            if ended and not stopped:
                rest, stopped = self.stop.push(self.decoder.flush())
                text += rest if stopped else rest + self.stop.flush()
                self.finish_reason = "stop" if stopped else self.finish_reason
            if text:
                self.texts.append(text)
                yield Piece(prompt=self.prompt, sample=self.sample, text=text)
            if self.finish_reason is not None:
                return

    def result(self) -> Result:
        """The finished answer."""
        text = "".join(self.texts)
        reasoning, answer = split_reasoning(
            text, open=self.run.thinks(self.prompt), truncated=self.finish_reason == "length"
        )
        return Result(
            prompt=self.prompt,
            sample=self.sample,
            text=text,
            reasoning=reasoning,
            answer=answer,
            tokens=tuple(self.tokens),
            prompt_tokens=len(self.row.prompt),
            finish_reason=self.finish_reason or "length",
        )


def _pad_eos(eos: Sequence[int]) -> list[int]:
    # A fixed number of places, so that another model's or run's list compiles nothing.
    return [*eos, *[-1] * (8 - len(eos))]
