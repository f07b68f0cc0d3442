"""The openai package against a server with an engine whose tokens are known."""

from __future__ import annotations

import json

import pytest

from tests.support.server_process import VOCAB_SIZE, fake_server, openai
from tests.support.tokenizer_files import write_bpe

PROMPT = "Hello \U0001f600 world"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text(
        "{{ messages[-1].content }}{{ '<end>' if messages[-1].role == 'assistant' }}"
        "{% for call in messages[-1].tool_calls %}{{ '' + call.function.arguments }}{% endfor %}"
    )
    words = ("--chat-template", str(template), "--reasoning-parser", "qwen3")
    with fake_server(folder, *words) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.feature("Serving: OpenAI's client completes, chats, streams and scores")
def test_a_completion_has_text_reason_and_usage(client):
    found = client.completions.create(model="fake", prompt=PROMPT, max_tokens=50)
    assert found.choices[0].text == PROMPT
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.prompt_tokens == 10
    assert found.usage.completion_tokens == 11  # with the end-of-document token
    assert found.usage.total_tokens == 21
    assert found.model == "fake"


def test_a_limit_of_tokens_ends_a_completion(client):
    found = client.completions.create(model="fake", prompt=PROMPT, max_tokens=3)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("Hello", "length")


def test_a_stream_has_the_text_of_the_completion(client):
    parts = list(
        client.completions.create(
            model="fake",
            prompt=PROMPT,
            max_tokens=50,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [part.choices[0].text for part in parts if part.choices]
    assert "".join(texts) == PROMPT
    assert "\U0001f600" in texts  # complete, though its tokens are four
    assert parts[-2].choices[0].finish_reason == "stop"
    assert parts[-1].usage.completion_tokens == 11


def test_a_stop_string_is_not_in_the_text(client):
    for is_stream in (False, True):
        found = client.completions.create(
            model="fake", prompt=PROMPT, max_tokens=50, stop=["wor", "xyz"], stream=is_stream
        )
        parts = list(found) if is_stream else [found]
        assert "".join(part.choices[0].text for part in parts) == "Hello \U0001f600 "
        assert parts[-1].choices[0].finish_reason == "stop"


def test_log_probs_have_tokens_offsets_and_likely_tokens(client):
    found = client.completions.create(model="fake", prompt=PROMPT, max_tokens=3, logprobs=2)
    table = found.choices[0].logprobs
    assert table.tokens == ["H", "ell", "o"]
    assert table.token_logprobs == [-0.25, -0.5, -0.75]
    assert table.text_offset == [0, 1, 4]
    assert table.top_logprobs[0] == {"<|endoftext|>": 0.0, "!": -1.0, "H": -0.25}


def test_echo_scores_the_prompt(client):
    found = client.completions.create(
        model="fake", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True
    )
    assert found.choices[0].text == PROMPT
    table = found.choices[0].logprobs
    assert table.token_logprobs == [None] + [-1.0] * 9
    assert len(table.tokens) == len(table.text_offset) == len(table.top_logprobs) == 10


def test_echo_streams_the_prompt_first(client):
    parts = list(
        client.completions.create(
            model="fake", prompt="ab", max_tokens=1, logprobs=1, echo=True, stream=True
        )
    )
    assert "".join(part.choices[0].text for part in parts).startswith("ab")
    tables = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    values = [value for table in tables for value in table.token_logprobs]
    assert values[0] is None
    assert values[-1] == -0.25


@pytest.mark.parametrize(
    "prompt", [["one", "two"], [[40, 413], [79]], [40, 413, 79]], ids=["texts", "rows", "ids"]
)
def test_prompts_are_texts_or_ids(client, prompt):
    found = client.completions.create(model="fake", prompt=prompt, max_tokens=20, n=2)
    count = 2 if isinstance(prompt[0], str | list) else 1
    assert [choice.index for choice in found.choices] == list(range(2 * count))
    assert found.choices[0].text == found.choices[1].text
    if count == 1:
        assert found.choices[0].text == "Hello"


def test_a_chat_has_role_content_and_reason(client):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": PROMPT}]
    found = client.chat.completions.create(model="fake", messages=messages)
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content == PROMPT
    assert found.choices[0].finish_reason == "stop"


def test_a_chat_reads_text_parts(client):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    found = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": parts}], n=2
    )
    assert [choice.message.content for choice in found.choices] == ["one two", "one two"]


def test_a_chat_streams_with_log_probs(client):
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": PROMPT}],
            stream=True,
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=3,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    content = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(content) == "Hello"
    entries = [
        entry
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for entry in c.choices[0].logprobs.content
    ]
    assert [entry.token for entry in entries] == ["H", "ell", "o"]
    assert entries[0].bytes == [72]
    assert [top.logprob for top in entries[0].top_logprobs] == [0.0, -1.0]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == 13


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_call_of_hermes_form_is_found(client, is_stream):
    found = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "Look. " + CALL}],
        tools=[WEATHER],
        stream=is_stream,
    )
    if is_stream:
        deltas = [chunk.choices[0] for chunk in found]
        content = "".join(d.delta.content or "" for d in deltas)
        calls = [call for d in deltas for call in d.delta.tool_calls or []]
        reason = deltas[-1].finish_reason
    else:
        message = found.choices[0].message
        reason = found.choices[0].finish_reason
        content = message.content
        calls = message.tool_calls
    assert content.strip() == "Look."
    assert [call.function.name for call in calls] == ["weather"]
    assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
    assert reason == "tool_calls"


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_apart_from_content_and_calls(client, is_stream):
    found = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": f"<think>\nHm.\n</think>\n\nLook. {CALL}"}],
        tools=[WEATHER],
        stream=is_stream,
        stream_options={"include_usage": True} if is_stream else None,
    )
    if is_stream:
        chunks = list(found)
        messages = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        usage = chunks[-1].usage
    else:
        messages = [found.choices[0].message]
        usage = found.usage
    for name, text in (("reasoning_content", "\nHm.\n"), ("content", "Look.")):
        written = "".join(getattr(message, name, None) or "" for message in messages)
        assert written.rstrip(" ") == text
        assert not is_stream or name == "content" or messages[0].content == ""
    assert [c.function.name for m in messages for c in m.tool_calls or []] == ["weather"]
    assert 2 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_a_chosen_tool_gets_the_text_as_arguments(client):
    found = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": '{"city": "Rome"}'}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    call = found.choices[0].message.tool_calls[0]
    assert call.function.arguments == '{"city": "Rome"}'


