"""Where samples come from and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they are cut."""

    dataloader_type: str | None = option(
        None,
        "Order of samples: single (once through), cyclic (shuffled each epoch) or external "
        "(the program's own loader); single if not given.",
        group="training",
        choices=("single", "cyclic", "external"),
    )
    data_path: tuple[str, ...] | None = option(
        None,
        "Data prefixes (of .bin and .idx): PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...; "
        "cut into sets by --split.",
        group="data and dataloader",
        nargs="*",
    )
    split: str | None = option(
        None,
        "Shares of train, valid and test data in --data-path, as 969,30,1.",
        group="data and dataloader",
    )
    train_data_path: tuple[str, ...] | None = option(
        None,
        "Training data prefixes, with or without weights, as in --data-path.",
        group="data and dataloader",
        nargs="*",
    )
    valid_data_path: tuple[str, ...] | None = option(
        None,
        "Validation data prefixes, with or without weights.",
        group="data and dataloader",
        nargs="*",
    )
    test_data_path: tuple[str, ...] | None = option(
        None,
        "Test data prefixes, with or without weights.",
        group="data and dataloader",
        nargs="*",
    )
    data_args_path: str | None = option(
        None,
        "File that holds what would follow --data-path.",
        group="data and dataloader",
    )
    per_split_data_args_path: str | None = option(
        None,
        "JSON file with the lists train, valid and test of weights and prefixes.",
        group="data and dataloader",
    )
    data_cache_path: str | None = option(
        None,
        "Directory for index arrays of data sets; beside the data if not given.",
        group="data and dataloader",
    )
    mmap_bin_files: bool = option(
        True,
        "Read .bin files instead of mapping them into memory.",
        group="data and dataloader",
    )
    mock_data: bool = option(
        False,
        "Train on made-up data that needs no files.",
        group="data and dataloader",
    )
    seq_length: int | None = option(
        None,
        "Tokens in one sample.",
        group="data and dataloader",
    )
    encoder_seq_length: int | None = option(
        None,
        "Another name of --seq-length: tokens of an encoder's sample.",
        group="data and dataloader",
    )
    decoder_seq_length: int | None = option(
        None,
        "Tokens of a decoder's sample in an encoder-decoder model; as many as the encoder's if not "
        "given.",
        group="data and dataloader",
    )
    retriever_seq_length: int = option(
        256,
        "Tokens of a retriever's sample.",
        group="data and dataloader",
        ignored="only retrieval models read it",
    )
    sample_rate: float = option(
        1.0,
        "Share of the samples that a retriever's training uses.",
        group="data and dataloader",
        ignored="only retrieval models read it",
    )
    mask_prob: float = option(
        0.15,
        "Share of tokens that masked training hides.",
        group="data and dataloader",
    )
    short_seq_prob: float = option(
        0.1,
        "Share of samples of masked training that are shorter than they could be.",
        group="data and dataloader",
    )
    num_workers: int = option(
        2,
        "Processes that load data on each rank.",
        group="data and dataloader",
    )
    reset_position_ids: bool = option(
        False,
        "Count positions from 0 again behind each end of document.",
        group="data and dataloader",
    )
    reset_attention_mask: bool = option(
        False,
        "Let no token attend to an earlier document of its sample.",
        group="data and dataloader",
    )
    eod_mask_loss: bool = option(
        False,
        "Give end-of-document tokens no loss.",
        group="data and dataloader",
    )
    create_attention_mask_in_dataloader: bool = option(
        True,
        "Do not build attention masks with the data; attention is causal by itself.",
        group="data and dataloader",
    )
    num_dataset_builder_threads: int = option(
        1,
        "Threads that build data sets at start-up.",
        group="data and dataloader",
    )
    object_storage_cache_path: str | None = option(
        None,
        "Directory for index files fetched from object storage.",
        group="data and dataloader",
    )
    mid_level_dataset_surplus: float = option(
        0.005,
        "Share of extra samples asked of each data set of a blend.",
        group="data and dataloader",
    )
    enable_msc: bool = option(
        True,
        "Treat msc:// paths as plain file names.",
        group="msc",
        flag="--disable-msc",
        ignored="only names that begin with msc:// are treated as such, by an extra package",
    )
    sft: bool = option(
        False,
        "Train on conversations.",
        group="sft",
        refused=states.SFT,
    )
    sft_tokenizer_prompt_format: str = option(
        "nemotron-h-aligned",
        "How a conversation becomes one text.",
        group="sft",
        ignored=states.only_with("--sft"),
    )
