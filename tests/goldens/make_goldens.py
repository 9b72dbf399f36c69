"""Records what transformers computes for the cases of `parity_cases`, for machines without torch.

Needs the parity extra. In the folder tests:  python -m goldens.make_goldens
"""

import tempfile
from typing import Any

import numpy as np
import torch

import parity_cases as cases
from checkpoints import save_hf
from weights import content_hash, open_checkpoint

LEAST_MARGIN = 2e-3  # between the two largest logits; float32 noise is below 1e-4
LEAST_DISTINCT = 5  # greedy tokens


def decode(model: Any, ids: np.ndarray, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens after a prompt, end-of-text tokens being tokens like others, and their logits."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor(ids.astype(np.int64)[None]),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.cat(out.logits).float()
    best = logits.topk(2).values
    margin = float((best[:, 0] - best[:, 1]).min())
    drawn = out.sequences[0, len(ids) :].numpy()
    distinct = len(np.unique(drawn))
    assert margin > LEAST_MARGIN and distinct >= LEAST_DISTINCT, f"margin {margin}, {distinct} distinct tokens"
    return drawn, logits.numpy()


def record_tiny() -> dict[str, np.ndarray]:
    """First logits and greedy tokens of every case, and the hash of its weights: one entry a case in each array."""
    ids, logits = [], []
    for name, case in cases.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = cases.load_reference(save_hf(folder, case.config, seed=case.seed))
        answers = [decode(model, case.prompt[:length], cases.NEW) for length in cases.LENGTHS]
        ids.append([drawn for drawn, _ in answers])
        logits.append([values[0, cases.COLUMNS] for _, values in answers])
        print(f"{name}: logits {np.std(logits[-1]):.2f} around their mean")
    return {
        "names": np.array(list(cases.CASES)),
        "sha256": np.array([case.hash_weights() for case in cases.CASES.values()]),
        "ids": np.array(ids, np.int16),
        "logits": np.array(logits, np.float32),
    }


def record_embedded() -> dict[str, np.ndarray]:
    """Logits of a text and greedy tokens after a question of the embedded model."""
    from jkv.text import load_tokenizer

    checkpoint = open_checkpoint()
    assert checkpoint.tokenizer is not None
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    text = np.array(tokenizer.encode(cases.TEXT), np.int32)
    chat = np.array(tokenizer.encode_chat([{"role": "user", "content": cases.QUESTION}]), np.int32)
    model = cases.load_reference(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    drawn, _ = decode(model, chat, cases.EMBEDDED_NEW)
    return {
        "text": text,
        "chat": chat,
        "ids": drawn.astype(np.int32),
        "logits": cases.forward(model, text)[cases.EMBEDDED_ROWS, cases.EMBEDDED_COLUMNS],
        "sha256": np.array(content_hash(checkpoint)),
    }


if __name__ == "__main__":
    np.savez_compressed(cases.TINY, **record_tiny())
    np.savez_compressed(cases.EMBEDDED, **record_embedded())
