"""What is compared with transformers: tiny checkpoints made from a seed, a text for the embedded model, recordings.

A recording holds no weights: they are made again from the seed, and a hash tells when they are not the same any more.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import VOCAB_SIZE, config, random_tensors

FOLDER = Path(__file__).parent / "goldens"
TINY, EMBEDDED = FOLDER / "tiny.npz", FOLDER / "embedded.npz"

LENGTHS = (1, 2, 3, 17, 31, 32, 33, 64, 65, 100, 127, 128, 129, 130)
NEW = 16
COLUMNS = slice(3, None, 23)  # of a tiny model's logits, those that are recorded

TEXT = (
    "The river rose in the night, and by morning the lower fields were under water. Anna counted the sheep from the "
    "window: forty-two, which was two fewer than the day before. She pulled on her boots, whistled for the dog, and "
    "went down the hill to look for the missing pair. The rain had stopped, but the sky was still the colour of slate, "
    "and every ditch along the lane was full. In 1997 the same had happened; her father lost 17 lambs that year."
)
QUESTION = "Write a short story about a lighthouse keeper who finds a message in a bottle."
EMBEDDED_NEW = 128
EMBEDDED_ROWS, EMBEDDED_COLUMNS = slice(None, None, 9), slice(5, None, 641)


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint.

    Attributes:
        seed: of its weights and prompt; one whose greedy tokens vary and are far from a tie.
        config: its Hugging Face config.
        block: prompt tokens read at once; less than the prompt takes twice as long to compile.
    """

    seed: int
    config: Mapping[str, Any]
    block: int = 512

    @property
    def prompt(self) -> np.ndarray:
        """The longest prompt, int32; the others are its beginnings. Neither BOS nor EOS is in it."""
        ids = np.random.default_rng(100 + self.seed).integers(2, VOCAB_SIZE, max(LENGTHS))
        return ids.astype(np.int32)

    def hash_weights(self) -> str:
        """SHA-256 of the weights, as hexadecimal digits."""
        digest = hashlib.sha256()
        for name, tensor in random_tensors(self.config, seed=self.seed).items():
            digest.update(name.encode() + tensor.tobytes())
        return digest.hexdigest()


def old_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 wrote it."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config |= {"torch_dtype": config.pop("dtype"), "rope_theta": rope.pop("rope_theta")}
    return config | {"rope_scaling": rope if rope["rope_type"] != "default" else None}


def extended(kind: str, **more: Any) -> dict[str, Any]:
    """Part of a config: a context of 64 tokens extended four times."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    return {"max_position_embeddings": 256, "rope_parameters": parameters | more}


_SEVEN = {"num_attention_heads": 14, "hidden_size": 112, "head_dim": 8}  # 7 query heads a group
_BIASES = {"attention_bias": True, "mlp_bias": True}
_TIED = {"tie_word_embeddings": True}

CASES = {
    "llama": Case(0, config("llama"), block=48),
    "llama_tied_biases": Case(3, config("llama", num_key_value_heads=4, **_TIED, **_BIASES)),
    "llama_one_kv_head": Case(6, config("llama", num_key_value_heads=1, head_dim=24)),
    "llama_linear": Case(0, config("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
    "llama_llama3": Case(3, config("llama", **extended("llama3", low_freq_factor=1.0, high_freq_factor=4.0))),
    "llama_yarn_mscale": Case(4, config("llama", **extended("yarn", mscale=0.7, mscale_all_dim=1.1, truncate=False))),
    "qwen2_seven": Case(0, config("qwen2", **_SEVEN), block=48),
    "qwen2_seven_tied": Case(0, config("qwen2", **_SEVEN, **_TIED)),
    "qwen2_theta_old_spelling": Case(
        2, old_spelling(config("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    ),
    "qwen2_window_off": Case(3, config("qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=1)),
    "qwen2_yarn_old_spelling": Case(1, old_spelling(config("qwen2", **extended("yarn")))),
    "qwen3": Case(0, config("qwen3"), block=48),
    "qwen3_tied_biases": Case(27, config("qwen3", attention_bias=True, **_TIED)),
    "qwen3_yarn_factor": Case(
        0, config("qwen3", **extended("yarn", attention_factor=0.8, beta_fast=16.0, beta_slow=2.0))
    ),
}


def load_reference(folder: Path, **options: Any) -> Any:
    """transformers' model of a checkpoint in float32, all of whose weights came from the file. Needs torch."""
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    return model.eval()


def forward(model: Any, ids: Any) -> np.ndarray:
    """Logits of one text by transformers' model, float32 `[T, V]`."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(ids, np.int64)[None])).logits[0].float().numpy()
