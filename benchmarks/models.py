"""Compare BERT, T5 and Mamba-2 with transformers and with the matmuls of the same step.

    python -m benchmarks.models [--rounds 9] [--kind bert|t5|mamba]

Measures forward and backward passes with loss, in fp32, without dropout, in one thread.  Our model
gets the converted weights of transformers' model, and their losses must agree.  The floor is the
matmuls of the step, with weights, in attention and in the scan, each at its own shape, by torch's
default kernels.  Contenders alternate in one process that keeps freed memory; results are medians
of CPU time.  Dated results are in models.md.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.moe import medians
from megatron.core import device
from megatron.core.device import cpu_tuning
from megatron.core.ssm.mamba_hybrid_layer_allocation import mixer_shape
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf, hf_folder
from megatron.training.conversion.convert import run_config
from megatron.training.conversion.shape import args_of
from megatron.training.conversion.verify import our_model

Step = Callable[[], Tensor]

HIDDEN, HEADS, INNER, VOCABULARY = 384, 6, 1536, 16000
BATCH, LENGTH, TARGETS = 4, 256, 64
HIDDEN_SHARE = 0.15  # masked part of BERT's tokens
CHUNK = 64  # tokens of a chunk of the scan
WAYS = {"bert": ("eager", "sdpa"), "t5": ("eager", "sdpa"), "mamba": ("eager",)}


def theirs(kind: str, way: str) -> nn.Module:
    """Build transformers' model; ``way`` is its attention implementation."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=6,
            num_attention_heads=HEADS, intermediate_size=INNER, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        config._attn_implementation = way
        return transformers.BertForPreTraining(config)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=INNER, num_layers=4,
            num_decoder_layers=4, num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0,
            use_cache=False,
        )  # fmt: skip
        config._attn_implementation = way
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=6, state_size=64, head_dim=64,
        num_heads=2 * HIDDEN // 64, n_groups=1, expand=2, chunk_size=CHUNK, use_cache=False,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


