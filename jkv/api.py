"""Strings in, results out: `load`, `generate`, `stream`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import weights as checkpoints
from jkv.config import CacheSpec
from jkv.engine import Engine
from jkv.loop import OnKept, Programs, bucket
from jkv.models.decoder import Decoder
from jkv.policies import Evict, Policy, get_policy
from jkv.policies.base import try_score
from jkv.prompt import prompt_logits
from jkv.run import GenerationConfig, Piece, Result, Run
from jkv.sampling import Sampling
from jkv.text import Tokenizer, load_tokenizer
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Gpu

Prompt = str | Sequence[Mapping[str, Any]]
SHORTEST_MAX_LEN = 512
LONG = 4096


@dataclass(frozen=True, kw_only=True)
class LLM:
    """A loaded model: parameters, tokenizer, and the programs compiled for it so far.

    Attributes:
        checkpoint: where it came from.
        dtype: of parameters and cache.
        decoder: the model.
        tokenizer: its tokenizer.
        implementation: what runs the operations of `pallas_kernels`; None is the quickest on the device.
        gpu: plan runs for this GPU in place of the device; they can be looked at alone.
    """

    checkpoint: checkpoints.Checkpoint
    dtype: str
    decoder: Decoder = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    implementation: str | None = None
    gpu: Gpu | None = None
    programs: Programs = field(default_factory=Programs, repr=False)
    _brought: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def weights(self) -> nnx.State:
        """The parameters as the compiled programs take them."""
        return nnx.state(self.decoder)

    @property
    def platform(self) -> str:
        """What programs are compiled for: "cpu" or "cuda"."""
        return "cuda" if self.gpu or jax.default_backend() == "gpu" else "cpu"

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
        ready = ready.adapt(self.checkpoint.config)
        if isinstance(ready, Evict) and not type(ready).__module__.startswith("jkv."):
            try_score(ready)
        return ready

    def bring(self, policy: Policy) -> Any:
        """What a prepared policy brings; loaded on first use, and kept for the last policy that was used."""
        if self._brought.get("policy") != policy:
            self._brought.clear()
            self._brought.update(policy=policy, arrays=policy.bring(self.checkpoint.config, self.dtype))
        return self._brought["arrays"]

    def engine(
        self,
        policy: Policy,
        sampling: Sampling,
        *,
        max_len: int,
        max_new: int,
        max_prompt: int,
        prefill_block: int = 512,
    ) -> Engine:
        """The engine for texts of up to `max_len` tokens, rounded up so that few programs are ever compiled."""
        asked = policy.implementation or self.implementation
        spec = CacheSpec.of(
            self.checkpoint.config,
            max_len=_round_length(max_len),
            max_new=_round_length(max_new),
            max_prompt=_round_length(max_prompt),
            dtype=self.dtype,
            implementation=dispatch.plan_for(asked, self.gpu)
            if self.gpu
            else dispatch.choose(asked, jax.devices()[0], self.dtype),
        )
        return Engine(
            config=self.checkpoint.config, policy=policy, spec=spec, sampling=sampling, prefill_block=prefill_block
        )

    def logits(self, tokens: np.ndarray, *, block: int = 512) -> np.ndarray:
        """Logits of right-padded prompts under full attention: float32 `[B, T, V]` for int32 `[B, T]`."""
        return np.asarray(prompt_logits(self.decoder, jnp.asarray(tokens, jnp.int32), block=block))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        policy: str | Policy = "full",
        config: GenerationConfig | None = None,
        samples: int = 1,
        slots: int | None = 8,
        rows: Sequence[int] | None = None,
        memory: int | None = None,
        on_kept: OnKept | None = None,
    ) -> "Run":
        """Answers prompts, each in the slot that is free first; iterate over the returned `Run`.

        Args:
            prompts: token ids.
            policy: a policy or its text form.
            config: None is the checkpoint's own (`default_config`).
            samples: answers for each prompt.
            slots: rows decoded together; when one ends, its slot is given to the next. None is as many as fit.
            rows: which answers to draw in which order, as prompt * samples + sample; None is all of them.
            memory: bytes that the run may take, where `slots` is None; None is what the device has.
            on_kept: see `jkv.loop.Scheduler`.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for an answer; not even one row fits.
        """
        if (slots is not None and slots < 1) or samples < 1:
            raise ValueError(f"slots={slots} and samples={samples} must be at least 1")
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
        return Run(self, prompts, self.prepare(policy), config, samples, slots, rows, memory, on_kept)


def load(
    model: str | Path | checkpoints.Checkpoint | None = None,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    implementation: str | None = None,
) -> LLM:
    """Loads a model.

    Args:
        model: a Hugging Face folder or hub id, a GGUF file, or a folder that ``python -m weights.convert`` wrote; None
            is the embedded small model. A checkpoint that is open already is taken as it is.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own; None is float32 on CPU, where
            half precision is emulated, and elsewhere the checkpoint's own if that is half precision, else bfloat16.
        revision: branch, tag or commit of a hub id.
        implementation: "xla", "triton" or "mosaic": what runs the operations of `pallas_kernels`; None is the quickest
            on the device.

    Raises:
        ValueError: the model cannot be found or is not supported; the message says what to do.
    """
    opened = isinstance(model, checkpoints.Checkpoint)
    checkpoint = model if opened else checkpoints.open_checkpoint(model, revision=revision)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{checkpoint.path}: no tokenizer files; copy the model's tokenizer.json there")
    dtype = resolve_dtype(checkpoint, dtype)
    dispatch.choose(implementation, jax.devices()[0], dtype)  # refused before any weight is read
    return LLM(
        checkpoint=checkpoint,
        dtype=dtype,
        implementation=implementation,
        tokenizer=load_tokenizer(checkpoint.tokenizer),
        decoder=checkpoints.load_parameters(checkpoints.cached(checkpoint, dtype), dtype),
    )


def resolve_dtype(checkpoint: checkpoints.Checkpoint, dtype: str | None) -> str:
    """The dtype name that `load` uses for its argument `dtype`."""
    if dtype is not None:
        return checkpoints.resolve_dtype(checkpoint, dtype)
    if jax.default_backend() == "cpu":
        return "float32"
    return half_precision(checkpoint)


def half_precision(checkpoint: checkpoints.Checkpoint) -> str:
    """The checkpoint's own dtype if that is half precision, else bfloat16."""
    return checkpoint.dtype if checkpoint.dtype in ("bfloat16", "float16") else "bfloat16"


def generate(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    *,
    policy: str | Policy = "full",
    config: GenerationConfig | None = None,
    samples: int = 1,
    slots: int | None = 8,
    raw: bool = False,
) -> list[Result]:
    """Answers one prompt or several.

    Args:
        llm: from `load`.
        prompts: a text, a chat (a list of messages), or a list of either.
        policy: a policy or its text form, as "gkv:budget=512".
        config: how to draw; None is the checkpoint's own.
        samples: answers for each prompt.
        slots: rows decoded together; when one ends, its slot is given to the next. None is as many as fit.
        raw: take texts as they are, without the chat template.

    Returns:
        Results in the order of prompts, then samples.
    """
    one = isinstance(prompts, str) or any(isinstance(item, Mapping) for item in prompts)
    several: Any = [prompts] if one else prompts
    ids = [llm.encode(prompt, raw=raw) for prompt in several]
    run = llm.run(ids, policy=policy, config=config, samples=samples, slots=slots)
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


def _round_length(length: int) -> int:
    """Capacities come in few sizes: powers of two from 512, then multiples of 4,096."""
    if length > LONG:
        return -(-length // LONG) * LONG
    return max(SHORTEST_MAX_LEN, bucket(length))
