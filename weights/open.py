"""Opens a model whatever form it is given in, by what is there and not by what it is called."""

import os
from pathlib import Path

from weights.hub import EMBEDDED, download, embedded_file, is_hub_id
from weights.safetensors import open_safetensors
from weights.source import Checkpoint, describe_missing


def open_checkpoint(
    model: str | Path | None = None, *, revision: str | None = None, with_weights: bool = True
) -> Checkpoint:
    """Finds a model and reads everything but its weights.

    Args:
        model: a Hugging Face folder, an Orbax folder from `python -m weights.convert`, a GGUF file, or a hub id
            OWNER/NAME; None (or `EMBEDDED`) is the embedded model. What exists locally comes before the hub.
        revision: branch, tag or commit of a hub id.
        with_weights: false leaves a hub model's weights where they are; the checkpoint then has no tensors.

    Raises:
        ValueError: there is no such model, or it is broken or not supported; one line with the remedy.
    """
    name = os.fspath(model) if model is not None else EMBEDDED
    path = Path(name).expanduser()
    exists = bool(name) and os.path.lexists(path)
    if revision is not None and (exists or not is_hub_id(name)):
        raise ValueError(f"revision {revision!r} applies to a model of the Hugging Face hub, and {name} is not one")
    if exists:
        return _open_path(path, name)
    if name == EMBEDDED:
        return _open_gguf(embedded_file(), name)
    if not is_hub_id(name):
        raise ValueError(
            f"model {name!r}: no such file or folder; give a Hugging Face folder, a .gguf file, or a hub id OWNER/NAME"
        )
    folder, commit = download(name, revision=revision, with_weights=with_weights)
    return open_safetensors(folder, name=name, revision=commit, with_weights=with_weights)


def _open_path(path: Path, name: str) -> Checkpoint:
    from weights.checkpoint import METADATA, open_orbax

    if not path.is_dir():
        return _open_file(path, name)
    if (path / METADATA).is_file():
        return open_orbax(path, name=name)
    if os.path.lexists(path / "config.json"):
        return open_safetensors(path, name=name)
    inside = sorted(path.glob("*.gguf"))
    if inside:
        raise ValueError(f"{path}: a folder of GGUF files; give one of them, as in {inside[0]}")
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path}: an adapter (adapter_config.json), not a model; merge it into its base model first")
    raise ValueError(
        f"{path}: neither config.json nor {METADATA}; give a Hugging Face folder or one written by "
        "`python -m weights.convert`"
    )


def _open_file(path: Path, name: str) -> Checkpoint:
    problem = describe_missing(path)
    if problem is not None:
        raise ValueError(f"{path}: {problem}")
    if path.suffix in (".safetensors", ".json"):
        raise ValueError(f"{path}: give its folder, which holds config.json too: {path.parent}")
    return _open_gguf(path, name)


def _open_gguf(path: Path, name: str) -> Checkpoint:
    from weights.gguf import open_gguf

    return open_gguf(path, name=name)
