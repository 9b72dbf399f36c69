"""What a run was, in one JSON file from which it can be run again: model, policy, sampling, seed, versions."""

import argparse
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jkv
import weights
from jkv.api import LLM
from jkv.policies import Policy, describe

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers")
# Options that say how to run, or where results go, not what is run.
TRANSIENT = ("rerun", "manifest", "output", "debug", "dry_run", "memory", "list_policies", "explain", "trace_kept")


def write_manifest(
    path: Path,
    llm: LLM,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
    **results: Any,
) -> None:
    """Writes the manifest of a run that has ended.

    Args:
        path: the JSON file.
        llm: the model.
        policy: prepared for it.
        prompts: token ids.
        options: the command line's; those that say what was run are kept.
        results: further values, as JSON takes them.
    """
    checkpoint, device = llm.checkpoint, jax.devices()[0]
    arguments = {name: value for name, value in vars(options).items() if name not in TRANSIENT}
    arguments["dtype"] = llm.dtype  # which depends on the device where no --dtype is given
    manifest = {
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "model": {
            "name": checkpoint.name,
            "path": str(checkpoint.path),
            "format": checkpoint.format,
            "revision": checkpoint.revision,
            "sha256": weights.content_hash(checkpoint),
            "dtype": llm.dtype,
        },
        "policy": {"class": type(policy).__name__, **dict(describe(policy))},
        "prompts_sha256": hash_prompts(prompts),
        "device": {"platform": device.platform, "kind": device.device_kind},
        "versions": {
            "python": platform.python_version(),
            "jkv": jkv.__version__,
            **{name: version(name) for name in PACKAGES},
        },
        **results,
    }
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_again(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line; with --rerun those of a manifest, where the command line says nothing else.

    Raises:
        ValueError: the manifest cannot be read, or is another command's or version's.
    """
    options = parser.parse_args(arguments)
    if options.rerun:
        given = read_manifest(options.rerun)["arguments"]
        if unknown := given.keys() - vars(options).keys():
            raise ValueError(f"manifest {options.rerun} has options this command does not know: {', '.join(unknown)}")
        parser.set_defaults(**{k: Path(v) if k == "input" and v else v for k, v in given.items()})
        options = parser.parse_args(arguments)
    return options


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest.

    Raises:
        ValueError: the file cannot be read or is not a manifest.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"manifest {path} cannot be read ({reason}); write one with --manifest") from None
    if not isinstance(manifest, dict) or not {"arguments", "model", "prompts_sha256"} <= manifest.keys():
        raise ValueError(f"{path} is not a manifest; write one with --manifest")
    return manifest


def check_same(manifest: Mapping[str, Any], llm: LLM, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless a run has the weights, dtype and prompts of a manifest."""
    found = {"sha256": weights.content_hash(llm.checkpoint), "dtype": llm.dtype}
    for key, value in found.items():
        if manifest["model"][key] != value:
            raise ValueError(
                f"the manifest's model has {key} {manifest['model'][key]}, this one {value}; use that model and dtype"
            )
    if manifest["prompts_sha256"] != hash_prompts(prompts):
        raise ValueError("the prompts are not those of the manifest; restore the prompts file that it was run with")


def hash_prompts(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the prompts' token ids, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([list(map(int, p)) for p in prompts]).encode()).hexdigest()
