"""Tokenizers made of GGUF metadata: ids, control tokens, pre-tokenizers, SentencePiece, the cache."""

import json
import shutil
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import platformdirs
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders

from checkpoints import CHAT_TEMPLATE, make_tokenizer
from gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    write_gguf,
)
from test_gguf import embedded_model
from weights.gguf_header import GgufHeader
from weights.gguf_pretokenizers import PRE_TOKENIZERS
from weights.gguf_tokenizer import tokenizer_files
from weights.tokenizer_cache import save_tokenizer

TEXTS = (
    "the quick brown fox, 12 + 30 = 42",
    "digits 7 42 2024-11-30 3.14159",
    "café naïve Ångström e\u0301",
    "😀 👩\u200d👩\u200d👧 🏳️\u200d🌈",
    "def f(x):\n\treturn x**2  # it's\r\n\r\n",
    "  two   three\u00a0\t\t",
    "你好，世界。日本語テキスト 한국어",
    "<|begin|><|user|>the dog<|end|><think>12</think><unknown>",
    "x² ½ Ⅷ ٣٤",
    "",
)


def load(folder: Path | None) -> Tokenizer:
    assert folder is not None
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def build(path: Path, **metadata) -> Tokenizer:
    """The tokenizer of the tests' own byte-level vocabulary with some metadata changed ("ggml." left out)."""
    changes = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return load(save_tokenizer(GgufHeader(write_gguf(path, {**byte_level_metadata(), **changes}))))


