"""Rules about number formats."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig


def one_half_precision(run: RunConfig) -> Iterator[str]:
    """Parameters have one format."""
    if run.model.bf16 and run.model.fp16:
        yield "--bf16 and --fp16 exclude each other: keep one"


def fp16_loss_needs_fp16(run: RunConfig) -> Iterator[str]:
    """There are no float16 logits otherwise."""
    if run.language_model.fp16_lm_cross_entropy and not run.model.fp16:
        yield "--fp16-lm-cross-entropy needs --fp16: add it, or drop the flag for a loss in fp32"


def fp32_residual_needs_half_precision(run: RunConfig) -> Iterator[str]:
    """In fp32 the residual stream is fp32 anyway."""
    if run.model.fp32_residual_connection and not (run.model.fp16 or run.model.bf16):
        yield "--fp32-residual-connection needs --bf16 or --fp16: without them all is fp32"


def bf16_reduction_needs_bf16(run: RunConfig) -> Iterator[str]:
    """Gradients of other formats would lose range or precision without a word."""
    if run.ddp.grad_reduce_in_bf16 and not run.model.bf16:
        yield "--grad-reduce-in-bf16 needs --bf16: add it or drop the flag"


def state_formats_have_their_optimizer(run: RunConfig) -> Iterator[str]:
    """Fewer bits are asked for by a flag of their own, and moments are Adam's."""
    o = run.optimizer
    moments = {"--exp-avg-dtype": o.exp_avg_dtype, "--exp-avg-sq-dtype": o.exp_avg_sq_dtype}
    formats = {
        "--main-grads-dtype": o.main_grads_dtype,
        "--main-params-dtype": o.main_params_dtype,
        **moments,
    }
    for flag, dtype in formats.items():
        if dtype != "fp32" and not o.use_precision_aware_optimizer:
            yield f"{flag} {dtype} needs --use-precision-aware-optimizer: add it"
    for flag, dtype in moments.items():
        if dtype != "fp32" and o.optimizer == "sgd":
            yield f"{flag} {dtype} is of --optimizer adam: {o.optimizer} has no such state, drop it"


def main_formats_fit_the_weights(run: RunConfig) -> Iterator[str]:
    """There are main parameters beside 16-bit weights, and bf16 gradients of bf16 weights."""
    o, main = run.optimizer, run.optimizer.main_params_dtype
    if main != "fp32" and not (run.model.bf16 or run.model.fp16):
        yield f"--main-params-dtype {main} needs --bf16 or --fp16: fp32 weights are all there is"
    if main != "fp32" and is_fully_sharded(run.ddp):
        yield (
            f"--main-params-dtype {main}: parameters that are sharded are kept in fp32 alone; "
            "drop the flag"
        )
    if o.main_grads_dtype != "fp32" and not run.model.bf16:
        yield f"--main-grads-dtype {o.main_grads_dtype} needs --bf16: add it or drop the flag"
    if o.main_grads_dtype != "fp32" and run.ddp.grad_reduce_in_fp32:
        yield (
            f"--main-grads-dtype {o.main_grads_dtype} and --accumulate-allreduce-grads-in-fp32 "
            "exclude each other: keep one"
        )


def loss_scale_can_work(run: RunConfig) -> Iterator[str]:
    """A constant scale is positive, an adaptive one starts above its floor."""
    o = run.optimizer
    if o.loss_scale is not None and o.loss_scale <= 0:
        yield f"--loss-scale {o.loss_scale}: a number greater than 0 is needed"
    if not 0 < o.min_loss_scale <= o.initial_loss_scale:
        yield (
            f"--min-loss-scale {o.min_loss_scale} must be greater than 0 and at most "
            f"--initial-loss-scale {o.initial_loss_scale}"
        )


CHECKS = (
    one_half_precision,
    fp16_loss_needs_fp16,
    fp32_residual_needs_half_precision,
    bf16_reduction_needs_bf16,
    state_formats_have_their_optimizer,
    main_formats_fit_the_weights,
    loss_scale_can_work,
)
