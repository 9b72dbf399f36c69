"""Converted checkpoints: the same parameters, whole or not there at all, on whatever devices there are."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import weights
from checkpoints import config, save_hf
from weights import checkpoint as checkpoints
from weights import conversion
from weights.convert import main


def parameters(model: Path | weights.Checkpoint, dtype: str = "auto") -> dict[str, np.ndarray]:
    checkpoint = model if isinstance(model, weights.Checkpoint) else weights.open_checkpoint(model)
    return {k: np.asarray(v) for k, v in weights.parameter_arrays(weights.load_parameters(checkpoint, dtype)).items()}


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert found[path].dtype == array.dtype, path
        np.testing.assert_array_equal(found[path], array, err_msg=path)


def convert(source: Path, folder: Path, **options) -> Path:
    conversion.convert(weights.open_checkpoint(source), folder, **options)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Two models of the same sizes, so that which of them a folder holds shows in the numbers alone."""
    root = tmp_path_factory.mktemp("sources")
    return {name: save_hf(root / name, config("qwen2"), seed=seed) for name, seed in (("old", 0), ("new", 1))}


@pytest.fixture
def existing(tmp_path, sources) -> Path:
    """A checkpoint of the model "old"."""
    return convert(sources["old"], tmp_path / "there" / "ckpt")


def model_in(folder: Path, sources: dict[str, Path]) -> str:
    found = parameters(folder)
    (name,) = (
        n for n, s in sources.items() if (parameters(s)["layers.0.qkv.bias"] == found["layers.0.qkv.bias"]).all()
    )
    assert_same(found, parameters(sources[name]))
    return name


