"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import INT64_MAX, option

_ckpt = partial(option, group="checkpointing")
_moe = partial(option, group="moe")
_distributed = partial(option, group="distributed")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: str | None = _ckpt(None, "Directory that checkpoints are written to.")
    save_interval: int | None = _ckpt(
        None,
        "Steps between checkpoints.",
        aliases=("--persistent-save-interval",),
        at_least=1,
        at_most=INT64_MAX,
    )
    save_retain_interval: int | None = _ckpt(
        None,
        "Keep the checkpoints at multiples of this many steps and drop older others.",
        at_least=1,
        at_most=INT64_MAX,
    )
    keep_last_checkpoints: int | None = _ckpt(
        None,
        "Keep this many of the newest checkpoints, and what --save-retain-interval keeps.",
        at_least=1,
    )
    ckpt_incremental: bool = _ckpt(
        False,
        "Link weights that are not trained from the checkpoint before instead of writing them.",
    )
    ckpt_max_failed_saves: int = _ckpt(
        3, "Go on training after this many failed saves in a row; one more ends the run."
    )
    no_save_optim: bool | None = _ckpt(None, "Leave the optimizer out of checkpoints.")
    no_save_rng: bool | None = _ckpt(None, "Leave the random state out of checkpoints.")
    load: str | None = _ckpt(None, "Directory of a checkpoint to go on from.")
    load_newest_valid: bool = _ckpt(
        False,
        "If the checkpoint that the tracker names is damaged, load the newest one that is whole.",
    )
    no_load_optim: bool | None = _ckpt(None, "Do not take the optimizer from the checkpoint.")
    load_main_params_from_ckpt: bool | None = _ckpt(
        None,
        "Start the fp32 main parameters from the checkpoint's weights in their stored precision.",
    )
    no_load_rng: bool | None = _ckpt(None, "Do not take the random state from the checkpoint.")
    strict_fsdp_dtensor_load: bool = _ckpt(
        True,
        "Let keys be missing when a sharded FSDP checkpoint is loaded.",
        ignored="--dist-ckpt-strictness says for every format what may be missing",
    )
    non_persistent_save_interval: int | None = _ckpt(
        None, "Steps between short-lived checkpoints.", at_least=1, at_most=INT64_MAX
    )
    non_persistent_ckpt_type: str | None = _ckpt(
        None,
        "Where short-lived checkpoints live.",
        choices=("global", "local", "in_memory", None),
        refused_values={"in_memory": flag_messages.IN_MEMORY},
    )
    non_persistent_global_ckpt_dir: str | None = _ckpt(
        None,
        "Directory of short-lived checkpoints that all ranks share; else non_persistent in --save.",
    )
    non_persistent_local_ckpt_dir: str | None = _ckpt(
        None, "Directory of short-lived checkpoints on each node."
    )
    non_persistent_local_ckpt_algo: str = _ckpt(
        "fully_parallel",
        "How short-lived checkpoints are divided over ranks.",
        choices=("fully_parallel", "atomic"),
    )
    moe_use_upcycling: bool = _moe(
        False,
        "Make the experts from the MLPs of the dense checkpoint in --load, and start from step 0.",
    )
    moe_upcycling_granularity: int = _moe(
        1, "Parts that each MLP is cut into when a dense model becomes experts.", at_least=1
    )
    finetune: bool = _ckpt(
        False, "Take only weights from the checkpoint and count steps and samples from 0."
    )
    pretrained_checkpoint: str | None = _ckpt(
        None, "Directory of a checkpoint to start fine-tuning from when --load has none yet."
    )
    ckpt_step: int | None = _ckpt(None, "Step of the checkpoint to load instead of the newest.")
    use_checkpoint_args: bool = _ckpt(
        False, "Take the model's shape and tokenizer from the checkpoint given by --load."
    )
    use_mp_args_from_checkpoint_args: bool = _ckpt(
        False, "Take the parallel sizes from the checkpoint too."
    )
    use_tokenizer_model_from_checkpoint_args: bool = _ckpt(
        True, "With --use-checkpoint-args, do not take the tokenizer's path from the checkpoint."
    )
    exit_on_missing_checkpoint: bool = _ckpt(
        False, "End if --load holds no checkpoint, also where --save names the same directory."
    )
    use_persistent_ckpt_worker: bool = _ckpt(
        False,
        "With --async-save, let one thread write all checkpoints instead of a new one each time.",
    )
    auto_detect_ckpt_format: bool = _ckpt(
        False,
        "Find out the format of the checkpoint that is loaded.",
        ignored=flag_messages.ALWAYS_SO,
    )
    ckpt_format: str = _ckpt(
        "safetensors_dist",
        "Format in which checkpoints are written.",
        choices=("safetensors_dist", "torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"),
        refused_values={"zarr": flag_messages.ZARR},
    )
    ckpt_convert_format: str | None = _ckpt(
        None,
        "Load a checkpoint, write it in this format and end.",
        choices=("torch", "torch_dist", "zarr"),
        refused_values={"zarr": flag_messages.ZARR},
    )
    ckpt_convert_save: str | None = _ckpt(
        None,
        "Directory for the converted checkpoint, which is put in a folder named as its format.",
    )
    ckpt_convert_update_legacy_dist_opt_format: bool = _ckpt(
        False,
        "Rewrite the distributed optimizer's state while converting.",
        ignored="it is always written in the present arrangement",
    )
    ckpt_fully_parallel_save: bool = _ckpt(True, "Let only the first replica write.")
    async_save: bool | None = _ckpt(None, "Go on training while a checkpoint is written.")
    async_save_when_busy: str = _ckpt(
        "wait",
        "With --async-save, when the checkpoint before is still being written: wait for it, or "
        "skip this one.",
        choices=("wait", "skip"),
    )
    ckpt_fully_parallel_load: bool = _ckpt(
        False,
        "Read what several data-parallel ranks hold alike once, and broadcast it to the others.",
    )
    ckpt_assume_constant_structure: bool = _ckpt(
        False,
        "Compute once, at the first save, which rank writes which tensor.",
    )
    dist_ckpt_strictness: str = _ckpt(
        "assume_ok_unexpected",
        "What happens when keys of checkpoint and model differ.",
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
    load_model_opt_format: bool = _ckpt(
        False,
        "Load a checkpoint of NVIDIA's model optimizer.",
        refused="checkpoints of NVIDIA's model optimizer are not available in this program; use a "
        "checkpoint of unquantised weights",
    )
    replication: bool = _distributed(False, "Copy short-lived checkpoints to other nodes.")
    replication_jump: int | None = _distributed(
        None, "Distance in ranks between copies of a short-lived checkpoint.", at_least=1
    )
    replication_factor: int = _distributed(2, "Copies of each short-lived checkpoint.", at_least=1)
