"""Checks of flags that every run needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def shape_is_given(run: RunConfig) -> Iterator[str]:
    """Require the sizes that have no sensible default."""
    m = run.model
    for flag, value in (
        ("--num-layers", m.num_layers),
        ("--hidden-size", m.hidden_size),
        ("--num-attention-heads", m.num_attention_heads),
        ("--seq-length", run.data.seq_length),
        ("--micro-batch-size", run.training.micro_batch_size),
    ):
        if not value:
            yield f"{flag} is required"


def training_has_a_length(run: RunConfig) -> Iterator[str]:
    """Require a run length and a learning rate, unless training is skipped."""
    t = run.training
    if run.validation.skip_train or not run.trains:
        return
    if t.train_iters is None and t.train_samples is None and t.epochs is None:
        yield "--train-iters, --train-samples or --epochs is required (or --skip-train)"
    if run.optimizer.lr is None:
        yield "--lr is required (or --skip-train)"


def tokenizer_has_its_files(run: RunConfig) -> Iterator[str]:
    """Require the files of the given tokenizer type."""
    t = run.tokenizer
    files = {"--vocab-file": t.vocab_file, "--merge-file": t.merge_file}
    model, size = {"--tokenizer-model": t.tokenizer_model}, {"--vocab-size": t.vocab_size}
    needed: dict[str, Mapping[str, object]] = {
        "GPT2BPETokenizer": files,
        "BertWordPieceLowerCase": {"--vocab-file": t.vocab_file},
        "BertWordPieceCase": {"--vocab-file": t.vocab_file},
        "SentencePieceTokenizer": model,
        "GPTSentencePieceTokenizer": model,
        "HuggingFaceTokenizer": model,
        "Llama2Tokenizer": model,
        "TikTokenizer": model,
        "NullTokenizer": size,
        "NullMultimodalTokenizer": size,
    }
    own = needed.get(t.tokenizer_type or "", {})
    missing = [flag for flag, value in own.items() if value is None]
    if missing:
        yield f"--tokenizer-type {t.tokenizer_type} needs {' and '.join(missing)}"


def one_number_for_each_size(run: RunConfig) -> Iterator[str]:
    """Refuse different values of --num-layers and --encoder-num-layers.

    The same holds for --seq-length and --encoder-seq-length: the --encoder flags are second names.
    """
    if model_kind_of(run).reads_images:  # there the flags of the encoder are the encoder's
        return
    for name in ("num_layers", "seq_length"):
        size, other = run.asked[name], run.asked[f"encoder_{name}"]
        if size is not None and other is not None and size != other:
            flag = name.replace("_", "-")
            yield (
                f"--{flag} {size} and --encoder-{flag} {other} set the same value: keep one of them"
            )
