"""Rules about the architecture of the model, its positions, and its kind."""

from __future__ import annotations

from megatron.core.config.rule import first_of, given, rules, where
from megatron.core.device import CPU
from megatron.core.models.common.embeddings.rotary_pos_embedding import wrong_sections
from megatron.core.ssm.mamba_hybrid_layer_allocation import (
    EXPERTS,
    MAMBA,
    mixer_problems,
    mixer_shape,
    pattern_problems,
)
from megatron.core.transformer.config.attention import KDA, LINEAR_VARIANTS
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.core.transformer.layer_layout import layer_ranges, layout_problems
from megatron.training.arguments.rules.rule import Settings, refusal
from megatron.training.config.language_model import MODEL_KINDS
from megatron.training.config.run import PRETRAINING
from megatron.training.models.registry import model_kind

# Limits far above the largest models and devices.  A larger product is a typing error, and a much
# larger one does not fit the 64 bits of a tensor's size.
_MAX_PARAMETERS = 10**15
_MAX_ACTIVATIONS = 10**15  # values of one micro-batch in its widest tensor


def _vocabulary(c: Settings) -> int:
    return int(c.padded_vocab_size or c.vocab_size or 0)


def _count_parameters(c: Settings) -> int:
    experts = (c.num_moe_experts or 0) * (c.moe_ffn_hidden_size or 0)
    heads = c.num_attention_heads * (c.kv_channels or 0)
    positions = (c.max_position_embeddings or 0) + _vocabulary(c)
    in_a_layer = c.hidden_size * (4 * heads + 3 * max(c.ffn_hidden_size or 0, experts))
    return int(c.num_layers * in_a_layer + positions * c.hidden_size)


def _count_activations(c: Settings) -> int:
    heads = c.num_attention_heads * (c.kv_channels or 0)
    width = max(c.hidden_size, c.ffn_hidden_size or 0, heads, _vocabulary(c))
    return int(c.micro_batch_size * c.seq_length * width)


def _find_activation_functions(c: Settings) -> str:
    chosen = given("--swiglu --geglu --quick-geglu --squared-relu --relu")(c)
    if chosen != ["--geglu"]:  # --openai-gelu chooses the approximation of its GELU
        chosen += given("--openai-gelu")(c)
    return " and ".join(chosen) if len(chosen) > 1 else ""


_ARCHITECTURE = rules(
    {
        f"the model has about {{found:.1e}} parameters, more than {_MAX_PARAMETERS:.0e}: "
        "lower --hidden-size, --ffn-hidden-size, "
        "--num-layers, --num-experts or --vocab-size": lambda c: (
            (count := _count_parameters(c)) > _MAX_PARAMETERS and count
        ),
        "a micro-batch has about {found:.1e} activations in one tensor, more than "
        f"{_MAX_ACTIVATIONS:.0e}: lower --micro-batch-size, "
        "--seq-length or the model's widths": lambda c: (
            (count := _count_activations(c)) > _MAX_ACTIVATIONS and count
        ),
        "{--hidden-size} is not a multiple of {--num-attention-heads}: change one of them or give "
        "the width of a head by --kv-channels": lambda c: (
            c.asked["kv_channels"] is None
            and c.num_attention_heads
            and c.hidden_size % c.num_attention_heads
        ),
        "{found} exclude each other: keep the model's activation": _find_activation_functions,
        "--qk-layernorm-full-width widens --qk-layernorm, which is not given: add it": lambda c: (
            c.qk_layernorm_full_width and not c.qk_layernorm
        ),
        "{found}": lambda c: refusal(layer_shapes, c.config.model),
        "{found}: a module and a name in it, or local, is needed": given(
            "--spec", lambda spec: len(spec) != 2 and spec != ("local",)
        ),
    },
    where(
        "--mtp-num-layers",
        {
            "{--mtp-num-layers}: multi-token prediction (MTP) does not support learned positions; "
            "use --position-embedding-type "
            "rope (or alibi or none)": "--position-embedding-type learned_absolute",
            "--mtp-use-repeated-layer and --overlap-grad-reduce exclude each other with "
            "recomputation and with weight gradients that are computed later "
            "(--pipeline-schedule zb-h1 or zb-v, --delay-wgrad-compute): each pass of the layer "
            "has a gradient of its own; drop one of them": lambda c: (
                c.mtp_use_repeated_layer
                and c.overlap_grad_reduce
                and (
                    c.recompute_granularity
                    or c.delay_wgrad_compute
                    or (c.pipeline_schedule or "").startswith("zb")
                )
            ),
            "--moe-router-load-balancing-type global_aux_loss and --mtp-use-repeated-layer exclude "
            "each other: the loss counts one pass of each layer in a micro-batch; use "
            "aux_loss": lambda c: (
                c.mtp_use_repeated_layer
                and c.num_moe_experts is not None
                and "global_aux_loss" in c.config.model.load_balancing_types
            ),
            "{--mtp-num-layers} and --defer-embedding-wgrad-compute need "
            "--untie-embeddings-and-output-weights: the MTP layers' embedding adds to the "
            "gradient of a tied weight": lambda c: (
                c.defer_embedding_wgrad_compute and not c.untie_embeddings_and_output_weights
            ),
        },
    ),
    {
        "--require-transformer-engine and --device cpu exclude each other: Transformer Engine "
        "needs a GPU, which --device cuda selects": lambda c: (
            c.require_transformer_engine and c.transformer_impl != "local" and c.device == CPU
        ),
    },
)


