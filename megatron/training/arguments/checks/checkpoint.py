"""Checks of saving and loading."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.run import RunConfig


def saving_knows_when(run: RunConfig) -> Iterator[str]:
    """Require that --save-retain-interval is a multiple of --save-interval."""
    c = run.checkpoint
    if c.save is None or c.save_retain_interval is None:
        return
    if c.save_interval is None or c.save_retain_interval % max(1, c.save_interval):
        yield (
            f"--save-retain-interval {c.save_retain_interval} is not a multiple of "
            f"--save-interval {c.save_interval}"
        )


def loading_knows_where(run: RunConfig) -> Iterator[str]:
    """Require --load for flags that read from a checkpoint."""
    c = run.checkpoint
    for flag, asked in (
        ("--use-checkpoint-args", c.use_checkpoint_args),
        ("--ckpt-step", c.ckpt_step is not None),
        ("--load-newest-valid", c.load_newest_valid),
        ("--exit-on-missing-checkpoint", c.exit_on_missing_checkpoint),
    ):
        if asked and c.load is None:
            yield f"{flag} needs --load"


def finetuning_has_a_start(run: RunConfig) -> Iterator[str]:
    """Require a checkpoint to fine-tune from."""
    c = run.checkpoint
    if c.finetune and c.load is None and c.pretrained_checkpoint is None:
        yield "--finetune needs --load or --pretrained-checkpoint"


def main_params_come_from_one_place(run: RunConfig) -> Iterator[str]:
    """Refuse --load-main-params-from-ckpt if the optimizer is loaded.

    A loaded optimizer state already contains the main parameters.
    """
    c = run.checkpoint
    if c.load_main_params_from_ckpt and not c.no_load_optim:
        yield (
            "--load-main-params-from-ckpt needs --no-load-optim: a loaded optimizer has main params"
        )


def parallel_sizes_come_with_the_rest(run: RunConfig) -> Iterator[str]:
    """Require --use-checkpoint-args for the parallel sizes of a checkpoint."""
    c = run.checkpoint
    if c.use_mp_args_from_checkpoint_args and not c.use_checkpoint_args:
        yield "--use-mp-args-from-checkpoint-args needs --use-checkpoint-args"


def older_grouped_experts_are_only_read(run: RunConfig) -> Iterator[str]:
    """Refuse to write legacy grouped experts in a format of one file per rank.

    Such files hold all experts of a rank in one matrix; this program reads but does not write that.
    """
    c, m = run.checkpoint, run.model
    if m.num_moe_experts is None or not m.moe_use_legacy_grouped_gemm:
        return
    for asked in _without_folders(c):
        yield (
            f"{asked} with --moe-use-legacy-grouped-gemm is not available in this program: use "
            "torch_dist"
        )


def tokens_ahead_have_a_place(run: RunConfig) -> Iterator[str]:
    """Refuse multi-token prediction over several stages in a format of one file per rank.

    The file of the last stage does not contain the embedding that the MTP layers need there.
    """
    stages = run.model.pipeline_model_parallel_size
    if run.model.mtp_num_layers is not None and stages > 1:
        for asked in _without_folders(run.checkpoint):
            yield (
                f"{asked} with --mtp-num-layers and --pipeline-model-parallel-size {stages} is not "
                "available in this program: use torch_dist"
            )


def histories_have_a_place(run: RunConfig) -> Iterator[str]:
    """Refuse delayed FP8 scaling with a format of one file per rank.

    Megatron-LM stores its amax histories there in a pickled object, which this program does not
    write.
    """
    if run.model.fp8 is not None and run.model.fp8_recipe == "delayed":
        for asked in _without_folders(run.checkpoint):
            yield (
                f"{asked} with --fp8-recipe delayed cannot store its amax histories: use "
                "torch_dist, or --fp8-recipe tensorwise"
            )


def _without_folders(c: CheckpointConfig) -> list[str]:
    """Return the given flags that select a format of one file per rank."""
    asked = {"--ckpt-format": c.ckpt_format, "--ckpt-convert-format": c.ckpt_convert_format}
    return [f"{flag} {kind}" for flag, kind in asked.items() if kind in ("torch", "torch_dcp")]


def converting_knows_where(run: RunConfig) -> Iterator[str]:
    """Require a source and a destination for a checkpoint conversion."""
    c = run.checkpoint
    if c.ckpt_convert_format is None:
        if c.ckpt_convert_save is not None:
            yield (
                "--ckpt-convert-save needs --ckpt-convert-format: add it, with the format to write"
            )
        return
    for flag, given in (("--ckpt-convert-save", c.ckpt_convert_save), ("--load", c.load)):
        if given is None:
            yield f"--ckpt-convert-format {c.ckpt_convert_format} needs {flag}"


def short_lived_checkpoints_have_a_place(run: RunConfig) -> Iterator[str]:
    """Require type and directory for non-persistent checkpoints."""
    c = run.checkpoint
    interval, kind = c.non_persistent_save_interval, c.non_persistent_ckpt_type
    if interval is not None and kind is None:
        yield (
            f"--non-persistent-save-interval {interval} needs --non-persistent-ckpt-type: global, "
            "in a directory that all ranks share, local, in one of each node, or in_memory"
        )
    has_place = c.save is not None or c.non_persistent_global_ckpt_dir is not None
    if interval is not None and kind == "global" and not has_place:
        yield ("--non-persistent-ckpt-type global needs --save or --non-persistent-global-ckpt-dir")


def links_need_files_of_our_own(run: RunConfig) -> Iterator[str]:
    """Require safetensors_dist for --ckpt-incremental.

    Only the index of that format has the tensor hashes that show which data is unchanged.
    """
    c = run.checkpoint
    if c.ckpt_incremental and c.ckpt_format != "safetensors_dist":
        yield (
            f"--ckpt-incremental does not support --ckpt-format {c.ckpt_format}, which stores no "
            "hashes of tensors: use --ckpt-format safetensors_dist"
        )


def local_checkpoints_have_a_place_and_peers(run: RunConfig) -> Iterator[str]:
    """Require a directory for local checkpoints and enough ranks for their copies.

    Each rank writes to a directory of its node, and each copy goes to another existing rank.
    """
    c = run.checkpoint
    kind = c.non_persistent_ckpt_type
    if kind in ("local", "in_memory"):
        if kind == "local" and c.non_persistent_local_ckpt_dir is None:
            yield "--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir"
        if kind == "in_memory" and c.save is None:
            yield (
                "--non-persistent-ckpt-type in_memory needs --save: its path tells the folders in "
                "memory of different runs apart, and the last checkpoint goes there"
            )
        if run.distributed.virtual_ranks is not None:
            yield (
                f"--non-persistent-ckpt-type {kind} needs one process per rank: use "
                f"torchrun instead of --virtual-ranks {run.distributed.virtual_ranks}, or use "
                "--non-persistent-ckpt-type global"
            )
    elif c.replication:
        yield (
            "--replication copies the checkpoints of nodes: add --non-persistent-ckpt-type local "
            "or in_memory"
        )
    if not c.replication:
        return
    if c.replication_jump is None:
        yield (
            "--replication needs --replication-jump: how many ranks further the copies go, as a "
            "rule the ranks of a node"
        )
    elif (c.replication_factor - 1) * c.replication_jump >= run.world_size:
        yield (
            f"--replication-factor {c.replication_factor} with --replication-jump "
            f"{c.replication_jump} needs more than "
            f"{(c.replication_factor - 1) * c.replication_jump} ranks, and the run has "
            f"{run.world_size}: lower one of them"
        )
