"""Compare the flags of the run that wrote a checkpoint with this run's, or set them from it.

Flags such as --num-attention-heads or --norm-epsilon change what the model computes, but not the
shape of any tensor, so with another value the run would silently train another model.  Both command
lines are resolved, so that an omitted value equals its default.  Flags that the checkpoint does not
contain, and flags that the rest of the model does not read, are not compared.

--use-checkpoint-args runs on every rank alike, before the command line is checked and before a
process group exists.
"""

from __future__ import annotations

import argparse
import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing.plain_values import plain
from megatron.core.models.vision.kinds import KINDS
from megatron.core.quantization.quant_config import is_text_of_globs
from megatron.core.ssm.mamba_hybrid_layer_allocation import ATTENTION, layer_pattern
from megatron.core.transformer.config.attention import LINEAR_VARIANTS, SPARSE_VARIANT
from megatron.core.transformer.spec_utils import reason_not_own_spec
from megatron.training.arguments.derive import DERIVATIONS
from megatron.training.arguments.flat_values import flat_values
from megatron.training.arguments.parser import OF_PROGRAM, build_parser
from megatron.training.arguments.resolve import assemble
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.checkpointing.paths import find, read_content, usable
from megatron.training.config.adapters import HEAD_SIZES, HEADS
from megatron.training.config.language_model import MODEL_KINDS
from megatron.training.models.registry import model_kind
from megatron.training.process.rank_print import print_rank_0