def ours(model: nn.Module) -> tuple[RunConfig, nn.Module]:
    """Build our model with the converted weights of ``model``; return its config and it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder)
        found = hf.import_model(hf_folder.read_config(path), hf_folder.read_weights(path))
        config = run_config(args_of(found.shape))
        return config, our_model(config, found.tensors, VOCABULARY).train()


def batch(kind: str) -> dict[str, Tensor]:
    """Return ids and labels; labels below 0 are ignored."""
    ids = torch.randint(10, VOCABULARY, (BATCH, LENGTH))
    if kind == "bert":
        is_hidden = torch.rand(BATCH, LENGTH) < HIDDEN_SHARE
        return {"ids": ids, "labels": torch.where(is_hidden, ids, -100)}
    if kind == "t5":
        return {"ids": ids, "labels": torch.randint(10, VOCABULARY, (BATCH, TARGETS))}
    return {"ids": ids, "labels": ids}


def their_step(kind: str, model: nn.Module, ids: Tensor, labels: Tensor) -> Step:
    """Return a function that runs a forward and a backward pass and returns the loss."""
    order = {"next_sentence_label": torch.zeros(BATCH, dtype=torch.long)} if kind == "bert" else {}

    def work() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(input_ids=ids, labels=labels, **order).loss
        loss.backward()
        return loss.detach()

    return work


def our_step(kind: str, model: nn.Module, ids: Tensor, labels: Tensor) -> Step:
    """Return a function that does the same with our model."""
    places = torch.arange(ids.shape[1]).expand_as(ids)
    shifted = torch.cat([labels.new_zeros(BATCH, 1), labels[:, :-1]], 1)  # BOS is 0

    def losses() -> Tensor:
        if kind == "bert":
            of_tokens, order = model(ids, None, torch.zeros_like(ids), lm_labels=labels)
            target = torch.zeros(BATCH, dtype=torch.long)
            return of_tokens.sum() / (labels >= 0).sum() + nn.functional.cross_entropy(
                order.float(), target
            )
        if kind == "t5":
            return model(ids, shifted, lm_labels=labels).mean()
        # The last token has no label.
        return model(ids, places, None, labels=labels.roll(-1, 1))[:, :-1].mean()

    def work() -> Tensor:
        cpu_tuning.choose_float32_products(HIDDEN)  # as a run does; the others use torch's default
        model.zero_grad(set_to_none=True)
        loss = losses()
        loss.backward()
        torch.set_float32_matmul_precision("highest")
        return loss.detach()

    return work


def floor(kind: str, config: RunConfig) -> Step:
    """Return a function that runs the matmuls alone: each once forward and twice backward."""
    tokens, h, heads, d = BATCH * LENGTH, HIDDEN, BATCH * HEADS, HIDDEN // HEADS
    layer = [(tokens, 3 * h, h), (tokens, h, h), (tokens, INNER, h), (tokens, h, INNER)]
    linear: list[tuple[int, int, int]] = []  # rows, out, in
    between: list[tuple[int, int, int, int]] = []  # batch, rows, columns, depth
    square = [(heads, LENGTH, LENGTH, d), (heads, LENGTH, d, LENGTH)]
    if kind == "bert":
        chosen = round(HIDDEN_SHARE * tokens)
        linear = layer * 6 + [(chosen, h, h), (chosen, VOCABULARY, h)]
        between = square * 6
    elif kind == "t5":
        targets = BATCH * TARGETS
        own = [(targets, 3 * h, h), (targets, h, h), (targets, INNER, h), (targets, h, INNER)]
        cross = [(targets, h, h), (tokens, 2 * h, h), (targets, h, h)]
        linear = layer * 4 + (own + cross) * 4 + [(targets, VOCABULARY, h)]
        half = [(heads, TARGETS, TARGETS // 2, d), (heads, TARGETS, d, TARGETS // 2)]
        seen = [(heads, TARGETS, LENGTH, d), (heads, TARGETS, d, LENGTH)]
        between = (square + half + seen) * 4
    else:
        shape = mixer_shape(config.model)
        mixer = [(tokens, sum(shape.projected), h), (tokens, h, shape.inner)]
        linear = mixer * 6 + [(tokens, VOCABULARY, h)]
        chunks, state = tokens // CHUNK, shape.state_dim
        of_head = [
            (chunks, CHUNK, CHUNK, state),  # scores of pairs of tokens, for all heads of the group
            (chunks * shape.num_heads, CHUNK, shape.head_dim, CHUNK),  # within a chunk
            (chunks * shape.num_heads, state, shape.head_dim, CHUNK),  # into the state
            (chunks * shape.num_heads, CHUNK, shape.head_dim, state),  # out of the state
        ]
        between = of_head * 6
    rand = torch.randn
    weights = {(r, o, i): (rand(r, i), rand(o, i), rand(r, o)) for r, o, i in set(linear)}
    pairs = {(b, m, n, k): (rand(b, m, k), rand(b, k, n)) for b, m, n, k in set(between)}

    def work() -> Tensor:
        for key in linear:
            x, w, dy = weights[key]
            for product in ((x, w.t()), (dy, w), (dy.t(), x)):
                torch.mm(*product)
        for size in between:
            for _ in range(3):
                torch.bmm(*pairs[size])
        return torch.zeros(())

    return work


def compare(kind: str, rounds: int) -> None:
    """Print one row of the table."""
    peers = {way: theirs(kind, way) for way in WAYS[kind]}
    config, mine = ours(next(iter(peers.values())))
    data = batch(kind)
    steps = {"ours": our_step(kind, mine, **data)}
    steps |= {way: their_step(kind, peer, **data) for way, peer in peers.items()}
    apart = max(float((steps["ours"]() - steps[way]()).abs()) for way in peers)
    times = medians({**steps, "floor": floor(kind, config)}, rounds)
    tokens = BATCH * (LENGTH + (TARGETS if kind == "t5" else 0))
    ratios = [f"{times[way] / times['ours']:.2f}" if way in times else "" for way in WAYS["bert"]]
    print(
        f"| {kind} | {tokens / times['ours']:.0f} | {' | '.join(ratios)} "
        f"| {times['floor'] / times['ours']:.2f} | {apart:.1e} |",
        flush=True,
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kind", choices=list(WAYS))
    args: Any = parser.parse_args()
    warnings.simplefilter("ignore")
    device.choose("cpu")
    torch.set_num_threads(1)
    cpu_tuning.keep_freed_memory()  # as a run does, for all contenders
    print(f"torch {torch.__version__}, {BATCH} x {LENGTH} tokens, width {HIDDEN}")
    print("| model | tokens/s | transformers eager / ours | sdpa / ours | floor / ours | apart |")
    print("|---|---|---|---|---|---|")
    for kind in [args.kind] if args.kind else WAYS:
        compare(kind, args.rounds)


if __name__ == "__main__":
    main()
