"""The sizes that the kernels meet: the models and runs of the papers' tables, for tests, compile checks and benches."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention of one model.

    Attributes:
        kv_heads, group, head_dim: H, G and D.
    """

    kv_heads: int
    group: int
    head_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The store of one layer in one run.

    Attributes:
        batch: rows.
        capacity: slots.
        kept: slots that a compaction leaves, or tokens that a step reads.
        window: tokens of the observation window.
        prompt: tokens of each prompt, where they matter.
    """

    batch: int
    capacity: int
    kept: int
    window: int = 16
    prompt: int = 32


MODELS = {
    "qwen-7b": Heads(kv_heads=4, group=7),
    "llama-8b": Heads(kv_heads=8, group=4),
    "qwen3-8b": Heads(kv_heads=8, group=4),
    "qwen-1.5b": Heads(kv_heads=2, group=6),
    "smollm2-135m": Heads(kv_heads=3, group=3, head_dim=64),
}

# Budgets of 512 to 2,048 tokens with compactions every 128, and full attention over long texts.
CACHES = {
    "b128-k512": Cache(batch=128, capacity=640, kept=512),
    "b64-k1024": Cache(batch=64, capacity=1152, kept=1024),
    "b32-k2048": Cache(batch=32, capacity=2176, kept=2048),
    "b1-k2048": Cache(batch=1, capacity=2176, kept=2048),
    "b16-full16k": Cache(batch=16, capacity=16384, kept=16384),
    "b4-full34k": Cache(batch=4, capacity=34816, kept=34816),
}

# Prompts and answers of 2,048 tokens to 32,768, of which a step reads 2,048.
SELECTED = {
    "b32-2k16k": Cache(batch=32, capacity=18432, kept=2048, prompt=2048),
    "b32-2k32k": Cache(batch=32, capacity=34816, kept=2048, prompt=2048),
    "b16-16k2k": Cache(batch=16, capacity=18432, kept=2048, prompt=16384),
    "b16-32k2k": Cache(batch=16, capacity=34816, kept=2048, prompt=32768),
    "b1-32k2k": Cache(batch=1, capacity=34816, kept=2048, prompt=32768),
}
RUNS = CACHES | SELECTED