# Flags (dests) that describe experts, latent, linear and sparse attention, and YaRN.
EXPERTS = tuple(
    """
    num_experts moe_ffn_hidden_size moe_router_topk moe_num_hash_layers moe_router_score_function
    moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
    moe_router_group_score_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias
    moe_router_dtype moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size
    """.split()
)
LATENT = tuple(
    """
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    mla_latent_norm_epsilon
    """.split()
)
LINEAR = tuple(
    """
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads
    """.split()
)
SPARSE = tuple(
    """
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_k_norm_epsilon
    dsa_indexer_rope_interleaved dsa_indexer_scoring_relu dsa_indexer_topk_freq
    dsa_indexer_skip_topk_offset
    """.split()
)
YARN = tuple(
    """
    rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_query_scaling_beta yarn_correction_range_round_to_int mscale mscale_all_dim
    """.split()
)
ADAPTERS = (
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "lora_use_rslora",
    "lora_use_dora",
    "lora_modules_to_save",
)
IMAGES = tuple(
    """
    img_h img_w patch_dim vision_model_type vision_num_layers vision_hidden_size
    vision_ffn_hidden_size vision_num_attention_heads vision_projection_type
    disable_vision_class_token pixel_shuffle image_grid_pinpoints pooled_image_embeddings
    vision_num_position_embeddings deepstack_visual_indexes image_row_end_tokens
    """.split()
)
ANY_SIZE = tuple(name for name, kind in KINDS.items() if kind.reads_any_size)
MIMO = ("model_provider", "image_size", "image_token_id", "hf_assign_unused_tokens")
_RECIPE = "export_quant_cfg"
_QUANTIZATION_PATH = "kitchen_config_file"
TILES = tuple(
    "use_tiling max_num_tiles use_thumbnail use_area_weighted_aspect_ratio use_tile_tags".split()
)
# Set from the checkpoint even if the command line has them: another value is another model.  The
# text has attention, positions, MLP, norms, the model as a whole, and tokens.
FORCED = (
    *"""
    attention_output_gate experimental_attention_variant linear_attention_freq
    enable_mhc_connections mhc_num_residual_streams mhc_sinkhorn_iterations
    linear_norm_epsilon linear_allow_neg_eigval
    num_query_groups group_query_attention add_qkv_bias qk_layernorm qk_layernorm_full_width
    qk_layernorm_after_rope qk_l2_norm apply_query_key_layer_scaling attn_logit_softcapping
    softmax_scale softmax_type
    position_embedding_type add_position_embedding use_rotary_position_embeddings rotary_base
    rotary_percent rotary_interleaved rope_type no_rope_freq use_rope_scaling
    rope_scaling_factor rotary_seq_len_interpolation_factor mrope_section mrope_interleaved
    window_rotary_base
    relu squared_relu swiglu openai_gelu geglu quick_geglu bias_gelu_fusion
    activation_func_clamp_value glu_linear_offset moe_layer_freq moe_token_dispatcher_type
    moe_grouped_gemm moe_apply_probs_on_input
    normalization norm_epsilon apply_layernorm_1p layer_norm_placement
    apply_residual_connection_post_layernorm
    add_bias_linear attention_dropout hidden_dropout residual_scale embedding_scale output_scale
    use_mup mup_base_hidden_size mup_base_head_dim mup_attn_scale_power mup_embedding_mult
    mup_output_mult final_logit_softcapping untie_embeddings_and_output_weights bert_binary_head
    mtp_num_layers mtp_use_repeated_layer mtp_hybrid_override_pattern is_hybrid_model
    retro_chunk_length retro_encoder_layers spec
    pad_vocab_in_loss tokenizer_type tiktoken_pattern vocab_extra_ids
    """.split(),
    *EXPERTS,
    *LATENT,
    *LINEAR,
    *SPARSE,
    *YARN,
    *IMAGES,
    *ADAPTERS,
    *HEADS,
    "num_classes",
    *MIMO,
    _RECIPE,
    "export_kv_cache_quant",
    _QUANTIZATION_PATH,
)
FORCED_PREFIXES = (
    "hybrid_", "mamba_state_", "mamba_head_", "mamba_num_", "heterogeneous_", "window_",
    "longrope_", "relative_attention_",
)  # fmt: skip
FORCED_PARALLEL = tuple(
    """
    tensor_model_parallel_size pipeline_model_parallel_size encoder_pipeline_model_parallel_size
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    expert_model_parallel_size expert_tensor_parallel_size
    """.split()
)
_LAYERS_PATH = "heterogeneous_layers_config_path"
_AUDIO_PATH = "audio_encoder_model"
_OUTSIDE = "it is a file outside the checkpoint"
# Set from the checkpoint only if the command line does not have them.  Another sft_alignment
# changes the order of samples.
IF_UNSET = tuple(
    """
    model_kind num_layers encoder_num_layers decoder_num_layers encoder_seq_length
    decoder_seq_length dataloader_seq_length hidden_size ffn_hidden_size seq_length
    num_attention_heads kv_channels max_position_embeddings padded_vocab_size vocab_size
    vocab_file merge_file sft_alignment
    """.split()
)

# Of these, `compare_models` does not compare aliases, layout, kernels and precision.
NOT_COMPARED = frozenset(
    """
    model_kind encoder_num_layers group_query_attention use_rotary_position_embeddings
    add_position_embedding apply_query_key_layer_scaling moe_token_dispatcher_type
    moe_grouped_gemm moe_router_dtype is_hybrid_model encoder_seq_length padded_vocab_size
    vocab_size heterogeneous_layers_config_path
    """.split()
)
# Flags that also change names or shapes of tensors; --dist-ckpt-strictness compares those.
SHOWN_BY_TENSORS = frozenset(
    """
    num_layers decoder_num_layers hidden_size ffn_hidden_size add_bias_linear add_qkv_bias
    qk_layernorm untie_embeddings_and_output_weights bert_binary_head mtp_num_layers num_experts
    moe_ffn_hidden_size moe_latent_size moe_layer_freq moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_router_enable_expert_bias q_lora_rank kv_lora_rank
    mtp_use_repeated_layer mtp_hybrid_override_pattern
    hybrid_override_pattern retro_encoder_layers export_quant_cfg kitchen_config_file
    export_kv_cache_quant
    attention_output_gate experimental_attention_variant linear_attention_freq
    linear_conv_kernel_dim linear_num_key_heads linear_num_value_heads
    dsa_indexer_n_heads dsa_indexer_head_dim
    enable_mhc_connections mhc_num_residual_streams
    """.split()
) | {*HEADS}
# Flags that --finetune may change: the model is trained for longer contexts.
LEARNED_ANEW = frozenset(
    """
    rotary_base rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
    rope_type window_size window_attn_skip_freq window_rotary_base longrope_short_factor
    longrope_long_factor longrope_original_max_position_embeddings sft_alignment
    """.split()
).union(YARN)
# Flags that any run may change; one log line reports both values.
LOGGED = (
    *TILES,
    *"""
    seq_length decoder_seq_length dataloader_seq_length max_position_embeddings
    attention_dropout hidden_dropout lora_dropout bias_gelu_fusion spec pad_vocab_in_loss
    tokenizer_type tokenizer_model tiktoken_pattern vocab_extra_ids vocab_file merge_file
    data_path train_data_path valid_data_path test_data_path data_args_path
    per_split_data_args_path split seed adam_beta1 adam_beta2 sft_packing sft_long_conversations
    """.split(),
)


