"""What the flags of a run ask of its attention implementation."""

from __future__ import annotations

from megatron.core import device
from megatron.core.transformer.attention_backends import FLASH, AttentionRequest, choose
from megatron.training.config.run import RunConfig
from megatron.training.models.encoders import encoder_config
from megatron.training.models.registry import model_kind_of


def attention_request(config: RunConfig, comm_type: str) -> AttentionRequest:
    """Return the features that training needs from an attention backend.

    ``comm_type`` is a value of --cp-comm-type, the empty string without context parallelism.
    """
    # A CPU computes the packed conversations of a row one by one.
    is_packed = config.data.sft and device.is_cuda() and comm_type in ("", "a2a")
    return _request(config, comm_type, has_bounds=documents_are_bounds(config) or is_packed)


def encoder_attention_request(config: RunConfig) -> AttentionRequest:
    """Return what the encoder of images needs: each patch attends to all others of its tile."""
    layers = encoder_config(config)
    return AttentionRequest(
        dtype=layers.params_dtype,
        head_dim=layers.kv_channels,
        has_dropout=layers.attention_dropout > 0,
    )


def packs_documents(config: RunConfig) -> bool:
    """Return whether a row has parts that do not attend to each other."""
    return config.data.reset_attention_mask or config.vision.use_packed_sequence


def documents_are_bounds(config: RunConfig) -> bool:
    """Return whether attention gets the bounds of documents, or of samples in a row.

    Otherwise it passes a mask of s x s per sample: attention without a kernel that takes lengths,
    CUDA graphs, whose shapes are fixed, and code of the user, which expects tensors.
    """
    model = config.model
    spec = config.language_model.spec
    needs_mask = (
        not packs_documents(config)
        or model.context_parallel_size > 1
        or model.uses_graphs
        or model.softmax_type != "vanilla"
        or config.data.dataloader_type == "external"
        or bool(spec and spec[0] != "local")
    )
    request = _request(config, "", has_bounds=True)
    return (
        not needs_mask and request.is_cuda and choose(model.attention_backend, request) == (FLASH,)
    )


def _request(config: RunConfig, comm_type: str, *, has_bounds: bool) -> AttentionRequest:
    model = config.model
    kind = model_kind_of(config)
    has_sink = model.softmax_type != "vanilla"
    is_whole = comm_type in ("", "a2a") and not has_sink and not has_bounds
    positions = config.language_model.position_embedding_type
    narrow = model.v_head_dim if model.multi_latent_attention else model.kv_channels
    is_causal = kind.is_causal and not kind.has_encoder
    # A sink has no kernel for a part of the queries.
    is_masked = not is_causal or (has_sink and comm_type == "allgather")
    return AttentionRequest(
        dtype=model.params_dtype,
        head_dim=model.kv_channels,
        value_dim=narrow if narrow < model.kv_channels else 0,
        has_mask=(packs_documents(config) and not has_bounds) or is_masked,
        has_band=has_bounds or model.window_size is not None or comm_type == "allgather",
        has_bias=positions in ("alibi", "relative"),
        has_dropout=model.attention_dropout > 0,
        has_softcap=model.attn_logit_softcapping is not None,
        causal_tokens=config.data.seq_length if is_whole and is_causal else 0,
        by_blocks=has_sink or comm_type in ("p2p", "a2a+p2p"),
    )
