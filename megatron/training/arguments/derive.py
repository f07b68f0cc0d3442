"""Derive values from other values: one function per subject, applied in order by `resolve`.

Each function updates the private copy of the namespace that `resolve` made, under the dest of a
flag or the name of a config field that no flag sets.  It yields a warning where it overrides a
value that the user gave.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.config.errors import ConfigError
from megatron.core.device import CPU
from megatron.core.distributed.distributed_data_parallel_config import (
    is_fully_sharded,
    shares_instances,
)
from megatron.core.enums import AttnBackend
from megatron.core.models.vision.kinds import KINDS, get_num_image_embeddings
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.ssm.mamba_hybrid_layer_allocation import EXPERTS
from megatron.core.transformer.pipeline_parallel_layer_layout import parse_layout
from megatron.training.config.adapters import HEAD_SIZES, MTP
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.preference import reads_conversations
from megatron.training.config.run import data_parallel_size
from megatron.training.config.vision import largest_image
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
    """Set values that follow from one flag, and switch off parallelism that has nothing to shard.

    --num-experts 0, --mtp-num-layers 0 and 0 draft heads are like absent flags; dist_muon is Muon
    with sharded state; the seed of initial weights, the same on all ranks, is --seed.
    --expert-tensor-parallel-size is ignored without --num-experts, and --sequence-parallel with
    --tensor-model-parallel-size 1 (with a warning).
    """
    ns.num_experts = ns.num_experts or None
    ns.mtp_num_layers = ns.mtp_num_layers or None
    for name in HEAD_SIZES:
        setattr(ns, name, getattr(ns, name) or None)
    if ns.freeze_base_for_mtp:
        ns.export_num_mtp = ns.export_num_mtp or ns.mtp_num_layers
    is_mtp = ns.export_eagle_algorithm == MTP
    if num_trained := ns.export_num_mtp or (is_mtp and ns.export_num_eagle_layers):
        ns.mtp_num_layers = num_trained
    ns.use_distributed_optimizer |= ns.optimizer == "dist_muon"
    ns.init_seed = ns.seed
    if not ns.num_experts:
        ns.expert_tensor_parallel_size = None
    if ns.sequence_parallel and ns.tensor_model_parallel_size == 1:
        ns.sequence_parallel = False
        yield "--sequence-parallel is without effect: --tensor-model-parallel-size is 1"


def precision(ns: Namespace) -> Iterator[str]:
    """Set the dtypes of parameters, pipeline messages and gradient reduction.

    --bf16 or --fp16 selects the first two, fp32 is the default.  --bf16 accumulates and reduces
    gradients in fp32 unless --grad-reduce-in-bf16 or a 16-bit --main-grads-dtype is given.  With
    --fp16 and a dynamic loss scale the NaN check of loss and gradient is off.
    """
    if ns.use_megatron_fsdp and ns.megatron_fsdp_grad_comm_dtype == "bf16":
        ns.grad_reduce_in_bf16 = True
    half = torch.bfloat16 if ns.bf16 else torch.float16
    ns.params_dtype = ns.pipeline_dtype = half if ns.bf16 or ns.fp16 else torch.float32
    if ns.fp16 and ns.loss_scale is None:  # which causes overflows by design
        ns.check_for_nan_in_loss_and_grad = False
    if ns.bf16 and not ns.grad_reduce_in_bf16 and ns.main_grads_dtype == "fp32":
        ns.accumulate_allreduce_grads_in_fp32 = True
    if ns.grad_reduce_in_bf16 and ns.accumulate_allreduce_grads_in_fp32:
        ns.accumulate_allreduce_grads_in_fp32 = False
        yield "--grad-reduce-in-bf16 overrules --accumulate-allreduce-grads-in-fp32"


def rewritten(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags (dests) that runs save as derived, because other flags have set them."""
    if {*"|/"} & {*(given["hybrid_override_pattern"] or "")}:
        yield from ("hybrid_override_pattern", "pipeline_model_parallel_layout")
        yield from ("mtp_num_layers", "mtp_hybrid_override_pattern")
    if given["freeze_base_for_mtp"]:
        yield "export_num_mtp"


