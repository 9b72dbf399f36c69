"""What a run was, in one JSON file from which it can be run again: model, policy, sampling, seed, versions."""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jkv
import weights
from jkv.policies import describe
from jkv.run import Run

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers")


def write_manifest(path: Path, run: Run, arguments: Mapping[str, Any]) -> None:
    """Writes the manifest of a run.

    Args:
        path: the JSON file.
        run: the run, after its end.
        arguments: command-line options from which the run can be repeated.
    """
    checkpoint, device = run.llm.checkpoint, jax.devices()[0]
    manifest = {
        "arguments": dict(arguments),
        "model": {
            "name": checkpoint.name,
            "path": str(checkpoint.path),
            "format": checkpoint.format,
            "revision": checkpoint.revision,
            "sha256": weights.content_hash(checkpoint),
            "dtype": run.llm.dtype,
        },
        "policy": {"class": type(run.policy).__name__, **dict(describe(run.policy))},
        "generation": asdict(run.config),
        "samples": run.samples,
        "prompts_sha256": hash_prompts(run),
        "device": {"platform": device.platform, "kind": device.device_kind},
        "versions": {
            "python": platform.python_version(),
            "jkv": jkv.__version__,
            **{name: version(name) for name in PACKAGES},
        },
        "stats": run.stats.report(),
    }
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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


def check_same(manifest: Mapping[str, Any], run: Run) -> None:
    """Raises ValueError unless a run has the weights, dtype and prompts of a manifest."""
    found = {
        "sha256": weights.content_hash(run.llm.checkpoint),
        "dtype": run.llm.dtype,
    }
    for key, value in found.items():
        if manifest["model"][key] != value:
            raise ValueError(
                f"the manifest's model has {key} {manifest['model'][key]}, this one {value}; use that model and dtype"
            )
    if manifest["prompts_sha256"] != hash_prompts(run):
        raise ValueError("the prompts are not those of the manifest; restore the prompts file that it was run with")


def hash_prompts(run: Run) -> str:
    """SHA-256 of the prompts' token ids, as hexadecimal digits."""
    return hashlib.sha256(json.dumps([list(map(int, p)) for p in run.prompts]).encode()).hexdigest()
