"""Checks of numerical precision."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def one_half_precision(run: RunConfig) -> Iterator[str]:
    """Refuse --bf16 with --fp16."""
    if run.model.bf16 and run.model.fp16:
        yield (
            "--bf16 and --fp16 exclude each other: keep --bf16 on hardware with bf16 matmuls, "
            "--fp16, with its loss scaling, on older GPUs"
        )


def fp16_loss_needs_fp16(run: RunConfig) -> Iterator[str]:
    """Require --fp16 for --fp16-lm-cross-entropy: otherwise no logits are fp16."""
    if run.language_model.fp16_lm_cross_entropy and not run.model.fp16:
        yield (
            "--fp16-lm-cross-entropy needs --fp16, and the loss is computed in fp32 with it too: "
            "use "
            "--loss-chunk-size to reduce the memory of logits"
        )


def fp32_residual_needs_half_precision(run: RunConfig) -> Iterator[str]:
    """Refuse --fp32-residual-connection in fp32, where it has no effect."""
    if run.model.fp32_residual_connection and not (run.model.fp16 or run.model.bf16):
        yield (
            "--fp32-residual-connection needs --bf16 or --fp16: without them hidden states are fp32"
        )


def bf16_reduction_needs_bf16(run: RunConfig) -> Iterator[str]:
    """Require --bf16 for --grad-reduce-in-bf16.

    Other gradients would silently lose range (fp16) or precision (fp32).
    """
    if run.ddp.grad_reduce_in_bf16 and not run.model.bf16:
        yield (
            "--grad-reduce-in-bf16 needs --bf16: add it; gradients of fp16 and fp32 parameters "
            "cannot be reduced in bf16"
        )


def state_formats_have_their_optimizer(run: RunConfig) -> Iterator[str]:
    """Require --use-precision-aware-optimizer for state dtypes below fp32.

    Refuse moment dtypes for an optimizer without that moment.
    """
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
    rule = o.muon_scalar_optimizer if o.has_muon else o.optimizer
    chosen = "--muon-scalar-optimizer" if o.has_muon else "--optimizer"
    for flag, dtype in moments.items():
        if dtype != "fp32" and (rule == "sgd" or (rule == "lion" and flag == "--exp-avg-sq-dtype")):
            yield f"{flag} {dtype}: {chosen} {rule} has no such state; use {chosen} adam"


def main_formats_fit_the_weights(run: RunConfig) -> Iterator[str]:
    """Require 16-bit parameters for --main-params-dtype, and bf16 for --main-grads-dtype.

    fp32 parameters have no main parameters.
    """
    o, main = run.optimizer, run.optimizer.main_params_dtype
    if main != "fp32" and not (run.model.bf16 or run.model.fp16):
        yield (
            f"--main-params-dtype {main} needs --bf16 or --fp16: fp32 parameters have no separate "
            "main parameters"
        )
    if main != "fp32" and is_fully_sharded(run.ddp):
        yield (
            f"--main-params-dtype {main}: fully sharded parameters have fp32 main parameters "
            "only; use --use-distributed-optimizer instead of FSDP"
        )
    if o.main_grads_dtype != "fp32" and not run.model.bf16:
        yield f"--main-grads-dtype {o.main_grads_dtype} needs --bf16: add it"
    if o.main_grads_dtype != "fp32" and run.ddp.grad_reduce_in_fp32:
        yield (
            f"--main-grads-dtype {o.main_grads_dtype} and --accumulate-allreduce-grads-in-fp32 "
            "exclude each other: keep the first to save memory, the second for fp32 gradient sums"
        )


def loss_scale_can_work(run: RunConfig) -> Iterator[str]:
    """Require a positive loss scale, and a dynamic one that starts at or above its minimum."""
    o = run.optimizer
    if o.loss_scale is not None and o.loss_scale <= 0:
        yield f"--loss-scale {o.loss_scale}: a number greater than 0 is needed"
    if not 0 < o.min_loss_scale <= o.initial_loss_scale:
        yield (
            f"--min-loss-scale {o.min_loss_scale} must be greater than 0 and at most "
            f"--initial-loss-scale {o.initial_loss_scale}"
        )


def one_quantised_format(run: RunConfig) -> Iterator[str]:
    """Refuse FP8 with FP4."""
    if run.model.fp8 is not None and run.model.fp4 is not None:
        yield (
            "--fp8-format and --fp4-format exclude each other: keep --fp8-format for the smaller "
            "rounding error, --fp4-format for the smaller operands"
        )


def quantised_widths_fit_kernels(run: RunConfig) -> Iterator[str]:
    """Require widths that quantized GEMMs support on every rank.

    The kernels operate on complete blocks of values.
    """
    m = run.model
    if not m.is_quantized:
        return
    tp, etp = m.tensor_model_parallel_size, m.expert_tensor_parallel_size or 1
    heads, channels = m.num_attention_heads, m.kv_channels or 0
    widths = [("--hidden-size", m.hidden_size, 1)]
    if m.multi_latent_attention:
        place = m.qk_pos_emb_head_dim
        widths += [
            ("--q-lora-rank", m.q_lora_rank or 0, 1),
            ("--kv-lora-rank", m.kv_lora_rank, 1),
            ("--kv-lora-rank and --qk-pos-emb-head-dim, together", m.kv_lora_rank + place, 1),
            ("width of all queries", heads * (m.qk_head_dim + place), tp),
            ("width of keys and values", heads * (m.qk_head_dim + m.v_head_dim), tp),
            ("width of all values", heads * m.v_head_dim, tp),
        ]
    else:
        keys = 2 * (m.num_query_groups or heads) * channels
        widths.append(("width of all heads", heads * channels, tp))
        widths.append(("width of queries, keys and values", heads * channels + keys, tp))
    if m.num_moe_experts is None:
        widths.append(("--ffn-hidden-size", m.ffn_hidden_size or 0, tp))
    else:
        shared = m.moe_shared_expert_intermediate_size or 0
        widths.append(("--moe-ffn-hidden-size", m.moe_ffn_hidden_size or 0, etp))
        widths.append(("--moe-shared-expert-intermediate-size", shared, tp))
    for name, width, ranks in widths:
        if width % (m.width_multiple * ranks):
            yield (
                f"--{m.format_flag}: {name} {width} on {ranks} tensor-parallel ranks is not a "
                f"multiple of {m.width_multiple} on each: use a width that is a multiple of "
                f"{m.width_multiple * ranks}"
            )


def sequence_ranks_hold_whole_blocks(run: RunConfig) -> Iterator[str]:
    """Require complete quantization blocks of tokens on each sequence-parallel rank.

    The input that is gathered for a weight gradient is quantized along its tokens.
    """
    m, d = run.model, run.data
    sizes = {"blockwise": 128, "mxfp8": 32}
    size = 16 if m.fp4 is not None else sizes.get(m.fp8_recipe, 1)
    if not (m.is_quantized and m.sequence_parallel and m.fp8_wgrad):
        return
    ranks = m.tensor_model_parallel_size * m.context_parallel_size
    halves: dict[str, int | None] = {"--seq-length": d.seq_length}
    if model_kind_of(run).has_encoder:
        halves["--decoder-seq-length"] = d.decoder_seq_length
    for flag, length in halves.items():
        tokens = (length or 0) * run.training.micro_batch_size
        if tokens % (ranks * size):
            yield (
                f"{flag} {length} times --micro-batch-size {run.training.micro_batch_size}, split "
                "over "
                f"{ranks} ranks by --sequence-parallel, is not a multiple of the {size} values "
                f"that share a scale in --{m.format_flag}: change one of them, or use --fp8-format "
                "with --fp8-recipe tensorwise"
            )


def stored_codes_have_main_parameters(run: RunConfig) -> Iterator[str]:
    """Require 16-bit parameters for --fp8-param-gather.

    The update needs main parameters, which fp32 weights do not have.
    """
    m = run.model
    if m.fp8 is not None and m.fp8_param and not (m.bf16 or m.fp16):
        yield (
            "--fp8-param-gather needs --bf16 or --fp16: fp32 weights have no main parameters "
            "apart, so the update itself would be rounded"
        )


def some_layer_is_quantised(run: RunConfig) -> Iterator[str]:
    """Require at least one quantized layer between the layers that stay in bf16."""
    m = run.model
    first, last = m.num_layers_at_start_in_bf16, m.num_layers_at_end_in_bf16
    if m.is_quantized and m.first_last_layers_bf16 and first + last >= m.num_layers:
        yield (
            f"--num-layers-at-start-in-bf16 {first} and --num-layers-at-end-in-bf16 {last} leave "
            f"none of --num-layers {m.num_layers} to --{m.format_flag}: lower them"
        )