def _find_longer_sample(c: Settings) -> int:
    """Return the length of a sample that is longer than the table of positions; else 0."""
    table = c.max_position_embeddings
    longest = max(c.seq_length, c.decoder_seq_length or 0)
    if c.kind.reads_images:  # its positions count an image as one token
        longest = (c.dataloader_seq_length or 0) + 1
    # An image classifier has padding beyond the table.
    has_table = c.position_embedding_type == "learned_absolute" and not c.kind.classifies_images
    return longest if has_table and table and table < longest else 0


def _count_rotated_pairs(c: Settings) -> int:
    return int((c.kv_channels or 0) * c.rotary_percent) // 2


def _find_rotary_scalings(c: Settings) -> str:
    flags = "--use-rope-scaling --rotary-seq-len-interpolation-factor --longrope-short-factor"
    scalings = [flag for flag in flags.split() if c.value(flag)]
    scalings += given("--rope-type", lambda name: name == "yarn")(c)
    return " and ".join(scalings) if len(scalings) > 1 else ""


_LONGROPE = (
    "--longrope-short-factor --longrope-long-factor --longrope-original-max-position-embeddings"
).split()

_POSITIONS = rules(
    {
        "--position-embedding-type {asked[position_embedding_type]} and "
        "--use-rotary-position-embeddings, which means --position-embedding-type rope, exclude "
        "each other: keep one of them": lambda c: (
            c.asked["use_rotary_position_embeddings"]
            and c.asked["position_embedding_type"] not in ("learned_absolute", "rope", "yarn")
        ),
        "{--max-position-embeddings} is less than the {found} tokens of a sample (--seq-length): "
        "raise it or shorten the samples": _find_longer_sample,
        "--no-position-embedding contradicts {--position-embedding-type}: use "
        "--position-embedding-type none": lambda c: (
            not c.asked["add_position_embedding"]
            and c.position_embedding_type not in ("rope", "none")
        ),
    },
    where(
        "--position-embedding-type mrope",
        {
            "--position-embedding-type mrope with {--model-kind}: only GPT and models that read "
            "images support it; use rope": lambda c: (
                c.kind.has_encoder or c.kind.has_masked_lm_head or c.kind.is_hybrid
            ),
            "{found}": lambda c: wrong_sections(c.mrope_section, _count_rotated_pairs(c)),
        },
    ),
    where(
        lambda c: c.position_embedding_type in ("rope", "mrope"),
        first_of(
            {
                "{found}: more than 0 and at most 1 is needed": given(
                    "--rotary-percent", lambda share: not 0 < share <= 1
                ),
                "{--rotary-percent} of a head {kv_channels} wide is an odd number of channels: "
                "change --rotary-percent "
                "or --kv-channels": lambda c: int((c.kv_channels or 0) * c.rotary_percent) % 2,
            },
        ),
    ),
    {
        "{found} exclude each other: keep the model's scaling": _find_rotary_scalings,
    },
    where(
        lambda c: any(c.value(flag) is not None for flag in _LONGROPE),
        {
            "LongRoPE also needs {found}": lambda c: " and ".join(
                flag for flag in _LONGROPE if c.value(flag) is None
            ),
            "LongRoPE scales rotations and --position-embedding-type is "
            "{position_embedding_type}: use rope": lambda c: c.position_embedding_type != "rope",
            "{found}": lambda c: [
                f"{flag} has {len(factors)} numbers and a head rotates {pairs} pairs of channels"
                for flag in _LONGROPE[:2]
                if isinstance(factors := c.value(flag), tuple)
                and len(factors) != (pairs := _count_rotated_pairs(c))
            ],
        },
    ),
    where(
        "--multi-latent-attention",
        {
            "--multi-latent-attention with {--position-embedding-type}: it rotates a part of each "
            "head itself; use rope or none, or learned_absolute to add a learned table": lambda c: (
                c.position_embedding_type not in ("rope", "none", "learned_absolute")
            ),
            "--group-query-attention and --multi-latent-attention exclude each other: keep the "
            "first to share key and value heads, the second "
            "to compress them to a latent vector": lambda c: c.asked["group_query_attention"],
        },
    ),
    where(
        "--position-embedding-type relative",
        first_of(
            {
                "{found}: use 4 or more": given(
                    "--relative-attention-num-buckets", lambda count: count < 4
                ),
                "{--relative-attention-max-distance}: it must exceed the {found} buckets of small "
                "distances; raise it or lower --relative-attention-num-buckets": lambda c: (
                    c.relative_attention_max_distance
                    <= (near := c.relative_attention_num_buckets // 2)
                    and near
                ),
            },
        ),
    ),
)


def _find_scripts(c: Settings) -> str:
    """Return the programs of the kinds that have the objective, if the model's kind lacks it."""
    if c.objective in (PRETRAINING, *c.kind.objectives):
        return ""
    kinds = (model_kind(name) for name in MODEL_KINDS)
    return ", ".join(kind.entry_script for kind in kinds if c.objective in kind.objectives)


def problems_of_kind(c: Settings) -> list[str]:
    """Return the problems that the model kind reports, which user code may define."""
    return list(c.kind.problems(c.config))


_KIND = rules(
    {
        "{--context-parallel-size} with {kind.title}: {kind.title} does not support context "
        "parallelism; for long sequences use "
        "--tensor-model-parallel-size with --sequence-parallel": lambda c: (
            c.context_parallel_size > 1 and not c.kind.supports_context_parallel
        ),
        "{objective} "
        "is not implemented for {kind.title}: it is for models of {found}": _find_scripts,
        "{found}": problems_of_kind,
    },
)


def _has_explicit_layer_frequency(c: Settings) -> bool:
    freq = c.asked["moe_layer_freq"]
    # Checkpoints in Megatron-LM's formats have the list that was derived from the pattern.
    is_derived = isinstance(freq, list | tuple) and tuple(freq) == c.moe_layer_freq
    return freq != 1 and not is_derived


_HYBRID = rules(
    {
        "--is-hybrid-model: this program does not train hybrid models; use pretrain_mamba.py "
        "(--model-kind mamba)": lambda c: c.is_hybrid_model and not c.kind.is_hybrid,
    },
    where(
        lambda c: c.kind.is_hybrid,
        {
            "{found}": lambda c: (
                list(
                    pattern_problems(
                        c.num_layers,
                        c.hybrid_attention_ratio,
                        c.hybrid_mlp_ratio,
                        c.hybrid_override_pattern,
                        c.mtp_hybrid_override_pattern,
                    )
                )
                if c.num_layers
                else ()
            ),
            "{--mtp-num-layers} in a Mamba or hybrid model needs the letters of an MTP layer: add "
            "--mtp-hybrid-override-pattern": lambda c: (
                c.mtp_num_layers and c.mtp_hybrid_override_pattern is None
            ),
            "{found} is not available for Mamba and hybrid models: a Mamba layer normalizes "
            "before its mixer (pre); use pretrain_gpt.py "
            "for other placements": given("--layer-norm-placement", lambda place: place != "pre"),
            "{found} is not available for Mamba and hybrid models: use --hybrid-override-pattern "
            "to choose the layers": "--heterogeneous-layers-config-path",
            "{found} is not available for Mamba and hybrid models: a Mamba layer carries its "
            "state across the end "
            "of a document; use pretrain_gpt.py to separate documents": "--reset-attention-mask",
        },
    ),
    where(
        lambda c: MAMBA in c.hybrid_pattern and c.hidden_size,
        first_of(
            {
                "{found}": lambda c: list(mixer_problems(c.config.model)),
                "{--fp8-format}: the input projection of a Mamba layer has {found} rows on each "
                "tensor-parallel rank, not a multiple of 16; change --mamba-num-heads or "
                "--mamba-state-dim": lambda c: (
                    c.fp8 is not None
                    and (
                        rows := sum(mixer_shape(c.config.model).projected)
                        // max(1, c.tensor_model_parallel_size)
                    )
                    % 16
                    and rows
                ),
            },
        ),
    ),
    where(
        lambda c: c.hybrid_pattern,
        {
            "--hybrid-override-pattern {hybrid_pattern} has "
            "MoE layers, E: add --num-experts": lambda c: (
                EXPERTS in c.hybrid_pattern and c.num_moe_experts is None
            ),
            "{--num-experts}: no layer of the pattern {hybrid_pattern} has experts; give "
            "--hybrid-override-pattern with an E for each MoE layer": lambda c: (
                EXPERTS not in c.hybrid_pattern and c.num_moe_experts is not None
            ),
            "--moe-layer-freq {asked[moe_layer_freq]} is not available for hybrid models: put an "
            "E into --hybrid-override-pattern for each MoE layer": _has_explicit_layer_frequency,
        },
    ),
)

_ATTENTION_VARIANT = where(
    "--experimental-attention-variant",
    {
        "{--experimental-attention-variant} with {kind.title}: only GPT has such layers; use "
        "pretrain_gpt.py": lambda c: not c.kind.has_linear_attention,
    },
)

_LINEAR_ATTENTION = where(
    lambda c: c.experimental_attention_variant in LINEAR_VARIANTS,
    {
        "{found} and --experimental-attention-variant exclude each other: linear attention carries "
        "its state across the end of a document; drop the flag, or pack conversations with --sft": (
            "--reset-attention-mask"
        ),
        "{--context-parallel-size} does not divide the {found} key heads of linear attention on a "
        "tensor-parallel rank, as packed conversations need: use a divisor": lambda c: (
            min(c.context_parallel_size, c.tensor_model_parallel_size) >= 1
            and c.objective != PRETRAINING
            and (heads := c.linear_num_key_heads // c.tensor_model_parallel_size)
            % c.context_parallel_size
            and heads
        ),
        "--experimental-attention-variant kda with {--linear-num-key-heads} and "
        "{--linear-num-value-heads}: each head has its own decays; give equal numbers": lambda c: (
            c.experimental_attention_variant == KDA
            and c.linear_num_key_heads != c.linear_num_value_heads
        ),
        "--experimental-attention-variant kda with {--linear-key-head-dim} and "
        "{--linear-value-head-dim}: the latents of its gates, which are as wide, cannot be split "
        "over {--tensor-model-parallel-size}; use a divisor of both": lambda c: (
            c.experimental_attention_variant == KDA
            and (tp := c.tensor_model_parallel_size) >= 1
            and (c.linear_key_head_dim % tp or c.linear_value_head_dim % tp)
        ),
    },
)

_SEVERAL_STREAMS = where(
    "--enable-mhc-connections",
    {
        "--enable-mhc-connections with {kind.title}: only GPT has several residual streams; use "
        "pretrain_gpt.py": lambda c: not c.kind.has_linear_attention,
        "--mhc-recompute-layer-num and fully sharded parameters exclude each other: streams of "
        "several layers are recomputed at once, and parameters are gathered for one layer at a "
        "time; use --recompute-granularity full": lambda c: (
            c.mhc_recompute_layer_num is not None and c.is_fully_sharded
        ),
        "--enable-mhc-connections and {found} exclude each other: draft heads read one residual "
        "stream; drop one of the flags": (
            "--export-num-medusa-heads --export-num-eagle-layers --export-num-mtp"
        ),
    },
)

_HASH_ROUTING = where(
    lambda c: c.moe_num_hash_layers,
    {
        "--moe-num-hash-layers with {kind.title}: only GPT routes by token id; use "
        "pretrain_gpt.py": lambda c: not c.kind.has_linear_attention,
        "{--moe-num-hash-layers} on later pipeline stages: only pretraining passes token ids to "
        "them; hold these layers on the first stage": lambda c: (
            c.objective != PRETRAINING
            and c.kind.has_linear_attention
            and (ranks := c.pipeline_model_parallel_size) > 1
            and not list(layout_problems(c.model, ranks))
            and layer_ranges(c.model, ranks)[0].stop < c.moe_num_hash_layers
        ),
    },
)

_BERT = where(
    lambda c: c.kind.has_masked_lm_head,
    {
        "{found} with BERT: BERT does not support it; use learned_absolute, rope or none": given(
            "--position-embedding-type",
            lambda name: name not in ("learned_absolute", "rope", "none"),
        ),
        "{found} with BERT: the BERT model does not have this feature; use pretrain_gpt.py for "
        "it": "--num-experts --multi-latent-attention --mtp-num-layers "
        "--heterogeneous-layers-config-path",
        "{found} with BERT: BERT builds its own layers; use pretrain_gpt.py "
        "for layers from a spec": given("--spec", lambda spec: spec and spec[0] != "local"),
        "{found} with BERT: BERT does not support Llama's scaling; use "
        "--rotary-seq-len-interpolation-factor": "--use-rope-scaling",
        "{found} with BERT: a BERT sample comes from one document; use pretrain_gpt.py for packed "
        "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    },
)

_T5_STAGES = where(
    lambda c: c.kind.has_encoder and c.pipeline_model_parallel_size > 1,
    first_of(
        {
            "{--pipeline-model-parallel-size}: T5 has separate stages for encoder and decoder, "
            "and --encoder-pipeline-model-parallel-size is "
            "{encoder_pipeline_model_parallel_size}: use {found}": lambda c: (
                not 0 < c.encoder_pipeline_model_parallel_size < c.pipeline_model_parallel_size
                and f"1 to {c.pipeline_model_parallel_size - 1}"
            ),
            "{found}: change --encoder-pipeline-model-parallel-size "
            "or use fewer stages": lambda c: [
                f"{flag} {depth} layers cannot be split over {stages} pipeline stages"
                for flag, depth, stages in (
                    (
                        "--encoder-num-layers",
                        c.num_layers,
                        c.encoder_pipeline_model_parallel_size,
                    ),
                    (
                        "--decoder-num-layers",
                        c.decoder_num_layers or 0,
                        c.pipeline_model_parallel_size - c.encoder_pipeline_model_parallel_size,
                    ),
                )
                if depth < stages
            ],
        },
    ),
)

_T5 = where(
    lambda c: c.kind.has_encoder,
    {
        "virtual pipeline stages with T5: a rank has one stage; for a smaller pipeline bubble use "
        "--pipeline-schedule zb-h1": lambda c: c.virtual_pipeline_model_parallel_size is not None,
        "{found} with T5: encoder and decoder each split their layers evenly; use "
        "--encoder-pipeline-model-parallel-size to set "
        "how many stages are the encoder's": lambda c: [
            *given(
                "--pipeline-model-parallel-layout --decoder-first-pipeline-num-layers "
                "--decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split "
                "--account-for-loss-in-pipeline-split"
            )(c),
            *given("--pipeline-split", lambda name: name == "auto")(c),
        ],
        "--ckpt-format torch with T5: it cannot store encoder stages; use torch_dist or "
        "safetensors_dist": lambda c: (
            c.pipeline_model_parallel_size > 1 and c.save and c.ckpt_format == "torch"
        ),
        "{found} with T5: the T5 model does not have "
        "this feature; use pretrain_gpt.py for it": lambda c: [
            *given(
                "--num-experts --multi-latent-attention --mtp-num-layers "
                "--heterogeneous-layers-config-path --qk-layernorm --qk-l2-norm"
            )(c),
            *given("--spec", lambda spec: spec and spec[0] != "local")(c),
        ],
        "{found} with T5: T5 normalizes before attention and MLP (pre); use pretrain_gpt.py for "
        "other placements": given("--layer-norm-placement", lambda place: place != "pre"),
        "{found} with T5: a list has an entry for each layer of one stack; give a number, for "
        "every Nth layer": given(
            "--no-rope-freq --window-attn-skip-freq", lambda freq: isinstance(freq, tuple)
        ),
        "{found} with T5: T5 does not support it; use relative, learned_absolute, "
        "rope or none": given("--position-embedding-type", lambda name: name == "alibi"),
        "{found} with T5: a T5 sample comes from one document; use pretrain_gpt.py for packed "
        "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
        "{--decoder-seq-length} is not a multiple of {--tensor-model-parallel-size}, as "
        "--sequence-parallel needs: use a multiple of {tensor_model_parallel_size}": lambda c: (
            c.sequence_parallel
            and c.tensor_model_parallel_size > 0
            and (c.decoder_seq_length or 0) % c.tensor_model_parallel_size
        ),
    },
)

_RETRO = where(
    lambda c: c.kind.reads_neighbors,
    {
        "--retro-add-retriever needs --retro-project-dir, the folder of the neighbors, or "
        "--mock-data": lambda c: (
            c.retro_add_retriever and c.trains and not (c.retro_project_dir or c.mock_data)
        ),
        "{--seq-length} is not a multiple of --retro-chunk-length {retro_chunk_length}: a sample "
        "has complete chunks": lambda c: (c.seq_length or 0) % max(1, c.retro_chunk_length),
        "{--max-position-embeddings}: a neighbor has {found} positions; raise it, or lower "
        "--retro-num-retrieved-chunks": lambda c: (
            c.position_embedding_type == "learned_absolute"
            and c.retro.retrieved_length > (c.max_position_embeddings or 0)
            and c.retro.retrieved_length
        ),
        "{--tensor-model-parallel-size} does not divide the {found} tokens of a neighbor, as "
        "--sequence-parallel needs: use a divisor": lambda c: (
            c.sequence_parallel
            and c.retro.retrieved_length % max(1, c.tensor_model_parallel_size)
            and c.retro.retrieved_length
        ),
        "{found} with RETRO: the RETRO model does not have this feature; use pretrain_gpt.py for "
        "it": lambda c: [
            *given(
                "--num-experts --multi-latent-attention --mtp-num-layers --lora-rank "
                "--heterogeneous-layers-config-path --reset-attention-mask --reset-position-ids "
                "--cpu-offloading --fine-grained-activation-offloading --multiple-validation-sets "
                "--phase-transition-iterations --dataset-type"
            )(c),
            *given("--spec", lambda spec: spec and spec[0] != "local")(c),
            *given("--position-embedding-type", lambda name: name in ("alibi", "mrope"))(c),
            *given("--layer-norm-placement", lambda place: place != "pre")(c),
            *(["CUDA graphs"] if c.model.uses_graphs else []),
        ],
        "{found} changes the samples of --retro-project-dir, and neighbors belong to samples: "
        "leave it out": lambda c: (
            c.retro_add_retriever
            and c.retro_project_dir
            and not c.mock_data
            and given("--full-validation --fim-data --index-free --pack-documents")(c)
        ),
        "--ckpt-format torch with RETRO: it cannot store layers of two kinds; use torch_dist or "
        "safetensors_dist": lambda c: c.save and c.ckpt_format == "torch",
    },
)

RULES = rules(
    _ARCHITECTURE,
    _POSITIONS,
    _KIND,
    _HYBRID,
    _ATTENTION_VARIANT,
    _LINEAR_ATTENTION,
    _SEVERAL_STREAMS,
    _HASH_ROUTING,
    _BERT,
    _T5_STAGES,
    _T5,
    _RETRO,
    {
        "--retro-add-retriever: only pretrain_retro.py (--model-kind retro) reads neighbors; use "
        "it, or leave the flag out": lambda c: c.retro_add_retriever and not c.kind.reads_neighbors,
        "--position-embedding-type relative: only T5 has the relative position bias; use rope, or "
        "pretrain_t5.py": lambda c: (
            c.position_embedding_type == "relative" and not c.kind.has_encoder
        ),
    },
)
