"""Derive values from other values: one function per subject, applied in order by `resolve`.

Each function updates the private copy of the namespace that `resolve` made, under the dest of a
flag or the name of a config field that no flag sets.  It yields a warning where it overrides a
value that the user gave.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.config.errors import ConfigError
from megatron.core.device import CPU
from megatron.core.distributed.sharding import shares_instances
from megatron.core.enums import AttnBackend
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.ssm.mamba_hybrid_layer_allocation import EXPERTS
from megatron.core.transformer.layer_layout import parse_layout
from megatron.training.arguments.cuda_graph_capture import cuda_graph_capture
from megatron.training.arguments.derive_images import image_classes, images
from megatron.training.config.preference import reads_conversations
from megatron.training.config.run import data_parallel_size
from megatron.training.models.registry import model_kind

Derivation = Callable[[Namespace], Iterator[str] | None]


def virtual_ranks(ns: Namespace) -> Iterator[str]:
    """Under --virtual-ranks N set the world size to N and the device to the CPU.

    The ranks are threads of this process.  An explicit --device stays.
    """
    if ns.virtual_ranks is None:
        return
    if ns.world_size == 1:
        ns.world_size = ns.virtual_ranks
    if ns.device == "auto":
        ns.device = CPU
    if ns.distributed_backend is not None:
        yield (
            f"--distributed-backend {ns.distributed_backend} is without effect: --virtual-ranks "
            "communicate in memory"
        )


def parallel_degrees(ns: Namespace) -> Iterator[str]:
    """Switch off parallelism that has nothing to shard.

    --expert-tensor-parallel-size is ignored without --num-experts, and --sequence-parallel with
    --tensor-model-parallel-size 1 (with a warning).
    """
    if not ns.num_experts:
        ns.expert_tensor_parallel_size = None
    if ns.sequence_parallel and ns.tensor_model_parallel_size == 1:
        ns.sequence_parallel = False
        yield "--sequence-parallel is without effect: --tensor-model-parallel-size is 1"


def initial_weights(ns: Namespace) -> None:
    """Set the seed of initial weights, which is the same on all ranks: --seed."""
    ns.init_seed = ns.seed


def precision(ns: Namespace) -> Iterator[str]:
    """Set the dtypes of parameters, pipeline messages and gradient reduction.

    --bf16 or --fp16 selects the first two, fp32 is the default.  --bf16 accumulates and reduces
    gradients in fp32 unless --grad-reduce-in-bf16 or a 16-bit --main-grads-dtype is given.  With
    --fp16 and a dynamic loss scale the NaN check of loss and gradient is off.
    """
    half = torch.bfloat16 if ns.bf16 else torch.float16
    ns.params_dtype = half if ns.bf16 or ns.fp16 else torch.float32
    ns.pipeline_dtype = ns.params_dtype
    if ns.fp16 and ns.loss_scale is None and ns.check_for_nan_in_loss_and_grad:
        # A dynamic loss scale causes overflows by design.
        ns.check_for_nan_in_loss_and_grad = False
    if ns.bf16 and not ns.grad_reduce_in_bf16 and ns.main_grads_dtype == "fp32":
        ns.accumulate_allreduce_grads_in_fp32 = True
    if ns.grad_reduce_in_bf16 and ns.accumulate_allreduce_grads_in_fp32:
        ns.accumulate_allreduce_grads_in_fp32 = False
        yield "--grad-reduce-in-bf16 overrules --accumulate-allreduce-grads-in-fp32"


def nothing_asked(ns: Namespace) -> None:
    """Treat --num-experts 0 and --mtp-num-layers 0 like absent flags."""
    ns.num_experts = ns.num_experts or None
    ns.mtp_num_layers = ns.mtp_num_layers or None


def depth(ns: Namespace) -> None:
    """Resolve --num-layers, its alias --encoder-num-layers, and --decoder-num-layers.

    Without either of the first two, a hybrid model has as many layers as
    --hybrid-override-pattern has letters.  --decoder-num-layers of an encoder-decoder model
    defaults to --num-layers.
    """
    if ns.num_layers is None:
        ns.num_layers = ns.encoder_num_layers
    kind = model_kind(ns.model_kind)
    pattern = ns.hybrid_override_pattern if kind.is_hybrid else None
    if ns.num_layers is None and pattern is not None:
        ns.num_layers = len(pattern)
    ns.encoder_num_layers = ns.num_layers
    if kind.has_encoder and ns.decoder_num_layers is None:
        ns.decoder_num_layers = ns.num_layers


def optimizer_of_matrices(ns: Namespace) -> None:
    """Set --use-distributed-optimizer for --optimizer dist_muon (Muon with sharded state)."""
    ns.use_distributed_optimizer |= ns.optimizer == "dist_muon"


def data_parallel_sharding(ns: Namespace) -> Iterator[str]:
    """Under --use-megatron-fsdp derive --use-distributed-optimizer from the sharding strategy.

    --data-parallel-sharding-strategy optim sets it, and so does every strategy of an FSDP that
    shards over several optimizer instances; other strategies clear it.  Only optim can overlap
    parameter gathers with the optimizer step.
    """
    if not ns.use_megatron_fsdp:
        return
    strategy = ns.data_parallel_sharding_strategy
    if strategy == "no_shard" and ns.use_distributed_optimizer:
        yield (
            "--use-distributed-optimizer is without effect: --data-parallel-sharding-strategy "
            "no_shard does not shard optimizer state"
        )
    ns.use_distributed_optimizer = strategy == "optim" or shares_instances(ns)
    ns.overlap_param_gather_with_optimizer_step &= strategy == "optim"


def pipeline(ns: Namespace) -> None:
    """Set the number of virtual stages per pipeline rank; None for one stage.

    In this order, the number follows from --num-layers-per-virtual-pipeline-stage,
    --pipeline-model-parallel-layout or --num-virtual-stages-per-pipeline-rank; the default is 2
    with --pipeline-schedule zb-v, otherwise 1.  Without virtual stages --align-param-gather has
    no effect.  --microbatch-group-size-per-virtual-pipeline-stage defaults to the pipeline size.
    """
    chunks = ns.num_virtual_stages_per_pipeline_rank
    if ns.num_layers_per_virtual_pipeline_stage is not None:
        slots = (ns.num_layers or 0) + ns.account_for_embedding_in_pipeline_split
        slots += ns.account_for_loss_in_pipeline_split
        per_chunk = ns.pipeline_model_parallel_size * ns.num_layers_per_virtual_pipeline_stage
        chunks = slots // max(1, per_chunk)
    elif ns.pipeline_model_parallel_layout is not None:
        ranks = max(1, ns.pipeline_model_parallel_size)
        chunks = _stages(ns.pipeline_model_parallel_layout) // ranks
    elif ns.pipeline_schedule == "zb-v":
        chunks = 2 if chunks is None else chunks
    ns.virtual_pipeline_model_parallel_size = chunks if chunks is not None and chunks > 1 else None
    if ns.virtual_pipeline_model_parallel_size is None:
        ns.align_param_gather = False
    if ns.microbatch_group_size_per_vp_stage is None:
        ns.microbatch_group_size_per_vp_stage = ns.pipeline_model_parallel_size


def _stages(layout: str) -> int:
    """Return the number of stages in ``layout``; 0 for an invalid one, which a check reports."""
    try:
        return len(parse_layout(layout))
    except ConfigError:
        return 0


def sequence_lengths(ns: Namespace) -> None:
    """Resolve --seq-length, its alias --encoder-seq-length, and --decoder-seq-length.

    --decoder-seq-length of an encoder-decoder model defaults to --seq-length, and
    --max-position-embeddings to the longer of the two.
    """
    if ns.seq_length is None:
        ns.seq_length = ns.encoder_seq_length
    ns.encoder_seq_length = ns.seq_length
    if model_kind(ns.model_kind).has_encoder and ns.decoder_seq_length is None:
        ns.decoder_seq_length = ns.seq_length
    if ns.max_position_embeddings is None:
        ns.max_position_embeddings = ns.seq_length and max(
            ns.seq_length, ns.decoder_seq_length or 0
        )


def widths(ns: Namespace) -> None:
    """Set MLP width and number of key/value heads where TransformerConfig's defaults differ.

    --swiglu without --ffn-hidden-size: 8/3 of --hidden-size, rounded down to a multiple of 64.
    Without --group-query-attention, --num-query-groups is ignored.
    """
    if ns.ffn_hidden_size is None and ns.hidden_size and ns.swiglu:
        # Three matrices instead of two: keep the parameter count, in multiples of 64.
        ns.ffn_hidden_size = 8 * ns.hidden_size // (3 * 64) * 64
    if not ns.group_query_attention:
        ns.num_query_groups = None


def activation(ns: Namespace) -> None:
    """Set the activation function of the MLP, its gate and its fusion with the bias.

    Of several activation flags the first one counts: --swiglu, --relu, --squared-relu,
    --openai-gelu, --quick-geglu.  GELU is the default.  --no-bias-gelu-fusion and
    --no-bias-swiglu-fusion switch the fusion off.  Only GELU with biases and SwiGLU can be fused.
    """
    ns.gated_linear_unit = ns.swiglu or ns.geglu or ns.quick_geglu
    ns.activation_func = F.gelu
    if ns.swiglu:
        ns.activation_func = F.silu
    elif ns.relu:
        ns.activation_func = F.relu
    elif ns.squared_relu:
        ns.activation_func = squared_relu
    elif ns.openai_gelu:
        ns.activation_func = openai_gelu
    elif ns.quick_geglu:
        ns.activation_func = quick_gelu
    if not ns.add_bias_linear:
        ns.bias_gelu_fusion = False
    ns.bias_activation_fusion = ns.bias_swiglu_fusion if ns.swiglu else ns.bias_gelu_fusion
    if ns.relu or ns.squared_relu or ns.openai_gelu or ns.geglu or ns.quick_geglu:
        ns.bias_activation_fusion = False


def attention(ns: Namespace) -> Iterator[str]:
    """Resolve --add-qkv-bias and --attention-backend.

    QKV layers have biases unless --disable-bias-linear is given without --add-qkv-bias.
    --use-flash-attn means --attention-backend flash unless another backend is given.  As in
    Megatron-LM, --qk-l2-norm replaces --qk-layernorm.
    """
    if ns.qk_layernorm and ns.qk_l2_norm and not ns.multi_latent_attention:
        ns.qk_layernorm = False
        yield "--qk-layernorm is without effect: --qk-l2-norm, without weights, replaces it"
    if ns.add_bias_linear:
        ns.add_qkv_bias = True
    if ns.use_flash_attn and ns.attention_backend is AttnBackend.auto:
        ns.attention_backend = AttnBackend.flash


def positions(ns: Namespace) -> None:
    """Resolve --position-embedding-type; rotary embeddings have several flags.

    --use-rotary-position-embeddings means --position-embedding-type rope, and
    --position-embedding-type yarn means rope with --rope-type yarn.  Other types switch off the
    fused kernel of rotary embeddings (--no-rope-fusion).
    """
    if ns.use_rotary_position_embeddings and ns.position_embedding_type != "yarn":
        ns.position_embedding_type = "rope"
    if ns.position_embedding_type == "yarn":
        ns.position_embedding_type, ns.rope_type = "rope", "yarn"
    if ns.position_embedding_type not in ("rope", "mrope") and not ns.multi_latent_attention:
        ns.apply_rope_fusion = False


def recomputation(ns: Namespace) -> None:
    """Translate two older flags for --recompute-granularity selective.

    --recompute-activations selects it.  So does --moe-layer-recompute with --num-experts, which
    also adds ``moe`` to --recompute-modules.
    """
    if ns.recompute_activations:
        ns.recompute_granularity = "selective"
    if ns.moe_layer_recompute and ns.num_experts:
        ns.recompute_granularity = "selective"
        ns.recompute_modules = sorted({*(ns.recompute_modules or ()), "moe"})


def experts(ns: Namespace) -> None:
    """Set MoE layers from a hybrid pattern, and resolve upcycling and capacity.

    The letters E of --hybrid-override-pattern replace --moe-layer-freq.  --moe-use-upcycling with
    --load implies --finetune: a dense checkpoint has only weights to load.  A negative
    --moe-expert-capacity-factor means no capacity limit.
    """
    if model_kind(ns.model_kind).is_hybrid:
        pattern = ns.hybrid_override_pattern or ""
        is_whole = len(pattern) == ns.num_layers
        ns.moe_layer_freq = tuple(int(x == EXPERTS) for x in pattern) if is_whole else 1
    if ns.moe_use_upcycling and ns.load is not None:
        ns.finetune = True
    if (ns.moe_expert_capacity_factor or 0) < 0:
        ns.moe_expert_capacity_factor = None


def batch_sizes(ns: Namespace) -> None:
    """Set the default of --global-batch-size: one micro-batch per data-parallel rank."""
    if ns.global_batch_size is None and ns.micro_batch_size is not None:
        degrees = ns.tensor_model_parallel_size, ns.pipeline_model_parallel_size
        replicas = data_parallel_size(ns.world_size, *degrees, ns.context_parallel_size)
        ns.global_batch_size = ns.micro_batch_size * replicas


def fine_tuning(ns: Namespace) -> None:
    """Set the normalisation of the loss and the alignment of packed conversations.

    Means of micro-batches would depend on which conversations share a row.  Context parallelism
    splits each conversation into twice as many parts as it has ranks.
    """
    if not reads_conversations(ns):
        return
    ns.calculate_per_token_loss = True
    if ns.sft_alignment is None:
        ns.sft_alignment = sequence_divisor(cp=ns.context_parallel_size)


def data_sources(ns: Namespace) -> Iterator[str]:
    """Set --split to 969, 30, 1 for --data-path and --data-args-path, if it is not given."""
    flag = "--data-path" if ns.data_path is not None else "--data-args-path"
    if (ns.data_path is not None or ns.data_args_path is not None) and ns.split is None:
        ns.split = "969, 30, 1"
        yield f"--split is not given: {flag} is split into train, valid, test as {ns.split}"


def weight_decay(ns: Namespace) -> None:
    """Under --weight-decay-incr-style constant ignore --start-weight-decay, --end-weight-decay.

    Both become --weight-decay.
    """
    if ns.weight_decay_incr_style == "constant":
        ns.start_weight_decay = ns.end_weight_decay = ns.weight_decay


def compilation(ns: Namespace) -> None:
    """Disable --gradient-accumulation-fusion under --compile layer and --compile model.

    A compiled backward pass returns gradients and cannot write into main_grad.
    """
    if ns.compile != "none":
        ns.gradient_accumulation_fusion = False


DERIVATIONS: tuple[Derivation, ...] = (
    virtual_ranks,
    parallel_degrees,
    optimizer_of_matrices,
    data_parallel_sharding,
    initial_weights,
    precision,
    nothing_asked,
    image_classes,
    images,
    depth,
    pipeline,
    sequence_lengths,
    widths,
    activation,
    attention,
    positions,
    recomputation,
    compilation,
    experts,
    batch_sizes,
    data_sources,
    fine_tuning,
    weight_decay,
    cuda_graph_capture,
)
