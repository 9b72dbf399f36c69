"""Texts to compare policies on: pieces of a file, or what a model writes by itself."""

import hashlib
import json
from pathlib import Path

import numpy as np
import platformdirs

from jkv.api import LLM
from jkv.jsonl import write_whole
from jkv.run import GenerationConfig, Result

# What the model goes on from.
OPENINGS = (
    "Write a long story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain in detail how a steam engine works, and how it changed the world.",
    "Tell the history of a small town by a river, from its founding to today.",
    "Describe a walk through an old forest, and every plant and animal on the way.",
    "Write a dialogue in which two friends plan a journey around the world.",
    "Explain how bread is made, step by step, and why each step matters.",
    "Write the diary of a sailor on a long voyage across the ocean.",
    "Describe how the planets move, and how people found that out.",
)


def read_passages(llm: LLM, path: Path, *, count: int, length: int) -> list[list[int]]:
    """Pieces of a text file, `count` of `length` tokens each, spread evenly over it.

    Raises:
        ValueError: it is too short, or no text.
    """
    try:
        ids = llm.tokenizer.encode(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}); convert it") from error
    if len(ids) < count * length:
        raise ValueError(
            f"{path} has {len(ids)} tokens, and {count} texts of {length} need {count * length}: ask for less"
        )
    return [ids[start : start + length] for start in np.linspace(0, len(ids) - length, count).astype(int)]


def write_passages(llm: LLM, *, count: int, length: int, seed: int) -> list[list[int]]:
    """What the model writes under full attention: `count` texts of `length` tokens, at temperature 1 and top-p 0.95.

    They are kept in the user's cache: the same model and seed give the same texts.

    Raises:
        ValueError: the openings alone are longer than `length`, or that is longer than the model reads.
    """
    if length > (most := llm.checkpoint.config.max_position):
        raise ValueError(f"texts of {length} tokens are longer than the {most} that the model reads")
    raw = not llm.tokenizer.has_chat_template
    openings = [llm.encode(OPENINGS[index % len(OPENINGS)], raw=raw) for index in range(count)]
    longest = max(map(len, openings))
    if longest >= length:
        raise ValueError(f"texts of {length} tokens are too short for what they begin with, {longest} tokens")
    meant = [llm.checkpoint.name, llm.checkpoint.revision, str(llm.checkpoint.path), llm.dtype, length, seed, openings]
    key = hashlib.sha256(json.dumps(meant).encode()).hexdigest()[:16]
    path = platformdirs.user_cache_path("jkv") / "texts" / f"{key}.json"
    if path.is_file():
        return json.loads(path.read_text())
    config = GenerationConfig(
        max_new_tokens=length - min(map(len, openings)), temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True
    )
    results = [event for event in llm.run(openings, config=config, slots=count) if isinstance(event, Result)]
    results.sort(key=lambda result: result.prompt)
    texts = [[*openings[result.prompt], *result.tokens][:length] for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(texts))
    return texts
