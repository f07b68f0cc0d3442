"""Flags for the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option
from megatron.core.registry import Registry

# Values are functions that build a tokenizer; see megatron.training.tokenizer.
TOKENIZER_TYPES = Registry[object](
    "--tokenizer-type",
    dict.fromkeys(
        (
            "BertWordPieceLowerCase BertWordPieceCase GPT2BPETokenizer SentencePieceTokenizer "
            "GPTSentencePieceTokenizer HuggingFaceTokenizer Llama2Tokenizer TikTokenizer "
            "MultimodalTokenizer NullTokenizer NullMultimodalTokenizer SFTTokenizer"
        ).split(),
        "megatron.training.tokenizer.tokenizer:create_tokenizer",
    ),
)
# Of the conversations of MultimodalTokenizer; see megatron.training.tokenizer.
PROMPT_FORMATS = (
    "mistral llama3 chatml nvlm-yi-34b qwen2p0 qwen2p5 llama3p1 nemotron5 nemotron5-aligned"
).split()
# Of the conversations of SFTTokenizer; see megatron.training.tokenizer.
SFT_PROMPT_FORMATS = ("nemotron-nano-v2", "nemotron-h-aligned", "identity", "default")
IMAGE_TAG_TYPES = ("nvlm", "internvl", "")
_tokenizer = partial(option, group="tokenizer")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    vocab_size: int | None = _tokenizer(
        None, "Vocabulary size before padding; that of the tokenizer if not given.", at_least=1
    )
    padded_vocab_size: int | None = _tokenizer(
        None, "Vocabulary size after padding, instead of the computed one.", at_least=1
    )
    vocab_file: str | None = _tokenizer(None, "Vocabulary file of the tokenizer.")
    merge_file: str | None = _tokenizer(None, "Merge file of a byte-pair tokenizer.")
    vocab_extra_ids: int = _tokenizer(0, "Number of extra tokens at the end of the vocabulary.")
    tokenizer_type: str | None = _tokenizer(
        None,
        "Tokenizer type.",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_model: str | None = _tokenizer(
        None, "File, directory or Hugging Face name of the tokenizer model."
    )
    tiktoken_pattern: str | None = _tokenizer(
        None, "Pre-tokenization pattern of a tiktoken vocabulary: v1 or v2."
    )
    tiktoken_num_special_tokens: int = _tokenizer(
        1000, "Ids reserved for special tokens in a tiktoken vocabulary."
    )
    tiktoken_special_tokens: tuple[str, ...] | None = _tokenizer(
        None, "Names of a tiktoken vocabulary's first special tokens.", nargs="+"
    )
    tokenizer_prompt_format: str | None = _tokenizer(
        None,
        "Chat template of conversations for MultimodalTokenizer, which requires it; llama3, "
        "llama3p1 and chatml use the template in the tokenizer's files.",
        choices=PROMPT_FORMATS,
    )
    special_tokens: tuple[str, ...] = _tokenizer(
        ("<image>",), "Tokens that MultimodalTokenizer adds to its vocabulary.", nargs="*"
    )
    image_tag_type: str = _tokenizer(
        "",
        "Text around an image for MultimodalTokenizer: <Image> </Image> (nvlm), <img> </img> "
        "(internvl) or none.",
        choices=IMAGE_TAG_TYPES,
    )
    force_system_message: bool = _tokenizer(
        False,
        "Replace the system message of each conversation by a fixed one (MultimodalTokenizer).",
    )
    sft_tokenizer_prompt_format: str = option(
        "nemotron-h-aligned",
        "Chat template of SFTTokenizer: nemotron-nano-v2, nemotron-h-aligned, identity (the "
        "contents alone) or default (the one in the tokenizer's files).",
        group="sft",
    )
    chat_template: str | None = _tokenizer(
        None,
        "File with the jinja2 chat template of conversations; that of the tokenizer's files if "
        "not given.",
    )
