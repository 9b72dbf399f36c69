"""`bench.quality`, which measures what policies cost, and `bench.plot`, which draws it."""

from importlib.util import find_spec

import pytest

from bench import plot, quality
from checkpoints import config, save_hf
from jkv import cli
from jkv.jsonl import read_answers

SIZES = ("--budgets", 24, "--sequences", 2, "--length", 96, "--prompt-tokens", 24)
KEYS = ("--passkeys", 2, "--passkey-length", 230)
POLICIES = ("--policies", "gkv:window=8,interval=16", "streamingllm:interval=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("quality") / "tiny", config(num_hidden_layers=1), seed=0)


def test_rows_are_measured_once_and_drawn(folder, tmp_path, capsys):
    def run(*options: object) -> tuple[int, str, str]:
        given = (*SIZES, *KEYS, *POLICIES, "--model", folder, "--out", tmp_path, *options)
        return cli.run(quality.main, list(map(str, given))), *capsys.readouterr()

    code, out, err = run()
    assert code == 0, err
    rows = read_answers(tmp_path / "quality.jsonl")
    by_name = {row["name"]: row for row in rows}
    assert sorted(by_name) == ["full", "gkv:window=8,interval=16", "oracle", "random", "streamingllm:interval=16"]
    random, gkv, oracle = (by_name[name] for name in ("random", "gkv:window=8,interval=16", "oracle"))
    assert random["kl"] > oracle["kl"] > 0 and gkv["fields"]["budget"] == 24
    assert "seen_nll" not in oracle and gkv["seen_nll"] != by_name["full"]["seen_nll"]
    assert (tmp_path / "quality.md").read_text() + "\n" == out
    scale = (random["kl"] - gkv["kl"]) / (random["kl"] - oracle["kl"])
    assert f"| {scale:.2f} |" in out and "| oracle |" in out and "| full |" in out
    # The last row was cut off by a kill: it is measured again, and no other.
    lines = (tmp_path / "quality.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "quality.jsonl").write_text("".join(lines[:-1]))
    code, again, err = run()
    assert code == 0 and read_answers(tmp_path / "quality.jsonl") == rows and again == out
    code, _, err = run("--sequences", 1)
    assert code == 2 and "rows of another model, text or size" in err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib: .[bench]")
def test_a_plot(tmp_path, capsys):
    file, picture = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    file.write_text('{"name": "a", "budget": 64, "kl": 0.5}\n{"name": "full", "budget": 0, "hits": 1.0}\n')
    options = (str(file), "--output", str(picture))
    assert cli.run(plot.main, [*options, "--y", "kl", "hits"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for given, message in (
        ((*options, "--y", "nll"), "no row has a number 'nll'; there are budget, hits, kl"),
        ((str(tmp_path / "none.jsonl"), "--y", "kl", "--output", "x.png"), "none.jsonl: there is no such file"),
    ):
        assert cli.run(plot.main, list(given)) == 2 and message in capsys.readouterr().err
