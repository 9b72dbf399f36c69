"""Strings in, results out: `load`, `generate`, `stream`."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import weights as checkpoints
from jkv import engine as engines
from jkv.config import CacheSpec
from jkv.engine import Engine, Request
from jkv.loop import Batch, Programs, bucket
from jkv.models.decoder import Decoder
from jkv.plan import Plan, make_plan
from jkv.policies import Evict, Policy, get_policy
from jkv.policies.base import try_score
from jkv.sampling import Sampling, check_seed, seed_words
from jkv.text import StopChecker, StreamDecoder, Tokenizer, load_tokenizer, split_reasoning

Prompt = str | Sequence[Mapping[str, Any]]
SHORTEST_MAX_LEN = 512
LONG = 4096


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
        prefill_seconds, decode_seconds, compile_seconds: summed over batches.
        first_token_at: when the first token was there, in seconds since the epoch; None before.
        longest_text: tokens of the longest text, prompt and answer together.
        decoded_tokens: new tokens without the first of each row, which prefill draws.
        plan: bytes held and read, of one batch.
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

    def report(self) -> dict[str, float | int | None]:
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
        }


@dataclass(frozen=True, kw_only=True)
class LLM:
    """A loaded model: parameters, tokenizer, and the programs compiled for it so far.

    Attributes:
        checkpoint: where it came from.
        dtype: of parameters and cache.
        decoder: the model.
        tokenizer: its tokenizer.
    """

    checkpoint: checkpoints.Checkpoint
    dtype: str
    decoder: Decoder = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    programs: Programs = field(default_factory=Programs, repr=False)

    @cached_property
    def weights(self) -> nnx.State:
        """The parameters as the compiled programs take them."""
        return nnx.state(self.decoder)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the generation config's, else the model config's, else the tokenizer's."""
        listed = self.checkpoint.generation.get("eos_token_id")
        if listed is not None:
            return tuple(listed) if isinstance(listed, list | tuple) else (int(listed),)
        return self.checkpoint.config.eos_ids or tuple(self.tokenizer.eos_ids)

    def default_config(self, **changes: Any) -> GenerationConfig:
        """The sampling that the checkpoint's generation config asks for, with some fields changed.

        Only a generation config with `do_sample` on counts; without one the default is greedy.
        """
        asked = self.checkpoint.generation
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        known = {name: asked[name] for name in names if asked.get(name) is not None} if asked.get("do_sample") else {}
        return GenerationConfig(**{**({"temperature": 1.0} if asked.get("do_sample") else {}), **known, **changes})

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: text, or chat messages as ``{"role": ..., "content": ...}``.
            raw: take the text as it is, without a chat template.
            system: system message to begin the chat with.
            arguments: values for the chat template.

        Raises:
            ValueError: messages with `raw`, or no chat template without it.
        """
        if raw:
            if not isinstance(prompt, str):
                raise ValueError("chat messages need the chat template; leave out raw")
            return self.tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return self.tokenizer.encode_chat(messages, arguments or {})

    def prepare(self, policy: str | Policy) -> Policy:
        """A policy from its text form, with text fields turned into this tokenizer's ids.

        Raises:
            ValueError: no such policy or field, or a policy from elsewhere whose score is not one.
        """
        encode = self.tokenizer.backend.encode
        ready = get_policy(policy).prepare(lambda text: tuple(encode(text, add_special_tokens=False).ids))
        if isinstance(ready, Evict) and not type(ready).__module__.startswith("jkv."):
            try_score(ready)
        return ready

    def engine(
        self, policy: Policy, sampling: Sampling, *, max_len: int, max_new: int, prefill_block: int = 512
    ) -> Engine:
        """The engine for texts of up to `max_len` tokens, rounded up so that few programs are ever compiled."""
        spec = CacheSpec.of(
            self.checkpoint.config,
            max_len=_round_length(max_len),
            max_new=_round_length(max_new),
            dtype=self.dtype,
        )
        return Engine(
            config=self.checkpoint.config, policy=policy, spec=spec, sampling=sampling, prefill_block=prefill_block
        )

    def logits(self, tokens: np.ndarray, *, block: int = 512) -> np.ndarray:
        """Logits of right-padded prompts under full attention: float32 `[B, T, V]` for int32 `[B, T]`."""
        return np.asarray(engines.logits(self.decoder, jnp.asarray(tokens, jnp.int32), block=block))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        policy: str | Policy = "full",
        config: GenerationConfig | None = None,
        samples: int = 1,
        batch_size: int = 8,
        rows: Sequence[int] | None = None,
        on_kept: Callable[[int, np.ndarray], None] | None = None,
    ) -> "Run":
        """Answers prompts in batches; iterate over the returned `Run`.

        Args:
            prompts: token ids.
            policy: a policy or its text form.
            config: None is the checkpoint's own (`default_config`).
            samples: answers for each prompt.
            batch_size: rows decoded together.
            rows: which answers to draw, as prompt * samples + sample; None is all of them.
            on_kept: see `jkv.loop.Batch`.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for an answer.
        """
        if batch_size < 1 or samples < 1:
            raise ValueError(f"batch_size={batch_size} and samples={samples} must be at least 1")
        config = config or self.default_config()
        longest = self.checkpoint.config.max_position
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {index} is empty; give it at least one token")
            if len(prompt) >= longest:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; the model reads at most {longest}, answer included: "
                    "shorten it"
                )
            if not 0 <= min(prompt) <= max(prompt) < self.checkpoint.config.vocab_size:
                raise ValueError(f"prompt {index} has token ids that the model does not; is the tokenizer its own?")
        rows = range(len(prompts) * samples) if rows is None else rows
        return Run(
            self, prompts, self.prepare(policy), config, samples, min(batch_size, max(len(rows), 1)), rows, on_kept
        )


@dataclass
class Run:
    """A run over prompts: iterating yields `Piece`s as text grows and a `Result` as each row ends."""

    llm: LLM
    prompts: Sequence[Sequence[int]]
    policy: Policy
    config: GenerationConfig
    samples: int
    batch_size: int
    rows: Sequence[int]
    on_kept: Callable[[int, np.ndarray], None] | None = None

    def __post_init__(self) -> None:
        """Sizes the cache for the longest of the prompts."""
        longest = max((len(prompt) for prompt in self.prompts), default=0)
        length = min(longest + self.config.max_new_tokens, self.llm.checkpoint.config.max_position)
        self.engine = self.llm.engine(
            self.policy, self.config.sampling, max_len=length, max_new=self.config.max_new_tokens
        )
        self.stats = Stats(
            plan=make_plan(
                self.llm.checkpoint.config,
                self.policy,
                self.engine.spec,
                batch=self.batch_size,
                length=length,
                dtype=self.llm.dtype,
            )
        )

    def limit(self, prompt: int) -> int:
        """Tokens that the answer to a prompt may have: what the text may be long in all is the model's to say."""
        return min(self.config.max_new_tokens, self.llm.checkpoint.config.max_position - len(self.prompts[prompt]))

    def __iter__(self) -> Iterator[Piece | Result]:
        """Runs batch after batch."""
        for first in range(0, len(self.rows), self.batch_size):
            yield from self._run_batch(self.rows[first : first + self.batch_size])

    def _run_batch(self, rows: Sequence[int]) -> Iterator[Piece | Result]:
        idle = self.batch_size - len(rows)
        eos = () if self.config.ignore_eos else self.llm.eos_ids
        which = [row // self.samples for row in rows]
        batch = Batch(
            engine=self.engine,
            weights=self.llm.weights,
            programs=self.llm.programs,
            request=Request(jnp.asarray(seed_words(self.config.seed)), jnp.asarray(_pad_eos(eos), jnp.int32)),
            prompts=[*(self.prompts[p] for p in which), *[[]] * idle],
            limits=[*(self.limit(p) for p in which), *[0] * idle],
            rows=[*rows, *[0] * idle],
            on_kept=self.on_kept,
        )
        writers = [_Writer(self, row, eos) for row in rows]
        compiling = self.llm.programs.seconds
        for tokens in batch.blocks():
            self.stats.first_token_at = self.stats.first_token_at or time.time()
            for index, writer in enumerate(writers):
                if writer.finish_reason is None:
                    yield from writer.push([int(t) for t in tokens[index] if t >= 0])
                    if writer.finish_reason is not None:
                        batch.stop(index)
                        yield self._count(writer)
            if all(writer.finish_reason is not None for writer in writers):
                break
        self.stats.prefill_seconds += batch.prefill_seconds
        self.stats.decode_seconds += batch.decode_seconds
        self.stats.compile_seconds += self.llm.programs.seconds - compiling

    def _count(self, writer: "_Writer") -> Result:
        result = writer.result()
        self.stats.prompt_tokens += result.prompt_tokens
        self.stats.new_tokens += len(result.tokens)
        self.stats.decoded_tokens += len(result.tokens) - 1
        self.stats.longest_text = max(self.stats.longest_text, result.prompt_tokens + len(result.tokens))
        return result


class _Writer:
    """Turns one row's tokens into text, and notices where the answer ends."""

    def __init__(self, run: Run, row: int, eos: Sequence[int]):
        self.run, self.eos = run, frozenset(eos)
        self.prompt, self.sample = divmod(row, run.samples)
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.decoder, self.stop = StreamDecoder(run.llm.tokenizer), StopChecker(run.config.stop)

    def push(self, tokens: Sequence[int]) -> Iterator[Piece]:
        """Takes the row's next tokens; sets `finish_reason` when the answer has ended."""
        for token in tokens:
            self.tokens.append(token)
            text, stopped = self.stop.push(self.decoder.push([token]))
            ended = token in self.eos or len(self.tokens) >= self.run.limit(self.prompt)
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
        prompt, text = self.run.prompts[self.prompt], "".join(self.texts)
        tail = self.run.llm.tokenizer.decode(prompt[-8:], skip_special=False)
        reasoning, answer = split_reasoning(
            text, open=tail.rstrip().endswith("<think>"), truncated=self.finish_reason == "length"
        )
        return Result(
            prompt=self.prompt,
            sample=self.sample,
            text=text,
            reasoning=reasoning,
            answer=answer,
            tokens=tuple(self.tokens),
            prompt_tokens=len(prompt),
            finish_reason=self.finish_reason or "length",
        )


def load(
    model: str | Path | checkpoints.Checkpoint | None = None, *, dtype: str | None = None, revision: str | None = None
) -> LLM:
    """Loads a model.

    Args:
        model: a Hugging Face folder or hub id, a GGUF file, or a folder that ``python -m weights.convert`` wrote; None
            is the embedded small model. A checkpoint that is open already is taken as it is.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own; None is float32 on CPU, where
            half precision is emulated, and elsewhere the checkpoint's own if that is half precision, else bfloat16.
        revision: branch, tag or commit of a hub id.

    Raises:
        ValueError: the model cannot be found or is not supported; the message says what to do.
    """
    opened = isinstance(model, checkpoints.Checkpoint)
    checkpoint = model if opened else checkpoints.open_checkpoint(model, revision=revision)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{checkpoint.path}: no tokenizer files; copy the model's tokenizer.json there")
    dtype = resolve_dtype(checkpoint, dtype)
    return LLM(
        checkpoint=checkpoint,
        dtype=dtype,
        tokenizer=load_tokenizer(checkpoint.tokenizer),
        decoder=checkpoints.load_parameters(checkpoints.cached(checkpoint, dtype), dtype),
    )


def resolve_dtype(checkpoint: checkpoints.Checkpoint, dtype: str | None) -> str:
    """The dtype name that `load` uses for its argument `dtype`."""
    if dtype is not None:
        return checkpoints.resolve_dtype(checkpoint, dtype)
    if jax.default_backend() == "cpu":
        return "float32"
    return checkpoint.dtype if checkpoint.dtype in ("bfloat16", "float16") else "bfloat16"


def generate(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    *,
    policy: str | Policy = "full",
    config: GenerationConfig | None = None,
    samples: int = 1,
    batch_size: int = 8,
    raw: bool = False,
) -> list[Result]:
    """Answers one prompt or several.

    Args:
        llm: from `load`.
        prompts: a text, a chat (a list of messages), or a list of either.
        policy: a policy or its text form, as "gkv:budget=512".
        config: how to draw; None is the checkpoint's own.
        samples: answers for each prompt.
        batch_size: rows decoded together.
        raw: take texts as they are, without the chat template.

    Returns:
        Results in the order of prompts, then samples.
    """
    one = isinstance(prompts, str) or any(isinstance(item, Mapping) for item in prompts)
    several: Any = [prompts] if one else prompts
    ids = [llm.encode(prompt, raw=raw) for prompt in several]
    run = llm.run(ids, policy=policy, config=config, samples=samples, batch_size=batch_size)
    results = [event for event in run if isinstance(event, Result)]
    return sorted(results, key=lambda result: (result.prompt, result.sample))


def stream(
    llm: LLM,
    prompt: Prompt,
    *,
    policy: str | Policy = "full",
    config: GenerationConfig | None = None,
    raw: bool = False,
) -> Iterator[str]:
    """Answers one prompt piece by piece: whole characters, and nothing of a stop string. Arguments as `generate`."""
    for event in llm.run([llm.encode(prompt, raw=raw)], policy=policy, config=config):
        if isinstance(event, Piece):
            yield event.text


def _pad_eos(eos: Sequence[int]) -> list[int]:
    # A fixed number of places, so that another model's or run's list compiles nothing.
    return [*eos, *[-1] * (8 - len(eos))]


def _round_length(length: int) -> int:
    """Capacities come in few sizes: powers of two from 512, then multiples of 4,096."""
    if length > LONG:
        return -(-length // LONG) * LONG
    return max(SHORTEST_MAX_LEN, bucket(length))