def depth(ns: Namespace) -> None:
    """Resolve --num-layers, its alias --encoder-num-layers, and --decoder-num-layers.

    Without either of the first two, a hybrid model has as many layers as
    --hybrid-override-pattern has letters.  A / in it begins the layers of an MTP depth: those of
    all depths are equal, or given once with --mtp-use-repeated-layer.  A | ends a pipeline stage,
    unless the run has one stage or --pipeline-model-parallel-layout.  --decoder-num-layers of an
    encoder-decoder model defaults to --num-layers.
    """
    if ns.num_layers is None:
        ns.num_layers = ns.encoder_num_layers
    kind = model_kind(ns.model_kind)
    pattern = ns.hybrid_override_pattern if kind.is_hybrid else None
    if not kind.is_hybrid:
        ns.mtp_hybrid_override_pattern = None
    main, *ahead = (pattern or "").split("/")
    depths = ns.mtp_num_layers or len(ahead)
    is_one = len({*ahead, ns.mtp_hybrid_override_pattern or "".join(ahead[:1])}) == 1
    if any(ahead) and is_one and len(ahead) in (depths, 1 if ns.mtp_use_repeated_layer else depths):
        ns.mtp_num_layers = depths
        ns.mtp_hybrid_override_pattern = ahead[0]
        pattern = ns.hybrid_override_pattern = main  # else a rule refuses it
    if pattern is not None and "|" in pattern:
        if ns.pipeline_model_parallel_size > 1 and ns.pipeline_model_parallel_layout is None:
            stages = "|".join("t" * len(stage) for stage in pattern.split("|"))
            ns.pipeline_model_parallel_layout = f"E{stages}{'m' * (ns.mtp_num_layers or 0)}L"
        pattern = ns.hybrid_override_pattern = pattern.replace("|", "")
    if ns.num_layers is None and pattern is not None:
        ns.num_layers = len(pattern)
    ns.encoder_num_layers = ns.num_layers
    if kind.has_encoder and ns.decoder_num_layers is None:
        ns.decoder_num_layers = ns.num_layers


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
    no effect.
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
    elif ns.pipeline_schedule == "zb-v" and chunks is None:
        chunks = 2
    ns.virtual_pipeline_model_parallel_size = chunks if chunks is not None and chunks > 1 else None
    if ns.virtual_pipeline_model_parallel_size is None:
        ns.align_param_gather = False


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
    functions = {
        "swiglu": F.silu,
        "relu": F.relu,
        "squared_relu": squared_relu,
        "openai_gelu": openai_gelu,
        "quick_geglu": quick_gelu,
    }
    chosen = (function for flag, function in functions.items() if vars(ns)[flag])
    ns.activation_func = next(chosen, F.gelu)
    if not ns.add_bias_linear:
        ns.bias_gelu_fusion = False
    ns.bias_activation_fusion = ns.bias_swiglu_fusion if ns.swiglu else ns.bias_gelu_fusion
    if ns.relu or ns.squared_relu or ns.openai_gelu or ns.geglu or ns.quick_geglu:
        ns.bias_activation_fusion = False


def attention(ns: Namespace) -> Iterator[str]:
    """Resolve --transformer-impl, --add-qkv-bias and --attention-backend.

    QKV layers have biases unless --disable-bias-linear is given without --add-qkv-bias.
    --use-flash-attn means --attention-backend flash unless another backend is given.  As in
    Megatron-LM, --qk-l2-norm replaces --qk-layernorm.
    """
    if ns.transformer_impl == "inference_optimized":
        ns.transformer_impl = "local"
        yield "--transformer-impl inference_optimized: local layers, which generate too, are used"
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


def recomputation(ns: Namespace) -> Iterator[str]:
    """Translate two older flags for --recompute-granularity selective, and adaptive into full.

    --recompute-activations selects it.  So does --moe-layer-recompute with --num-experts, which
    also adds ``moe`` to --recompute-modules.
    """
    if ns.recompute_granularity == "adaptive":
        ns.recompute_granularity = "full"
        ns.recompute_method = ns.recompute_method or "uniform"
        ns.recompute_num_layers = ns.recompute_num_layers or 1
        yield (
            "--recompute-granularity adaptive recomputes all layers, as full does: give "
            "--check-only with --check-device-memory-gib to find less recomputation that fits"
        )
    if ns.recompute_activations:
        ns.recompute_granularity = "selective"
    if ns.moe_layer_recompute and ns.num_experts:
        ns.recompute_granularity = "selective"
        ns.recompute_modules = sorted({*(ns.recompute_modules or ()), "moe"})