def apply_checkpoint_args(
    namespace: argparse.Namespace, load_dir: str | None = None
) -> Arguments | None:
    """Set the flags that determine the model from the checkpoint in ``load_dir``, in place.

    ``load_dir`` defaults to ``--load``.  Returns the checkpoint's command line (dest -> value), or
    None without any change if there is no checkpoint yet.  Raises ConfigError without ``--load``,
    CheckpointError for a checkpoint that cannot be read or used.
    """
    directory = load_dir or namespace.load
    if directory is None:
        raise ConfigError("--use-checkpoint-args needs --load: which checkpoint?")
    choice = find(directory, namespace.ckpt_step)
    if choice is None:
        print_rank_0(f"{directory} holds no checkpoint: the command line is used as it is")
        return None
    stored = read_content(usable(choice.found)).asked
    asked = without_code_and_paths(stored, vars(namespace))
    check_kind(asked, vars(namespace).get("model_kind"))
    values = vars(namespace)
    # The command line may set a value with or without the prefix encoder_.
    given = {n.removeprefix("encoder_") for n, v in values.items() if v is not None}
    unset = [name for name in IF_UNSET if name.removeprefix("encoder_") not in given]
    for name in dict.fromkeys((*_forced(namespace, asked), *unset)):
        stored_value = asked.get(name)
        # A flag of the program is not one of the model.
        is_settable = name in values and name not in values.get(OF_PROGRAM, ())
        if is_settable and stored_value is not None and values[name] != stored_value:
            print_rank_0(f"Setting {name} to {stored_value} from checkpoint")
            values[name] = stored_value
    return asked


def without_code_and_paths(stored: Arguments, given: Mapping[str, object]) -> JsonObject:
    """Return a checkpoint's command line without values that only this run's may set.

    These are code to import (--spec), unless it is a spec of this project, and files outside the
    checkpoint that describe the model (--heterogeneous-layers-config-path, --audio-encoder-model).
    Tokenizer files are
    data; --use-tokenizer-model-from-checkpoint-args decides about them.  ``given`` is this run's
    command line.  Raises CheckpointError if the checkpoint has such a value and ``given`` has none.
    """
    out = dict(stored)
    spec = stored.get("spec")
    # Older checkpoints contain the path of the description of layers, newer ones its text; those
    # of Megatron-LM a path of recipes.
    has_layers = stored.get(_LAYERS_PATH) and not stored.get(
        "heterogeneous_layers_config_encoded_json"
    )
    recipes = stored.get(_QUANTIZATION_PATH)
    has_recipes = recipes and not is_text_of_globs(recipes)
    for name, flag, problem in (
        ("spec", "--spec MODULE ATTRIBUTE", reason_not_own_spec(spec) if spec else None),
        (_LAYERS_PATH, "--heterogeneous-layers-config-path", _OUTSIDE if has_layers else None),
        (_AUDIO_PATH, "--audio-encoder-model", _OUTSIDE if stored.get(_AUDIO_PATH) else None),
        (_QUANTIZATION_PATH, "--kitchen-config-file", _OUTSIDE if has_recipes else None),
    ):
        if problem is not None and not given.get(name):
            value = stored[name]
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            raise CheckpointError(
                f"the checkpoint was saved with {flag.split()[0]} {shown}, which is not taken from "
                f"it: {problem}; pass {flag} if you trust it"
            )
        if problem is not None or name in (_LAYERS_PATH, _AUDIO_PATH):
            out[name] = None
    return out


