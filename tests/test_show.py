"""`python -m jkv.show`, and the traces that it reads."""

import base64
import json
import re
import shutil
import subprocess
import zlib
from importlib.util import find_spec

import numpy as np
import pytest

from jkv import cli
from jkv.commands import show as command
from jkv.commands.show import make_page
from jkv.trace import Trace, read_trace, share_held

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def kept(*records: list[list[int]], slots: int = 5) -> np.ndarray:
    """`[N, 1, 1, H, S]` of the positions that each head holds at each record."""
    padded = [[[*head, *[-1] * (slots - len(head))] for head in record] for record in records]
    return np.array(padded, np.int32)[:, None, None]


def make_trace(**changes: object) -> Trace:
    """A prompt of three tokens and an answer of five, of which the last is in no cache, in one layer of two heads."""
    fields = {
        "policy": "GKV: budget 3",
        "steps": np.array([0, 2, 4], np.int32),
        "kept": kept([[0, 1, 2], [0, 2]], [[1, 3, 4], [0, 3, 4]], [[4, 5, 6], [0, 3, 5, 6]]),
        "prompt_ids": np.array([[5, 6, 7]], np.int32),
        "new_ids": np.array([[1, 2, 3, 4, 5]], np.int32),
        "pieces": np.array([["<s>", "The", " sky", " is", " </script>", "é", "", " blue"]]),
        **changes,
    }
    return Trace(**fields)


def test_when_tokens_come_and_go():
    trace = make_trace()
    assert trace.lengths(0) == (3, 5)
    assert trace.births(0).tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert trace.drops(0).tolist() == [[[1, 2, 1, 2, 3, 3, 3, 3], [3, 0, 1, 3, 2, 3, 3, 3]]]
    held = share_held(trace, 0)
    np.testing.assert_array_equal(
        held,
        [
            [1, 0.5, 1, *[np.nan] * 5],
            [0.5, 0.5, 0, 1, 1, *[np.nan] * 3],
            [0.5, 0, 0, 0.5, 0.5, 1, 1, np.nan],
        ],
    )


def test_a_trace_is_read_as_it_was_saved(tmp_path):
    trace = make_trace()
    np.savez_compressed(tmp_path / "kept.npz", **vars(trace))
    again = read_trace(tmp_path / "kept.npz")
    assert again.policy == trace.policy and again.tokens(0) == trace.tokens(0)
    np.testing.assert_array_equal(again.drops(0), trace.drops(0))


def embedded(page: str) -> dict:
    """What a page has of its trace."""
    return json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])


def test_a_page_holds_the_trace_and_needs_nothing_else():
    trace = make_trace()
    page = make_page(trace)
    assert page.count("</script>") == 1 and not re.search(r"https?:|src=|@import|url\(", page)
    data = embedded(page)
    (row,) = data["rows"]
    drops = np.frombuffer(zlib.decompress(base64.b64decode(row["drops"])), "<u2")
    assert drops.reshape(1, 2, 8).tolist() == trace.drops(0).tolist()
    assert row["tokens"] == trace.tokens(0) and row["births"] == trace.births(0).tolist()
    assert (data["policy"], data["steps"], row["prompt"]) == ("GKV: budget 3", [0, 2, 4], 3)


def test_a_page_of_a_long_text_is_small():
    """4,096 tokens, 30 layers of 8 heads that drop at random."""
    rng = np.random.default_rng(0)
    records, slots = 33, 256
    positions = np.stack(
        [rng.permuted(np.tile(np.arange(128 + 124 * i), (240, 1)), axis=1)[:, :128] for i in range(records)]
    )
    held = np.full((records, 30, 1, 8, slots), -1, np.int32)
    held[..., :128] = positions.reshape(records, 30, 1, 8, 128)
    trace = make_trace(
        steps=np.arange(records) * 124,
        kept=held,
        prompt_ids=np.ones((1, 128), np.int32),
        new_ids=np.ones((1, 3968), np.int32),
        pieces=np.array([[" words"] * 4096]),
    )
    assert 100_000 < len(make_page(trace).encode()) < 5_000_000


@pytest.fixture
def run(capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run(command.main, list(map(str, arguments)))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def saved(tmp_path):
    np.savez_compressed(tmp_path / "kept.npz", **vars(make_trace()))
    return tmp_path / "kept.npz"


def test_the_command(run, saved, tmp_path):
    code, out, err = run(saved, "--step", 3)
    assert code == 0, err
    assert "kept.html: 1 row" in err and (tmp_path / "kept.html").read_text() == make_page(make_trace())
    assert out == "<s>The· is </script>\n" and "after 2 decoded tokens: 80.0% of 5 tokens" in err
    if find_spec("matplotlib"):
        code, _, err = run(saved, "--output", tmp_path / "page.html", "--png", tmp_path / "kept.png")
        assert code == 0 and (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_what_cannot_be_shown_is_refused(run, saved, tmp_path, monkeypatch):
    (tmp_path / "text.npz").write_text("no trace")
    np.savez(tmp_path / "other.npz", kept=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", **{**vars(make_trace()), "pieces": np.array([[None]])})
    np.savez(tmp_path / "crooked.npz", **vars(make_trace(steps=np.arange(9))))
    for options, message in (
        ((tmp_path / "none.npz",), "No such file or directory; write one with --trace-kept"),
        ((tmp_path,), "Is a directory"),
        ((tmp_path / "text.npz",), "is no trace of kept positions"),
        ((tmp_path / "other.npz",), "is no trace of kept positions"),
        ((tmp_path / "pickled.npz",), "is no trace of kept positions"),
        ((tmp_path / "crooked.npz",), "its arrays do not fit"),
        ((saved, "--row", 2), "--row 2: "),
        ((saved, "--step", -1), "--step -1 must be at least 0"),
        ((saved, "--output", tmp_path / "nowhere" / "x.html"), "does not exist; make it first"),
    ):
        code, out, err = run(*options)
        assert (code, out) == (2, "") and message in err and err.splitlines()[-1].startswith("error: ")
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    code, _, err = run(saved, "--png", tmp_path / "x.png")
    assert code == 2 and "pip install matplotlib" in err


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to look at the page")
def test_a_browser_shows_the_page(saved, run, tmp_path):
    run(saved)
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options += f" --disable-sync --virtual-time-budget=3000 --user-data-dir={tmp_path / 'profile'} --dump-dom"
    shown = subprocess.run(
        [CHROMIUM, *options.split(), f"file://{tmp_path / 'kept.html'}"], capture_output=True, text=True, timeout=120
    ).stdout
    spans = re.findall(r'<span data-position="(\d)"([^>]*)>([^<]*)', shown)
    assert [text for _, _, text in spans] == ["&lt;s&gt;", "The", " sky", " is", " &lt;/script&gt;", "é", "", " blue"]
    assert [("gone" in how, "later" in how) for _, how, _ in spans] == [
        *[(False, False), (True, False), (True, False)],
        *[(False, False)] * 4,
        (False, True),
    ]
    shades = [float(re.search(r"rgba\(.*?, ([\d.]+)\)", how)[1]) for _, how, _ in spans if "rgba" in how]
    assert shades == pytest.approx([0.47, 0.47, 0.47, 0.82, 0.82], abs=0.01) and '<canvas id="map" width="8"' in shown
