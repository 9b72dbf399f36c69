"""Prompts from JSONL, and answers into a JSONL file that a killed run goes on with."""

import json
import os

import pytest

from jkv.jsonl import Answers, Item, read_prompts


def write(path, *lines: object):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def test_every_kind_of_line_is_read(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "one"},
        "",
        {"problem": "two", "answer": "42"},
        {"id": "q-3", "question": "three"},
        {"messages": chat, "prompt": ""},
        {"id": 0, "prompt": "five"},
    )
    assert read_prompts(path) == [Item(1, "one"), Item(3, "two"), Item("q-3", "three"), Item(5, chat), Item(0, "five")]


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\x0bb", "naïve 😀", "a\nb", "a\r\nb"])
@pytest.mark.parametrize("escaped", [True, False])
def test_a_text_may_hold_any_character(tmp_path, text, escaped):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(json.dumps({"prompt": text}, ensure_ascii=escaped).encode())
    assert read_prompts(path) == [Item(1, text)]


def test_files_of_other_systems_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}')
    assert read_prompts(path) == [Item(1, "one"), Item(3, "two")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a"}, '{"prompt":'], r":2: not JSON"),
        ([{"prompt": "a"}, "", '["a"]'], r":3: needs a text in 'prompt'"),
        (["3"], r":1: needs a text"),
        ([{"text": "a"}], r":1: needs a text"),
        ([{"prompt": 5}], r":1: needs a text"),
        ([{"prompt": " \t "}], r":1: needs a text"),
        ([{"messages": "hi"}], r":1: needs a text"),
        ([{"messages": []}], r":1: needs a text"),
        ([{"id": 2, "prompt": "a"}, {"prompt": "b"}], r":2: id 2 is that of an earlier line"),
        ([{"id": [1], "prompt": "a"}], r":1: id \[1\] must be"),
        ([{"id": None, "prompt": "a"}], r":1: id None must be"),
        ([], "has no prompts"),
        (["", "  "], "has no prompts"),
    ],
)
def test_a_bad_line_is_refused_by_number(tmp_path, lines, message):
    path = write(tmp_path / "prompts.jsonl", *lines)
    with pytest.raises(ValueError, match=message) as refusal:
        read_prompts(path)
    assert "prompts.jsonl" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    for name, message in (("none.jsonl", "No such file"), ("", "Is a directory"), ("latin.jsonl", "not UTF-8")):
        with pytest.raises(ValueError, match=message) as refusal:
            read_prompts(tmp_path / name)
        assert str(tmp_path) in str(refusal.value) and str(refusal.value).count(str(tmp_path)) == 1


# Answers


def rows(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_answers_are_remembered(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    answers = Answers(path, "s1")
    assert answers.done == set()
    answers.write(1, 0, text="é\u2028😀\n", token_ids=[3, 4])
    answers.write("q", 1, text="")
    answers.close()
    assert path.read_bytes().count(b"\n") == 2
    again = Answers(path, "s1")
    assert again.done == {(1, 0), ("q", 1)}
    again.write(2, 0, text="later")
    again.close()
    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    assert lines[0] == {"id": 1, "sample": 0, "text": "é\u2028😀\n", "token_ids": [3, 4], "settings": "s1"}
    assert [line["id"] for line in lines] == [1, "q", 2]


def test_an_answer_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "answers.jsonl"
    answers = Answers(path, "s1")
    answers.write(1, 0, text="a")
    assert len(rows(path)) == 1  # though the file is still open
    answers.close()


def test_a_line_cut_off_anywhere_is_removed(tmp_path):
    path = tmp_path / "answers.jsonl"
    answers = Answers(path, "s1")
    answers.write(1, 0, text="a" * 20)
    whole = path.stat().st_size
    answers.write(2, 0, text="é" * 20)
    answers.close()
    complete = path.read_bytes()
    for size in range(whole, len(complete)):
        path.write_bytes(complete[:size])
        answers = Answers(path, "s1")
        assert answers.done == {(1, 0)}
        answers.write(2, 0, text="é" * 20)
        answers.close()
        assert path.read_bytes() == complete


def test_answers_of_other_settings_are_left_alone(tmp_path):
    path = tmp_path / "answers.jsonl"
    answers = Answers(path, "s1")
    answers.write(1, 0, text="a")
    answers.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(s1, now s2\); give another --output"):
        Answers(path, "s2")
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["not JSON\n", "no line end", '{"id": 1}\n', "[1]\n", '{"id": 1, "sample": 0}\n'])
def test_another_file_is_left_alone(tmp_path, content):
    path = tmp_path / "notes.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes.jsonl:1 is not an answer of jkv; give another --output"):
        Answers(path, "s1")
    assert path.read_text() == content


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "answers.jsonl"):
        with pytest.raises(ValueError, match="give another --output"):
            Answers(path, "s1")
    if os.geteuid():  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(ValueError, match="Permission denied"):
            Answers(tmp_path / "answers.jsonl", "s1")
