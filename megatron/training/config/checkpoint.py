"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = option(
        None,
        "Directory that checkpoints are written to.",
        group="checkpointing",
    )
    save_interval: int | None = option(
        None,
        "Steps between checkpoints.",
        group="checkpointing",
        aliases=("--persistent-save-interval",),
    )
    save_retain_interval: int | None = option(
        None,
        "Keep the checkpoints at multiples of this many steps and drop older others.",
        group="checkpointing",
    )
    keep_last_checkpoints: int | None = option(
        None,
        "Keep this many of the newest checkpoints, and what --save-retain-interval keeps.",
        group="checkpointing",
    )
    ckpt_incremental: bool = option(
        False,
        "Link weights that are not trained from the checkpoint before instead of writing them.",
        group="checkpointing",
    )
    ckpt_max_failed_saves: int = option(
        3,
        "Go on training after this many failed saves in a row; one more ends the run.",
        group="checkpointing",
    )
    no_save_optim: bool | None = option(
        None,
        "Leave the optimizer out of checkpoints.",
        group="checkpointing",
    )
    no_save_rng: bool | None = option(
        None,
        "Leave the random state out of checkpoints.",
        group="checkpointing",
    )
    load: str | None = option(
        None,
        "Directory of a checkpoint to go on from.",
        group="checkpointing",
    )
    load_newest_valid: bool = option(
        False,
        "If the checkpoint that the tracker names is damaged, load the newest one that is whole.",
        group="checkpointing",
    )
    no_load_optim: bool | None = option(
        None,
        "Do not take the optimizer from the checkpoint.",
        group="checkpointing",
    )
    load_main_params_from_ckpt: bool | None = option(
        None,
        "Start the fp32 main parameters from the checkpoint's weights in their stored precision.",
        group="checkpointing",
    )
    no_load_rng: bool | None = option(
        None,
        "Do not take the random state from the checkpoint.",
        group="checkpointing",
    )
    strict_fsdp_dtensor_load: bool = option(
        True,
        "Let keys be missing when a sharded FSDP checkpoint is loaded.",
        group="checkpointing",
        ignored="--dist-ckpt-strictness says for every format what may be missing",
    )
    non_persistent_save_interval: int | None = option(
        None,
        "Steps between short-lived checkpoints.",
        group="checkpointing",
    )
    non_persistent_ckpt_type: str | None = option(
        None,
        "Where short-lived checkpoints live.",
        group="checkpointing",
        choices=("global", "local", "in_memory", None),
        refused_values={"in_memory": states.IN_MEMORY},
    )
    non_persistent_global_ckpt_dir: str | None = option(
        None,
        "Directory of short-lived checkpoints that all ranks share; else non_persistent in --save.",
        group="checkpointing",
    )
    non_persistent_local_ckpt_dir: str | None = option(
        None,
        "Directory of short-lived checkpoints on each node.",
        group="checkpointing",
    )
    non_persistent_local_ckpt_algo: str = option(
        "fully_parallel",
        "How short-lived checkpoints are divided over ranks.",
        group="checkpointing",
        choices=("fully_parallel", "atomic"),
    )
    moe_use_upcycling: bool = option(
        False,
        "Make the experts from the MLPs of the dense checkpoint in --load, and start from step 0.",
        group="moe",
    )
    moe_upcycling_granularity: int = option(
        1,
        "Parts that each MLP is cut into when a dense model becomes experts.",
        group="moe",
    )
    finetune: bool = option(
        False,
        "Take only weights from the checkpoint and count steps and samples from 0.",
        group="checkpointing",
    )
    pretrained_checkpoint: str | None = option(
        None,
        "Directory of a checkpoint to start fine-tuning from when --load has none yet.",
        group="checkpointing",
    )
    ckpt_step: int | None = option(
        None,
        "Step of the checkpoint to load instead of the newest.",
        group="checkpointing",
    )
    use_checkpoint_args: bool = option(
        False,
        "Take the model's shape and tokenizer from the checkpoint given by --load.",
        group="checkpointing",
    )
    use_mp_args_from_checkpoint_args: bool = option(
        False,
        "Take the parallel sizes from the checkpoint too.",
        group="checkpointing",
    )
    use_tokenizer_model_from_checkpoint_args: bool = option(
        True,
        "With --use-checkpoint-args, do not take the tokenizer's path from the checkpoint.",
        group="checkpointing",
    )
    exit_on_missing_checkpoint: bool = option(
        False,
        "End if --load holds no checkpoint, also where --save names the same directory.",
        group="checkpointing",
    )
    use_persistent_ckpt_worker: bool = option(
        False,
        "Keep the background writer alive between checkpoints.",
        group="checkpointing",
        ignored="the background writer is a thread, which costs nothing to start",
    )
    auto_detect_ckpt_format: bool = option(
        False,
        "Find out the format of the checkpoint that is loaded.",
        group="checkpointing",
        ignored=states.ALWAYS_SO,
    )
    ckpt_format: str = option(
        "safetensors_dist",
        "Format in which checkpoints are written.",
        group="checkpointing",
        choices=(
            "safetensors_dist",
            "torch",
            "torch_dist",
            "zarr",
            "torch_dcp",
            "fsdp_dtensor",
        ),
        refused_values={"zarr": states.ZARR},
    )
    ckpt_convert_format: str | None = option(
        None,
        "Load a checkpoint, write it in this format and end.",
        group="checkpointing",
        choices=("torch", "torch_dist", "zarr"),
        refused_values={"zarr": states.ZARR},
    )
    ckpt_convert_save: str | None = option(
        None,
        "Directory for the converted checkpoint, which is put in a folder named as its format.",
        group="checkpointing",
    )
    ckpt_convert_update_legacy_dist_opt_format: bool = option(
        False,
        "Rewrite the distributed optimizer's state while converting.",
        group="checkpointing",
        ignored="it is always written in the present arrangement",
    )
    ckpt_fully_parallel_save: bool = option(
        True,
        "Let only the first replica write.",
        group="checkpointing",
    )
    async_save: bool | None = option(
        None,
        "Go on training while a checkpoint is written.",
        group="checkpointing",
    )
    async_save_when_busy: str = option(
        "wait",
        "With --async-save, when the checkpoint before is still being written: wait for it, or "
        "skip this one.",
        group="checkpointing",
        choices=("wait", "skip"),
    )
    ckpt_fully_parallel_load: bool = option(
        False,
        "Let each replica read a part and exchange it.",
        group="checkpointing",
        ignored="every rank reads just what it needs",
    )
    ckpt_assume_constant_structure: bool = option(
        False,
        "Keep the plan of a save for the next one.",
        group="checkpointing",
        ignored="planning a save takes no time worth keeping",
    )
    dist_ckpt_strictness: str = option(
        "assume_ok_unexpected",
        "What happens when keys of checkpoint and model differ.",
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
    load_model_opt_format: bool = option(
        False,
        "Load a checkpoint of NVIDIA's model optimizer.",
        group="checkpointing",
        refused="quantised and pruned models are not in this version; drop the flag",
    )
    replication: bool = option(
        False,
        "Copy short-lived checkpoints to other nodes.",
        group="distributed",
    )
    replication_jump: int | None = option(
        None,
        "Distance in ranks between copies of a short-lived checkpoint.",
        group="distributed",
    )
    replication_factor: int = option(
        2,
        "Copies of each short-lived checkpoint.",
        group="distributed",
    )