def test_tool_choice_none_leaves_the_text(client):
    found = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": CALL}],
        tools=[WEATHER],
        tool_choice="none",
    )
    assert found.choices[0].message.content == CALL
    assert found.choices[0].finish_reason == "stop"


def test_a_schema_that_the_engine_refuses_is_an_error_of_the_request(client):
    with pytest.raises(openai.BadRequestError, match="allows no text") as error:
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "impossible"}},
            },
        )
    assert error.value.param == "response_format"


def test_errors_have_the_type_of_the_client(client):
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.completions.create(model="fake", prompt="a", temperature=3)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="fake", prompt="a " * 3000)
    assert error.value.code == "context_length_exceeded"


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_extensions_of_vllm_are_accepted(client):
    extra = {"ignore_eos": True, "min_tokens": 2, "top_k": 5, "min_p": 0.1, "prompt_logprobs": 1}
    found = client.completions.create(
        model="fake", prompt="abc", max_tokens=9, seed=1, extra_body=extra
    )
    assert found.usage.completion_tokens == 9
    assert found.choices[0].prompt_logprobs[0] is None


def test_ids_of_tokens_are_returned_and_prompts_truncated(client):
    extra = {"return_token_ids": True, "truncate_prompt_tokens": 3, "ignore_eos": True}
    for is_stream in (False, True):
        found = client.completions.create(
            model="fake", prompt=PROMPT, max_tokens=4, stream=is_stream, extra_body=extra
        )
        choices = [part.choices[0] for part in (found if is_stream else [found])]
        prompt = choices[0].prompt_token_ids
        assert len(prompt) == 3
        ids = [token for choice in choices for token in choice.token_ids]
        assert ids == [*prompt, prompt[0]]  # the engine repeats its prompt
        assert all("prompt_token_ids" not in c.model_extra for c in choices[1:])


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chat_returns_ids_and_scores_of_its_prompt(client, is_stream):
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    found = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "Hello"}],
        stream=is_stream,
        extra_body=extra,
    )
    parts = list(found) if is_stream else [found]
    assert parts[0].prompt_token_ids == [40, 413, 79]
    assert [entry and len(entry) for entry in parts[0].prompt_logprobs] == [None, 2, 2]
    ids = [t for p in parts for t in p.choices[0].model_extra.get("token_ids") or []]
    assert ids == [40, 413, 79, 0]


