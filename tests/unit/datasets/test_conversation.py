"""Rows of fine-tuning files, and the conversations in them."""

from __future__ import annotations

import gzip
import importlib
import json
import struct
from unittest import mock

import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets import conversations
from megatron.core.datasets.conversations import (
    Conversation,
    conversation_of,
    open_rows,
    read_row,
)
from megatron.post_training.sft.dataset import encode_conversation
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.chat import load_chat_template
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support.chat_templates import write_chat_tokenizer

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello."}
CHAT = {"messages": [USER, ASSISTANT]}


def write_lines(path, *rows):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return str(path)


def read_conversation(rows, i):
    return read_row(rows, i, conversation_of)


def test_rows_of_a_jsonl_file_are_read_by_number(tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", CHAT, "\n", {"prompt": "a", "completion": "b"})
    rows = open_rows(path)
    assert len(rows) == 2
    assert read_conversation(rows, 0) == Conversation((USER, ASSISTANT))
    text = read_conversation(rows, 1)
    assert text.is_text
    assert [message["content"] for message in text.messages] == ["a", "b"]
    assert rows.where(1) == f"{path}, line 3"
    last = write_lines(tmp_path / "last.jsonl", CHAT, json.dumps(CHAT))  # no newline at the end
    assert len(open_rows(last)) == 2
    assert len(open_rows(write_lines(tmp_path / "empty.jsonl"))) == 0


def test_files_of_a_folder_are_joined_in_order(tmp_path):
    write_lines(tmp_path / "b.jsonl", {"prompt": "b", "completion": "b"})
    write_lines(tmp_path / "a.jsonl", CHAT, CHAT)
    (tmp_path / "README.md").write_text("no rows")
    rows = open_rows(str(tmp_path))
    assert [read_conversation(rows, i).is_text for i in range(3)] == [False, False, True]
    assert rows.where(2).endswith("b.jsonl, line 1")


@pytest.mark.parametrize(
    ("row", "user", "system"),
    [
        ({"instruction": "Add.", "input": "1 + 1", "output": "2"}, "Add.\n\n1 + 1", None),
        ({"instruction": "Say hi.", "input": "", "output": "2"}, "Say hi.", None),
        ({"instruction": "Say hi.", "output": "2", "history": []}, "Say hi.", None),
        (
            {"instruction": "Hi", "input": None, "output": "2", "system": "Be brief."},
            "Hi",
            "Be brief.",
        ),
    ],
)
@pytest.mark.feature("Fine-tuning: rows of Alpaca (instruction, input, output)")
def test_a_row_of_alpaca_is_the_prompt_and_completion_that_it_stands_for(row, user, system):
    before = [{"role": "system", "content": system}] if system else []
    same = {
        "prompt": [*before, {"role": "user", "content": user}],
        "completion": [{"role": "assistant", "content": "2"}],
    }
    assert conversation_of(row) == conversation_of(same)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a", "output": ["b"]}, r"output is \['b'\]; it must be a text"),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "write the turns .* messages",
        ),
        ({"instruction": "a", "output": ""}, "is empty"),
        ({"instruction": "a"}, "instruction and output; this one has instruction"),
    ],
)
def test_a_wrong_row_of_alpaca_is_refused(row, message):
    with pytest.raises(DataError, match=message):
        conversation_of(row)


def test_lists_of_messages_as_prompt_and_completion_train_the_completion(tmp_path):
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT], "tools": '[{"a": 1}]'}
    found = read_conversation(open_rows(write_lines(tmp_path / "c.jsonl", row)), 0)
    assert found == Conversation(
        (USER, ASSISTANT, USER, ASSISTANT), tools=({"a": 1},), first_trained=3
    )


def _turn(role, content="x", **more):
    return {"role": role, "content": content, **more}