def check_kind(asked: Arguments, wanted: str | None) -> None:
    """Raise CheckpointError if the model kind of a checkpoint is not ``wanted``.

    A model of another kind has other tensors.  Megatron-LM stores no kind: its checkpoints pass.
    """
    stored = asked.get("model_kind")
    if None not in (stored, wanted) and stored != wanted:
        entry = model_kind(stored).entry_script if stored in MODEL_KINDS else "its entry script"
        raise CheckpointError(
            f"the checkpoint in --load is of kind {stored}, the command line builds {wanted}: use "
            f"{entry}, or another --load"
        )


def _forced(namespace: argparse.Namespace, asked: Arguments) -> Iterable[str]:
    reads_any_size = asked.get("vision_model_type") in ANY_SIZE  # then they bound its area
    omitted = {"img_h", "img_w"} if reads_any_size else set()
    if asked.get("lora_rank") is None:  # the base of this run's adapters
        omitted |= set(ADAPTERS)
    if not any(asked.get(name) for name in HEAD_SIZES):  # the model that this run trains heads on
        omitted |= set(HEADS)
    if not (asked.get(_RECIPE) or asked.get(_QUANTIZATION_PATH)):  # the model to calibrate
        omitted.add("export_kv_cache_quant")
    yield from (each for each in FORCED if each not in omitted)
    yield from (name for name in asked if name.startswith(FORCED_PREFIXES))
    if namespace.use_tokenizer_model_from_checkpoint_args:
        yield "tokenizer_model"
    if namespace.use_mp_args_from_checkpoint_args:
        yield from FORCED_PARALLEL


def saved_namespace(asked: Arguments) -> argparse.Namespace:
    """Return the command line of a checkpoint as the parser would return it."""
    namespace = argparse.Namespace(**vars(build_parser().parse_args([])))
    known = vars(namespace)
    for dest, value in asked.items():
        if dest in known and (value is not None or known[dest] is None):  # None: not given
            if isinstance(default := known[dest], enum.Enum) and isinstance(value, str):
                value = type(default).__members__.get(value, default)  # JSON has no enums
            known[dest] = value
    return namespace


