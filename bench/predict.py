"""What a run would take and could reach on a GPU that is not there: memory, bytes of a step, tokens a second."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean

import jax
import numpy as np

from bench.gpu_target import TARGETS, Target
from jkv.engine import Engine
from jkv.loop import bucket
from jkv.memory import Peak, abstract_weights, largest_batch, measure_programs, nbytes
from jkv.plan import make_plan
from jkv.policies import Evict, get_policy

USABLE = 0.95  # of a card's memory, by a program
LENGTHS = 128  # of a text, over which a step is averaged
# Products of half precision, sums in float32, without sparsity: floating-point operations a second, from data sheets.
FLOPS = {"a100": 312e12, "h100": 989e12, "h200": 989e12}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A batch of texts of one length.

    Attributes:
        engine: what decodes them.
        batch: rows.
        prompt, new: tokens of each.
    """

    engine: Engine
    batch: int
    prompt: int
    new: int

    @property
    def full(self) -> "Work":
        """The same under full attention."""
        return replace(self, engine=replace(self.engine, policy=get_policy("full")))


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that compiled programs move.

    Attributes:
        ratio: those of a step over those that it must, the text at its longest.
        compacted: a step's share of those of a compaction.
    """

    ratio: float
    compacted: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a batch of texts takes; see `predict`.

    Attributes:
        peaks: by program, in bytes.
        step: bytes that a step must move, in the mean over the answer.
        compacted: a step's share of the bytes that a compaction must move.
        kv_held, kv_read: bytes of keys and values of all rows, and of those that a step must read in the mean.
        flops: floating-point operations of a step's matrix products.
        prompt_flops: of those that read the prompts.
        traffic: what the compiled programs move; None where none was compiled.
    """

    work: Work
    peaks: Mapping[str, Peak]
    step: float
    kv_held: int
    kv_read: float
    flops: float
    prompt_flops: float
    compacted: float
    traffic: Moved | None = None

    @property
    def memory(self) -> int:
        """Bytes at the fullest."""
        return max(peak.total for peak in self.peaks.values())

    def fits(self, gpu: str) -> bool:
        """Whether a card of `TARGETS` has so much."""
        return self.memory <= usable_memory(TARGETS[gpu])

    def decode_ceiling(self, gpu: str) -> float:
        """New tokens a second of all rows at most, prompts not counted."""
        return self.work.batch / self._step_seconds(gpu)

    def ceiling(self, gpu: str) -> float:
        """New tokens a second of all rows at most, the time of reading the prompts included."""
        seconds = self.prompt_flops / FLOPS[gpu] + self.work.new * self._step_seconds(gpu)
        return self.work.batch * self.work.new / seconds

    def _step_seconds(self, gpu: str) -> float:
        moved = self.step + self.compacted
        if self.traffic is not None:
            moved = self.traffic.ratio * self.step + self.traffic.compacted
        return max(moved / TARGETS[gpu].bandwidth, self.flops / FLOPS[gpu])


def predict(work: Work, traffic: Moved | None = None) -> Prediction:
    """Counts the bytes and operations of a batch; nothing is compiled."""
    engine, batch = work.engine, work.batch
    config = engine.config
    kv_read = batch * mean(_bytes_read(engine, work.prompt + round(done)) for done in _spread(work.new))
    appended = 2 * batch * config.num_layers * config.num_kv_heads * engine.spec.vector_bytes
    weights = abstract_weights(config, engine.spec.dtype)
    looked_up = 0 if config.tie_embeddings else nbytes(weights["embedding"])
    matrices = sum(x.size for x in jax.tree.leaves(weights) if x.ndim == 2)
    matrices -= 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    # Two products of keys or values with each query head, over half of the prompt in the mean.
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * work.prompt
    return Prediction(
        work=work,
        peaks=measure_programs(engine, batch=batch, prompt=bucket(work.prompt), platform="cuda"),
        step=nbytes(weights) - looked_up + kv_read + appended,
        compacted=_compacted(engine, batch),
        kv_held=make_plan(
            config, engine.policy, engine.spec, batch=batch, length=engine.spec.max_len, dtype=engine.spec.dtype
        ).kv_held,
        kv_read=kv_read,
        flops=2 * batch * matrices,
        prompt_flops=batch * work.prompt * (2 * matrices + attention),
        traffic=traffic,
    )


def largest_that_fits(work: Work, gpu: str) -> int:
    """Rows of such texts that fit a card of `TARGETS`; 0 where none does."""
    memory = usable_memory(TARGETS[gpu])
    return largest_batch(work.engine, prompt=bucket(work.prompt), memory=memory, platform="cuda")


def usable_memory(target: Target) -> int:
    """Bytes that a run may take."""
    return int(USABLE * target.memory)


def _bytes_read(engine: Engine, length: int) -> int:
    """Bytes of the stores of one row that a step must read, at a length of the text."""
    layers = engine.config.num_layers
    policies = [engine.at(index).policy for index in range(layers)]
    if isinstance(engine.policy, Evict) and engine.policy.interval:
        # Between what a compaction leaves and what it finds.
        length = min(length, engine.policy.most(length) + engine.policy.interval // 2)
    return sum(policy.bytes_read(engine.spec, length) for policy in policies)


def _compacted(engine: Engine, batch: int) -> float:
    """A step's share of a compaction, which has to read the keys, and to read and write what it keeps."""
    policy, spec = engine.policy, engine.spec
    if not isinstance(policy, Evict) or not policy.interval:
        return 0.0
    kept = policy.most(spec.max_len)
    vectors = kept + policy.interval + 4 * kept
    return batch * engine.config.num_layers * spec.num_kv_heads * spec.vector_bytes * vectors / policy.interval


def _spread(new: int) -> np.ndarray:
    return (np.arange(LENGTHS) + 0.5) * new / LENGTHS