WRONG = [
    ('{"messages": \n', "it is no JSON: Expecting value at character 15"),
    ("[1]\n", r"it is \[1\], not an object"),
    ("3\n", "it is 3, not an object"),
    ("null\n", "it is None, not an object"),
    ('{"prompt": "a\\ud800"}\n', r"half of a character: .*ud800.*remove it"),
    ({"text": "a"}, "completion, or instruction and output; this one has text"),
    ({"messages": None}, "prompt and completion, or instruction and output; this one has nothing"),
    ({"conversations": [{"from": "x", "value": "a"}]}, "message 0 is .* it needs a role of"),
    ({"messages": [_turn("user", [{"type": "image"}])]}, "parts must be texts .* pretrain_vlm.py"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": 3}]}]}, "must be a list of {"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": "f"}]}, "tool_calls of message 1 are 'f'"),
    ({"messages": [USER, {**ASSISTANT, "tool_calls": {"name": "f"}}]}, "must be a list of {"),
    ({"messages": [USER, {**ASSISTANT, "reasoning_content": 3}]}, "the reasoning_content of mess"),
    ({"messages": "a"}, "messages is 'a'; it must be a list of messages"),
    ({"messages": []}, "it must be a list of messages"),
    ({"messages": [_turn("human")]}, "it needs a role of system, developer, user"),
    ({"messages": [_turn("user", 3)]}, "the content of message 0 is 3; it must be a text"),
    ({"messages": [_turn("user", None)]}, r"message 0 \(user\) has no content"),
    ({"messages": [USER]}, "the last message is of the user"),
    ({"messages": [ASSISTANT]}, r"message 0 \(assistant\) follows nothing; roles are in the order"),
    ({"messages": [USER, ASSISTANT, ASSISTANT]}, r"message 2 \(assistant\) follows assistant"),
    ({"messages": [USER, _turn("system"), ASSISTANT]}, r"message 1 \(system\) follows user"),
    ({"messages": [_turn("tool"), ASSISTANT]}, r"message 0 \(tool\) follows nothing"),
    ({"messages": [USER, _turn("assistant", " \n")]}, r"message 1 \(assistant\) is empty; remove"),
    ({"prompt": "a", "completion": ""}, "completion is empty"),
    ({"prompt": "a", "completion": [ASSISTANT]}, "prompt is 'a'; it must be a list of messages"),
    ({"prompt": [USER], "completion": "a"}, "completion is 'a'; it must be a list of messages"),
    ({**CHAT, "tools": "{"}, "tools is no JSON"),
    ({**CHAT, "tools": {"a": 1}}, "tools is .*; it must be a list of functions"),
]


@pytest.mark.feature("Fine-tuning: a wrong conversation is reported with file and line")
@pytest.mark.parametrize(("row", "message"), WRONG)
def test_a_wrong_row_is_reported_with_file_and_line(tmp_path, row, message):
    path = write_lines(tmp_path / "wrong.jsonl", CHAT, row)
    rows = open_rows(path)
    read_conversation(rows, 0)
    with pytest.raises(DataError, match=message) as error:
        read_conversation(rows, 1)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert str(error.value).count("line 2") == 1


def test_blank_lines_and_marks_of_other_systems_are_no_rows(tmp_path):
    path = tmp_path / "chats.jsonl"
    row = json.dumps(CHAT).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n  \n\t\r\n" + row + b"\r\n \n{\r\n")
    rows = open_rows(str(path))
    assert len(rows) == 3
    assert [read_conversation(rows, i).messages for i in range(2)] == [(USER, ASSISTANT)] * 2
    with pytest.raises(DataError, match="chats.jsonl, line 7: it is no JSON"):
        read_conversation(rows, 2)


@pytest.mark.feature("Fine-tuning: rows in JSON lists, compressed files, and those of ShareGPT")
def test_a_file_may_be_one_list_or_compressed(tmp_path):
    text = json.dumps([CHAT, CHAT, {"a": 1}], indent=1)
    (tmp_path / "list.json").write_text("\n" + text)
    lines = "".join(json.dumps(row) + "\n" for row in (CHAT, CHAT, {"a": 1})).encode()
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "list.json.gz").write_bytes(gzip.compress(text.encode()))
    places = {"list.json": "element 3", "lines.jsonl.gz": "line 3", "list.json.gz": "element 3"}
    for name, place in places.items():
        rows = open_rows(str(tmp_path / name))
        assert len(rows) == 3
        assert read_conversation(rows, 1).messages == (USER, ASSISTANT)
        with pytest.raises(DataError, match=f"{name}, {place}: a row needs messages"):
            read_conversation(rows, 2)
    assert len(open_rows(str(tmp_path))) == 9


def test_rows_of_sharegpt_are_conversations():
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello.", "weight": 1}]
    found = conversation_of({"conversations": turns, "system": "Be brief.", "id": "3"})
    assert found.messages == (_turn("system", "Be brief."), USER, {**ASSISTANT, "weight": 1})
    assert conversation_of({"conversations": turns, "messages": None}).messages[0] == USER


def test_texts_in_parts_are_joined():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i", "index": None}]
    assert conversation_of({"messages": [_turn("user", parts), ASSISTANT]}).messages[0] == USER


