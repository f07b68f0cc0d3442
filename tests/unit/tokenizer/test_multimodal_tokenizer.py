"""MultimodalTokenizer, judged by transformers' chat templates on tokenizers built here."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.config.tokenizer import PROMPT_FORMATS
from megatron.training.tokenizer import MissingToken, TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.multimodal_tokenizer import (
    IGNORE_INDEX,
    MultimodalTokenizer,
    mistral_custom_template,
)

transformers = pytest.importorskip("transformers")

SPECIAL = (
    "<s> </s> <unk> <|im_start|> <|im_end|> <|begin_of_text|> <|end_of_text|> <|eot_id|> "
    "<|start_header_id|> <|end_header_id|> <|finetune_right_pad_id|> <SPECIAL_10> <SPECIAL_11> "
    "<SPECIAL_14> <SPECIAL_15> <SPECIAL_233>"
).split()
# The templates of Llama 3 and ChatML models, with the answers marked for transformers' mask.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"llama3": LLAMA3, "llama3p1": LLAMA3, "chatml": CHATML}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<image>\nWhat is it?"},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Which color?"},
    {"role": "assistant", "content": "Red, I think."},
]
_CHATML_TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image>\nWhat is it?<|im_end|>\n"
    "<|im_start|>assistant\nA cat.<|im_end|>\n<|im_start|>user\nWhich color?<|im_end|>\n"
    "<|im_start|>assistant\nRed, I think.<|im_end|>\n"
)
_LLAMA3_TEXT = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat is it?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA cat.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhich color?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nRed, I think.<|eot_id|>"
)
TEXTS = {
    "mistral": "<s>[INST] <image>\nWhat is it?[/INST] A cat.</s>"
    "[INST] Which color?[/INST] Red, I think.</s>",
    "llama3": _LLAMA3_TEXT,
    "llama3p1": _LLAMA3_TEXT,
    "chatml": _CHATML_TEXT,
    "nvlm-yi-34b": "<s>" + _CHATML_TEXT,
    "qwen2p0": _CHATML_TEXT,
    "qwen2p5": _CHATML_TEXT,
    "nemotron5": _CHATML_TEXT.replace("<|im_start|>", "<SPECIAL_14>").replace(
        "<|im_end|>", "<SPECIAL_15>"
    ),
    "nemotron5-aligned": "<SPECIAL_10>System\nBe brief.\n"
    "<SPECIAL_11>User\n<image>\nWhat is it?\n<SPECIAL_11>Assistant\nA cat.\n"
    "<SPECIAL_11>User\nWhich color?\n<SPECIAL_11>Assistant\nRed, I think.\n",
}
ANSWERS = {
    "mistral": [" A cat.</s>", " Red, I think.</s>"],
    "llama3": ["A cat.<|eot_id|>", "Red, I think.<|eot_id|>"],
    "nemotron5": ["A cat.<SPECIAL_15>\n", "Red, I think.<SPECIAL_15>\n"],
    "nemotron5-aligned": ["A cat.\n", "Red, I think.\n"],
}
ANSWERS["llama3p1"] = ANSWERS["llama3"]
_CHATML_ANSWERS = ["A cat.<|im_end|>\n", "Red, I think.<|im_end|>\n"]


@pytest.fixture(scope="session")
def built(bpe_dir):
    """Return a function that builds a tokenizer of transformers with a chat template."""

    def build(template=None):
        rules = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
        rules.add_special_tokens(SPECIAL)
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=rules,
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            pad_token="<|endoftext|>",
            chat_template=template,
        )

    return build


def create(built, prompt_format, tags="", **options):
    wrapper = built(TEMPLATES.get(prompt_format))
    return MultimodalTokenizer(wrapper, prompt_format, ["<image>"], tags, **options)


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
@pytest.mark.feature("Data: conversations about images in the nine prompt formats of Megatron-LM")
def test_a_conversation_is_the_text_of_its_format_with_loss_on_the_answers(built, prompt_format):
    tokenizer = create(built, prompt_format)
    ids, target = tokenizer.tokenize_conversation(TALK, True, False)
    assert ids.dtype == target.dtype == np.int64
    owner = built()
    owner.add_tokens(["<image>"], special_tokens=True)
    assert ids.tolist() == owner.encode(TEXTS[prompt_format], add_special_tokens=False)
    assert np.array_equal(ids, tokenizer.tokenize_conversation(TALK, False, False))
    has_loss = target != IGNORE_INDEX
    assert (target[has_loss] == ids[has_loss]).all()
    answers = ANSWERS.get(prompt_format, _CHATML_ANSWERS)
    starts = np.flatnonzero(np.diff(has_loss, prepend=False) & has_loss)
    ends = np.flatnonzero(np.diff(has_loss, append=False) & has_loss) + 1
    found = [owner.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)]
    assert found == answers


@pytest.mark.parametrize("prompt_format", ["llama3", "chatml"])
def test_ids_and_loss_are_those_of_transformers(built, prompt_format):
    tokenizer = create(built, prompt_format)
    judge = built(TEMPLATES[prompt_format])
    judge.add_tokens(["<image>"], special_tokens=True)
    judged = judge.apply_chat_template(
        TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, target = tokenizer.tokenize_conversation(TALK, True, False)
    assert ids.tolist() == judged["input_ids"]
    assert (target != IGNORE_INDEX).tolist() == [bool(m) for m in judged["assistant_masks"]]
    asked = judge.apply_chat_template(TALK[:2], tokenize=True, add_generation_prompt=True)
    prompt = tokenizer.tokenize_conversation(TALK[:2], False, True)
    assert prompt.tolist() == asked["input_ids"]


def test_a_generation_prompt_carries_no_loss(built):
    tokenizer = create(built, "qwen2p5")
    ids, target = tokenizer.tokenize_conversation(TALK, True, True)
    plain, plain_target = tokenizer.tokenize_conversation(TALK, True, False)
    assert tokenizer.detokenize(ids[len(plain) :]) == "<|im_start|>assistant\n"
    assert np.array_equal(target[: len(plain)], plain_target)
    assert (target[len(plain) :] == IGNORE_INDEX).all()


def test_a_template_without_generation_prompt_loses_the_prefix_by_its_length(built):
    bare = CHATML.split("{% if add_generation_prompt %}")[0]
    tokenizer = MultimodalTokenizer(built(bare), "chatml", ["<image>", "assistant"], "")
    ids, target = tokenizer.tokenize_conversation(TALK, True, False)
    found = tokenizer.detokenize([t for t in target if t != IGNORE_INDEX])
    assert found == "A cat.<|im_end|>\nRed, I think.<|im_end|>\n"


@pytest.mark.parametrize(
    ("tags", "text"),
    [("nvlm", "<Image><image></Image>"), ("internvl", "<img><image></img>"), ("", "<image>")],
)
def test_tags_surround_images(built, tags, text):
    tokenizer = create(built, "qwen2p0", tags)
    ids = tokenizer.tokenize_conversation(TALK, False, False)
    assert f"user\n{text}\nWhat" in tokenizer.detokenize(ids)
    assert ids.tolist().count(tokenizer.convert_tokens_to_ids("<image>")) == 1


def test_a_forced_system_message_replaces_that_of_the_conversation(built):
    tokenizer = create(built, "qwen2p0", force_system_message=True)
    for talk in (TALK, TALK[1:]):
        text = tokenizer.detokenize(tokenizer.tokenize_conversation(talk, False, False))
        assert text.startswith("<|im_start|>system\nAnswer the questions.<|im_end|>\n")
        assert text.count("system") == 1


def test_vocabulary_and_special_ids(built):
    tokenizer = create(built, "nemotron5")
    size = len(built())
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.convert_tokens_to_ids("<image>") == size
    assert tokenizer.vocab["<image>"] == size
    assert tokenizer.inv_vocab[size] == "<image>"
    assert tokenizer.get_special_tokens()["<SPECIAL_14>"] < size
    assert tokenizer.eod == tokenizer.vocab["</s>"]
    assert tokenizer.pad == tokenizer.vocab["<SPECIAL_233>"]
    assert create(built, "chatml").pad == tokenizer.vocab["<|endoftext|>"]
    assert tokenizer.detokenize(tokenizer.tokenize("Hello <image> world")) == "Hello <image> world"
    with pytest.raises(MissingToken):
        _ = tokenizer.mask


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ([], "no turn"),
        ([{"role": "user", "content": ""}], "turn of the user is empty"),
        ([{"role": "user"}], "role and content"),
        ([{"role": "user", "content": ["a"]}], "role and content"),
    ],
)
def test_odd_conversations_are_refused(built, talk, message):
    with pytest.raises(DataError, match=message):
        create(built, "qwen2p0").tokenize_conversation(talk, True, False)


def test_what_the_template_refuses_is_a_data_error(built):
    strict = "{{ raise_exception('roles must alternate') }}"
    tokenizer = MultimodalTokenizer(built(strict), "chatml", [], "")
    with pytest.raises(DataError, match="roles must alternate"):
        tokenizer.tokenize_conversation(TALK, False, False)


def test_a_template_that_changes_earlier_turns_is_refused(built):
    last_only = "{% for m in messages %}{{ m['content'] if loop.last else '-' }}{% endfor %}"
    tokenizer = MultimodalTokenizer(built(last_only), "chatml", [], "")
    with pytest.raises(DataError, match="changes earlier turns"):
        tokenizer.tokenize_conversation(TALK, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_format": "alpaca"}, "--tokenizer-prompt-format alpaca"),
        ({"prompt_format": "llama3"}, "chat_template"),
        ({"image_tag_type": "html"}, "--image-tag-type html"),
        ({"prompt_format": "mistral", "force_system_message": True}, "--force-system-message"),
    ],
)
def test_wrong_options_are_refused(built, options, message):
    given = {"prompt_format": "qwen2p0", "special_tokens": [], "image_tag_type": ""} | options
    with pytest.raises(ConfigError, match=message):
        MultimodalTokenizer(built(), **given)


def test_the_command_line_builds_it(built, tmp_path):
    built(CHATML).save_pretrained(tmp_path)
    spec = TokenizerSpec(
        tokenizer_type="MultimodalTokenizer",
        tokenizer_model=str(tmp_path),
        tokenizer_prompt_format="chatml",
        special_tokens=("<image>", "<video>"),
        image_tag_type="internvl",
    )
    tokenizer = create_tokenizer(spec)
    assert tokenizer.vocab_size == len(built()) + 2
    text = tokenizer.detokenize(tokenizer.tokenize_conversation(TALK, False, False))
    assert "<img><image></img>" in text
    with pytest.raises(ConfigError, match="needs --tokenizer-prompt-format"):
        create_tokenizer(TokenizerSpec(tokenizer_type="MultimodalTokenizer", tokenizer_model="x"))


def test_the_template_that_scripts_import_is_a_template():
    assert "[INST]" in mistral_custom_template
