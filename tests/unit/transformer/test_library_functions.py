"""Functions of Megatron Core around layers, as projects call them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.compat import moe as moe_library
from megatron.core.compat import transformer as library
from megatron.core.config.errors import ConfigError
from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider, TESpecProvider
from megatron.core.models.common.embeddings.rope_utils import (
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_thd,
)
from megatron.core.models.gpt import gpt_model
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
    get_mtp_layer_spec,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, Linear, RowParallelLinear
from megatron.core.transformer.attention_masks import is_layer_window_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_layout import (
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.norms import L2Norm
from megatron.core.transformer.rope import RotaryEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config


def pipeline(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("first", [None, 2])
def test_offsets_are_those_of_the_formulas(chunks: int | None, first: int | None) -> None:
    ranks, layers = 4, 16 if first is None else 14
    config = tiny_config(
        num_layers=layers,
        pipeline_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=chunks,
        num_layers_in_first_pipeline_stage=first,
    )
    pieces = chunks or 1
    start, middle = first or 0, (layers - (first or 0)) // (ranks - (first is not None))
    for rank in range(ranks):
        own = first if first is not None and rank == 0 else middle
        before = 0 if rank == 0 else start + (rank - (first is not None)) * middle
        for stage in range(pieces):
            args = config, None if chunks is None else stage
            group = pipeline(rank, ranks)
            offset = stage * (layers // pieces) + before // pieces
            assert get_transformer_layer_offset(*args, pp_group=group) == offset
            assert get_transformer_layer_offset(*args, rank, pp_group=pipeline(0, ranks)) == offset
            assert get_num_layers_to_build(*args, pp_group=group) == own // pieces
    alone = tiny_config(num_layers=5)  # a vision encoder of the first stage
    assert get_num_layers_to_build(alone, pp_group=pipeline(1, 2)) == 5


class Numbered(TransformerLayer):
    """A project's layer, which knows nothing of offsets."""

    def __init__(self, config, submodules, layer_number=1, hidden_dropout=None,
                 model_comm_pgs=None, vp_stage=None):  # fmt: skip
        super().__init__(config=config, submodules=submodules, layer_number=layer_number,
                         model_comm_pgs=model_comm_pgs, vp_stage=vp_stage)  # fmt: skip
        self.given = layer_number


class Renamed(TransformerBlock):
    """A project's block, which builds its layers itself."""

    def _build_layers(self) -> None:
        self.layers = torch.nn.ModuleList(
            spec.module(self.config, spec.submodules, i + 1, None, self.model_comm_pgs)
            for i, spec in enumerate(self.submodules.layer_specs)
        )


class RebuiltLayer(TransformerLayer):
    """A project's layer that builds its submodules itself, as mcore-bridge's."""

    def __init__(self, config: Any, submodules: Any, vp_stage: int | None = None) -> None:
        super(TransformerLayer, self).__init__(config=config, vp_stage=vp_stage)  # type: ignore
        self.input_layernorm = IdentityOp()
        self.self_attention = MLP(config, submodules, tp_group=one_process_groups().tp)
        self.self_attention.forward = lambda x, **_: (3 * x, None)  # type: ignore
        self.self_attn_bda = get_bias_dropout_add
        self.cross_attention = IdentityOp()
        self.pre_mlp_layernorm = IdentityOp()
        self.mlp = lambda x: (x + 1, None)
        self.mlp_bda = get_bias_dropout_add
        self.recompute_mlp = False


def test_a_layer_may_build_its_submodules_without_our_constructor() -> None:
    matrices = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    layer = RebuiltLayer(tiny_config(hidden_dropout=0.0), matrices)
    assert layer(torch.tensor([[[1.0, 2.0]]]))[0].tolist() == [[[9.0, 17.0]]]


def test_the_class_of_a_models_stack_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnBlock(TransformerBlock):
        pass

    monkeypatch.setattr(gpt_model, "TransformerBlock", OwnBlock)
    model: Any = GPTModel(tiny_config(), get_gpt_layer_local_spec(), 32, 16)  # type: ignore
    assert type(model.decoder) is OwnBlock


