"""Chat templates: the tokens of a conversation, and which of them are trained."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.chat import ChatTemplate, load_chat_template
from megatron.training.tokenizer.multimodal_tokenizer import IGNORE_INDEX
from megatron.training.tokenizer.sft_tokenizer import SFTTokenizer
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support import chat_templates as texts

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is 1 + 1?"}
ANSWER = {"role": "assistant", "content": "It is 2."}
NEXT = {"role": "user", "content": "And 2 + 2?"}
LAST = {"role": "assistant", "content": "It is 4.\nSure?"}
TURNS = [QUESTION, ANSWER, NEXT, LAST]
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# Name of the model, template, eos, has system role, trained texts of the two answers.
TEMPLATES = [
    ("qwen2.5", texts.CHATML, "<|im_end|>", True, "It is 2.<|im_end|>\n"),
    ("qwen3", texts.QWEN3.replace("PROMPT", ""), "<|im_end|>", True, "It is 2.<|im_end|>\n"),
    ("llama-2", texts.LLAMA2, "</s>", True, " It is 2. </s>"),
    ("llama-3.1", texts.LLAMA3, "<|eot_id|>", True, "It is 2.<|eot_id|>"),
    ("mistral", texts.MISTRAL, "</s>", False, " It is 2.</s>"),
    ("gemma", texts.GEMMA, "</s>", False, "It is 2.<end_of_turn>\n"),
    ("phi-3", texts.PHI3, "<|endoftext|>", True, "It is 2.<|end|>\n"),
    ("deepseek", texts.DEEPSEEK, END, True, "It is 2." + END),
    ("zephyr", texts.ZEPHYR, "</s>", True, "It is 2.</s>\n"),
    ("olmo", texts.OLMO, "<|endoftext|>", True, "It is 2.<|endoftext|>"),
]
IDS = [row[0] for row in TEMPLATES]


class _WithoutOffsets(MegatronTokenizer):
    """A tokenizer that keeps no offsets."""

    def __init__(self, inner):
        super().__init__("none")
        self._inner = inner

    def tokenize(self, text):
        return self._inner.tokenize(text)

    def tokenize_plain(self, text):
        return self._inner.tokenize_plain(text)

    def detokenize(self, ids):
        return self._inner.detokenize(ids)

    def appended_tokens(self):
        return self._inner.appended_tokens()

    @property
    def vocab(self):
        return self._inner.vocab

    @property
    def vocab_size(self):
        return self._inner.vocab_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return texts.write_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return create_tokenizer(spec)


def template_of(tokenizer, source, eos="</s>"):
    return ChatTemplate(
        tokenizer, source, {"bos_token": "<s>", "eos_token": eos}, "--chat-template file"
    )


def trained(tokenizer, encoded):
    """Texts of the uninterrupted stretches of trained tokens."""
    stretches = []
    was_trained = False
    for token, is_trained in zip(*encoded, strict=True):
        if is_trained and not was_trained:
            stretches.append([])
        if is_trained:
            stretches[-1].append(int(token))
        was_trained = is_trained
    return [tokenizer.detokenize(ids) for ids in stretches]


@pytest.mark.feature("Fine-tuning: loss on the answers of a conversation, for any chat template")
@pytest.mark.parametrize(("name", "source", "eos", "has_system", "first"), TEMPLATES, ids=IDS)
def test_answers_and_the_tokens_that_end_them_are_trained(
    tokenizer, name, source, eos, has_system, first
):
    template = template_of(tokenizer, source, eos)
    messages = [SYSTEM, *TURNS] if has_system else TURNS
    encoded = template.encode(messages)
    last = first.replace("It is 2.", "It is 4.\nSure?")
    if name == "qwen3":
        last = "<think>\n\n</think>\n\n" + last
    if name == "phi-3":
        last += eos  # ends the conversation
    assert trained(tokenizer, encoded) == [first, last]
    assert encoded.tokens.dtype == np.int32
    assert encoded.is_trained.dtype == np.bool_
    text, _ = template.trained_text(messages)
    assert encoded.tokens.tolist() == tokenizer.tokenize_plain(text)


@pytest.mark.parametrize(("name", "source", "eos", "has_system", "first"), TEMPLATES, ids=IDS)
def test_templates_render_as_transformers_does(folder, name, source, eos, has_system, first):
    transformers = pytest.importorskip("transformers")
    wrapper = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token=eos
    )
    tokenizer = create_tokenizer(
        TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    )
    template = template_of(tokenizer, source, eos)
    for ask in (False, True):
        messages = TURNS[:3] if ask else TURNS
        expected = wrapper.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=ask, return_dict=False
        )
        ids = template.encode_prompt(messages) if ask else template.encode(messages).tokens
        assert ids.tolist() == expected
    opened = wrapper.apply_chat_template(
        TURNS, chat_template=source, continue_final_message=True, return_dict=False
    )
    assert template.encode_prompt(TURNS, continue_final_message=True).tolist() == opened


@pytest.mark.parametrize("source", [row[1] for row in TEMPLATES], ids=IDS)
def test_a_tokenizer_without_offsets_has_the_same_masks(tokenizer, source):
    expected = template_of(tokenizer, source).encode(TURNS)
    found = template_of(_WithoutOffsets(tokenizer), source).encode(TURNS)
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.is_trained, expected.is_trained)


def test_a_boundary_inside_a_token_needs_offsets(tokenizer):
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    word = next(t for t in sorted(tokenizer.vocab) if t.isalpha() and t.isascii() and len(t) > 2)
    assert len(tokenizer.tokenize_plain(word)) == 1
    turns = [
        {"role": "user", "content": word[:1]},
        {"role": "assistant", "content": word[1:] + " end"},
    ]
    found = template_of(tokenizer, source).encode(turns)
    assert trained(tokenizer, found) == [word + " end"]
    with pytest.raises(DataError, match=r"joins the end of a turn.*tokenizer.json"):
        template_of(_WithoutOffsets(tokenizer), source).encode(turns)


def test_generation_blocks_say_what_is_trained(tokenizer):
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n"
        "  {%- generation %}{{ m.content }}!{% endgeneration %}{{ eos_token }}"
        "{% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}"
    )
    template = template_of(tokenizer, source)
    encoded = template.encode(TURNS)
    assert trained(tokenizer, encoded) == ["It is 2.!", "It is 4.\nSure?!"]
    later = template.encode(TURNS, first_trained=3)
    assert trained(tokenizer, later) == ["It is 4.\nSure?!"]
    assert np.array_equal(later.tokens, encoded.tokens)
    with pytest.raises(DataError, match=r"U\+FDD0"):
        template.encode([{"role": "user", "content": "\ufdd0"}, ANSWER])


def test_messages_of_a_prompt_are_not_trained(tokenizer):
    template = template_of(tokenizer, texts.CHATML)
    encoded = template.encode(TURNS, first_trained=2)
    assert trained(tokenizer, encoded) == ["It is 4.\nSure?<|im_end|>\n"]


def test_earlier_reasoning_that_a_template_drops_is_not_trained(tokenizer):
    source = texts.QWEN3.replace("PROMPT", "")
    template = template_of(tokenizer, source)
    thinks = {"role": "assistant", "content": "<think>\nadd\n</think>\n\nIt is 2."}
    encoded = template.encode([QUESTION, thinks, NEXT, {**LAST, "reasoning_content": "double"}])
    assert trained(tokenizer, encoded) == [
        "It is 2.<|im_end|>\n",
        "<think>\ndouble\n</think>\n\nIt is 4.\nSure?<|im_end|>\n",
    ]
    # The prompt of a thinking model begins the reasoning, which earlier answers do not have.
    template = template_of(tokenizer, source.replace("PROMPT", ""))
    begun = template_of(tokenizer, texts.QWEN3.replace("PROMPT", "<think>\\n"))
    encoded = begun.encode([QUESTION, thinks, NEXT, {**LAST, "reasoning_content": "double"}])
    assert trained(tokenizer, encoded) == [
        "It is 2.<|im_end|>\n",
        "double\n</think>\n\nIt is 4.\nSure?<|im_end|>\n",
    ]


def test_an_answer_that_begins_like_the_prompt_is_trained_from_its_first_character(tokenizer):
    answer = {"role": "assistant", "content": "<thick> ice"}
    encoded = template_of(tokenizer, texts.DEEPSEEK, END).encode([QUESTION, answer])
    assert trained(tokenizer, encoded) == ["<thick> ice" + END]


def test_calls_of_functions_are_trained_and_their_results_are_not(tokenizer):
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "2"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    written = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call><|im_end|>\n'
    for source in (texts.CHATML, texts.QWEN3.replace("PROMPT", "")):
        template = template_of(tokenizer, source)
        encoded = template.encode([QUESTION, asks, result, LAST], tools)
        first, last = trained(tokenizer, encoded)
        assert first == written
        assert last.endswith("It is 4.\nSure?<|im_end|>\n")
        assert (tokenizer.detokenize(encoded.tokens.tolist()).count("<tools>") == 1) == (
            source == texts.CHATML
        )


def test_a_template_without_derivable_mask_is_refused_with_a_sample(tokenizer):
    template = template_of(tokenizer, texts.MISTRAL_MOVING)
    assert template.encode([SYSTEM, QUESTION, ANSWER]).is_trained.any()
    with pytest.raises(DataError) as error:
        template.encode([SYSTEM, *TURNS])
    message = str(error.value)
    assert message.startswith("--chat-template file: the tokens to train cannot be derived")
    assert "the rendering of the messages before message 2 does not begin the complete" in message
    assert "{% generation %}" in message
    assert message.endswith(
        "A sample:\n"
        + template.trained_text([SYSTEM, QUESTION, ANSWER])[0].replace("Be brief.\n\n", "")
        + "[INST] Be brief.\n\nAnd 2 + 2?[/INST]"
        " It is 4.\nSure?</s>"
    )


def test_a_template_that_leaves_out_what_the_assistant_says_is_refused(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    result = {"role": "tool", "content": "2"}
    with pytest.raises(DataError, match="leaves out the call of a function of message 1; give"):
        template_of(tokenizer, texts.ZEPHYR).encode([QUESTION, call, result, ANSWER])
    silent = "{% for m in messages %}{{ m.role + eos_token }}{% endfor %}"
    with pytest.raises(DataError, match=r"leaves out the text of message 1; .*--chat-template"):
        template_of(tokenizer, silent).encode(TURNS)
    block = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match="leaves out the text of message 1"):
        template_of(tokenizer, block).encode(TURNS)


def test_a_refusal_of_the_template_is_an_error_of_the_data(tokenizer):
    with pytest.raises(DataError, match="refuses a conversation: System role not supported"):
        template_of(tokenizer, texts.GEMMA).encode([SYSTEM, QUESTION, ANSWER])
    with pytest.raises(ConfigError, match=r"--chat-template file: .*give a template that jinja2"):
        template_of(tokenizer, "{% for %}")


def test_json_has_the_form_that_a_template_asks_for(tokenizer):
    source = "{{ tools | tojson(indent=1, separators=(',', ':'), sort_keys=true) }}"
    text, _ = template_of(tokenizer, source).trained_text([QUESTION], [{"b": "\u00e9", "a": 1}])
    assert text == '[\n {\n  "a":1,\n  "b":"\u00e9"\n }\n]'


def test_a_template_cannot_leave_the_sandbox(tokenizer):
    source = "{{ messages.__class__.__mro__ }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="unsafe"):
        template_of(tokenizer, source).encode([QUESTION, ANSWER])


def test_special_tokens_of_a_template_must_be_tokens(tokenizer):
    with pytest.raises(ConfigError, match=r"writes the eos_token '<end>', which the tokenizer"):
        template_of(tokenizer, texts.MISTRAL, "<end>")


def test_a_template_is_read_from_the_flag_or_the_files_of_the_tokenizer(
    tokenizer, folder, tmp_path
):
    found = load_chat_template(tokenizer, None, str(folder))
    assert found.source == texts.CHATML
    own = tmp_path / "own.jinja"
    own.write_text(texts.GEMMA)
    assert load_chat_template(tokenizer, str(own), str(folder)).source == texts.GEMMA
    bare = texts.write_chat_tokenizer(tmp_path, None)
    with pytest.raises(ConfigError, match=r"has no chat template.*give --chat-template"):
        load_chat_template(tokenizer, None, str(bare))


# Format -> trained text of the first answer, and the text before the last answer's header.
FORMATS = {
    "nemotron-nano-v2": ("It is 2.\n<SPECIAL_12>\n", "<SPECIAL_11>Assistant\n"),
    "nemotron-h-aligned": ("It is 2.\n", "<SPECIAL_11>Assistant\n"),
    "identity": ("It is 2.", "And 2 + 2?"),
    "default": ("It is 2.<|im_end|>\n", "<|im_start|>assistant\n"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_sft_tokenizer_has_the_prompt_formats_of_megatron(folder, name):
    tokenizer = SFTTokenizer(str(folder), name)
    messages = [SYSTEM, *TURNS]
    ids, target = tokenizer.tokenize_conversation(messages, True, False)
    assert ids.dtype == target.dtype == np.int64
    is_trained = target != IGNORE_INDEX
    assert np.array_equal(ids[is_trained], target[is_trained])
    written, header = FORMATS[name]
    assert trained(tokenizer, (ids, is_trained))[0] == written
    prompt = tokenizer.tokenize(messages[:-1])
    assert tokenizer.detokenize(prompt).endswith(header)
    assert ids[: len(prompt)].tolist() == prompt
    asked = tokenizer.tokenize_conversation(messages[:-1], False, True)
    assert asked.tolist() == prompt
    pads = {"nemotron-h-aligned": "<SPECIAL_233>", "default": "</s>"}
    assert tokenizer.pad == tokenizer.convert_tokens_to_ids(pads.get(name, "<unk>"))


def test_sft_tokenizer_is_built_from_flags_and_refuses_what_its_files_lack(folder, tmp_path):
    spec = TokenizerSpec(
        tokenizer_type="SFTTokenizer",
        tokenizer_model=str(folder),
        sft_tokenizer_prompt_format="identity",
    )
    tokenizer = create_tokenizer(spec)
    assert isinstance(tokenizer, SFTTokenizer)
    assert tokenizer.unique_identifiers["tokenizer_path"] == [str(folder), "identity"]
    assert tokenizer.convert_tokens_to_ids(["<s>", "no such token"])[1] is None
    assert "<|im_end|>" in tokenizer.get_special_tokens()
    with pytest.raises(ConfigError, match="is unknown; give one of nemotron-nano-v2"):
        SFTTokenizer(str(folder), "other")
    bare = texts.write_bpe(tmp_path)
    with pytest.raises(ConfigError, match="has no <SPECIAL_10>, .*give .* default"):
        SFTTokenizer(str(bare), "nemotron-h-aligned")
    with pytest.raises(ConfigError, match="has no chat template"):
        SFTTokenizer(str(bare), "default")
