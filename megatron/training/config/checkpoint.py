"""Flags for saving and loading checkpoints."""

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
        "Keep checkpoints at multiples of this many steps and delete the older others; a "
        "multiple of --save-interval.",
        at_least=1,
        at_most=INT64_MAX,
    )
    keep_last_checkpoints: int | None = _ckpt(
        None,
        "Keep this many of the newest checkpoints, plus those of --save-retain-interval and "
        "--save-best; also of the folders of --save-hf-interval.",
        at_least=1,
    )
    save_best: bool = _ckpt(
        False,
        "Save a checkpoint whenever an evaluation improves --best-metric, keep the best one, and "
        "end with its weights: the last evaluation and --save-hf use them.",
    )
    ckpt_max_failed_saves: int = _ckpt(
        3, "Continue training after this many failed saves in a row; one more ends the run."
    )
    no_save_optim: bool | None = _ckpt(None, "Do not save the optimizer state.")
    no_save_rng: bool | None = _ckpt(None, "Do not save the random number generator states.")
    load: str | None = _ckpt(None, "Directory of the checkpoint to resume from.")
    allow_missing_vision_projection_checkpoint: bool = _ckpt(
        False,
        "Keep the initial values of a projector of images that the checkpoint does not have.",
    )
    load_newest_valid: bool = _ckpt(
        False,
        "If the newest checkpoint is damaged, load the newest complete one instead.",
    )
    no_load_optim: bool | None = _ckpt(None, "Do not load the optimizer state.")
    load_main_params_from_ckpt: bool | None = _ckpt(
        None,
        "Initialize the fp32 main parameters from the checkpoint's weights in their stored "
        "precision; needs --no-load-optim.",
    )
    no_load_rng: bool | None = _ckpt(None, "Do not load the random number generator states.")
    non_persistent_save_interval: int | None = _ckpt(
        None,
        "Steps between non-persistent checkpoints; needs --non-persistent-ckpt-type.",
        at_least=1,
        at_most=INT64_MAX,
    )
    non_persistent_ckpt_type: str | None = _ckpt(
        None,
        "Storage of non-persistent checkpoints: global (a directory that all ranks share), "
        "local (a directory on each node) or in_memory (host memory of each node).",
        choices=("global", "local", "in_memory", None),
    )
    non_persistent_global_ckpt_dir: str | None = _ckpt(
        None,
        "Shared directory for non-persistent checkpoints; SAVE/non_persistent if not given.",
    )
    non_persistent_local_ckpt_dir: str | None = _ckpt(
        None,
        "Directory on each node for local non-persistent checkpoints; with in_memory a directory "
        "in memory, /dev/shm if not given.",
    )
    non_persistent_local_ckpt_algo: str = _ckpt(
        "fully_parallel",
        "How a local non-persistent checkpoint is distributed over ranks.",
        choices=("fully_parallel", "atomic"),
    )
    moe_use_upcycling: bool = _moe(
        False,
        "Initialize the experts from the MLPs of the dense checkpoint in --load, and start "
        "from step 0.",
    )
    moe_upcycling_granularity: int = _moe(
        1, "Number of experts that each dense MLP is split into by --moe-use-upcycling.", at_least=1
    )
    finetune: bool = _ckpt(
        False,
        "Load only the weights and start at step 0; optimizer and random states are not loaded. "
        "If --save is another directory and holds a checkpoint of the run that started so, that "
        "run is continued.",
    )
    pretrained_checkpoint: str | None = _ckpt(
        None, "Checkpoint directory to fine-tune from while --load holds no checkpoint."
    )
    ckpt_step: int | None = _ckpt(None, "Step of the checkpoint to load; the newest if not given.")
    use_checkpoint_args: bool = _ckpt(
        False, "Read the model architecture and tokenizer from the checkpoint in --load."
    )
    use_mp_args_from_checkpoint_args: bool = _ckpt(
        False, "Also read the parallel sizes from the checkpoint; needs --use-checkpoint-args."
    )
    use_tokenizer_model_from_checkpoint_args: bool = _ckpt(
        True,
        "With --use-checkpoint-args, do not read the tokenizer path from the checkpoint.",
    )
    exit_on_missing_checkpoint: bool = _ckpt(
        False, "Exit if --load holds no checkpoint, even if --save is the same directory."
    )
    use_persistent_ckpt_worker: bool = _ckpt(
        False,
        "With --async-save, keep the process that writes checkpoints.",
        ignored="a thread of each rank writes, and a new one starts at once",
    )
    ckpt_format: str = _ckpt(
        "safetensors_dist",
        "Format in which checkpoints are written.",
        choices=("safetensors_dist", "torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"),
        refused_values={"zarr": flag_messages.ZARR},
    )
    ckpt_convert_format: str | None = _ckpt(
        None,
        "Load a checkpoint, write it in this format to --ckpt-convert-save and exit.",
        choices=("torch", "torch_dist", "zarr"),
        refused_values={"zarr": flag_messages.ZARR},
    )
    ckpt_convert_save: str | None = _ckpt(
        None,
        "Output directory of --ckpt-convert-format; the checkpoint is written to a "
        "subdirectory named after the format.",
    )
    save_hf: str | None = _ckpt(
        None,
        "Folder that a model in Hugging Face's form is written to when training is done; with "
        "--lora-rank the adapters, in the form of PEFT.",
    )
    save_hf_interval: int | None = _ckpt(
        None,
        "Also write the folder of --save-hf every this many steps, as SAVE_HF-step-N.",
        at_least=1,
        at_most=INT64_MAX,
    )
    save_hf_merged: bool = _ckpt(
        False, "Add the adapters to their model in --save-hf, so that a complete model is written."
    )
    ckpt_fully_parallel_save: bool = _ckpt(
        True, "Do not distribute saving over data-parallel ranks: only the first of them writes."
    )
    async_save: bool | None = _ckpt(
        None, "Save checkpoints in the background while training continues."
    )
    async_save_when_busy: str = _ckpt(
        "wait",
        "With --async-save, what to do while the previous save is still running: wait for "
        "it, or skip this save.",
        choices=("wait", "skip"),
    )
    ckpt_fully_parallel_load: bool = _ckpt(
        False,
        "Read each tensor that data-parallel ranks share once, on one of them, and broadcast it.",
    )
    ckpt_assume_constant_structure: bool = _ckpt(
        False,
        "Compute at the first save which rank writes which tensor, and reuse it for later saves.",
    )
    dist_ckpt_strictness: str = _ckpt(
        "assume_ok_unexpected",
        "How to handle keys that differ between checkpoint and model.",
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
    replication: bool = _distributed(
        False, "Replicate local non-persistent checkpoints to other nodes."
    )
    replication_jump: int | None = _distributed(
        None,
        "Distance in ranks between replicas of a local checkpoint, usually the ranks of a node.",
        at_least=1,
    )
    replication_factor: int = _distributed(
        2, "Number of replicas of each local checkpoint, the original included.", at_least=1
    )
