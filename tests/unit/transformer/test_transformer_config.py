"""Configs of the library: values that projects assign, copies, subclasses, initialization."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.params.param_info import ParamInfo, name_parameters
from megatron.core.params.param_init import initialize_parameters, new_parameter, param_info_for
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.layer_layout import layer_ranges
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def config_of(**values: Any) -> TransformerConfig:
    given = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    return TransformerConfig(**given | values)


@dataclass
class Provider(TransformerConfig):
    """Model description of a project, as Megatron-Bridge has them."""

    vocab_size: int = 128
    normalization: str = "RMSNorm"


def test_a_project_may_subclass_and_assign() -> None:
    provider = Provider(num_layers=2, hidden_size=64, num_attention_heads=4)
    provider.num_layers = 8
    provider.pipeline_model_parallel_size = 2
    provider.finalize_model_grads_func = print
    provider.an_attribute_of_the_project = 1
    assert (provider.ffn_hidden_size, provider.normalization) == (256, "RMSNorm")
    assert [len(layers) for layers in layer_ranges(provider, 2)] == [4, 4]
    provider.num_layers_in_first_pipeline_stage = 3
    assert [len(layers) for layers in layer_ranges(provider, 2)] == [3, 5]
    for other in (copy.deepcopy(provider), pickle.loads(pickle.dumps(provider))):
        assert other == provider
        assert other.an_attribute_of_the_project == 1
    assert replace(provider, num_layers=4) != provider
    assert asdict(provider).keys() == {f.name for f in fields(Provider)}


@dataclass
class Deferred(TransformerConfig):
    """Config of a project that derives values when its fields are final, perhaps several times."""

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        TransformerConfig.__post_init__(self)


def test_a_project_may_derive_and_check_later() -> None:
    config = Deferred(num_layers=2, hidden_size=64, num_attention_heads=4, bf16=True, fp16=True)
    config.fp16 = False
    config.num_attention_heads = 8
    config.finalize()
    assert (config.kv_channels, config.ffn_hidden_size) == (8, 256)
    config.fp16 = True
    with pytest.raises(ConfigError, match="bf16 and fp16 exclude each other"):
        config.finalize()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("recompute_granularity", "some", "recompute_granularity some: use one of full, selective"),
        ("tensor_model_parallel_size", 0, "tensor_model_parallel_size 0: at least 1 is needed"),
        ("moe_aux_loss_coeff", [0.1, -1.0], "moe_aux_loss_coeff -1.0: at least 0 is needed"),
        ("enable_autocast", True, "enable_autocast True: use bf16 or fp16"),
        ("fp8_dot_product_attention", True, "fp8_dot_product_attention True: this fp8 path"),
    ],
)
def test_values_are_checked_at_construction_and_assignment(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**{name: value})
    config = config_of()
    before = getattr(config, name)
    with pytest.raises(ConfigError, match=message):
        setattr(config, name, value)
    assert getattr(config, name) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp16": True, "bf16": True}, "bf16 and fp16 exclude each other"),
        ({"tensor_model_parallel_size": 3}, "num_attention_heads 4 cannot be split over"),
        ({"tensor_model_parallel_size": 4, "num_query_groups": 2}, "num_query_groups 2 cannot"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size 2 needs num_moe_experts"),
        ({"num_moe_experts": 4, "moe_enable_deepep": True}, "needs moe_token_dispatcher_type flex"),
        ({"recompute_granularity": "full"}, "full needs recompute_method uniform or block"),
        ({"sequence_parallel": True}, "needs tensor_model_parallel_size above 1"),
        ({"moe_ffn_hidden_size": 8}, "moe_ffn_hidden_size 8 needs num_moe_experts"),
        ({"cp_comm_type": ["p2p"] * 3}, "cp_comm_type has 3 entries and num_layers is 4"),
    ],
)
def test_contradictions_are_found_at_construction_and_at_the_use_of_a_changed_config(
    values: dict[str, Any], message: str
) -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=message):
            config_of(**values)
    config = config_of()
    for name, value in values.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        MegatronModule(config)


def test_graphs_of_later_releases_are_asked_for_by_name_and_scope() -> None:
    config = config_of(cuda_graph_impl="local", cuda_graph_scope=[CudaGraphScope.attn])
    assert (config.captures_layers, config.graph_scope) == (True, "attn")
    config.cuda_graph_scope = [CudaGraphScope.full_iteration]
    assert not config.captures_layers
    config.cuda_graph_scope = []
    assert config.graph_scope == "full"
    config.cuda_graph_impl = "none"
    assert not config.uses_graphs


def test_fields_that_megatron_core_replaced_have_their_effect() -> None:
    config = config_of(num_moe_experts=4, moe_layer_recompute=True, num_layers=4)
    assert {*config.modules_to_recompute} == {"moe"}
    config = config_of(num_moe_experts=4, moe_router_topk_limited_devices=1)
    assert (config.moe_router_group_topk, config.moe_router_num_groups) == (1, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", "x"), ("hidden_size", "32"), ("params_dtype", "float32"), ("window_size", 3)],
)
def test_a_value_of_another_type_is_named(name: str, value: object) -> None:
    message = f"{name} .*: a value of type "
    with pytest.raises(ConfigError, match=message):
        config_of(**{name: value})
    with pytest.raises(ConfigError, match=message):
        setattr(config_of(), name, value)


def test_one_value_or_a_list_may_be_given() -> None:
    config = config_of(cp_comm_type="all_gather", moe_router_load_balancing_type="none")
    assert (config.cp_comm_types, config.load_balancing_types) == (("allgather",), ("none",))
    config.cp_comm_type = ["p2p", "a2a"] * 2
    config.moe_aux_loss_coeff = [0.1, 0.2]
    assert config.cp_comm_types == ("p2p", "a2a", "p2p", "a2a")
    assert config.aux_loss_coeffs == (0.1, 0.2)
    assert config_of(cp_comm_type=None).cp_comm_types == ("p2p",)
    assert hash(config) == hash(copy.deepcopy(config))


def test_a_config_of_a_project_may_have_values_without_a_hash() -> None:
    @dataclass
    class Extended(TransformerConfig):
        num_moe_experts: int | None = None  # declared again: rules still find it by its flag
        extra: dict[str, list[int]] = field(default_factory=dict)

    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    config = Extended(**sizes, extra={"a": [1]})
    assert hash(config) == hash(Extended(**sizes, extra={"a": [1]}))
    assert config != Extended(**sizes, extra={"a": [2]})


def test_a_layout_may_be_a_list_and_sets_the_number_of_model_chunks() -> None:
    layers = [["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder", "loss"]]
    config = config_of(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layers)
    assert config.virtual_pipeline_model_parallel_size == 2
    assert [*map(len, layer_ranges(config, 2))] == [1, 1, 1, 1]
    assert config.pipeline_model_parallel_layout.layout[1][1][-1].name == "loss"


def test_initializations_follow_the_fields_unless_they_are_given() -> None:
    config = config_of(init_method_std=0.1, embedding_init_method_std=0.5)
    assert (config.init_method.std, config.embedding_init_method.std) == (0.1, 0.5)
    assert config.output_layer_init_method.std == pytest.approx(0.1 / 8**0.5)
    deeper = replace(config, num_layers=16)
    assert deeper.output_layer_init_method.std == pytest.approx(0.1 / 32**0.5)
    given = partial(nn.init.constant_, val=3.0)
    config = config_of(init_method=given, num_layers=1)
    assert replace(config, num_layers=4).init_method is config.embedding_init_method is given


@pytest.mark.parametrize("width", [8, 4])
def test_a_function_initializes_parts_of_the_same_tensor(width: int) -> None:
    def initialize(weight: Tensor) -> None:
        assert weight.shape == (8, 3)
        nn.init.normal_(weight)

    model, whole = nn.Module(), nn.Module()
    info: ParamInfo = param_info_for((8, 3), initialize)
    shard = replace(info, shard_dim=0, shard_index=8 // width - 1, shard_count=8 // width)
    state = torch.random.get_rng_state()
    for module, record in ((model, shard), (whole, info)):
        shape = (width if module is model else 8, 3)
        module.weight = new_parameter(shape, torch.float32, record)
        name_parameters(module)
        initialize_parameters(module, 1)
    assert torch.equal(model.weight, whole.weight[-width:])
    assert float(whole.weight.detach().std()) > 0.3
    assert torch.equal(torch.random.get_rng_state(), state)


def test_configs_of_latent_attention_have_the_defaults_of_megatron_core() -> None:
    config = MLATransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    assert config.multi_latent_attention
    assert (config.q_lora_rank, config.rope_type, config.yarn_beta_fast) == (512, "yarn", 32)
    assert (config.kv_channels, config.yarn_original_max_position_embeddings) == (192, 4096)


def test_other_configs_take_dtypes_and_assignments_too() -> None:
    optimizer = OptimizerConfig(
        lr=1e-3, use_precision_aware_optimizer=True, exp_avg_dtype=torch.bfloat16, timers=print
    )
    optimizer.exp_avg_sq_dtype = "fp16"
    optimizer.lr = 0.1
    with pytest.raises(ValueError, match="optimizer unknown: use one of adam, sgd"):
        optimizer.optimizer = "unknown"
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp.overlap_grad_reduce = True
    with pytest.raises(ValueError, match="bucket_size 0: at least 1 is needed"):
        ddp.bucket_size = 0