def test_special_tokens_can_be_left_out_of_the_text(client):
    for is_left_out, text in ((False, "H<|endoftext|>"), (True, "H")):
        found = client.completions.create(
            model="fake",
            prompt=[40, 0],
            max_tokens=2,
            extra_body={"ignore_eos": True, "skip_special_tokens": is_left_out},
        )
        assert found.choices[0].text == text


@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"type": "impossible"}},
        {"guided_json": '{"type": "impossible"}'},
        {"structured_outputs": {"json": {"type": "impossible"}}},
    ],
)
def test_a_grammar_of_vllm_reaches_the_engine(client, field):
    with pytest.raises(openai.BadRequestError, match="allows no text"):
        client.completions.create(model="fake", prompt="abc", extra_body=field)


def test_a_message_goes_on_where_it_ends(server):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " Hello  "}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    status, found = server.ask("POST", "/v1/chat/completions", body)
    assert status == 200
    status, whole = server.ask("POST", "/tokenize", {"prompt": " Hello  "})
    assert found["prompt_token_ids"] == whole["tokens"]


def test_a_template_may_join_arguments_as_text(client):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [{"role": "assistant", "content": "a", "tool_calls": [call]}]
    found = client.chat.completions.create(model="fake", messages=messages)
    assert found.choices[0].message.content == 'a<end>{"x": [1]}'


def test_messages_have_the_tokens_of_the_chat(server):
    messages = [{"role": "user", "content": PROMPT}]
    status, found = server.ask(
        "POST", "/tokenize", {"messages": messages, "tools": [WEATHER], "return_token_strs": True}
    )
    assert (status, found["count"], "".join(found["token_strs"][:3])) == (200, 10, "Hello")
    chat = {"messages": messages, "return_token_ids": True}
    assert (
        server.ask("POST", "/v1/chat/completions", chat)[1]["prompt_token_ids"] == found["tokens"]
    )


REPLY = f"<think>Hm.</think>\n\nLook. {CALL}\n{CALL}"
OWN_TOOL = {"type": "function", "strict": False, **WEATHER["function"]}