@pytest.mark.parametrize(
    "values", [config("llama", tie_word_embeddings=True), config("qwen2"), config("qwen3", attention_bias=True)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_converted_model_is_the_same_model(tmp_path, values, dtype):
    source = weights.open_checkpoint(save_hf(tmp_path / "source", values | {"dtype": dtype}, dtype=dtype, shards=2))
    conversion.convert(source, tmp_path / "out")
    out = weights.open_checkpoint(tmp_path / "out")
    assert_same(parameters(out), parameters(source))
    assert (out.format, out.dtype, out.config, out.generation) == ("orbax", dtype, source.config, source.generation)
    assert weights.content_hash(out) == weights.content_hash(source)
    assert out.tokenizer is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out.tokenizer / name).read_bytes() == (source.path / name).read_bytes()
    parameter_bytes = sum(array.nbytes for array in parameters(out).values())
    assert out.size == parameter_bytes


def test_orbax_itself_restores_it(tmp_path, sources):
    folder = convert(sources["old"], tmp_path / "out")
    (data,) = folder.glob("data-*")
    wanted = parameters(sources["old"])
    device = ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        how = ocp.args.PyTreeRestore(restore_args=dict.fromkeys(wanted, device))
        restored = checkpointer.restore(data / "parameters", args=how)
    assert_same({path: np.asarray(array) for path, array in restored.items()}, wanted)


def test_a_converted_model_can_be_converted_again(tmp_path, sources):
    first = convert(sources["old"], tmp_path / "first")
    assert model_in(convert(first, tmp_path / "second"), sources) == "old"
    assert model_in(convert(first, first, overwrite=True), sources) == "old"


def test_a_cast_is_recorded_and_asked_for(tmp_path, sources):
    folder = convert(sources["old"], tmp_path / "out", dtype="bfloat16")
    assert weights.open_checkpoint(folder).dtype == "bfloat16"
    rounded = parameters(sources["old"], "bfloat16")
    assert_same(parameters(folder), rounded)
    assert_same(parameters(folder, "float32"), {path: array.astype(np.float32) for path, array in rounded.items()})
    recorded = json.loads((folder / "checkpoint.json").read_text())
    assert recorded["dtype"] == "bfloat16" and recorded["source"]["dtype"] == "float32"


def test_relative_paths_spaces_and_home(tmp_path, sources, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, written in (("a b/c", tmp_path / "a b" / "c"), ("~/x", tmp_path / "home" / "x")):
        convert(sources["old"], Path(given))
        assert model_in(written, sources) == model_in(Path(given), sources) == "old"


# What is there already


def test_an_existing_folder_is_kept_unless_told_otherwise(existing, sources, tmp_path):
    with pytest.raises(ValueError, match=r"exists already.*--overwrite"):
        convert(sources["new"], existing)
    assert model_in(existing, sources) == "old"
    convert(sources["new"], existing, overwrite=True)
    assert model_in(existing, sources) == "new"
    assert len(list(existing.iterdir())) == 2 and list(existing.parent.iterdir()) == [existing]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ValueError, match="not a converted checkpoint"):
        convert(sources["new"], tmp_path / "photos", overwrite=True)
    (tmp_path / "empty").mkdir()
    assert model_in(convert(sources["new"], tmp_path / "empty"), sources) == "new"


STEPS = ("_write_arrays", "_copy_tokenizer", "_write_metadata", "Path.rename", "Path.replace", "rmtree of the old data")


def die_at(step: str, monkeypatch) -> None:
    """Ends the write at a step as a killed process would: whatever is on disk then, stays."""

    def die(*_, **__):
        raise KeyboardInterrupt

    if step.startswith("Path."):
        monkeypatch.setattr(Path, step.removeprefix("Path."), die)
    elif step.startswith("_"):
        monkeypatch.setattr(checkpoints, step, die)
    nothing = die if step.startswith("rmtree") else lambda *_, **__: None
    monkeypatch.setattr(checkpoints, "shutil", SimpleNamespace(**{**vars(shutil), "rmtree": nothing}))


@pytest.mark.parametrize("step", STEPS)
def test_a_dead_writer_leaves_the_old_checkpoint_or_the_new(existing, sources, monkeypatch, step):
    with monkeypatch.context() as patch:
        die_at(step, patch)
        with pytest.raises(KeyboardInterrupt):
            convert(sources["new"], existing, overwrite=True)
    assert model_in(existing, sources) == ("new" if step.startswith("rmtree") else "old")
    convert(sources["new"], existing, overwrite=True)
    assert model_in(existing, sources) == "new" and len(list(existing.iterdir())) == 2


@pytest.mark.parametrize("step", STEPS[:4])
def test_a_dead_writer_leaves_nothing_that_opens(tmp_path, sources, monkeypatch, step):
    with monkeypatch.context() as patch:
        die_at(step, patch)
        with pytest.raises(KeyboardInterrupt):
            convert(sources["new"], tmp_path / "out")
    with pytest.raises(ValueError):
        weights.open_checkpoint(tmp_path / "out")
    assert model_in(convert(sources["old"], tmp_path / "out"), sources) == "old"


KILLED = """
import os, signal, sys, jkv
from pathlib import Path
import orbax.checkpoint as ocp
from weights.convert import main
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
ocp.Checkpointer.close = die
main(sys.argv[1:])
"""


def test_a_kill_in_the_middle_harms_nothing(existing, sources):
    command = [sys.executable, "-c", KILLED, sources["new"], existing, "--overwrite"]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    left = [path for path in existing.parent.iterdir() if path != existing]
    assert len(left) == 1 and list(left[0].rglob("0.0")), "it died before it wrote"
    assert model_in(existing, sources) == "old"
    with pytest.raises(ValueError, match=r"checkpoint\.json"):
        weights.open_checkpoint(left[0])


@pytest.fixture
def small_files() -> Iterator[None]:
    """A limit on the size of a file, which a write runs into as into the end of a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, old)


def assert_refused(model: Path, out: Path, capfd) -> str:
    assert main([str(model), str(out), "--overwrite"]) == 2
    *_, message = capfd.readouterr().err.splitlines()
    assert message.startswith(f"error: {out}: cannot be written (") and message.endswith("unchanged")
    return message


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_takes_no_more_is_seen_at_once(existing, sources, small_files, overwrite, capfd):
    out = existing if overwrite else existing.parent / "other"
    assert_refused(sources["new"], out, capfd)
    assert model_in(existing, sources) == "old" and list(existing.parent.iterdir()) == [existing]


def test_a_disk_that_fills_up_in_between_leaves_nothing_behind(existing, sources, monkeypatch, capfd):
    def fill(_, folder: Path, **__) -> None:
        folder.mkdir()
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 203392 bytes to file 17: No space left on device")

    monkeypatch.setattr(ocp.Checkpointer, "save", fill)
    assert "no space left" in assert_refused(sources["new"], existing, capfd)
    assert model_in(existing, sources) == "old" and list(existing.parent.iterdir()) == [existing]


def test_a_full_disk_is_seen_before_it_is_filled(existing, sources, monkeypatch, capfd):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert "no space left: 2 MB needed, 1 MB free" in assert_refused(sources["new"], existing, capfd)
    assert model_in(existing, sources) == "old" and list(existing.parent.iterdir()) == [existing]


# Devices

SHARDED = """
import sys, jax, numpy as np, jkv, weights
from jax.sharding import NamedSharding, PartitionSpec
from pathlib import Path
from weights.checkpoint import save_orbax
source = weights.open_checkpoint(sys.argv[1])
whole = weights.parameter_arrays(weights.load_parameters(weights.open_checkpoint(sys.argv[2])))
assert len(jax.devices()) == 4
mesh = jax.make_mesh((2, 2), ("rows", "columns"))
def spread(array):
    spec = PartitionSpec("rows", "columns") if array.ndim == 2 else PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec))