def test_a_layer_of_a_later_stage_counts_over_the_model() -> None:
    config = tiny_config(num_layers=6, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    groups = replace(one_process_groups(), pp=pipeline(1, 2))
    spec = get_gpt_layer_local_spec()
    spec.module = Numbered
    for kind in (TransformerBlock, Renamed):
        block = kind(config, spec, False, False, True, groups)
        assert [layer.given for layer in block.layers] == [1, 2, 3]
        assert [layer.layer_number for layer in block.layers] == [4, 5, 6]
        assert block.final_layernorm is None


def test_providers_choose_the_classes_of_the_specs() -> None:
    for provider, make in (
        (TESpecProvider(), get_gpt_layer_with_transformer_engine_spec),
        (LocalSpecProvider(), get_gpt_layer_local_spec),
    ):
        dense, sparse = (get_mlp_module_spec_for_backend(provider, n, True) for n in (None, 4))
        assert make().submodules.mlp == dense
        if isinstance(provider, TESpecProvider):
            assert make(4, True).submodules.mlp == sparse
        ahead = get_mtp_layer_spec_for_backend(make(), provider)
        assert ahead.submodules.eh_proj is provider.column_parallel_linear()


def test_an_mlp_weighs_tokens() -> None:
    config = tiny_config(params_dtype=torch.float64)
    mlp = MLP(config, get_gpt_layer_local_spec().submodules.mlp.submodules, False, None, 16)
    for param in mlp.parameters():
        torch.nn.init.normal_(param)
    x, scale = torch.randn(3, 2, 32, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    inner = mlp.activation_func(
        torch.nn.functional.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias)
    )
    want = (inner * scale[..., None]) @ mlp.linear_fc2.weight.t() + mlp.linear_fc2.bias
    out, bias = mlp(x, scale)
    torch.testing.assert_close(out if bias is None else out + bias, want)


def test_depths_run_one_after_the_other() -> None:
    config = tiny_config(mtp_num_layers=2, num_layers=1, params_dtype=torch.float64)
    layer = get_mtp_layer_spec(get_gpt_layer_with_transformer_engine_spec(), True)
    spec = MultiTokenPredictionBlockSubmodules([layer] * 2)
    block = MultiTokenPredictionBlock(config, spec)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.3)
    table = torch.randn(8, 32, dtype=torch.float64)
    hidden = torch.randn(4, 1, 32, dtype=torch.float64)
    ids = torch.tensor([[3, 1, 4, 5]])

    def embed(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return table[input_ids].transpose(0, 1)

    found = block(
        input_ids=ids, position_ids=ids, hidden_states=hidden, attention_mask=None, embedding=embed
    )
    one, _, _ = block.layers[0](None, None, hidden, None, embedded=table[[1, 4, 5, 0]][:, None])
    two, _, _ = block.layers[1](None, None, one, None, embedded=table[[4, 5, 0, 0]][:, None])
    torch.testing.assert_close(found, torch.cat([hidden, one, two]))


def test_losses_of_depths_are_logged() -> None:
    helper, seen = moe_library.MTPLossLoggingHelper, {}
    helper.tracker.clear()
    helper.save_loss_to_tracker(torch.tensor(3.0), None, 2)
    assert "values" not in helper.tracker
    for loss in (1.0, 2.0):
        helper.save_loss_to_tracker(torch.tensor(loss), 1, 2)
    helper.track_mtp_metrics(0.5, 7, None, total_loss_dict=seen)
    assert seen == {"mtp_1 loss": 0.0, "mtp_2 loss": 1.5}
    assert not helper.tracker["values"].any()


def test_functions_of_the_engine_are_formulas() -> None:
    x = torch.randn(7, 4, requires_grad=True)
    y = library.te_checkpoint(lambda a, b: (a * b).sin(), False, None, None, x, b=2.0)
    assert torch.equal(y, (x * 2).sin())
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x * 2).cos())
    padded, sizes = library.Fp8Padding(2, 4)(x, [5, 2])
    assert (len(padded), sizes) == (12, [8, 4])
    assert torch.equal(library.Fp8Unpadding(2, 4)(padded, [5, 2]), x)
    heads, angles = torch.randn(5, 1, 2, 8), RotaryEmbedding(8)(5)
    first, second = heads.chunk(2, -1)
    want = heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    close = tolerances.of(torch.float32)
    torch.testing.assert_close(fused_apply_rotary_pos_emb(heads, angles), want, **close)
    ends = torch.tensor([0, 2, 5])
    found = fused_apply_rotary_pos_emb_thd(heads[:, 0], ends, angles)
    parts = [fused_apply_rotary_pos_emb(h, angles)[:, 0] for h in heads.split([2, 3])]
    torch.testing.assert_close(found, torch.cat(parts))
    torch.testing.assert_close(
        L2Norm(hidden_size=8)(heads), heads / (heads.square().mean(-1, True) + 1e-6).sqrt()
    )


