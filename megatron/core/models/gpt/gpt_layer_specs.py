"""Layer specs of GPT: the class of each submodule."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from megatron.core import device
from megatron.core.config import flag_messages
from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.enums import AttnMaskType
from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TENorm,
    unsupported_matrices_reason,
    unsupported_reason,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, TESpecProvider
from megatron.core.parallel.default_groups import default_groups, library_call
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.config.attention import SPARSE_VARIANT
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_layout import (
    has_experts,
    has_hash_routing,
    has_linear_attention,
    is_last_stage,
    layers_of_stage,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.hash_router import HashRouter
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.norms import HeadsWideRMSNorm, L2Norm, Norm
from megatron.core.transformer.sparse_attention import SparseMLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, Slot, import_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, block_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

logger = logging.getLogger(__name__)


LOCAL = BackendSpecProvider()
ENGINE = TESpecProvider()
_DEFAULT = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)


def column_with_norm(backend: BackendSpecProvider, config: TransformerConfig | None) -> Slot | None:
    """Return the linear layer that has the norm before it; None if norms must be separate."""
    c = config or _DEFAULT
    must_be_separate = (
        layer_shapes(c) is not None  # another part may take the place of the matrix
        or c.layer_norm_placement != "pre"
        or c.apply_residual_connection_post_layernorm
        or c.fp32_residual_connection
        or "layernorm" in c.modules_to_recompute
    )
    return None if must_be_separate else backend.column_parallel_layer_norm_linear()


def transformer_engine_parts(config: TransformerConfig | None) -> BackendSpecProvider:
    """Return Transformer Engine's classes; ours where it cannot do what ``config`` requests.

    Logs the fallback once.  Raises MissingDependency if --require-transformer-engine forbids it.
    """
    # A plan is made for another machine.
    if device.is_cuda() and not device.launches_kernels(device.current()):
        return LOCAL
    reason = unsupported_reason()
    parts = LOCAL
    if reason is None and config is not None:
        reason = unsupported_matrices_reason(config)
        parts = replace(LOCAL, norm=TENorm, attention=TEDotProductAttention)
    if reason is None:
        return ENGINE
    which = "" if parts is LOCAL else " for matrices"
    if config is not None and config.require_transformer_engine:
        raise MissingDependency(
            f"--require-transformer-engine{which}: {reason}; install "
            "transformer-engine, or use the layers of this program without the flag"
        )
    _warn(f"--transformer-impl transformer_engine falls back to local{which}: {reason}")
    return parts


@cache
def _warn(sentence: str) -> None:
    logger.warning(sentence)


def layer_of(
    backend: BackendSpecProvider,
    num_experts: int | None = None,
    *,
    config: TransformerConfig | None,
    grouped_experts: bool | None = None,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    qk_l2_norm: bool = False,
    use_kitchen: bool = False,
    is_linear: bool = False,
) -> ModuleSpec:
    """Return the spec of a causal layer, which may have linear attention, of ``backend``.

    ``grouped_experts``: see `experts_of`.
    """
    if use_kitchen:
        raise ConfigError(f"a GPT layer with use_kitchen: {flag_messages.KITCHEN}")
    c = config or _DEFAULT
    placement = c.layer_norm_placement
    if placement == "post_softmax":
        placement = "pre" if is_linear else "post"
    is_latent = (multi_latent_attention or c.multi_latent_attention) and not is_linear
    column = backend.column_parallel_linear()
    row = backend.row_parallel_linear()
    before = IdentityOp if placement == "post" else backend.layer_norm()
    after = IdentityOp if placement == "pre" else backend.layer_norm()
    # A norm that is fused into the following linear layer leaves its own slot empty.
    fused = column_with_norm(backend, config)
    is_dense = num_experts is None
    norm: Slot | None = None
    if qk_layernorm or c.qk_layernorm:
        norm = backend.layer_norm(for_qk=True)
    if is_linear:
        slots = GatedDeltaNetSubmodules(fused or column, row)
        attention = ModuleSpec(GatedDeltaNet, submodules=slots)
    elif is_latent:
        attention = _latent_attention(backend, c, fused, norm)
    else:
        if c.qk_l2_norm:
            norm = None  # the norm without weights takes its place
        if qk_l2_norm:
            norm = L2Norm
        if c.qk_layernorm_full_width:
            norm = HeadsWideRMSNorm
        attention = ModuleSpec(
            SelfAttention,
            submodules=SelfAttentionSubmodules(
                fused or column, backend.core_attention(), row, norm, norm
            ),
        )
    if not is_linear:
        attention.params["attn_mask_type"] = AttnMaskType.causal
    if is_dense:
        mlp = ModuleSpec(MLP, submodules=MLPSubmodules(fused or column, row))
    else:
        mlp = experts_of(backend, grouped_experts)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused and not is_latent else before,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            post_self_attn_layernorm=after,
            pre_mlp_layernorm=IdentityOp if fused and is_dense else before,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            post_mlp_layernorm=after,
        ),
    )


def _latent_attention(
    backend: BackendSpecProvider, c: TransformerConfig, fused: Slot | None, norm: Slot | None
) -> ModuleSpec:
    """Return the spec of latent attention; ``fused``: see `column_with_norm`."""
    column = backend.column_parallel_linear()
    up = column
    if fused and norm is not None:
        up = fused
        norm = IdentityOp
    is_sparse = c.experimental_attention_variant == SPARSE_VARIANT
    return ModuleSpec(
        SparseMLASelfAttention if is_sparse else MLASelfAttention,
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=up,
            linear_kv_down_proj=backend.linear(),
            linear_kv_up_proj=up,
            core_attention=(LOCAL if is_sparse else backend).core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def experts_of(backend: BackendSpecProvider, grouped: bool | None) -> ModuleSpec:
    """Return the spec of a layer of experts with the classes of ``backend``.

    ``grouped``: the experts of a rank have one module per matrix, or one per expert, with Megatron
    Core's names; None: those of this program, with numbers that do not depend on the layout.
    """
    matrices = MLPSubmodules(backend.column_parallel_linear(), backend.row_parallel_linear())
    shared = ModuleSpec(SharedExpertMLP, submodules=matrices)
    experts: MLPSubmodules | ModuleSpec = matrices
    if grouped is not None:
        kind, own = backend.grouped_mlp_modules(grouped, False)
        experts = ModuleSpec(kind, submodules=own)
    return ModuleSpec(
        MoELayer, submodules=MoESubmodules(experts, shared, latent_proj=backend.linear())
    )


_UNUSED = "fp8 moe_use_legacy_grouped_gemm use_te_op_fuser"


@library_call(f"... {_UNUSED}", unused=_UNUSED)
def get_mlp_module_spec(
    use_te: bool | None = True, num_experts: int | None = None, moe_grouped_gemm: bool = False
) -> ModuleSpec:
    """Return the spec of an MLP, or of experts."""
    return get_mlp_module_spec_for_backend(_backend(use_te), num_experts, moe_grouped_gemm)


@library_call("... moe_use_legacy_grouped_gemm use_te_op_fuser", unused=_UNUSED)
def get_mlp_module_spec_for_backend(
    backend: BackendSpecProvider, num_experts: int | None = None, moe_grouped_gemm: bool = False
) -> ModuleSpec:
    """Return the spec of an MLP, or of experts, with the classes of ``backend``."""
    layer = layer_of(backend, num_experts, config=None, grouped_experts=moe_grouped_gemm)
    mlp: ModuleSpec = layer.submodules.mlp
    return mlp


def _backend(use_te: bool | None) -> BackendSpecProvider:
    return ENGINE if use_te else LOCAL


@library_call(
    "... qk_layernorm multi_latent_attention fp8 moe_use_legacy_grouped_gemm normalization "
    "qk_l2_norm use_kitchen",
    unused="fp8 moe_use_legacy_grouped_gemm normalization",
    like=layer_of,
)
def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    *,
    config: TransformerConfig | None = None,
    **of_layer: bool,
) -> ModuleSpec:
    """Return a spec whose modules are plain PyTorch.

    Scripts describe the layer with the other arguments; arguments left out, and the placement of
    norms, come from ``config``.  The kind of norm and the precision always come from the model's
    config.  ``of_layer``: further arguments of `layer_of`.
    """
    grouped = False if config is None else None
    return layer_of(LOCAL, num_experts, config=config, grouped_experts=grouped, **of_layer)


@library_call(
    "... qk_layernorm multi_latent_attention fp8 moe_use_legacy_grouped_gemm qk_l2_norm "
    "use_te_op_fuser use_kitchen",
    unused="fp8 moe_use_legacy_grouped_gemm use_te_op_fuser",
    like=layer_of,
)
def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    *,
    config: TransformerConfig | None = None,
    **of_layer: bool,
) -> ModuleSpec:
    """Return a spec with Transformer Engine's modules, where it can do what ``config`` requests.

    Without ``config`` every module is one of Transformer Engine's, also where the package cannot
    run: parameters always have the names by which converters know them.  With it, warns once and
    uses the modules of the local spec there.  Other arguments are those of
    `get_gpt_layer_local_spec`.
    """
    backend = ENGINE if config is None else transformer_engine_parts(config)
    grouped = moe_grouped_gemm if config is None else None
    return layer_of(backend, num_experts, config=config, grouped_experts=grouped, **of_layer)


def without_attention(slots: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    """Return the submodules of a layer that has an MLP only."""
    return replace(
        slots,
        input_layernorm=IdentityOp,
        self_attention=IdentityOp,
        self_attn_bda=IdentityFuncOp,
        post_self_attn_layernorm=IdentityOp,
    )


def without_mlp(slots: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    """Return the submodules of a layer that has attention only."""
    return replace(
        slots,
        pre_mlp_layernorm=IdentityOp,
        mlp=IdentityOp,
        mlp_bda=IdentityFuncOp,
        post_mlp_layernorm=IdentityOp,
    )


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Return a spec for every layer of this pipeline stage.

    The config gives the normalization.  With ``use_transformer_engine`` every module is one of
    Transformer Engine's, see `get_gpt_layer_with_transformer_engine_spec`.
    """
    specs = get_gpt_decoder_layer_specs(
        config, use_transformer_engine, normalization, qk_l2_norm=qk_l2_norm
    )
    norm = _backend(use_transformer_engine).layer_norm()
    return layers_on_this_stage(TransformerBlockSubmodules(specs, norm), config, vp_stage)


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
) -> Sequence[Slot]:
    """Return the specs of all layers of the model; see `get_gpt_decoder_block_spec`."""
    backend = _backend(use_transformer_engine)
    grouped = config.moe_grouped_gemm
    block = decoder_block_of(backend, config, grouped_experts=grouped, qk_l2_norm=qk_l2_norm)
    return block.layer_specs or ()


