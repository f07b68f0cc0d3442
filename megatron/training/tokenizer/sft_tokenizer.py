"""SFTTokenizer: Hugging Face tokenizer files, and a prompt format of Megatron-LM for conversations.

The formats mark what the assistant writes with generation blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.chat_templates import read_chat_template
from megatron.core.config.errors import ConfigError
from megatron.training.config.tokenizer import SFT_PROMPT_FORMATS, TokenizerConfig
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.chat import ChatTemplate, Message, load_chat_template
from megatron.training.tokenizer.huggingface import _HuggingFaceTokenizer
from megatron.training.tokenizer.multimodal_tokenizer import IGNORE_INDEX

_TURNS = (
    "{% for turn in messages %}{% set text = turn['content'] | trim %}"
    "{% if turn['role'] == 'system' %}{{ '<SPECIAL_10>System\n' + text + '\n' }}"
    "{% elif turn['role'] in ('user', 'tool') %}{{ '<SPECIAL_11>User\n' + text + '\n' }}"
    "HEADER_AFTER_USER"
    "{% elif turn['role'] == 'assistant' %}HEADER_BEFORE_ANSWER"
    "{% generation %}{{ text + 'END' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
_HEADER = "{{ '<SPECIAL_11>Assistant\n' }}"
# The header of the answer follows each user's turn, also without a generation prompt.
nemotron_h_aligned_custom_template = (
    _TURNS.replace("HEADER_AFTER_USER", _HEADER)
    .replace("HEADER_BEFORE_ANSWER", "")
    .replace("END", "\n")
)
nemotron_nano_v2_custom_template = (
    _TURNS.replace("HEADER_AFTER_USER", "")
    .replace("HEADER_BEFORE_ANSWER", _HEADER)
    .replace("END", "\n<SPECIAL_12>\n")
    + "{% if add_generation_prompt %}"
    + _HEADER
    + "{% endif %}"
)
identity_template = (
    "{% for turn in messages %}"
    "{% if turn['role'] == 'assistant' %}"
    "{% generation %}{{ turn['content'] }}{% endgeneration %}"
    "{% else %}{{ turn['content'] }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class _Format:
    template: str | None  # None: that of the tokenizer's files
    pad_token: str | None  # None: that of the tokenizer's files
    tokens: tuple[str, ...] = ()  # that the vocabulary must have


_FORMATS = {
    "nemotron-nano-v2": _Format(
        nemotron_nano_v2_custom_template,
        "<unk>",
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    "nemotron-h-aligned": _Format(
        nemotron_h_aligned_custom_template,
        "<SPECIAL_233>",
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>"),
    ),
    "identity": _Format(identity_template, "<unk>"),
    "default": _Format(None, None),
}
assert set(_FORMATS) == set(SFT_PROMPT_FORMATS)


def chat_template_of(tokenizer: MegatronTokenizer, config: TokenizerConfig) -> ChatTemplate | None:
    """Return the chat template of a run: --chat-template, else that of the tokenizer, if any."""
    if config.chat_template is None and isinstance(tokenizer, SFTTokenizer):
        return tokenizer.chat
    path = config.tokenizer_model
    if config.chat_template is None and read_chat_template(None, path)[0] is None:
        return None
    return load_chat_template(tokenizer, config.chat_template, path)


class SFTTokenizer(_HuggingFaceTokenizer):
    """Tokenizer of conversations in ``prompt_format``; ``chat`` is the format's template."""

    def __init__(self, tokenizer_path: str, prompt_format: str) -> None:
        super().__init__(tokenizer_path)
        self.unique_identifiers["tokenizer_path"] = [tokenizer_path, prompt_format]
        flag = f"--sft-tokenizer-prompt-format {prompt_format}"
        if prompt_format not in _FORMATS:
            raise ConfigError(f"{flag} is unknown; give one of {', '.join(_FORMATS)}")
        self._format = _FORMATS[prompt_format]
        missing = [token for token in self._format.tokens if token not in self.vocab]
        if missing:
            raise ConfigError(
                f"{flag}: the vocabulary of {tokenizer_path} has no {', '.join(missing)}; give "
                "--sft-tokenizer-prompt-format default for the chat template of the tokenizer"
            )
        own, special_tokens = read_chat_template(None, tokenizer_path)
        source = self._format.template or own
        if source is None:
            raise ConfigError(
                f"{flag}: {tokenizer_path} has no chat template; give --chat-template with a file "
                "of jinja text and --tokenizer-type HuggingFaceTokenizer"
            )
        self.chat = ChatTemplate(self, source, special_tokens, flag)

    @classmethod
    def build(cls, spec: TokenizerSpec) -> SFTTokenizer:
        """Build the tokenizer of the command line."""
        return cls(spec.need("tokenizer_model"), spec.sft_tokenizer_prompt_format)

    def tokenize(self, text: str | Sequence[Message], **options: Any) -> list[int]:
        """Return the ids of a text, or of a conversation and the header of its next answer."""
        if isinstance(text, str):
            return super().tokenize(text, **{"add_special_tokens": False, **options})
        return list(map(int, self.chat.encode_prompt(text)))

    def tokenize_conversation(
        self, conversation: Sequence[Message], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the token ids i64 [n] of a conversation.

        With ``return_target``, return (ids, target); target i64 [n] is IGNORE_INDEX for tokens
        that are not trained.
        """
        encoded = self.chat.encode(conversation)
        ids = encoded.tokens.astype(np.int64)
        target = np.where(encoded.is_trained, ids, IGNORE_INDEX)
        if add_generation_prompt:
            ids = self.chat.encode_prompt(conversation).astype(np.int64)
            target = np.pad(target, (0, len(ids) - len(target)), constant_values=IGNORE_INDEX)
        return (ids, target) if return_target else ids

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of several; None for tokens it lacks."""
        if isinstance(tokens, str):
            return self.vocab.get(tokens)
        return [self.vocab.get(token) for token in tokens]

    def _special(self, role: str) -> int:
        if role != "pad":
            return super()._special(role)
        pad = self.vocab.get(self._format.pad_token or "")
        return super()._special("pad" if "pad" in self._tokens else "eod") if pad is None else pad
