"""Where samples come from and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_data = partial(option, group="data and dataloader")
_sft = partial(option, group="sft")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dataloader_type: str | None = option(
        None,
        "Order of samples: single (once through), cyclic (shuffled each epoch) or external "
        "(the program's own loader); single if not given.",
        group="training",
        choices=("single", "cyclic", "external"),
    )
    data_path: tuple[str, ...] | None = _data(
        None,
        "Data prefixes (of .bin and .idx): PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...; "
        "cut into sets by --split.",
        nargs="*",
    )
    split: str | None = _data(
        None, "Shares of train, valid and test data in --data-path, as 969,30,1."
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
    data_args_path: str | None = _data(None, "File that holds what would follow --data-path.")
    per_split_data_args_path: str | None = _data(
        None, "JSON file with the lists train, valid and test of weights and prefixes."
    )
    data_cache_path: str | None = _data(
        None, "Directory for index arrays of data sets; beside the data if not given."
    )
    mmap_bin_files: bool = _data(
        True, "Open .bin files for each read instead of keeping them open."
    )
    verify_data: bool = _data(
        False,
        "Compare each MiB of .bin files with the checksums in PREFIX.crc before its first read in "
        "each process; off by default.",
    )
    mock_data: bool = _data(False, "Train on made-up data that needs no files.")
    seq_length: int | None = _data(None, "Tokens in one sample.", at_least=1)
    encoder_seq_length: int | None = _data(
        None, "Another name of --seq-length: tokens of an encoder's sample."
    )
    decoder_seq_length: int | None = _data(
        None,
        "Tokens of a decoder's sample in an encoder-decoder model; as many as the encoder's if not "
        "given.",
        at_least=1,
    )
    retriever_seq_length: int = _data(
        256, "Tokens of a retriever's sample.", ignored="only retrieval models read it"
    )
    sample_rate: float = _data(
        1.0,
        "Share of the samples that a retriever's training uses.",
        ignored="only retrieval models read it",
    )
    mask_prob: float = _data(0.15, "Share of tokens that masked training hides.")
    short_seq_prob: float = _data(
        0.1, "Share of samples of masked training that are shorter than they could be."
    )
    num_workers: int = _data(2, "Processes that load data on each rank.")
    reset_position_ids: bool = _data(
        False, "Count positions from 0 again behind each end of document."
    )
    reset_attention_mask: bool = _data(
        False, "Let no token attend to an earlier document of its sample."
    )
    eod_mask_loss: bool = _data(False, "Give end-of-document tokens no loss.")
    create_attention_mask_in_dataloader: bool = _data(
        True, "Do not build attention masks with the data; attention is causal by itself."
    )
    num_dataset_builder_threads: int = _data(
        1, "Threads that build data sets at start-up.", at_least=1
    )
    object_storage_cache_path: str | None = _data(
        None, "Directory for index files fetched from object storage."
    )
    mid_level_dataset_surplus: float = _data(
        0.005, "Share of extra samples asked of each data set of a blend."
    )
    enable_msc: bool = option(
        True,
        "Treat msc:// paths as plain file names.",
        group="msc",
        flag="--disable-msc",
        ignored="only names that begin with msc:// are treated as such, by an extra package",
    )
    sft: bool = _sft(False, "Train on conversations.", refused=flag_messages.SFT)
    sft_tokenizer_prompt_format: str = _sft(
        "nemotron-h-aligned",
        "How a conversation becomes one text.",
        ignored=flag_messages.only_with("--sft"),
    )