def layers_on_this_stage(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return ``block``, which has all layers of the model, with those of this stage only."""
    if config.pipeline_model_parallel_size == 1 and not config.virtual_pipeline_model_parallel_size:
        return block
    specs = block.layer_specs or []
    stage = layers_of_stage(config, default_groups().pp, vp_stage)
    return replace(block, layer_specs=[specs[i] for i in stage])


def decoder_block_of(
    backend: BackendSpecProvider, config: TransformerConfig, **more: Any
) -> TransformerBlockSubmodules:
    """Return a spec for every layer of the model, with the classes of ``backend``.

    ``more``: further arguments of `layer_of`.
    """

    @cache
    def layer(is_sparse: bool, is_linear: bool, is_hashed: bool) -> ModuleSpec:
        num_experts = config.num_moe_experts if is_sparse else None
        spec = layer_of(backend, num_experts, config=config, is_linear=is_linear, **more)
        if is_hashed:
            spec.submodules.mlp.submodules.router = HashRouter
        return spec

    numbers = range(config.num_layers)
    layers = [
        layer(has_experts(config, i), has_linear_attention(config, i), has_hash_routing(config, i))
        for i in numbers
    ]
    return TransformerBlockSubmodules(layers, Norm)


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of multi-token prediction on the last stage; None on others or without it.

    ``spec``: that of the decoder.  As in Megatron Core the projection is sharded.
    """
    is_split = config.pipeline_model_parallel_size > 1
    if is_split and not is_last_stage(config, default_groups().pp, vp_stage):
        return None
    backend = _backend(use_transformer_engine)
    return mtp_block_of(backend, config, spec, backend.column_parallel_linear())


def mtp_block_of(
    backend: BackendSpecProvider,
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    projection: Slot | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of multi-token prediction, whose layers are like the last of ``spec``.

    ``projection``: class of the linear layer behind the norms, by default a replicated one.
    """
    layers = block_submodules(config, spec).layer_specs
    if not config.mtp_num_layers or not layers:
        return None
    one = get_mtp_layer_spec_for_backend(layers[-1], backend, projection or backend.linear())
    return MultiTokenPredictionBlockSubmodules([one] * config.mtp_num_layers)


def get_mtp_layer_spec(transformer_layer_spec: Slot, use_transformer_engine: bool) -> ModuleSpec:
    """Return the spec of one depth of multi-token prediction."""
    return get_mtp_layer_spec_for_backend(transformer_layer_spec, _backend(use_transformer_engine))


def get_mtp_layer_spec_for_backend(
    transformer_layer_spec: Slot, backend: BackendSpecProvider, projection: Slot | None = None
) -> ModuleSpec:
    """Return the spec of one depth of multi-token prediction with the classes of ``backend``."""
    norm = backend.layer_norm()
    projection = projection or backend.column_parallel_linear()
    return ModuleSpec(
        MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            norm, norm, projection, transformer_layer_spec, norm
        ),
    )


def get_imported_layer_spec(
    path: tuple[str, ...], config: TransformerConfig
) -> ModuleSpec | TransformerBlockSubmodules:
    """Import the spec that --spec MODULE NAME names: a spec, or a function that returns one.

    The function receives the config if it has a parameter of that name or requires one. Raises
    ConfigError.
    """
    spec = import_module(path)
    if inspect.isfunction(spec):
        signature = inspect.signature(spec)
        parameters = signature.parameters
        is_needed = any(p.default is p.empty for p in parameters.values())
        try:
            if "config" in parameters:
                call = signature.bind(config=config)
            else:
                call = signature.bind(*[config] * is_needed)
        except TypeError as error:
            raise ConfigError(
                f"--spec {' '.join(path)} cannot be called with the config alone: {error}"
            ) from None
        spec = spec(*call.args, **call.kwargs)
    if not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        raise ConfigError(
            f"--spec {' '.join(path)} is a {type(spec).__name__}: name a ModuleSpec, a "
            "TransformerBlockSubmodules, or a function that returns one"
        )
    return spec
