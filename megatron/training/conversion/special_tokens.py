"""Ids of special tokens for config.json, from the tokenizer of a run."""

from __future__ import annotations

from megatron.core.config.errors import CheckpointError, MegatronError
from megatron.core.models.multimodal.llava_model import IMAGE_TOKEN
from megatron.training.config.run import RunConfig
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer


def special_ids(run: RunConfig) -> dict[str, int | None]:
    """Return the tokenizer's bos, eos and pad ids under config.json's names; None if unknown."""
    spec = TokenizerSpec.of(run.tokenizer)
    ids: dict[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if spec.tokenizer_type in (None, "NullTokenizer"):
        return ids
    try:
        tokenizer = create_tokenizer(spec)
    except (MegatronError, OSError):  # its files may be on another machine
        return ids
    return {name: tokenizer.id_of(name.removesuffix("_token_id")) for name in ids}


def image_token(run: RunConfig) -> int:
    """Return the id of the tokenizer's token for an image."""
    tokenizer = create_tokenizer(TokenizerSpec.of(run.tokenizer))
    try:
        ids = tokenizer.tokenize(IMAGE_TOKEN)
    except MegatronError:
        ids = []
    if len(ids) != 1:
        raise CheckpointError(
            f"the tokenizer has no token {IMAGE_TOKEN}, whose id config.json needs: give "
            "--tokenizer-model with one, or put a config.json into the checkpoint's folder "
            "huggingface"
        )
    return int(ids[0])
