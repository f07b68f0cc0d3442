"""Options from which a tokenizer is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Tokenizer options of the command line."""

    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: Sequence[str] | None = None
    tokenizer_prompt_format: str | None = None
    special_tokens: Sequence[str] = ("<image>",)
    image_tag_type: str = ""
    force_system_message: bool = False
    sft_tokenizer_prompt_format: str = "nemotron-h-aligned"
    chat_template: str | None = None

    @classmethod
    def of(cls, source: object) -> TokenizerSpec:
        """Read the fields from a namespace or a config; missing fields and None get defaults."""
        if dataclasses.is_dataclass(source):
            names = {f.name for f in dataclasses.fields(source)}
            values = {name: getattr(source, name) for name in names}
        else:
            values = vars(source)
        known = {f.name for f in dataclasses.fields(cls)}
        said = {name: value for name, value in values.items() if value is not None}
        return cls(**{name: value for name, value in said.items() if name in known})

    def need(self, field: str) -> Any:
        """Return the value of ``field``.  Raises ConfigError if it is not set."""
        value = getattr(self, field)
        if value is None:
            flag = "--" + field.replace("_", "-")
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs {flag}; give {flag}")
        return value
