"""--use-checkpoint-args: set the model's shape and its tokenizer from a checkpoint.

Runs on every rank alike, before the command line is checked and before a process group exists.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterable, Mapping

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.transformer.spec_utils import reason_not_own_spec
from megatron.training.arguments.parser import OF_PROGRAM, build_parser
from megatron.training.checkpointing.paths import find, read_content, usable
from megatron.training.config.language_model import MODEL_KINDS
from megatron.training.models.registry import model_kind
from megatron.training.process.rank_print import print_rank_0

# Flags (dests) that describe experts, latent attention and YaRN.
EXPERTS = tuple(
    "num_experts moe_ffn_hidden_size moe_router_topk moe_router_score_function "
    "moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
    "moe_router_group_score_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias "
    "moe_router_dtype moe_shared_expert_intermediate_size moe_shared_expert_gate".split()
)
LATENT = tuple(
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
    "v_head_dim".split()
)
YARN = tuple(
    "rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
    "yarn_correction_range_round_to_int mscale mscale_all_dim".split()
)
_ATTENTION = (
    "num_query_groups group_query_attention add_qkv_bias qk_layernorm qk_layernorm_full_width "
    "qk_l2_norm apply_query_key_layer_scaling attn_logit_softcapping softmax_scale softmax_type"
)
_POSITIONS = (
    "position_embedding_type add_position_embedding use_rotary_position_embeddings rotary_base "
    "rotary_percent rotary_interleaved rope_type no_rope_freq use_rope_scaling "
    "rope_scaling_factor rotary_seq_len_interpolation_factor mrope_section "
    "window_rotary_base"
)
_MLP = (
    "relu squared_relu swiglu openai_gelu geglu quick_geglu bias_gelu_fusion "
    "activation_func_clamp_value glu_linear_offset moe_layer_freq moe_token_dispatcher_type "
    "moe_grouped_gemm moe_apply_probs_on_input"
)
_NORMS = (
    "normalization norm_epsilon apply_layernorm_1p layer_norm_placement "
    "apply_residual_connection_post_layernorm"
)
_WHOLE = (
    "add_bias_linear attention_dropout hidden_dropout embedding_scale output_scale "
    "final_logit_softcapping untie_embeddings_and_output_weights bert_binary_head mtp_num_layers "
    "is_hybrid_model spec"
)
ADAPTERS = ("lora_rank", "lora_alpha", "lora_target_modules", "lora_use_rslora")
_TOKENS = "pad_vocab_in_loss tokenizer_type tiktoken_pattern vocab_extra_ids"
IMAGES = tuple(
    "img_h img_w patch_dim vision_model_type vision_num_layers vision_hidden_size "
    "vision_ffn_hidden_size vision_num_attention_heads vision_projection_type "
    "disable_vision_class_token pixel_shuffle image_grid_pinpoints".split()
)
MIMO = ("model_provider", "image_size", "image_token_id", "hf_assign_unused_tokens")
TILES = tuple(
    "use_tiling max_num_tiles use_thumbnail use_area_weighted_aspect_ratio use_tile_tags".split()
)
# Set from the checkpoint even if the command line has them: another value is another model.
FORCED = (
    *" ".join((_ATTENTION, _POSITIONS, _MLP, _NORMS, _WHOLE, _TOKENS)).split(),
    *EXPERTS,
    *LATENT,
    *YARN,
    *IMAGES,
    *ADAPTERS,
    "num_classes",
    *MIMO,
)
FORCED_PREFIXES = (
    "hybrid_", "mamba_", "heterogeneous_", "window_", "longrope_", "relative_attention_",
)  # fmt: skip
FORCED_PARALLEL = tuple(
    "tensor_model_parallel_size pipeline_model_parallel_size encoder_pipeline_model_parallel_size "
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "expert_model_parallel_size expert_tensor_parallel_size".split()
)
_LAYERS_PATH = "heterogeneous_layers_config_path"
_AUDIO_PATH = "audio_encoder_model"
_OUTSIDE = "it is a file outside the checkpoint"
# Set from the checkpoint only if the command line does not have them.
IF_UNSET = tuple(
    "model_kind num_layers encoder_num_layers decoder_num_layers encoder_seq_length "
    "decoder_seq_length dataloader_seq_length hidden_size ffn_hidden_size seq_length "
    "num_attention_heads kv_channels "
    "max_position_embeddings padded_vocab_size vocab_size vocab_file merge_file "
    "sft_alignment".split()  # another one changes the order of samples
)

# Of these, `same_model` does not compare aliases, layout, kernels and precision.
NOT_COMPARED = frozenset(
    "model_kind encoder_num_layers group_query_attention use_rotary_position_embeddings "
    "add_position_embedding apply_query_key_layer_scaling moe_token_dispatcher_type "
    "moe_grouped_gemm moe_router_dtype is_hybrid_model encoder_seq_length padded_vocab_size "
    "vocab_size heterogeneous_layers_config_path".split()
)
# Flags that also change names or shapes of tensors; --dist-ckpt-strictness compares those.
SHOWN_BY_TENSORS = frozenset(
    "num_layers decoder_num_layers hidden_size ffn_hidden_size add_bias_linear add_qkv_bias "
    "qk_layernorm untie_embeddings_and_output_weights bert_binary_head mtp_num_layers num_experts "
    "moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size "
    "moe_shared_expert_gate moe_router_enable_expert_bias q_lora_rank kv_lora_rank "
    "hybrid_override_pattern".split()
)
# Flags that --finetune may change: the model is trained for longer contexts.
LEARNED_ANEW = frozenset(
    (
        *"rotary_base rotary_seq_len_interpolation_factor use_rope_scaling".split(),
        *"rope_scaling_factor rope_type window_size window_attn_skip_freq".split(),
        "window_rotary_base",
        *"longrope_short_factor longrope_long_factor".split(),
        *("longrope_original_max_position_embeddings", "sft_alignment", *YARN),
    )
)
# Flags that any run may change; one log line reports both values.
LOGGED = (
    *TILES,
    *(
        "seq_length decoder_seq_length dataloader_seq_length "
        "max_position_embeddings attention_dropout hidden_dropout "
        "lora_dropout bias_gelu_fusion spec pad_vocab_in_loss tokenizer_type tokenizer_model "
        "tiktoken_pattern "
        "vocab_extra_ids vocab_file merge_file data_path train_data_path valid_data_path "
        "test_data_path data_args_path per_split_data_args_path split seed adam_beta1 "
        "adam_beta2 sft_packing sft_long_conversations"
    ).split(),
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
    for name in _forced(namespace, asked):
        _set(namespace, name, asked)
    for name in [name for name in IF_UNSET if not _is_given(namespace, name)]:
        _set(namespace, name, asked)
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
    for name, (flag, problem) in {
        "spec": ("--spec MODULE ATTRIBUTE", _problem_of_spec(stored)),
        _LAYERS_PATH: ("--heterogeneous-layers-config-path", _problem_of_layers(stored)),
        _AUDIO_PATH: ("--audio-encoder-model", _OUTSIDE if stored.get(_AUDIO_PATH) else None),
    }.items():
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


def _problem_of_spec(stored: Arguments) -> str | None:
    return reason_not_own_spec(stored["spec"]) if stored.get("spec") else None


def _problem_of_layers(stored: Arguments) -> str | None:
    """Return why the description of the layers cannot be used, or None.

    Older checkpoints contain the path of the file, newer ones its text.
    """
    is_told = not stored.get(_LAYERS_PATH) or stored.get("heterogeneous_layers_config_encoded_json")
    return None if is_told else _OUTSIDE


def _is_given(namespace: argparse.Namespace, name: str) -> bool:
    """Return whether the command line sets ``name``, with or without the prefix encoder_."""
    names = {name, f"encoder_{name}", name.removeprefix("encoder_")}
    return any(vars(namespace).get(each) is not None for each in names)


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
    reads_any_size = asked.get("vision_model_type") == "qwen2_vl"  # then they bound its area
    omitted = {"img_h", "img_w"} if reads_any_size else set()
    if asked.get("lora_rank") is None:  # the base of this run's adapters
        omitted |= set(ADAPTERS)
    yield from (each for each in FORCED if each not in omitted)
    yield from (name for name in asked if name.startswith(FORCED_PREFIXES))
    if namespace.use_tokenizer_model_from_checkpoint_args:
        yield "tokenizer_model"
    if namespace.use_mp_args_from_checkpoint_args:
        yield from FORCED_PARALLEL


def _set(namespace: argparse.Namespace, name: str, asked: Arguments) -> None:
    """Set ``name`` from the checkpoint, if both sides have it with different values; log it."""
    values = vars(namespace)
    if name not in values or asked.get(name) is None or values[name] == asked[name]:
        return
    if name in values.get(OF_PROGRAM, ()):  # a flag of the program, not of the model
        return
    print_rank_0(f"Setting {name} to {asked[name]} from checkpoint")
    values[name] = asked[name]


def saved_namespace(asked: Arguments) -> argparse.Namespace:
    """Return the command line of a checkpoint as the parser would return it."""
    namespace = argparse.Namespace(**vars(build_parser().parse_args([])))
    known = vars(namespace)
    for dest, value in asked.items():
        if dest in known and (value is not None or known[dest] is None):  # None: not given
            known[dest] = _as_parsed(known[dest], value)
    return namespace


def _as_parsed(default: object, value: object) -> object:
    """Convert a saved value to the parser's type: JSON has no enums."""
    if isinstance(default, enum.Enum) and isinstance(value, str):
        return type(default).__members__.get(value, default)
    return value