def experts(ns: Namespace) -> Iterator[str]:
    """Set MoE layers from a hybrid pattern, and resolve upcycling and the flex dispatcher.

    The letters E of --hybrid-override-pattern replace --moe-layer-freq.  --moe-use-upcycling with
    --load implies --finetune: a dense checkpoint has only weights to load.
    """
    if model_kind(ns.model_kind).is_hybrid:
        pattern = ns.hybrid_override_pattern or ""
        is_whole = len(pattern) == ns.num_layers
        ns.moe_layer_freq = tuple(int(x == EXPERTS) for x in pattern) if is_whole else 1
    if ns.moe_use_upcycling and ns.load is not None:
        ns.finetune = True
    backend = ns.moe_flex_dispatcher_backend
    if ns.moe_token_dispatcher_type == "flex" and backend == "deepep":
        ns.moe_enable_deepep = True
    elif ns.moe_token_dispatcher_type == "flex" and backend is not None:
        yield (
            f"--moe-flex-dispatcher-backend {backend} is without effect: PyTorch's all-to-all "
            "dispatches tokens; deepep uses that package"
        )


def batch_sizes(ns: Namespace) -> None:
    """Set the default of --global-batch-size: one micro-batch per data-parallel rank."""
    if ns.global_batch_size is None and ns.micro_batch_size is not None:
        degrees = ns.tensor_model_parallel_size, ns.pipeline_model_parallel_size
        replicas = data_parallel_size(ns.world_size, *degrees, ns.context_parallel_size)
        ns.global_batch_size = ns.micro_batch_size * replicas


def fine_tuning(ns: Namespace) -> None:
    """Set the normalization of the loss and the alignment of packed conversations.

    Means of micro-batches would depend on which conversations share a row.  Context parallelism
    splits each conversation into twice as many parts as it has ranks.
    """
    if not reads_conversations(ns):
        return
    ns.calculate_per_token_loss = True
    if ns.sft_alignment is None:
        ns.sft_alignment = sequence_divisor(cp=ns.context_parallel_size)


def data_sources(ns: Namespace) -> Iterator[str]:
    """Set --split to 969, 30, 1 for data of all splits, if it is not given."""
    flags = "--data-path", "--data-args-path", "--phase-data-args-path"
    flag = next((f for f in flags if getattr(ns, f[2:].replace("-", "_")) is not None), None)
    if flag is not None and ns.split is None:
        ns.split = "969, 30, 1"
        yield f"--split is not given: {flag} is split into train, valid, test as {ns.split}"


def weight_decay(ns: Namespace) -> None:
    """Under --weight-decay-incr-style constant ignore --start-weight-decay, --end-weight-decay.

    Both become --weight-decay.
    """
    if ns.weight_decay_incr_style == "constant":
        ns.start_weight_decay = ns.end_weight_decay = ns.weight_decay


