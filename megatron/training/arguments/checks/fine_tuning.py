"""Checks of training on conversations (--sft) and of text during training (--eval-generate)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.training.config.run import DPO, OF_CONVERSATIONS, REWARD, SFT, RunConfig
from megatron.training.models.registry import model_kind_of

_FLAGS = {SFT: "--sft", DPO: "--dpo-beta", REWARD: "--reward-model"}


def conversations_have_bounds_of_their_own(run: RunConfig) -> Iterator[str]:
    """Refuse flags that describe documents of a text, other data and graphs of fixed shapes."""
    if run.objective not in OF_CONVERSATIONS:
        return
    d = run.data
    flag_of_objective = _FLAGS[run.objective]
    reasons = {
        "--reset-position-ids": (d.reset_position_ids, "each conversation starts at position 0"),
        "--reset-attention-mask": (d.reset_attention_mask, "conversations do not see each other"),
        "--eod-mask-loss": (d.eod_mask_loss, "the loss is on the turns of the assistant alone"),
        f"--dataset-type {d.dataset_type}": (
            d.dataset_type is not None,
            f"{flag_of_objective} reads the conversations of --data-path; use one of the two",
        ),
        f"--dataloader-type {d.dataloader_type}": (
            d.dataloader_type == "external",
            f"{flag_of_objective} reads the conversations of --data-path; use single or cyclic",
        ),
        "--enable-cuda-graph and --external-cuda-graph": (
            run.model.uses_graphs,
            "a graph has fixed shapes, and each row has another number of conversations",
        ),
    }
    for flag, (is_given, reason) in reasons.items():
        if is_given:
            yield f"{flag} with {flag_of_objective}: {reason}: leave it out"


def packed_conversations_fit_the_layout(run: RunConfig) -> Iterator[str]:
    """Require rows of complete parts, each of which context parallelism can split."""
    d = run.data
    cp = run.model.context_parallel_size
    if run.objective not in OF_CONVERSATIONS or d.sft_alignment is None:
        return
    part = sequence_divisor(cp=cp)
    if d.sft_alignment < 1:  # refused for its value
        return
    if d.sft_alignment % part:
        yield (
            f"--sft-alignment {d.sft_alignment} with --context-parallel-size {cp}: each packed "
            f"conversation is split into {part} parts: give a multiple of {part}"
        )
    elif d.seq_length % d.sft_alignment:
        yield (
            f"--seq-length {d.seq_length}: rows consist of conversations that are padded to "
            f"multiples of {d.sft_alignment} (--sft-alignment): give a multiple of it"
        )


def the_model_answers_prompts(run: RunConfig) -> Iterator[str]:
    """Require a model that writes text, and space for a prompt and its answer."""
    v = run.validation
    kind = model_kind_of(run)
    if v.eval_generate is None:
        return
    if not kind.writes_text or kind.reads_images or kind.has_encoder:
        yield f"--eval-generate with {kind.title}: it is for models that continue a text"
    if v.eval_generate_tokens >= run.data.seq_length:
        yield (
            f"--eval-generate-tokens {v.eval_generate_tokens}: --seq-length {run.data.seq_length} "
            "is the length of prompt and answer together: give a smaller number"
        )
