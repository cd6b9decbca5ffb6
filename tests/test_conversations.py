"""Conversation files are checked once, read by place, and ordered by a seed alone."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchspec_lite.conversations import (
    Conversation, Dataset, check_disjoint, parse, resolve_files, split_epoch)
from torchspec_lite.errors import UserError

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="data.jsonl"):
        path = tmp_path / name
        with path.open("wb") as file:
            for line in lines:
                file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
        return path
    return write


def test_every_form_of_line_is_read(write):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    path = write(
        b"\xef\xbb\xbf" + json.dumps({"id": "own", "conversations": [USER]}).encode(),
        b" " * 20,
        {"id": 7, "messages": [USER, {"role": "assistant", "content": "Gr\u00fc\u00dfe"}], "tools": [{"name": "f"}]},
        {"id": "share", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]},
        {"id": "call", "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"id": "none", "conversations": []},
        {"id": "odd/ id", "conversations": [{"role": "critic", "content": ""}]},
    )
    data = Dataset([path])
    assert data.ids == ["own", "7", "share", "data:5", "call", "none", "odd/ id"] and len(data) == 7
    assert data.get("own") == Conversation("own", (USER,), None)
    assert data.get("7").messages[1]["content"] == "Grüße" and data.get("7").tools == [{"name": "f"}]
    assert data.get("share").messages == ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    assert data.get("data:5").messages[0]["content"] == "x\ny"
    # Templates are given the arguments as an object, as vLLM gives them.
    assert data.get("call").messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert data.get("none").messages == ()
    assert data.get("odd/ id").messages[0]["role"] == "critic"


def test_ids_are_found_in_any_file_and_epoch(write):
    first = write(*({"id": f"a{i}", "messages": [{"role": "user", "content": f"A{i}"}]} for i in range(50)))
    last = {"id": "b0", "messages": [{"role": "user", "content": "last, no line end"}]}
    second = write(name="second.jsonl")
    second.write_text(json.dumps(last))
    data = Dataset([first, second])
    for i in reversed(range(50)):
        assert data.get(f"a{i}").messages[0]["content"] == f"A{i}"
    assert data.get("b0#3").id == "b0" and "b0#3" in data and "b1" not in data
    with pytest.raises(UserError, match="no conversation 'b1'.*second.jsonl"):
        data.get("b1")


@pytest.mark.parametrize("line, words", [
    (b"{not json", "not valid JSON.*expected .*conversations"),
    (b"[1, 2]", "found a list"),
    (b"null", "found null"),
    (b'{"id": "x"}', "expected one of .*found the keys 'id'"),
    (b'{"id": "x", "messages": [], "conversations": []}', "found both"),
    (b'{"id": "x", "messages": "hi"}', "messages: expected a list of turns, found text"),
    (b'{"id": "x", "messages": ["hi"]}', "turn 1: expected .*found text"),
    (b'{"id": "x", "messages": [{"role": "user", "content": "a"}, {"content": "b"}]}', "turn 2: role: .*None"),
    (b'{"id": "x", "messages": [{"role": 3, "content": "b"}]}', "role: expected text .*found 3"),
    (b'{"id": "x", "messages": [{"from": 3, "value": "b"}]}', "role"),
    (b'{"id": "x", "messages": [{"role": "user"}]}', "content: expected text, found None"),
    (b'{"id": "x", "messages": [{"role": "user", "content": {"text": "b"}}]}', "content: expected text"),
    (b'{"id": "x", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content: expected parts"),
    (b'{"id": "", "messages": []}', "id: expected 1 to 256 printable"),
    (b'{"id": true, "messages": []}', "id: expected"),
    (b'{"id": "a\\nb", "messages": []}', "id: expected"),
    (b'{"id": "\\ud800", "messages": []}', "id: expected"),
    (b'{"id": "x", "messages": [], "tools": {"name": "f"}}', "tools: expected a list"),
    (b'{"id": "x\xff"}', "not UTF-8 text .* byte 9"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"id": ' + b"9" * 5000 + b', "messages": []}', "not valid JSON"),
    (b'{"id": "good", "messages": []}', r"id 'good' was used before \(.*data.jsonl, line 1\)"),
    (b'{"id": "good#2", "messages": []}', "reads as epoch 2 of id 'good'"),
])
def test_a_bad_line_is_named(write, line, words):
    path = write({"id": "good", "messages": [USER]}, b"", line, {"id": "after", "messages": []})
    with pytest.raises(UserError, match=words) as caught:
        Dataset([path])
    assert str(caught.value).startswith(f"{path}, line 3:")
    assert len(str(caught.value)) < 1000


def test_a_line_without_end_is_refused(write, monkeypatch):
    monkeypatch.setattr("torchspec_lite.conversations.MAX_LINE_BYTES", 1 << 20)
    path = write(b" " * (2 << 20))
    with pytest.raises(UserError, match="line 1: longer than 1 MiB"):
        Dataset([path])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="none.jsonl: No such file"):
        Dataset([tmp_path / "none.jsonl"])
    with pytest.raises(UserError, match="data.held_out: no file none.jsonl"):
        resolve_files(["none.jsonl"], "held_out", tmp_path)


def test_a_file_changed_during_the_run_is_noticed(write):
    data = Dataset([write({"id": "a", "messages": [USER]}, {"id": "b", "messages": [USER]})])
    write({"id": "b", "messages": [USER]}, {"id": "a", "messages": [USER]})
    with pytest.raises(UserError, match="changed during the run"):
        data.get("a")
    data.files[0].unlink()
    with pytest.raises(UserError, match="keep the run's conversation files"):
        data.get("a")


def test_the_order_is_fixed_by_seed_and_ids_alone(write):
    lines = [{"id": f"s{i}", "messages": [USER]} for i in range(40)]
    one, other = Dataset([write(*lines)]), Dataset([write(*reversed(lines), name="other.jsonl")])
    order = one.order(3, 2, None)
    assert order == other.order(3, 2, None)
    assert order[:4] == ["s17", "s22", "s12", "s4"]    # by b2sum -l 128; another machine must agree
    first, second = order[:40], order[40:]
    assert sorted(first) == sorted(one.ids) and sorted(second) == sorted(f"{id}#2" for id in one.ids)
    assert [split_epoch(id)[0] for id in second] != first
    assert first != one.order(4, 1, None) != one.ids
    assert one.order(3, 2, 50) == order[:50]
    assert all(one.get(id).id == split_epoch(id)[0] for id in order)


def test_epochs_of_ids():
    assert split_epoch("a#2") == ("a", 2)
    assert split_epoch("a#b#31") == ("a#b", 31)
    for id in ("a", "a#", "#2", "a#1", "a#0", "a#x", "a#²", "a#999999999999"):
        assert split_epoch(id) == (id, 1)


def test_learning_from_what_is_measured_on_is_refused(write):
    train = Dataset([write({"id": "a", "messages": [USER]})])
    check_disjoint(train, Dataset([write({"id": "b", "messages": [USER]}, name="held.jsonl")]))
    with pytest.raises(UserError, match="held2.jsonl, line 1: id 'a' is among the training files"):
        check_disjoint(train, Dataset([write({"id": "a", "messages": [USER]}, name="held2.jsonl")]))


def test_demo_names_the_shipped_prompts(tmp_path, write):
    train = Dataset(resolve_files(["demo"], "train", tmp_path))
    held_out = Dataset(resolve_files(["demo"], "held_out", tmp_path))
    assert len(train) > 1000 and len(held_out) >= 24
    check_disjoint(train, held_out)
    path = write({"id": "a", "messages": [USER]})
    assert resolve_files([str(path)], "train", tmp_path) == [path]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["id", "conversations", "messages", "role", "content", "from", "value", "tool_calls", "function",
                         "arguments", "tools", "type", "text"]) | st.text(max_size=4), inner, max_size=5),
    max_leaves=20)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_conversation_or_a_named_error(line):
    try:
        conversation = parse(line, Path("any.jsonl"), 2)
    except UserError as error:
        assert str(error).startswith("any.jsonl, line 2")
    else:
        assert all(isinstance(message["role"], str) for message in conversation.messages)