@pytest.mark.feature("Serving: OpenAI's client gets responses, complete, parsed and streamed")
def test_a_response_has_reasoning_text_and_calls(client):
    found = client.responses.create(
        model="fake", input=REPLY, instructions="Be brief.", tools=[OWN_TOOL], store=True
    )
    assert [item.type for item in found.output] == ["reasoning", "message", *["function_call"] * 2]
    assert found.output[0].content[0].text == "Hm."
    assert found.output_text == "Look. "
    assert json.loads(found.output[2].arguments) == {"city": "Paris"}
    assert (found.status, found.store, found.instructions) == ("completed", False, "Be brief.")
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    cut = client.responses.create(model="fake", input=PROMPT, max_output_tokens=3)
    assert (cut.output_text, cut.status) == ("Hello", "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_the_events_of_a_response_follow_its_items(client):
    found = client.responses.create(model="fake", input=REPLY, tools=[OWN_TOOL], stream=True)
    events = list(found)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    order = [kind for i, kind in enumerate(kinds) if kind != (kinds[i - 1] if i else None)]

    def text_of(kind):
        item = ["output_item.added", "content_part.added", f"{kind}.delta", f"{kind}.done"]
        return [*item, "content_part.done", "output_item.done"]

    call = [f"function_call_arguments.{kind}" for kind in ("delta", "done")]
    assert order == [
        *("created", "in_progress"),
        *text_of("reasoning_text"),
        *text_of("output_text"),
        *(2 * ["output_item.added", *call, "output_item.done"]),
        "completed",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == done[1].content[0].text == "Look. "


def test_the_client_collects_a_stream_of_a_response(client):
    with client.responses.stream(model="fake", input=REPLY, tools=[OWN_TOOL]) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_response()
    assert "response.completed" in kinds
    assert found.output_text == "Look. "


def test_a_response_is_parsed_by_the_client(client):
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str

    found = client.responses.parse(model="fake", input='{"name": "Oslo"}', text_format=City)
    assert found.output_parsed == City(name="Oslo")


def test_the_output_of_a_response_is_input_of_the_next_one(client, server):
    first = client.responses.create(model="fake", input=REPLY, tools=[OWN_TOOL])
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, *first.output]
    for item in first.output[2:]:
        answer = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        items.append(answer)
    found = client.responses.create(model="fake", input=items, tools=[OWN_TOOL])
    assert found.output_text == "sunny"


def test_the_best_of_several_samples_are_returned(client):
    found = client.completions.create(model="fake", prompt="abc", max_tokens=9, n=2, best_of=4)
    assert [(choice.index, choice.text) for choice in found.choices] == [(0, "abc"), (1, "abc")]


def test_a_stop_token_ends_the_text(client):
    ids = [40, 413, 79]
    found = client.completions.create(
        model="fake", prompt=ids, max_tokens=9, extra_body={"stop_token_ids": [413]}
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("H", "stop")
    assert found.choices[0].stop_reason == 413


def test_an_encoder_reads_the_prompt(tmp_path):
    with fake_server(tmp_path / "bpe", "--decoder-start", "5") as server:
        status, found = server.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 50})
        assert (status, found["choices"][0]["text"]) == (200, PROMPT)
        assert found["usage"]["prompt_tokens"] == 10
        status, found = server.ask("PUT", "/api", {"prompts": ["Hello"], "tokens_to_generate": 9})
        assert (status, found["text"]) == (200, ["HelloHello"])


def test_a_missing_key_is_refused(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    with fake_server(tmp_path / "bpe", "--api-key-file", str(keys)) as server:
        for key, is_right in (("second", True), ("third", False), ("", False)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or "-") as client:
                if is_right:
                    assert client.completions.create(model="fake", prompt="a").choices[0].text
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.completions.create(model="fake", prompt="a")
        assert server.ask("GET", "/v1/models")[0] == 401
        assert server.ask("GET", "/health")[0] == 200


def test_special_tokens_around_a_text_can_be_left_out(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_bpe(tmp_path, VOCAB_SIZE)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    words = ("--chat-template", str(template))
    with fake_server(tmp_path, *words, tokenizer=folder) as server:

        def num_tokens(path, text, **more):
            given = {"messages": [{"role": "user", "content": text}]}
            given = given if "chat" in path else {"prompt": text}
            found = server.ask("POST", path, {**given, "max_tokens": 1, **more})[1]
            return found["usage"]["prompt_tokens"]

        for path in ("/v1/completions", "/v1/chat/completions"):
            assert num_tokens(path, "Hello") == 4  # BOS, "H", "ell", "o"
            assert num_tokens(path, "Hello", add_special_tokens=True) == 4
            assert num_tokens(path, "Hello", add_special_tokens=False) == 3
            # The text of a special token is this token, wherever it stands.
            assert num_tokens(path, "H<|endoftext|>", add_special_tokens=False) == 2
        assert server.ask("POST", "/v1/completions", {"prompt": "", "max_tokens": 1})[0] == 200
