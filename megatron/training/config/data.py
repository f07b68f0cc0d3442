"""Where samples come from and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from and how they are cut."""

    dataloader_type: str | None = option(
        None,
        "",
        group="training",
        choices=("single", "cyclic", "external"),
    )
    data_path: tuple[str, ...] | None = option(None, "", group="data and dataloader", nargs="*")
    split: str | None = option(None, "", group="data and dataloader")
    train_data_path: tuple[str, ...] | None = option(
        None,
        "",
        group="data and dataloader",
        nargs="*",
    )
    valid_data_path: tuple[str, ...] | None = option(
        None,
        "",
        group="data and dataloader",
        nargs="*",
    )
    test_data_path: tuple[str, ...] | None = option(
        None,
        "",
        group="data and dataloader",
        nargs="*",
    )
    data_args_path: str | None = option(None, "", group="data and dataloader")
    per_split_data_args_path: str | None = option(None, "", group="data and dataloader")
    data_cache_path: str | None = option(None, "", group="data and dataloader")
    mmap_bin_files: bool = option(True, "", group="data and dataloader")
    mock_data: bool = option(False, "", group="data and dataloader")
    seq_length: int | None = option(None, "", group="data and dataloader")
    encoder_seq_length: int | None = option(None, "", group="data and dataloader")
    decoder_seq_length: int | None = option(None, "", group="data and dataloader")
    retriever_seq_length: int = option(256, "", group="data and dataloader")
    sample_rate: float = option(1.0, "", group="data and dataloader")
    mask_prob: float = option(0.15, "", group="data and dataloader")
    short_seq_prob: float = option(0.1, "", group="data and dataloader")
    num_workers: int = option(2, "", group="data and dataloader")
    reset_position_ids: bool = option(False, "", group="data and dataloader")
    reset_attention_mask: bool = option(False, "", group="data and dataloader")
    eod_mask_loss: bool = option(False, "", group="data and dataloader")
    create_attention_mask_in_dataloader: bool = option(True, "", group="data and dataloader")
    num_dataset_builder_threads: int = option(1, "", group="data and dataloader")
    object_storage_cache_path: str | None = option(None, "", group="data and dataloader")
    mid_level_dataset_surplus: float = option(0.005, "", group="data and dataloader")
    enable_msc: bool = option(True, "", group="msc", flag="--disable-msc")
    sft: bool = option(False, "", group="sft")
    sft_tokenizer_prompt_format: str = option("nemotron-h-aligned", "", group="sft")