def test_wrong_specs_are_named() -> None:
    config, groups = tiny_config(), one_process_groups()
    for spec in (None, torch.nn.Linear):
        with pytest.raises(TypeError, match="layer_spec is .* get_gpt_layer_local_spec"):
            GPTModel(config, spec, 16, 8, pg_collection=groups)
    for module in (3, "foo.bar"):
        with pytest.raises(TypeError, match="a class, a function or .module path, name., not "):
            build_module(ModuleSpec(module))


def test_state_of_the_engine_in_a_state_dict_is_left_out() -> None:
    config = tiny_config()
    build = config, get_gpt_layer_local_spec(), 16, 8
    model, other = (GPTModel(*build, pg_collection=one_process_groups()) for _ in range(2))
    with torch.no_grad():
        model.output_layer.weight.fill_(2.0)
    state = model.state_dict()
    layers = [n for n, m in model.named_modules() if isinstance(m, Linear)]
    other.load_state_dict({**state, **{f"{name}._extra_state": None for name in layers}})
    assert bool((other.output_layer.weight == 2).all())
    with pytest.raises(RuntimeError, match="Unexpected"):
        other.load_state_dict({**state, "decoder.layers.0._other_state": None})


def test_a_project_that_scales_an_output_does_not_scale_its_bias() -> None:
    class Halved(MLP):
        def forward(self, *args: Any, **more: Any) -> Any:
            out, bias = super().forward(*args, **more)
            return out * 0.5, bias

    spec = get_gpt_layer_local_spec().submodules.mlp.submodules
    x = torch.randn(3, 2, 32)
    outputs = []
    for kind in (MLP, Halved):
        mlp = kind(tiny_config(), spec)
        for number, param in enumerate(mlp.parameters()):
            torch.nn.init.constant_(param, 0.1 * (number + 1))
        out, bias = mlp(x)
        outputs.append(out if bias is None else out + bias)
        added = mlp.linear_fc2.bias
    torch.testing.assert_close(outputs[1], (outputs[0] - added) / 2 + added)


def test_layers_with_a_window_are_those_that_the_frequency_leaves() -> None:
    assert not is_layer_window_attention(None, None, 1)
    assert is_layer_window_attention((4, 0), None, 1)
    assert [is_layer_window_attention((4, 0), 2, n) for n in (1, 2)] == [True, False]
    assert [is_layer_window_attention((4, 0), [0, 1], n) for n in (1, 2)] == [False, True]


def test_what_the_program_does_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="TELinear with parallel_mode 'row': build a TEColumn"):
        te.TELinear(8, 8, parallel_mode="row", config=tiny_config(), init_method=None)
    with pytest.raises(ConfigError, match="set enable_cuda_graph"):
        library.CudaGraphManager(tiny_config())
    with pytest.raises(ConfigError, match="set cpu_offloading"):
        library.get_cpu_offload_context(True, 1, 2)