def image_classes(ns: Namespace) -> Iterator[str]:
    """Derive the length of an image classifier's sequences, which tensor-parallel ranks divide.

    ``--data-path TRAIN VALID`` names a folder of each split, as in Megatron-LM's
    pretrain_vision_classify.py.
    """
    if not model_kind(ns.model_kind).classifies_images:
        return
    side = max(1, ns.patch_dim)  # a rule reports 0
    length = (ns.img_h // side) * (ns.img_w // side) + 1
    for flag, given in (
        ("--seq-length", ns.seq_length),
        ("--encoder-seq-length", ns.encoder_seq_length),
        ("--max-position-embeddings", ns.max_position_embeddings),
    ):
        if given not in (None, length):
            yield (
                f"{flag} {given} is without effect: an image has {length} positions, its patches "
                "and the class token"
            )
    ns.seq_length = _whole_parts(ns, length)
    ns.encoder_seq_length = None
    ns.max_position_embeddings = length  # the table must not depend on the layout
    words: tuple[str, ...] = tuple(ns.data_path or ())
    if len(words) == 2 and not _is_number(words[0]):
        ns.train_data_path = words[:1]
        ns.valid_data_path = words[1:]
        ns.data_path = None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def images(ns: Namespace) -> Iterator[str]:
    """Derive the encoder's depth and the lengths of a model that reads images.

    --encoder-num-layers is the encoder's depth and --decoder-num-layers the language model's; both
    default to --num-layers.  Format torch, the only one of Megatron-LM's pretrain_vlm.py, becomes
    the default format.
    """
    kind = model_kind(ns.model_kind)
    if not kind.has_placeholders:
        ns.model_provider = "mock"
        ns.num_frames = 1
        ns.encoder_tp = None
    if not kind.reads_images:
        return
    if ns.vision_model_type not in KINDS:
        ns.vision_model_type = None  # a value that is reported as refused
    if ns.ckpt_format == "torch":
        ns.ckpt_format = CheckpointConfig.ckpt_format
        yield (
            f"--ckpt-format torch is without effect: this run saves in format {ns.ckpt_format}, "
            "which has a place for the encoder of images; tools/checkpoint/convert.py writes "
            "torch_dist"
        )
    ns.num_layers = ns.num_layers or ns.encoder_num_layers
    if ns.vision_num_layers is None:
        ns.vision_num_layers = ns.encoder_num_layers or ns.num_layers
    ns.num_layers = ns.decoder_num_layers or ns.num_layers
    ns.encoder_num_layers = None
    if kind.has_placeholders:
        _mimo_defaults(ns)
    ns.dataloader_seq_length = ns.dataloader_seq_length or ns.seq_length or ns.encoder_seq_length
    if ns.dataloader_seq_length is not None:
        _image_lengths(ns, has_placeholders=kind.has_placeholders)


def _image_lengths(ns: Namespace, *, has_placeholders: bool) -> None:
    """Derive --seq-length from the length of texts, which --dataloader-seq-length is.

    It becomes that of the text with the embeddings of its images in their places, or
    --decoder-seq-length if that is more, in parts of equal length for the ranks that share a row.
    """
    text = ns.dataloader_seq_length
    try:
        of_tile = get_num_image_embeddings(
            *(ns.img_h, ns.img_w, ns.patch_dim, ns.vision_model_type or "clip"),
            *(ns.disable_vision_class_token, 1, ns.pixel_shuffle, ns.pooled_image_embeddings),
        )
    except (ConfigError, ZeroDivisionError):  # a rule reports it
        of_tile = 0
    of_image = largest_image(ns, of_tile) if ns.decoder_seq_length is None else of_tile
    num_images = 2 if ns.use_packed_sequence and ns.decoder_seq_length is None else 1
    length = max(text + num_images * of_image, ns.decoder_seq_length or 0)
    if has_placeholders:
        length = text
        text -= of_tile * ns.num_frames + ns.audio_seq_length * (ns.model_provider == "llava_avlm")
    ns.dataloader_seq_length = text
    ns.row_length = length
    ns.seq_length = _whole_parts(ns, length)
    ns.decoder_seq_length = None
    # The table of positions must not depend on the layout.
    ns.max_position_embeddings = max(ns.max_position_embeddings or 0, length)
    ns.tp_comm_overlap |= ns.decoder_tp_comm_overlap


def _whole_parts(ns: Namespace, length: int) -> int:
    """Return the least length from ``length`` on that the ranks that share a row divide."""
    part = sequence_divisor(
        cp=ns.context_parallel_size,
        tp=ns.tensor_model_parallel_size,
        sequence_parallel=ns.sequence_parallel,
    )
    part = max(1, part)  # a rule reports sizes below 1
    return -(-length // part) * part


def _mimo_defaults(ns: Namespace) -> None:
    """Set the flags of the encoder of images, the data and the length by those of MiMo.

    All providers but mock have the layers of CLIP and drop its class token; only video_llava_vlm
    has several frames.  --total-seq-length is --seq-length, which counts placeholders.
    """
    if ns.model_provider != "mock":
        ns.vision_model_type = ns.vision_model_type or "clip"
        ns.disable_vision_class_token = True
    if ns.model_provider != "video_llava_vlm":
        ns.num_frames = 1
    if ns.image_size is not None:
        ns.img_h = ns.img_w = ns.image_size
    ns.dataloader_seq_length = ns.total_seq_length or ns.seq_length or ns.encoder_seq_length
    sources = ns.data_path or ns.data_args_path or ns.train_data_path or ns.per_split_data_args_path
    ns.mock_data |= ns.dataset_provider == "mock" or (ns.dataset_provider is None and not sources)


def cuda_graph_capture(ns: Namespace) -> Iterator[str]:
    """Reduce the scope of CUDA graphs to what the run supports; yield a warning per reduction.

    A graph cannot contain decisions of the host.  Parts that need them run eagerly, with the same
    results.
    """
    flag = "--external-cuda-graph" if ns.external_cuda_graph else "--enable-cuda-graph"
    if ns.cuda_graph_impl != "none":
        flag = f"--cuda-graph-impl {ns.cuda_graph_impl}"
        ns.enable_cuda_graph = not ns.external_cuda_graph
    if ns.enable_cuda_graph == ns.external_cuda_graph:  # neither, or both, which is refused
        return
    if ns.cuda_graph_impl == "full_iteration" or "full_iteration" in ns.cuda_graph_modules:
        ns.cuda_graph_scope = "full_iteration"
    elif "attn" in ns.cuda_graph_modules:
        ns.cuda_graph_scope = "attn"
    reasons = [reason for reason, applies in _nothing_is_captured(ns).items() if applies]
    if reasons:
        ns.enable_cuda_graph = ns.external_cuda_graph = False
        ns.cuda_graph_impl = "none"
        yield f"{flag} is without effect, nothing is captured: {'; '.join(reasons)}"
        return
    reasons = [reason for reason, applies in _no_whole_step(ns).items() if applies]
    if ns.cuda_graph_scope == "full_iteration" and reasons:
        ns.cuda_graph_scope = "full"
        by_impl = ns.cuda_graph_impl == "full_iteration"
        yield (
            f"{flag if by_impl else '--cuda-graph-scope full_iteration'}: each layer is captured "
            f"instead of the whole step: {'; '.join(reasons)}"
        )
    if ns.cuda_graph_scope == "full" and ns.num_experts:
        yield (
            f"{flag}: only attention is captured in layers with experts, whose token counts "
            "the host has to know"
        )


def _nothing_is_captured(ns: Namespace) -> dict[str, bool]:
    """Return reasons, and whether each applies."""
    updates = "the host updates scales and quantized weights"
    return {
        f"--recompute-granularity {ns.recompute_granularity} re-runs layers in backward": (
            ns.recompute_granularity is not None
        ),
        f"with --fp8-format {ns.fp8} {updates}": ns.fp8 is not None,
        f"with --fp4-format {ns.fp4} {updates}": ns.fp4 is not None,
        "sharded parameters are gathered to a new address each time": is_fully_sharded(ns),
        f"--pipeline-schedule {ns.pipeline_schedule} computes weight gradients separately": (
            str(ns.pipeline_schedule).startswith("zb")
        ),
        "--overlap-moe-expert-parallel-comm interleaves two micro-batches inside a layer": (
            ns.overlap_moe_expert_parallel_comm
        ),
        "--virtual-ranks are threads on a CPU": ns.virtual_ranks is not None,
    }


def _no_whole_step(ns: Namespace) -> dict[str, bool]:
    kind = model_kind(ns.model_kind)
    return {
        f"--pipeline-model-parallel-size is {ns.pipeline_model_parallel_size}": (
            ns.pipeline_model_parallel_size > 1
        ),
        "with experts the host has to know token counts": bool(ns.num_experts),
        "the losses of --mtp-num-layers are read inside a step": ns.mtp_num_layers is not None,
        f"the losses of {kind.title} are read inside a step": kind.has_masked_lm_head,
        "--fp16 adapts its loss scale inside a step": ns.fp16 and ns.loss_scale is None,
        "--timing-log-level above 0 times parts of a step": ns.timing_log_level > 0,
        "--log-straggler times parts of a step": ns.log_straggler,
    }


DERIVATIONS: tuple[Derivation, ...] = (
    virtual_ranks,
    parallel_degrees,
    data_parallel_sharding,
    precision,
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
    experts,
    batch_sizes,
    data_sources,
    fine_tuning,
    weight_decay,
    cuda_graph_capture,
)
