"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = option(None, "", group="checkpointing")
    save_interval: int | None = option(
        None,
        "",
        group="checkpointing",
        aliases=("--persistent-save-interval",),
    )
    save_retain_interval: int | None = option(None, "", group="checkpointing")
    no_save_optim: bool | None = option(None, "", group="checkpointing")
    no_save_rng: bool | None = option(None, "", group="checkpointing")
    load: str | None = option(None, "", group="checkpointing")
    load_newest_valid: bool = option(
        False,
        "If the checkpoint that the tracker names is damaged, load the newest one that is whole.",
        group="checkpointing",
    )
    no_load_optim: bool | None = option(None, "", group="checkpointing")
    load_main_params_from_ckpt: bool | None = option(None, "", group="checkpointing")
    no_load_rng: bool | None = option(None, "", group="checkpointing")
    strict_fsdp_dtensor_load: bool = option(True, "", group="checkpointing")
    non_persistent_save_interval: int | None = option(None, "", group="checkpointing")
    non_persistent_ckpt_type: str | None = option(
        None,
        "",
        group="checkpointing",
        choices=("global", "local", "in_memory", None),
    )
    non_persistent_global_ckpt_dir: str | None = option(None, "", group="checkpointing")
    non_persistent_local_ckpt_dir: str | None = option(None, "", group="checkpointing")
    non_persistent_local_ckpt_algo: str = option(
        "fully_parallel",
        "",
        group="checkpointing",
        choices=("fully_parallel", "atomic"),
    )
    finetune: bool = option(False, "", group="checkpointing")
    pretrained_checkpoint: str | None = option(None, "", group="checkpointing")
    ckpt_step: int | None = option(None, "", group="checkpointing")
    use_checkpoint_args: bool = option(False, "", group="checkpointing")
    use_mp_args_from_checkpoint_args: bool = option(False, "", group="checkpointing")
    use_tokenizer_model_from_checkpoint_args: bool = option(True, "", group="checkpointing")
    exit_on_missing_checkpoint: bool = option(False, "", group="checkpointing")
    use_persistent_ckpt_worker: bool = option(False, "", group="checkpointing")
    auto_detect_ckpt_format: bool = option(False, "", group="checkpointing")
    ckpt_format: str = option(
        "safetensors_dist",
        "",
        group="checkpointing",
        choices=(
            "safetensors_dist",
            "torch",
            "torch_dist",
            "zarr",
            "torch_dcp",
            "fsdp_dtensor",
        ),
    )
    ckpt_convert_format: str | None = option(
        None,
        "",
        group="checkpointing",
        choices=("torch", "torch_dist", "zarr"),
    )
    ckpt_convert_save: str | None = option(None, "", group="checkpointing")
    ckpt_convert_update_legacy_dist_opt_format: bool = option(False, "", group="checkpointing")
    ckpt_fully_parallel_save: bool = option(True, "", group="checkpointing")
    async_save: bool | None = option(None, "", group="checkpointing")
    ckpt_fully_parallel_load: bool = option(False, "", group="checkpointing")
    ckpt_assume_constant_structure: bool = option(False, "", group="checkpointing")
    dist_ckpt_strictness: str = option(
        "assume_ok_unexpected",
        "",
        group="checkpointing",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
    )
    load_model_opt_format: bool = option(False, "", group="checkpointing")
    replication: bool = option(False, "", group="distributed")
    replication_jump: int | None = option(None, "", group="distributed")
    replication_factor: int = option(2, "", group="distributed")