def config_of(path: Path, **metadata) -> dict:
    changes = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    files = tokenizer_files(GgufHeader(write_gguf(path, {**byte_level_metadata(), **changes})))
    return json.loads(files["tokenizer_config.json"])


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_the_tokenizer_in_the_file(tmp_path, text):
    own, found = make_tokenizer(), build(tmp_path / "m.gguf")
    assert found.encode(text).ids == own.encode(text).ids
    assert found.decode(found.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_control_tokens_are_skipped_and_user_defined_ones_are_not(tmp_path):
    tokenizer = build(tmp_path / "m.gguf")
    ids = tokenizer.encode("<|user|>the<think>fox<|end|>").ids
    assert ids[:2] == [0, 2] and ids[-1] == 1 and 4 in ids
    assert tokenizer.decode(ids) == "the<think>fox"


def test_rows_that_only_pad_are_no_text(tmp_path):
    tokenizer = build(tmp_path / "m.gguf")
    assert tokenizer.get_vocab_size() == 308
    assert tokenizer.decode([308, 309]) == ""


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_ends(tmp_path, bos, eos):
    """What the file says; Llama 3 has BOS where it says nothing, GPT-2 has not."""
    for pre, default in (("gpt-2", False), ("llama-bpe", True)):
        ids = build(tmp_path / "m.gguf", pre=pre, add_bos_token=bos, add_eos_token=eos).encode("the").ids
        assert ids.count(0) == (default if bos is None else bos) and ids.count(1) == bool(eos)
        assert (ids[0] == 0) == bool(ids.count(0)) and (ids[-1] == 1) == bool(eos)
    ids = build(tmp_path / "m.gguf", bos_token_id=None, eos_token_id=None, add_eos_token=True).encode("the").ids
    assert 0 not in ids and 1 not in ids


def test_special_ids_and_template(tmp_path):
    found = config_of(tmp_path / "m.gguf", padding_token_id=3, unknown_token_id=2)
    assert [found[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")] == [
        "<|begin|>",
        "<|end|>",
        "<|assistant|>",
        "<|user|>",
    ]
    assert "pad_token" not in config_of(tmp_path / "m.gguf")
    metadata = {**byte_level_metadata(), "tokenizer.chat_template": CHAT_TEMPLATE}
    folder = save_tokenizer(GgufHeader(write_gguf(tmp_path / "m.gguf", metadata)))
    assert folder is not None
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE


def test_a_file_without_template_has_none(tmp_path):
    assert set(tokenizer_files(GgufHeader(write_gguf(tmp_path / "m.gguf", byte_level_metadata())))) == {
        "tokenizer.json",
        "tokenizer_config.json",
    }


CODE = "it's 1234 'LL x+=[7];\n\n  y é"
CUTS = {
    "default": ["it", "'", "s", " ", "123", "4", " ", "'", "LL", " x", "+=[", "7", "];", "\n\n ", " y", " é"],
    "gpt-2": ["it", "'s", " 1234", " '", "LL", " x", "+=[", "7", "];", "\n\n ", " y", " é"],
    "smollm": ["it", "'s", " ", "1", "2", "3", "4", " '", "LL", " x", "+=[", "7", "];", "\n\n ", " y", " é"],
    "llama-bpe": ["it", "'s", " ", "123", "4", " '", "LL", " x", "+=[", "7", "];\n\n", " ", " y", " é"],
    "qwen2": ["it", "'s", " ", "1", "2", "3", "4", " '", "LL", " x", "+=[", "7", "];\n\n", " ", " y", " é"],
    "deepseek-llm": [*["it", "'", "s"], *" 1234", " '", "LL", " x", "+=[", "7", "];", "\n", "\n", " ", " y", " é"],
    "deepseek-coder": [*["it", "'", "s"], *" 1234", " '", "LL", " x", "+=", "[", "7", "];", *"\n\n ", " y", " é"],
    "tekken": ["it", "'s", " ", "1", "2", "3", "4", " '", "LL", " x", "+=[", "7", "];\n\n", " ", " y", " é"],
}
SAME = {
    "starcoder": "smollm",
    "refact": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizers_cut_code(name):
    spelling = decoders.ByteLevel()
    pieces = [spelling.decode([piece]) for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(CODE)]
    assert pieces == CUTS[SAME.get(name, name)]


@pytest.mark.parametrize(
    ("name", "text", "cuts"),
    [
        ("smollm", "x² Ⅷ٣", ["x", "²", " ", "Ⅷ", "٣"]),
        ("gpt-2", "x² Ⅷ٣", ["x", "²", " Ⅷ٣"]),
        ("tekken", "helloWorld ABCdef", ["hello", "World", " ABCdef"]),
        ("tekken", "a/b//\n", ["a", "/b", "//\n"]),
        ("llama-bpe", "don'T \n\n x", ["don", "'T", " \n\n", " x"]),
        ("deepseek-llm", "Äй你好ｗ。が ա", ["Äй", "你好", "ｗ", "。", "が", " ա"]),
        ("deepseek-coder", "Äй你好，。が٣", ["Äй", "你好", "，", "。", "が", "٣"]),
    ],
)
def test_pre_tokenizers_cut_other_scripts(name, text, cuts):
    spelling = decoders.ByteLevel()
    assert [spelling.decode([piece]) for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == cuts


def test_qwen_composes_characters_and_the_others_do_not(tmp_path):
    decomposed, composed = "e\u0301", unicodedata.normalize("NFC", "e\u0301")
    for pre, same in (("qwen2", True), ("deepseek-r1-qwen", True), ("gpt-2", False), ("llama-bpe", False)):
        tokenizer = build(tmp_path / "m.gguf", pre=pre)
        assert (tokenizer.encode(decomposed).ids == tokenizer.encode(composed).ids) is same


def test_llama3_takes_a_known_word_whole(tmp_path):
    """Its vocabulary has words that its merges do not lead to."""
    metadata = byte_level_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "Ġzyx"]
    kinds = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("smollm", False)):
        tokenizer = build(tmp_path / "m.gguf", pre=pre, tokens=tokens, token_type=kinds)
        assert (tokenizer.token_to_id("Ġzyx") in tokenizer.encode("the zyx").ids) is whole


# A SentencePiece vocabulary: no merges, the best scored token that two neighbours make comes first.
PIECES = tuple(
    [
        "▁",
        "a",
        "b",
        "c",
        "e",
        "t",
        "h",
        "é",
        "中",
        ".",
        "▁t",
        "he",
        "th",
        "▁the",
        "ab",
        "abc",
        "bc",
        "▁a",
        "aa",
        "aaa",
        "aaaa",
        "ca",
        "▁▁",
        "▁▁▁▁",
        "é.",
        "e.",
        "▁b",
    ]
)


def sentencepiece_metadata(**changes) -> dict:
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED, UNUSED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*special, *byte_tokens, *PIECES, "<think>", "[PAD9]"],
        "tokenizer.ggml.scores": [*[0.0] * 259, *(-float(i) for i in range(len(PIECES))), -1000.0, -1000.0],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def merge_by_score(text: str) -> list[str]:
    """SentencePiece's rule on a text whose spaces are ▁ already; unknown characters stay."""
    parts = list(text)
    while True:
        pairs = [a + b for a, b in pairwise(parts)]
        best = min((PIECES.index(pair) for pair in pairs if pair in PIECES), default=None)
        if best is None:
            return parts
        i = pairs.index(PIECES[best])
        parts[i : i + 2] = [pairs[i]]


def test_sentencepiece_merges_by_score(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    tokenizer = load(save_tokenizer(GgufHeader(write_gguf(path, sentencepiece_metadata()))))

    @settings(max_examples=300)
    @given(st.text("aaabcceth  é中.\n😀", max_size=24))
    def check(text: str) -> None:
        expected = ["<s>"]
        for part in merge_by_score("▁" + text.replace(" ", "▁")) if text else []:
            expected += [part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()]
        encoding = tokenizer.encode(text)
        assert encoding.tokens == expected
        assert tokenizer.decode(encoding.ids) == text

    check()


def test_sentencepiece_puts_a_space_before_every_text_unless_told_not_to(tmp_path):
    path = tmp_path / "m.gguf"
    with_space = load(save_tokenizer(GgufHeader(write_gguf(path, sentencepiece_metadata()))))
    assert with_space.encode("a</s>b<think>c").tokens == ["<s>", "▁a", "</s>", "▁b", "<think>", "▁", "c"]
    assert with_space.encode(" a").tokens == ["<s>", "▁", "▁a"]
    metadata = sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    without = load(save_tokenizer(GgufHeader(write_gguf(path, metadata))))
    assert without.encode("a b</s>c").tokens == ["a", "▁b", "</s>", "c"]
    assert without.decode(without.encode(" a b").ids) == " a b"


def test_sentencepiece_takes_merges_where_the_file_has_them(tmp_path):
    metadata = sentencepiece_metadata(merges=["a b", "b c"], scores=[0.0] * (261 + len(PIECES)))
    tokenizer = load(save_tokenizer(GgufHeader(write_gguf(tmp_path / "m.gguf", metadata))))
    assert tokenizer.encode("abc").tokens == ["<s>", "▁", "ab", "c"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": None}, "neither merges nor scores"),
        ({"scores": [-1000.0] * (261 + len(PIECES))}, "neither merges nor scores"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap"),
    ],
)
def test_sentencepiece_that_cannot_be_exact_is_refused(tmp_path, changes, named):
    header = GgufHeader(write_gguf(tmp_path / "m.gguf", sentencepiece_metadata(**changes)))
    with pytest.raises(ValueError, match=named):
        save_tokenizer(header)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "jkv" / "tokenizers"


@pytest.fixture
def header(tmp_path) -> GgufHeader:
    return GgufHeader(write_gguf(tmp_path / "m.gguf", byte_level_metadata()))


def test_a_tokenizer_is_written_once(cache, header, tmp_path):
    folder = save_tokenizer(header)
    assert folder is not None and folder.parent == cache
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert save_tokenizer(header) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    # The model's shape has no part in it, the vocabulary and its flags have.
    other = {**byte_level_metadata(), "llama.block_count": 7}
    assert save_tokenizer(GgufHeader(write_gguf(tmp_path / "b", other))) == folder
    other = {**byte_level_metadata(), "tokenizer.ggml.add_bos_token": False}
    assert save_tokenizer(GgufHeader(write_gguf(tmp_path / "c", other))) != folder
    assert len(list(cache.iterdir())) == 2


def test_a_damaged_folder_is_made_again(cache, header):
    folder = save_tokenizer(header)
    assert folder is not None
    (folder / "tokenizer.json").unlink()
    assert save_tokenizer(header) == folder
    assert load(folder).encode("the").ids[0] == 0
    assert [file.name for file in cache.iterdir()] == [folder.name]


def test_runs_at_once_share_one_folder(cache, header):
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: save_tokenizer(header), range(16)))
    assert len(folders) == 1
    assert [file.name for file in cache.iterdir()] == [folders.pop().name]


