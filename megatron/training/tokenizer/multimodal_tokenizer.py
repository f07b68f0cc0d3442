"""MultimodalTokenizer: conversations about images as token ids, in the prompt format of a model.

The format is a chat template in Jinja, one of this file or that of the tokenizer's own files.
An image is the text ``<image>``, one token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.optional import require
from megatron.training.config.tokenizer import IMAGE_TAG_TYPES, PROMPT_FORMATS
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.huggingface import (
    TransformersTokenizer,
    load_wrapper,
    parts_of,
)

IGNORE_INDEX = -100  # target of a token without loss
IMAGE_TOKEN = "<image>"
# --image-tag-type -> text before and after an image.
IMAGE_TAGS = dict(
    zip(IMAGE_TAG_TYPES, (("<Image>", "</Image>"), ("<img>", "</img>"), ("", "")), strict=True)
)

Turn = Mapping[str, str]  # role (system, user or assistant) and content

_BOS = "{{ bos_token }}"
_CHATML = (
    "{% for turn in messages %}"
    "{{ '<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
mistral_custom_template = _BOS + (
    "{% for turn in messages %}"
    "{% if turn['role'] == 'user' %}{{ '[INST] ' + turn['content'] + '[/INST]' }}"
    "{% elif turn['role'] == 'assistant' %}{{ ' ' + turn['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
nvlm_yi_34b_template = _BOS + _CHATML
qwen2p0_custom_template = _CHATML
nemotron_custom_template = _CHATML.replace("<|im_start|>", "<SPECIAL_14>").replace(
    "<|im_end|>", "<SPECIAL_15>"
)
# A user's turn also contains the header of the answer.
nemotron_aligned_custom_template = (
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}"
    "{{ '<SPECIAL_10>System\n' + turn['content'].strip() + '\n' }}"
    "{% elif turn['role'] == 'user' %}"
    "{{ '<SPECIAL_11>User\n' + turn['content'].strip() + '\n<SPECIAL_11>Assistant\n' }}"
    "{% elif turn['role'] == 'assistant' %}{{ turn['content'].strip() + '\n' }}{% endif %}"
    "{% endfor %}"
)


@dataclass
class PromptConfig:
    """What a prompt format adds to a conversation."""

    assistant_prefix_len: int  # tokens before an answer, if the template has no generation prompt
    pad_token_id: int | None
    custom_chat_template: str | None  # None: the template in the tokenizer's files
    has_bos: bool
    has_system_role: bool
    force_system_message: bool = False
    system_default: Turn | None = None


_SYSTEM_MESSAGE = {"role": "system", "content": "Answer the questions."}
# Prompt format -> length of the prefix of an answer, padding token (None: that of the tokenizer's
# files), template, whether it begins with BOS.
_FORMATS = {
    "mistral": (0, "<unk>", mistral_custom_template, True),
    "llama3": (4, "<|end_of_text|>", None, True),
    "llama3p1": (4, "<|finetune_right_pad_id|>", None, True),
    "chatml": (3, None, None, False),
    "nvlm-yi-34b": (4, None, nvlm_yi_34b_template, True),
    "qwen2p0": (3, None, qwen2p0_custom_template, False),
    "qwen2p5": (3, None, qwen2p0_custom_template, False),
    "nemotron5": (3, "<SPECIAL_233>", nemotron_custom_template, False),
    "nemotron5-aligned": (0, "<SPECIAL_233>", nemotron_aligned_custom_template, False),
}
assert set(_FORMATS) == set(PROMPT_FORMATS)


class MultimodalTokenizer(TransformersTokenizer):
    """Wrapper of a Hugging Face ``tokenizer`` that also renders conversations.

    ``special_tokens`` are added to the vocabulary if it lacks them.  ``force_system_message``
    replaces the system message of every conversation by a fixed one.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_format: str,
        special_tokens: Sequence[str],
        image_tag_type: str,
        force_system_message: bool = False,
    ) -> None:
        super().__init__(
            parts_of(tokenizer),
            str(tokenizer.name_or_path),
            prompt_format=prompt_format,
            special_tokens=list(special_tokens),
            image_tag_type=image_tag_type,
            force_system_message=force_system_message,
        )
        if prompt_format not in _FORMATS:
            raise ConfigError(
                f"--tokenizer-prompt-format {prompt_format}: give one of {', '.join(_FORMATS)}"
            )
        if image_tag_type not in IMAGE_TAGS:
            raise ConfigError(
                f"--image-tag-type {image_tag_type}: give nvlm, internvl or an empty text"
            )
        self._image_tag = IMAGE_TAGS[image_tag_type]
        tokenizer.add_tokens(list(special_tokens), special_tokens=True)
        prefix_len, pad_token, template, has_bos = _FORMATS[prompt_format]
        has_system_role = prompt_format != "mistral"
        if template is None and not tokenizer.chat_template:
            raise ConfigError(
                f"--tokenizer-prompt-format {prompt_format}: it uses the chat template of the "
                f"tokenizer, and {tokenizer.name_or_path} has none; give a tokenizer with "
                "chat_template in tokenizer_config.json, or another format"
            )
        if force_system_message and not has_system_role:
            raise ConfigError(
                f"--force-system-message: the format {prompt_format} has no system role: leave "
                "the flag out"
            )
        pads = (self.vocab.get(pad_token or ""), *map(self._tokens.get, ("pad", "eos")))
        pad = next((pad for pad in pads if pad is not None), None)
        if pad is not None:
            self._tokens["pad"] = pad
        self._prompt_config = PromptConfig(
            *(prefix_len, pad, template, has_bos, has_system_role),
            *(force_system_message, _SYSTEM_MESSAGE),
        )
        self._template_error: type[Exception] = require(
            "jinja2", "--tokenizer-type MultimodalTokenizer"
        ).TemplateError

    @classmethod
    def build(cls, spec: TokenizerSpec) -> MultimodalTokenizer:
        """Build the tokenizer of the command line."""
        prompt_format = spec.need("tokenizer_prompt_format")
        # Files of Yi do not request the BOS token that the format begins with.
        of_yi = {"from_slow": True, "legacy": False, "add_bos_token": True}
        options = of_yi if prompt_format == "nvlm-yi-34b" else {}
        return cls(
            load_wrapper(spec.need("tokenizer_model"), options),
            prompt_format,
            spec.special_tokens,
            spec.image_tag_type,
            spec.force_system_message,
        )

    def tokenize_conversation(
        self, conversation: Sequence[Turn], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the token ids i64 [n] of a conversation.

        With ``return_target``, return (ids, target); target i64 [n] is IGNORE_INDEX except for
        the answers of the assistant, each with the tokens that end it.  Raises DataError for
        empty turns, and for conversations that the template refuses.
        """
        turns = self.turns(conversation)
        tokens = self._render(turns, add_generation_prompt)
        if not return_target:
            return np.array(tokens, np.int64)
        target = np.full(len(tokens), IGNORE_INDEX, np.int64)
        for i, turn in enumerate(turns):
            if turn["role"] == "assistant":
                first, end = self._answer(tokens, turns, i)
                target[first:end] = tokens[first:end]
        return np.array(tokens, np.int64), target

    def chat_template(self) -> tuple[str, dict[str, str]]:
        """Return the template of the prompt format, and the special tokens that it may name."""
        source: str = self._wrapper.get_chat_template(self._prompt_config.custom_chat_template)
        named = self._wrapper.special_tokens_map
        return source, {name: text for name, text in named.items() if isinstance(text, str)}

    def turns(self, conversation: Sequence[Turn]) -> list[Turn]:
        """Return the turns to render: with the forced system message and the tags of images.

        Raises DataError for a turn without a text.
        """
        turns = list(conversation)
        prompt = self._prompt_config
        has_system = bool(turns) and turns[0].get("role") == "system"
        if has_system and (prompt.force_system_message or not prompt.has_system_role):
            turns = turns[1:]
        if prompt.force_system_message:
            turns = [_SYSTEM_MESSAGE, *turns]
        if not turns:
            raise DataError("a conversation has no turn")
        before, after = self._image_tag
        tagged = f"{before}{IMAGE_TOKEN}{after}"
        rendered: list[Turn] = []
        for turn in turns:
            role = turn.get("role")
            content = turn.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise DataError(f"a turn needs texts role and content, found {turn!r:.100}")
            if not content:
                raise DataError(f"a turn of the {role} is empty")
            rendered.append({**turn, "content": content.replace(IMAGE_TOKEN, tagged)})
        return rendered

    def _answer(self, tokens: list[int], turns: list[Turn], i: int) -> tuple[int, int]:
        """Return where the answer that is turn ``i`` begins and ends among ``tokens``."""
        asked = self._render(turns[:i], False) if i else []
        first = len(self._render(turns[:i], True)) if i else 0
        if first == len(asked):  # the template has no generation prompt
            has_new_bos = self._prompt_config.has_bos and not i
            first += self._prompt_config.assistant_prefix_len + has_new_bos
        until = self._render(turns[: i + 1], False)
        if tokens[: len(until)] != until or tokens[: len(asked)] != asked:
            raise DataError(
                "the chat template changes earlier turns of a conversation when another follows, "
                "so answers cannot be located"
            )
        return first, len(until)

    def _render(self, turns: Sequence[Turn], add_generation_prompt: bool) -> list[int]:
        """Return the ids of the turns in the format of the prompt."""
        try:
            text: str = self._wrapper.apply_chat_template(
                list(turns),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=self._prompt_config.custom_chat_template,
            )
        except self._template_error as error:
            raise DataError(f"the chat template refuses a conversation: {error}") from error
        return self.tokenize_plain(text)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of several."""
        return self._wrapper.convert_tokens_to_ids(tokens)