save_orbax({path: spread(array) for path, array in whole.items()}, Path(sys.argv[3]), source=source, dtype="float32")
again = weights.parameter_arrays(weights.load_parameters(weights.open_checkpoint(sys.argv[3])))
assert all((np.asarray(again[path]) == np.asarray(array)).all() for path, array in whole.items())
"""


def test_saved_on_one_device_or_four_it_loads_on_four_or_one(tmp_path, sources, monkeypatch):
    one, four = convert(sources["old"], tmp_path / "one"), tmp_path / "four"
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4")
    subprocess.run([sys.executable, "-c", SHARDED, sources["old"], one, four], check=True)
    assert list(four.rglob("layers.0.qkv.kernel/1.1")), "it was not saved in shards"
    assert len(jax.devices()) == 1 and model_in(four, sources) == "old"


# Checkpoints that do not fit or are not whole


def edit(folder: Path, change) -> None:
    file = folder / "checkpoint.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v["config"].update(head_dim=32), ["layers.0.qkv.kernel has shape (128, 64), wanted (256, 64)"]),
        (lambda v: v["config"].update(num_layers=3), ["layers.2.attention_norm.scale is missing"]),
        (lambda v: v["config"].update(num_layers=1), ["layers.1.attention_norm.scale is not used"]),
        (lambda v: v["config"].update(tie_embeddings=True), ["head.kernel is not used"]),
        (lambda v: v["config"].update(num_heads=3), ["query heads"]),
        (lambda v: v["config"].update(novelty=1), ["checkpoint.json", "novelty"]),
        (lambda v: v.update(version=99), ["checkpoint.json", "99", "convert the model again"]),
        (lambda v: v.update(format="other"), ["checkpoint.json", "'other'"]),
        (lambda v: v.pop("source"), ["checkpoint.json", "source"]),
        (lambda v: v.update(data="data-gone"), ["missing"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(existing, change, words):
    edit(existing, change)
    with pytest.raises(ValueError) as caught:
        parameters(existing)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_a_checkpoint_that_was_copied_in_part_is_refused(existing):
    (file,) = existing.glob("data-*/parameters/layers.1.down.kernel/0.0")
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"layers\.1\.down\.kernel.*copy or convert"):
        weights.open_checkpoint(existing)
    file.unlink()
    with pytest.raises(ValueError, match=r"layers\.1\.down\.kernel.*copy or convert"):
        weights.open_checkpoint(existing)


# The command


def test_the_command_reports_what_it_does_and_nothing_else(tmp_path, sources, capfd):
    assert main([str(sources["old"]), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == "" and [line.split()[0] for line in lines] == ["reading", "writing", "done"]
    assert str(sources["old"]) in lines[0] and "MB, float32" in lines[0] and "MB, bfloat16" in lines[1]


def test_the_command_runs_as_a_module_and_refuses_in_one_line(existing, sources):
    command = [sys.executable, "-W", "error", "-m", "weights.convert", sources["new"], existing]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr


# The cache of conversions


@pytest.fixture
def file_model(tmp_path, monkeypatch) -> weights.Checkpoint:
    """A checkpoint that says it is GGUF, and a cache of its own."""
    monkeypatch.setattr(conversion.platformdirs, "user_cache_path", lambda _: tmp_path / "cache")
    source = weights.open_checkpoint(save_hf(tmp_path / "model", config()))
    return dataclasses.replace(source, format="gguf")


class Unread:
    """Tensors that may be counted, not read."""

    def __init__(self, tensors: weights.source.TensorReader):
        self.names, self.shape = tensors.names, tensors.shape

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")


def test_a_second_load_reads_the_cache(file_model):
    wanted = parameters(file_model)
    first = weights.cached(file_model)
    second = weights.cached(dataclasses.replace(file_model, tensors=Unread(file_model.tensors)))
    for found in (first, second):
        assert_same(parameters(found), wanted)
        assert (found.name, found.config, found.tokenizer) == (file_model.name, file_model.config, file_model.tokenizer)
        assert weights.content_hash(found) == weights.content_hash(file_model)
    assert_same(parameters(weights.cached(file_model, "bfloat16"), "bfloat16"), parameters(file_model, "bfloat16"))


def test_a_changed_file_is_converted_anew(file_model, tmp_path):
    weights.cached(file_model)
    save_hf(tmp_path / "model", config(), seed=1)
    changed = dataclasses.replace(weights.open_checkpoint(tmp_path / "model"), format="gguf")
    assert_same(parameters(weights.cached(changed)), parameters(changed))


def test_a_broken_cache_is_made_anew(file_model, tmp_path):
    weights.cached(file_model)
    for file in (tmp_path / "cache").rglob("0.0"):
        file.unlink()
    found = weights.cached(file_model)
    assert found.format == "orbax"
    assert_same(parameters(found), parameters(file_model))


def test_a_cache_that_cannot_be_written_does_not_matter(file_model, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert weights.cached(file_model) is file_model
    assert "not cached" in caplog.text


def test_only_gguf_of_a_moderate_size_is_cached(file_model, tmp_path, monkeypatch):
    plain = dataclasses.replace(file_model, format="safetensors")
    assert weights.cached(plain) is plain
    monkeypatch.setattr(conversion, "CACHE_LIMIT", 100_000)
    assert weights.cached(file_model) is file_model
    assert not (tmp_path / "cache").exists()
