"""Flags for data sources, sample order and the layout of samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.errors import ConfigError
from megatron.core.config.option import INT64_MAX, MAX_THREADS, option
from megatron.core.registry import Registry

# Values are functions of user code; see megatron.training.data.
DATASETS = Registry[object]("--dataset-type", {})
_data = partial(option, group="data and dataloader")
_sft = partial(option, group="sft")


# How a data path that names text ends.
TEXT_ENDS = (".jsonl", ".json", ".txt", ".text", ".gz", ".zst", ".parquet", ".arrow")


def parse_iterations(words: str | None) -> list[int]:
    """Return the iterations of a list such as "1000,2000".  Raises ConfigError."""
    try:
        found = [int(word) for word in (words or "").replace(",", " ").split()]
    except ValueError:
        found = [0]
    if any(b <= a for a, b in zip([0, *found], found, strict=False)):
        raise ConfigError(
            f"--phase-transition-iterations {words}: give iterations above 0 in ascending order, "
            "such as 1000,2000"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dataloader_type: str = option(
        "single",
        "Order of samples: single (once through), cyclic (shuffled each epoch) or external "
        "(Energon's loader of --data-path, or the program's own); single if not given.",
        group="training",
        default=None,
        choices=("single", "cyclic", "external"),
    )
    dataloader_save: str | None = _data(
        None,
        "Directory for the state of Energon's or the program's own loader (--dataloader-type "
        "external), written with each checkpoint; Energon's is restored from it.",
    )
    data_path: tuple[str, ...] | None = _data(
        None,
        "Data prefixes (of .bin and .idx) or text (JSON lines, Parquet, Arrow, a folder of "
        "datasets), which is tokenized during training: PATH ..., or WEIGHT PATH WEIGHT PATH ...; "
        "--split divides them into train, valid and test.",
        nargs="*",
    )
    dataset_type: str | None = _data(
        None,
        "Registered dataset (register_dataset) to read instead of data prefixes.",
        choices=DATASETS,
    )
    split: str | None = _data(
        None, "Ratios of train, valid and test data in --data-path, such as 969,30,1."
    )
    train_data_path: tuple[str, ...] | None = _data(
        None, "Training data prefixes, with or without weights, as in --data-path.", nargs="*"
    )
    valid_data_path: tuple[str, ...] | None = _data(
        None, "Validation data prefixes, with or without weights.", nargs="*"
    )
    test_data_path: tuple[str, ...] | None = _data(
        None, "Test data prefixes, with or without weights.", nargs="*"
    )
    data_args_path: str | None = _data(None, "File that contains the arguments of --data-path.")
    per_split_data_args_path: str | None = _data(
        None, "JSON file with the lists train, valid and test of weights and prefixes."
    )
    data_cache_path: str | None = _data(
        None, "Cache directory for dataset indices; beside the data if not given."
    )
    mmap_bin_files: bool = _data(
        True, "Open .bin files for each read instead of keeping them open."
    )
    verify_data: bool = _data(
        False,
        "Verify each MiB of the .bin files against the checksums in PREFIX.crc before its "
        "first read in each process.",
    )
    pack_documents: bool = _data(
        False,
        "Fill samples with complete documents, first fit decreasing, and padding without loss, "
        "instead of cutting documents where samples end. Longer documents are cut at --seq-length.",
    )
    phase_transition_iterations: str | None = _data(
        None,
        "Iterations, such as 1000,2000, at which the next phase of the training data begins, from "
        "its first sample on.",
    )
    phase_data_args_path: tuple[str, ...] | None = _data(
        None,
        "One file for each phase of --phase-transition-iterations, with the arguments of "
        "--data-path; the first one also gives validation and test data.",
        nargs="+",
    )
    fim_data: bool = _data(
        False, "Reorder documents so that the model learns to fill in the middle (FIM)."
    )
    fim_rate: float = _data(0.5, "Share of documents that FIM reorders.")
    fim_spm_rate: float = _data(
        0.5, "Share of reordered documents whose suffix comes before the prefix."
    )
    fim_split_sample: str | None = _data(
        None, "Token that ends a fragment of a document; FIM then reorders fragments."
    )
    fim_fragment_rate: float | None = _data(
        None, "Share of fragments that FIM reorders; --fim-rate if not given."
    )
    fim_no_prefix: str | None = _data(
        None, "Text; FIM leaves documents that begin with it as they are."
    )
    fim_prefix_token: str = _data("<fim_prefix>", "Token before the prefix.")
    fim_middle_token: str = _data("<fim_middle>", "Token before the middle.")
    fim_suffix_token: str = _data("<fim_suffix>", "Token before the suffix.")
    data_text_key: str = _data(
        "text", "Key or column that holds the text of a document, in text data of --data-path."
    )
    data_tokenize_workers: int = _data(
        1, "Processes that tokenize text data during training.", at_least=1, at_most=MAX_THREADS
    )
    length_curriculum: tuple[int, ...] | None = _data(
        None,
        "TOKENS SAMPLES: begin with contexts of TOKENS tokens, which grow to --seq-length over "
        "SAMPLES samples; attention and positions begin anew after each context. Needs "
        "--reset-attention-mask and --reset-position-ids.",
        nargs="*",
        at_most=INT64_MAX,
    )
    index_free: bool = _data(
        False,
        "Compute the order of samples when they are read, without index arrays: training on data "
        "of any size starts at once, and more steps continue the same stream of samples. The order "
        "is not Megatron-LM's.",
    )
    mock_data: bool = _data(False, "Train on synthetic data; needs no files.")
    seq_length: int = _data(0, "Sequence length in tokens.", default=None, at_least=1)
    encoder_seq_length: int | None = _data(
        None, "Alias of --seq-length: encoder sequence length in tokens."
    )
    decoder_seq_length: int | None = _data(
        None,
        "Decoder sequence length in tokens of an encoder-decoder model; that of the encoder "
        "if not given.",
        at_least=1,
    )
    mask_prob: float = _data(0.15, "Fraction of tokens that BERT and T5 training masks.")
    short_seq_prob: float = _data(
        0.1, "Fraction of BERT and T5 samples that are shorter than the sequence length."
    )
    num_workers: int = _data(2, "Data loader worker processes per rank.", at_most=MAX_THREADS)
    reset_position_ids: bool = _data(
        False, "Restart position ids at 0 after each end-of-document token."
    )
    reset_attention_mask: bool = _data(
        False, "Mask attention between different documents of a sample."
    )
    eod_mask_loss: bool = _data(False, "Exclude end-of-document tokens from the loss.")
    create_attention_mask_in_dataloader: bool = _data(
        True,
        "Do not build attention masks in the data loader; attention is causal. Excludes "
        "--reset-attention-mask.",
    )
    num_dataset_builder_threads: int = _data(
        1, "Threads that build the datasets at start-up.", at_least=1, at_most=MAX_THREADS
    )
    object_storage_cache_path: str | None = _data(
        None, "Directory that caches index files from object storage."
    )
    mid_level_dataset_surplus: float = _data(
        0.005, "Fraction of extra samples requested from each dataset of a blend."
    )
    sft: bool = _sft(
        False,
        "Train on conversations (jsonl, parquet, folders of datasets): loss on the assistant's "
        "turns, as mean over all their tokens in the global batch.",
    )
    sft_packing: bool = _sft(True, "Put one conversation into each row instead of packing several.")
    sft_long_conversations: str = _sft(
        "truncate",
        "What happens to a conversation longer than --seq-length: it is cut, or left out.",
        choices=("truncate", "drop"),
    )
    sft_alignment: int | None = _sft(
        None,
        "Pad each packed conversation to a multiple of this number of tokens; twice the "
        "context-parallel size if not given, 1 without context parallelism.",
        at_least=1,
    )
    sft_show_sample: bool = _sft(
        False,
        "Print the first conversation of the training data, with the text that is trained in "
        "green, or between {+ and +} if the output is no terminal; the run goes on.",
    )