_ROTARY = ("rotary_", "rope_", "longrope_", "use_rope_scaling", "no_rope_freq", *YARN)
_OF_ATTENTION = ("num_attention_heads", "num_query_groups", "kv_channels", "softmax_", "window_")
_DERIVED = "kv_channels softmax_scale ffn_hidden_size max_position_embeddings".split()
_NO_PLAIN_GELU = ("swiglu", "geglu", "quick_geglu", "relu", "squared_relu", "openai_gelu")
_OF_ALIGNMENT = ("sft", "context_parallel_size")  # what --sft-alignment follows from
# Effective values of omitted flags, where the configuration has None.
_MEANT = {
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "output_scale": 1.0,
    "rotary_seq_len_interpolation_factor": 1,
    "moe_router_topk_scaling_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}

_OTHER_TOKENS = (
    "ids of equal value may be other tokens; give the tokenizer of the checkpoint, or "
    "--use-checkpoint-args"
)


@dataclass(frozen=True)
class ModelDifferences:
    """Flags whose values differ: for each of them a phrase with both values.

    ``refused``: they make it another model.  ``shown``: the tensors differ as well.  ``logged``: a
    run may change them.  ``warned``: every program may, but seldom should.  ``may_finetune``:
    --finetune would accept everything that is refused.
    """

    refused: Sequence[str]
    shown: Sequence[str]
    logged: Sequence[str]
    warned: Sequence[str] = ()
    may_finetune: bool = False

    def check(self, folder: Path) -> None:
        """Raise CheckpointError that lists the differences, if any of them is refused."""
        if not self.refused:
            return
        lines = "".join(f"\n  - {line}" for line in (*self.refused, *self.shown))
        also = ", or --finetune to train the changed model from these weights"
        raise CheckpointError(
            f"{folder} holds another model than the command line describes:{lines}\n"
            "give the values of the checkpoint, or leave these flags out and add "
            "--use-checkpoint-args"
            f"{also if self.may_finetune else ''}"
        )


def compare_models(stored: Arguments, asked: Arguments, *, is_finetuning: bool) -> ModelDifferences:
    """Compare the command line of a checkpoint with this run's (dest -> value).

    Raises CheckpointError for a stored command line that describes no model.
    """
    kind = asked.get("model_kind") or "gpt"
    try:
        theirs = _resolved(stored, kind)
        following = _following(stored, theirs, asked, kind)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise CheckpointError(
            f"the command line in the checkpoint describes no model: {error}"
        ) from None
    mine = _resolved(asked, kind)
    groups: dict[str, list[str]] = {"refused": [], "shown": [], "logged": [], "warned": []}
    may_finetune = True
    for name in _compared(stored, theirs, mine):
        if _is_same(theirs[name], mine[name]) or name in following:
            continue
        flag = flags_and_defaults()[name][0]
        line = f"{name}: {theirs[name]} in the checkpoint, {mine[name]} in this run ({flag})"
        group = "refused"
        if name == "tokenizer_type":
            group = "warned"
            line = f"{line}: {_OTHER_TOKENS}"
        elif name in LOGGED:
            group = "logged"
        elif name in (_RECIPE, _QUANTIZATION_PATH) and None not in (theirs[name], mine[name]):
            may_finetune = False  # scales of equal shapes have another meaning
        elif name in SHOWN_BY_TENSORS:
            group = "shown"
        elif name not in LEARNED_ANEW:
            may_finetune = False
        elif is_finetuning:
            group = "logged"
        if theirs[name] is not None or name not in LOGGED:
            groups[group].append(line)
    return ModelDifferences(**groups, may_finetune=may_finetune)


def _compared(stored: Arguments, theirs: Arguments, mine: Arguments) -> Iterator[str]:
    """Yield the flags that the checkpoint contains and both models read."""
    prefixed = (name for name in stored if name.startswith(FORCED_PREFIXES))
    for name in dict.fromkeys((*FORCED, *IF_UNSET, *prefixed, *LOGGED)):
        if name in NOT_COMPARED or name not in stored or name not in mine:
            continue
        if name == "heterogeneous_layers_config_encoded_json" and not stored[name]:
            continue  # older checkpoints contain the path of the file
        if _is_read(name, theirs) and _is_read(name, mine):
            yield name


def _following(stored: Arguments, theirs: Arguments, asked: Arguments, kind: str) -> set[str]:
    """Return flags that neither side gave and whose values follow from compared flags.

    Megatron-LM stores derived values, so a stored value that equals the derived one counts as not
    given.
    """
    derived = _resolved({k: v for k, v in stored.items() if k not in _DERIVED}, kind)
    out = {n for n in _DERIVED if asked.get(n) is None and theirs[n] == derived[n]}
    grouped = "group_query_attention"
    return out if stored.get(grouped) or asked.get(grouped) else out | {"num_query_groups"}


def _is_read(name: str, values: Arguments) -> bool:
    """Return whether the model that ``values`` describe depends on flag ``name``."""
    is_latent = bool(values["multi_latent_attention"])
    is_moe = bool(values["num_experts"])
    kind = model_kind(values["model_kind"])
    conditions = (
        (_ROTARY, is_latent or values["position_embedding_type"] in ("rope", "mrope")),
        ("mrope_", values["position_embedding_type"] == "mrope"),
        (YARN, values["rope_type"] == "yarn"),
        ("rope_scaling_factor", bool(values["use_rope_scaling"])),
        ("relative_attention_", values["position_embedding_type"] == "relative"),
        (LATENT[1:], is_latent),
        ("linear_", values["experimental_attention_variant"] in LINEAR_VARIANTS),
        (SPARSE, values["experimental_attention_variant"] == SPARSE_VARIANT),
        ("mhc_", values["enable_mhc_connections"]),
        (EXPERTS[1:], is_moe),
        ("moe_", is_moe),
        (("mamba_", "hybrid_"), kind.is_hybrid),
        (("hybrid_attention_ratio", "hybrid_mlp_ratio"), False),  # the pattern includes both
        (
            _OF_ATTENTION,
            not kind.is_hybrid or ATTENTION in (values["hybrid_override_pattern"] or ""),
        ),
        ("bias_gelu_fusion", not any(values[name] for name in _NO_PLAIN_GELU)),
        (("decoder_num_layers", "decoder_seq_length"), kind.has_encoder),
        (("img_h", "img_w"), values["vision_model_type"] not in ANY_SIZE),
        (IMAGES, kind.reads_images or kind.classifies_images),
        ((*TILES, "dataloader_seq_length"), kind.reads_images),
        ("num_classes", kind.classifies_images),
        (MIMO, kind.has_placeholders),
        ("bert_binary_head", kind.has_masked_lm_head),
        ("retro_", kind.reads_neighbors),
        ("lora_", values["lora_rank"] is not None),
        ("sft_", bool(values["sft"])),
    )
    return all(is_so for names, is_so in conditions if name.startswith(names))


def _resolved(asked: Arguments, kind: str) -> JsonObject:
    """Return all flags of the model that ``asked`` describes, derived values included."""
    names = {*FORCED, *IF_UNSET, *LOGGED, *_OF_ALIGNMENT}
    said = {
        name: value
        for name, value in asked.items()
        if name in names or name.startswith(FORCED_PREFIXES)
    }
    namespace = saved_namespace({**said, "model_kind": kind})
    namespace.world_size = 1
    for derive in DERIVATIONS:
        list(derive(namespace) or ())  # its messages were reported when the run was resolved
    values = flat_values(assemble(namespace, asked=vars(namespace)))
    for name, meant in _MEANT.items():
        values[name] = meant if values[name] is None else values[name]
    if values["rope_type"] is None:
        values["rope_type"] = "yarn" if values["multi_latent_attention"] else "rope"
    if values["softmax_scale"] is None and values["kv_channels"]:
        values["softmax_scale"] = values["kv_channels"] ** -0.5
    if values["lora_alpha"] is None:
        values["lora_alpha"] = values["lora_rank"]
    if model_kind(kind).is_hybrid and values["num_layers"]:
        if values["mamba_num_heads"] is None:
            values["mamba_num_heads"] = 2 * values["hidden_size"] // values["mamba_head_dim"]
        values["hybrid_override_pattern"] = layer_pattern(
            values["num_layers"],
            values["hybrid_attention_ratio"],
            values["hybrid_mlp_ratio"],
            values["hybrid_override_pattern"],
        )
    return {name: plain(value) for name, value in values.items()}


def _is_same(theirs: object, mine: object) -> bool:
    """Return whether two plain values are equal; floats to the 7 digits of float32."""
    if isinstance(theirs, list) and isinstance(mine, list):
        return len(theirs) == len(mine) and all(map(_is_same, theirs, mine))
    if isinstance(theirs, float) and isinstance(mine, float):
        return math.isclose(theirs, mine, rel_tol=1e-7)
    return bool(theirs == mine)