def test_files_that_are_no_json_text_are_refused(tmp_path):
    for name, data, reason in (
        ("a.jsonl", gzip.compress(b"{}"), r"line 1: it is no UTF-8 text: .*name it \.gz"),
        ("b.jsonl.gz", b"{}", "cannot be decompressed: .*; copy it again"),
        ("c.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], "cannot be decompressed: .*; copy it"),
        (
            "d.jsonl",
            json.dumps(CHAT).encode("utf-16"),
            "it is no UTF-8 text: .*; save it as UTF-8",
        ),
        ("e.json", b"[{},\n{]", "e.json: it is no JSON: .* at character 7; write one"),
        ("f.jsonl", b'{"a": "\xff"}', "line 1: it is no UTF-8 text: .* byte 0xff in position 7"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=reason):
            open_rows(str(tmp_path / name))[0]


def test_a_file_that_decompresses_to_more_than_memory_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.core.datasets.conversations.free_for_job", lambda: 1 << 24)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b" " * (1 << 23)))
    with pytest.raises(DataError, match="has more than 8388608 bytes when decompressed"):
        open_rows(str(tmp_path / "a.jsonl.gz"))


def test_a_file_that_memory_cannot_hold_is_refused(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise MemoryError

    (tmp_path / "a.json").write_text("[{}]")
    monkeypatch.setattr(json, "loads", fails)
    with pytest.raises(DataError, match=r"a.json: it is no JSON: MemoryError\(\); write one list"):
        open_rows(str(tmp_path / "a.json"))[0]


def test_a_million_blank_lines_are_read_with_one_open_file(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b" \n" * 20 + b"{}\n")
    rows = open_rows(str(tmp_path / "a.jsonl"))
    opened = mock.Mock(side_effect=open)
    monkeypatch.setattr(conversations, "open", opened, raising=False)
    assert len(rows) == 1
    assert opened.call_count < 5


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{", "", "[]", "{}", *map('{"_data_files": %s}'.__mod__, ("5", "[5]", "[{}]"))]
    + ['{"_data_files": [{"filename": 5}]}', '{"_data_files": 9' + "9" * 5000 + "}"],
)
def test_a_damaged_list_of_files_of_a_folder_is_named(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(DataError, match="state.json"):
        open_rows(str(tmp_path))


def test_forged_tables_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.ipc")
    path = tmp_path / "a.arrow"

    def write(table):
        with (
            pyarrow.OSFile(str(path), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)

    write(pyarrow.table({"text": ["a", "bb", "ccc"]}))
    offsets = struct.pack("<4i", 0, 1, 3, 6)
    data = path.read_bytes()
    assert data.count(offsets) == 1
    for forged in ((-(10**6), 1, 3, 6), (0, 10**9, 3, 6), (0, 2**31 - 1, -(2**31), 6)):
        path.write_bytes(data.replace(offsets, struct.pack("<4i", *forged)))
        with pytest.raises(DataError, match="a.arrow cannot be read: "):
            open_rows(str(path))[0]
    for kind in (pyarrow.timestamp("s"), pyarrow.duration("s"), pyarrow.timestamp("us", tz="No")):
        write(pyarrow.table({"at": pyarrow.array([2**62], kind)}))
        with pytest.raises(DataError, match="a.arrow, row 1: a value has no meaning: "):
            open_rows(str(path))[0]


def test_missing_and_unknown_files_are_reported(tmp_path):
    with pytest.raises(DataError, match="none.jsonl does not exist; give a jsonl or parquet file"):
        open_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"notes.txt is no .jsonl, .json, .parquet, .arrow file"):
        open_rows(write_lines(tmp_path / "notes.txt", "x"))
    empty = tmp_path / "folder"
    empty.mkdir()
    with pytest.raises(DataError, match="folder has no .* file; give a file, or the folder of one"):
        open_rows(str(empty))


def test_calls_of_functions_need_no_content(tmp_path):
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, _turn("tool")]
    path = write_lines(tmp_path / "t.jsonl", {"messages": [*turns, ASSISTANT], "tools": [call]})
    found = read_conversation(open_rows(path), 0)
    assert found.messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert found.tools == (call,)


def test_tables_of_parquet_and_arrow_have_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [[USER, {**ASSISTANT, "name": "x"}], [USER, ASSISTANT]]
    table = pyarrow.table({"messages": messages, "tools": [None, '[{"a": 1}]']})
    parquet.write_table(table, tmp_path / "a.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    with (
        pyarrow.OSFile(str(saved / "data-0.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    for path in (tmp_path / "a.parquet", saved):
        rows = open_rows(str(path))
        assert len(rows) == 2
        assert read_conversation(rows, 0).messages == (USER, {**ASSISTANT, "name": "x"})
        assert read_conversation(rows, 1) == Conversation((USER, ASSISTANT), ({"a": 1},))
        assert rows.where(1).endswith(", row 2")
    (tmp_path / "b.parquet").write_text("no table")
    with pytest.raises(DataError, match="b.parquet cannot be read"):
        len(open_rows(str(tmp_path / "b.parquet")))


def test_conversations_and_plain_texts_are_encoded(tmp_path):
    pytest.importorskip("jinja2")
    folder = str(write_chat_tokenizer(tmp_path))
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    tokenizer = create_tokenizer(spec)
    chat = load_chat_template(tokenizer, None, folder)
    encoded = encode_conversation(Conversation((USER, ASSISTANT)), tokenizer, chat)
    written = tokenizer.detokenize(encoded.tokens[encoded.is_trained].tolist())
    assert written == "Hello.<|im_end|>\n"
    text = Conversation((_turn("user", "One,"), _turn("assistant", " two.")), is_text=True)
    encoded = encode_conversation(text, tokenizer, None)
    assert encoded.tokens[-1] == tokenizer.eod
    assert tokenizer.detokenize(encoded.tokens.tolist()) == "One, two.</s>"
    assert tokenizer.detokenize(encoded.tokens[encoded.is_trained].tolist()) == " two.</s>"
