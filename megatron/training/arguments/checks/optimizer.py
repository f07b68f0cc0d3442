"""Checks of optimizer settings."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.core.optimizer.update_rules import update_rule
from megatron.training.config.run import RunConfig


def learning_rates_are_ordered(run: RunConfig) -> Iterator[str]:
    """Require min_lr <= lr and 0 <= lr_warmup_init <= lr."""
    o, s = run.optimizer, run.scheduler
    if o.lr is not None and o.min_lr > o.lr:
        yield f"--min-lr {o.min_lr} is greater than --lr {o.lr}: lower it"
    if o.lr is not None and not 0 <= s.lr_warmup_init <= o.lr:
        yield f"--lr-warmup-init {s.lr_warmup_init} does not lie between 0 and --lr {o.lr}"


def decoupled_learning_rates_are_ordered(run: RunConfig) -> Iterator[str]:
    """Require decoupled_min_lr <= decoupled_lr."""
    o = run.optimizer
    if o.decoupled_min_lr is not None and o.decoupled_lr is None:
        yield "--decoupled-min-lr needs --decoupled-lr"
    elif o.decoupled_lr is not None and (o.decoupled_min_lr or 0.0) > o.decoupled_lr:
        yield (
            f"--decoupled-min-lr {o.decoupled_min_lr} is greater than --decoupled-lr "
            f"{o.decoupled_lr}: lower it"
        )


def the_head_has_weights_of_its_own(run: RunConfig) -> Iterator[str]:
    """Refuse --head-lr-mult if the output layer shares its weight with the embedding."""
    factor = run.scheduler.head_lr_mult
    if factor != 1.0 and not run.language_model.untie_embeddings_and_output_weights:
        yield (
            f"--head-lr-mult {factor}: the output layer shares its weight with the word "
            "embedding; add --untie-embeddings-and-output-weights"
        )


def means_converge(run: RunConfig) -> Iterator[str]:
    """Require decay rates from 0 to below 1, and a positive Adam epsilon."""
    o = run.optimizer
    decays = {
        "--adam-beta1": o.adam_beta1,
        "--adam-beta2": o.adam_beta2,
        "--lion-beta1": o.lion_beta1,
        "--lion-beta2": o.lion_beta2,
        "--muon-momentum": o.muon_momentum,
    }
    for flag, beta in decays.items():
        if not 0 <= beta < 1:
            yield f"{flag} {beta}: a number from 0 up to, but not including, 1 is needed"
    if o.adam_eps <= 0:
        yield f"--adam-eps {o.adam_eps}: a number greater than 0 is needed"


def weight_decay_follows_its_style(run: RunConfig) -> Iterator[str]:
    """Require start and end of a changing weight decay, and neither for a constant one."""
    s, style = run.scheduler, run.scheduler.weight_decay_incr_style
    start, end = run.asked["start_weight_decay"], run.asked["end_weight_decay"]
    if style == "constant":
        for flag, value in (("--start-weight-decay", start), ("--end-weight-decay", end)):
            if value is not None:
                yield (
                    f"{flag} {value} needs --weight-decay-incr-style linear or cosine: for "
                    "constant use --weight-decay"
                )
    elif start is None or end is None:
        yield (
            f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
        )
    elif not 0 <= start <= end:
        yield (
            f"--start-weight-decay {s.start_weight_decay} and --end-weight-decay "
            f"{s.end_weight_decay}: 0 <= start <= end is needed"
        )


def muon_updates_matrices_at_once(run: RunConfig) -> Iterator[str]:
    """Refuse sharding for optimizers that need complete parameters.

    A bucket contains parts of parameters.  Besides Muon, user-defined optimizers may declare that
    their update is not element-wise.
    """
    o = run.optimizer
    if o.has_muon and o.overlap_param_gather_with_optimizer_step:
        yield (
            f"--overlap-param-gather-with-optimizer-step and --optimizer {o.optimizer}: a Muon "
            "step needs complete matrices, not buckets; use --overlap-param-gather alone"
        )
    if o.has_muon or update_rule(o.optimizer).is_element_wise:
        return
    tp = run.model.tensor_model_parallel_size
    for flag, is_on in {
        "--use-distributed-optimizer": o.use_distributed_optimizer,
        "fully sharded parameters (FSDP)": is_fully_sharded(run.ddp),
        f"--tensor-model-parallel-size {tp}": tp > 1,
        "--bf16 or --fp16": run.model.bf16 or run.model.fp16,
        "--optimizer-cpu-offload": o.optimizer_cpu_offload,
    }.items():
        if is_on:
            yield (
                f"{flag} with --optimizer {o.optimizer}: its update is not element-wise and needs "
                "complete parameters on one device; use data parallelism without it, or an "
                "element-wise optimizer such as adam"
            )


def the_format_has_room_for_the_optimizer(run: RunConfig) -> Iterator[str]:
    """Refuse formats that cannot store the two kinds of optimizer state of Muon.

    They number the parameters as a single Adam optimizer does.
    """
    o, formats = run.optimizer, ("torch", "torch_dcp")
    if o.has_muon and run.checkpoint.save and run.checkpoint.ckpt_format in formats:
        yield (
            f"--ckpt-format {run.checkpoint.ckpt_format} cannot store the two kinds of state of "
            f"--optimizer {o.optimizer}: use safetensors_dist or torch_dist"
        )


def host_memory_holds_what_it_can(run: RunConfig) -> Iterator[str]:
    """Require a valid offload fraction; only element-wise updates can be offloaded."""
    o = run.optimizer
    if not 0 <= o.optimizer_offload_fraction <= 1:
        yield (
            f"--optimizer-offload-fraction {o.optimizer_offload_fraction}: a number from 0 to 1 is "
            "needed"
        )
    if o.optimizer_cpu_offload and o.has_muon:
        yield (
            f"--optimizer-cpu-offload and --optimizer {o.optimizer} exclude each other: Muon's "
            "matmuls "
            "run on the GPU; keep the first with --optimizer adam, or use --optimizer dist_muon "
            "alone, which shards its state over data-parallel ranks"
        )
