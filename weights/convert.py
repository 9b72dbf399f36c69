"""Converts a model once, so that it loads quickly: `python -m weights.convert MODEL OUT`.

OUT is an Orbax checkpoint of the parameters as the decoder has them (projections joined, one dtype), with the config,
the generation config, the tokenizer and where it all came from. It is opened like any other model.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jkv.config import DTYPES
from weights.conversion import convert
from weights.open import open_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    start = time.perf_counter()
    try:
        checkpoint = open_checkpoint(options.model, revision=options.revision)
        convert(checkpoint, options.out, dtype=options.dtype, overwrite=options.overwrite, report=_report)
    except ValueError as error:
        _report(f"error: {error}")
        return 2
    _report(f"done in {time.perf_counter() - start:.1f} s; run it with --model {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weights.convert", description="Convert a model to Orbax.")
    parser.add_argument("model", help="Hugging Face folder or hub id, GGUF file, or a converted checkpoint")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="of the parameters; auto: the model's"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--overwrite", action="store_true", help="replace a converted checkpoint")
    return parser


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