def test_where_the_cache_cannot_be_written_a_temporary_folder_serves(cache, header):
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    folder = save_tokenizer(header)
    assert folder is not None and cache not in folder.parents
    assert load(folder).encode("the").ids[0] == 0
    shutil.rmtree(folder)


def test_a_full_disk_leaves_nothing_behind(cache, header, monkeypatch):
    def fail(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ValueError, match="No space left on device"):
        save_tokenizer(header)
    assert list(cache.iterdir()) == []


@pytest.fixture(scope="module")
def embedded_tokenizers():
    """The embedded model's tokenizer by transformers' own conversion, and ours."""
    path = embedded_model()
    pytest.importorskip("torch", reason="needs the parity extra")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return theirs, load(save_tokenizer(GgufHeader(path)))


@pytest.mark.parity
@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_models_ids_are_those_of_transformers(embedded_tokenizers, text):
    theirs, ours = embedded_tokenizers
    text = text.replace("<|user|>", "<|im_start|>user\n").replace("<|end|>", "<|im_end|>\n<|endoftext|>")
    if "Ⅷ" in text:  # transformers does not know "smollm" and keeps a numeral with the space before it
        assert ours.encode(text).ids != theirs(text).input_ids
        text = text.replace(" ", "_")
    assert ours.encode(text).ids == theirs(text).input_ids
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_the_embedded_model_cuts_numerals_as_its_own_tokenizer_does():
    tokenizer = load(save_tokenizer(GgufHeader(embedded_model())))
    spaced, numeral = tokenizer.token_to_id("Ġ"), tokenizer.encode("Ⅷ").ids
    assert tokenizer.encode("x Ⅷ").ids == [*tokenizer.encode("x").ids, spaced, *numeral]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[::4] == [1, 2]


@pytest.mark.parity
def test_the_folder_is_a_tokenizer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    metadata = {**byte_level_metadata(), "tokenizer.chat_template": CHAT_TEMPLATE}
    path = write_gguf(tmp_path / "m.gguf", metadata)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(save_tokenizer(GgufHeader(path)))
    assert tokenizer("the fox").input_ids == make_tokenizer().encode("the fox").ids
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token) == ("<|begin|>", 1, None)
    turns = [{"role": "user", "content": "the fox"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|user|>the fox<|assistant|>"
    assert tokenizer.decode(tokenizer("the <think> fox <|end|>").input_ids, skip_special_tokens=True) == (
        "the <think> fox "
    )
