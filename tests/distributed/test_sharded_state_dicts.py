"""Sharded state dicts of models and optimizers, saved in one layout and loaded in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, replace_prefix_for_sharding
from megatron.core.dist_checkpointing.module_state import make_sharded_tensors_for_checkpoint
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.default_groups import default_groups
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from tests.support.ranks import run_ranks

_GATED = {"gated_linear_unit": True, "activation_func": silu, "add_bias_linear": False}
_LATENT = {"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8}
_HEADS = {"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope"}
_SCAN = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}


def config(seed: int, **changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "init_seed": seed}
    return TransformerConfig(**sizes, use_cpu_initialization=True, **changes)


def _groups() -> dict[str, Any]:
    return {"pg_collection": default_groups()}


def gpt(seed: int, *, spec: dict[str, Any] | None = None, **changes: Any) -> GPTModel:
    tied = changes.pop("tied", False)
    own = config(seed, **changes)
    layer = get_gpt_layer_local_spec(**(spec or {}))
    predictions = get_gpt_mtp_block_spec(own, layer, False) if own.mtp_num_layers else None
    stage, stages = (
        (parallel_state.get_pipeline_model_parallel_rank(), own.pipeline_model_parallel_size)
        if torch.distributed.is_initialized()
        else (0, 1)
    )
    return GPTModel(
        own,
        layer,
        64,
        16,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=predictions,
        **_groups(),
    )


def mamba(seed: int, **changes: Any) -> MambaModel:
    own = config(seed, **_SCAN, **changes)
    return MambaModel(own, mamba_stack_spec, 64, 16, hybrid_override_pattern="M*", **_groups())


def t5(seed: int, **changes: Any) -> T5Model:
    specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2)
    return T5Model(config(seed, **changes), config(seed, **changes), *specs, 64, 16, **_groups())


def bert(seed: int, **changes: Any) -> BertModel:
    return BertModel(config(seed, **changes), 2, bert_layer_local_spec, 64, 16, **_groups())


_EXPERTS = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 16, **_GATED}
_MODELS = {
    "gated": (gpt, _GATED, "tp"),
    "tied": (gpt, {"tied": True}, "pp"),
    "experts": (gpt, {**_EXPERTS, "spec": {"num_experts": 4}}, "ep"),
    "sharded experts": (gpt, {**_EXPERTS, "spec": {"num_experts": 4}}, "tp"),
    "latent": (gpt, {**_LATENT, **_HEADS, "spec": {"multi_latent_attention": True}}, "tp"),
    "predictions": (gpt, {"mtp_num_layers": 1}, "tp"),
    "mamba": (mamba, {}, "tp"),
    "t5": (t5, {}, "tp"),
    "bert": (bert, {}, "tp"),
}
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


def _save_all(rank: int, world_size: int, root: str, strategy: Any) -> None:
    for name, (make, changes, axis) in _MODELS.items():
        parallel_state.destroy_model_parallel()
        sizes = {_SIZES[axis]: world_size}
        parallel_state.initialize_model_parallel(**sizes)
        own = dict(changes, **sizes, **({"pipeline_dtype": torch.float32} if axis == "pp" else {}))
        folder = Path(root) / name
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()
        state = {"model": make(1, **own).sharded_state_dict(), "name": name}
        dist_checkpointing.save(state, folder, strategy)


@pytest.mark.parametrize("strategy", [None, ("torch_dist", 1)], ids=["ours", "torch_dist"])
def test_every_model_that_two_ranks_saved_is_loaded_by_one(
    tmp_path: Path, strategy: tuple[str, int] | None
) -> None:
    run_ranks(_save_all, 2, str(tmp_path), strategy)
    for name, (make, changes, _) in _MODELS.items():
        expected, model = make(1, **changes), make(2, **changes)
        before = expected.state_dict()
        assert any(not torch.equal(before[key], own) for key, own in model.state_dict().items())
        asked = {"model": model.sharded_state_dict()}
        loaded, missing, unexpected = dist_checkpointing.load(
            asked, tmp_path / name, strict="return_all"
        )
        assert (loaded["name"], missing, unexpected) == (name, set(), set())
        model.load_state_dict(loaded["model"])
        for key, own in model.state_dict().items():
            assert torch.equal(before[key], own), (name, key)


class Halves(MegatronModule):
    """A user's module as for Megatron Core: it says itself how its parameters are sharded."""

    def __init__(self, own: TransformerConfig, values: Tensor, rank: int, size: int) -> None:
        super().__init__(own)
        self.rows = nn.Parameter(values.chunk(size)[rank].clone())
        self.plain = nn.Linear(2, 2)
        nn.init.constant_(self.plain.weight, float(values[0, 0]))
        nn.init.constant_(self.plain.bias, float(values[0, 0]))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        mine: dict[str, Any] = {}
        self._save_to_state_dict(mine, "", keep_vars=True)
        entries = make_sharded_tensors_for_checkpoint(mine, prefix, {"rows": 0}, sharded_offsets)
        more = self.plain.state_dict(prefix="", keep_vars=True)
        entries |= make_sharded_tensors_for_checkpoint(more, f"{prefix}plain.", {}, sharded_offsets)
        replace_prefix_for_sharding(entries, prefix, f"{prefix}renamed.")
        return entries


class Outer(MegatronModule):
    """A module that has a user's module, in a list too."""

    def __init__(self, own: TransformerConfig, values: Tensor, rank: int, size: int) -> None:
        super().__init__(own)
        self.inner = Halves(own, values, rank, size)
        self.more = nn.ModuleList([Halves(own, values + 10, rank, size)])


def _save_halves(rank: int, world_size: int, folder: str) -> list[str]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    outer = Outer(config(0), torch.arange(8.0).view(4, 2), rank, world_size)
    entries = outer.sharded_state_dict(prefix="a.")
    dist_checkpointing.save(entries, folder)
    return [f"{name}: {entry.key} {entry.replica_id}" for name, entry in entries.items()]


def test_a_module_that_overrides_sharded_state_dict_is_asked(tmp_path: Path) -> None:
    first, second = run_ranks(_save_halves, 2, str(tmp_path))
    assert first[0] == "a.inner.rows: a.inner.renamed.rows (0, 0, 0)"
    assert second[1] == "a.inner.plain.weight: a.inner.renamed.plain.weight (0, 1, 0)"
    outer = Outer(config(0), torch.zeros(4, 2), 0, 1)
    entries = outer.sharded_state_dict(prefix="a.")
    dist_checkpointing.load(entries, tmp_path, strict="raise_all")
    assert outer.inner.rows.flatten().tolist() == [float(n) for n in range(8)]
    assert outer.more[0].rows.flatten().tolist() == [float(n) for n in range(10, 18)]
    assert outer.more[0].plain.bias.tolist() == [10, 10]


_FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


def trained(
    seed: int, *, steps: int, sharded: bool, fsdp: bool = False, **changes: Any
) -> tuple[Any, Any]:
    own = config(seed, bf16=True, params_dtype=torch.bfloat16, **_GATED, **changes)
    layer = get_gpt_layer_local_spec()
    model = GPTModel(own, layer, 64, 16, position_embedding_type="rope", **_groups())
    settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    half = Float16Module(own, model)
    wrapper: Any
    if fsdp:
        settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **_FSDP)
        wrapper = FullyShardedDataParallel(own, settings, half, [TransformerLayer])
    else:
        wrapper = DistributedDataParallel(own, settings, half, **_groups())
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.01, bf16=True, use_distributed_optimizer=sharded), [wrapper]
    )
    ids = torch.arange(16).view(1, 16)
    for step in range(steps):
        wrapper.zero_grad_buffer()
        wrapper(ids + step, ids, None, labels=ids).mean().backward()
        finalize_model_grads([wrapper], **_groups())
        optimizer.step()
    return wrapper, optimizer


def state_of(wrapper: Any, optimizer: Any) -> ShardedStateDict:
    model = wrapper.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model)}


def _train_and_save(
    rank: int, world_size: int, folder: str, tp: int, sharded: bool, fsdp: bool
) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    run = trained(1, steps=2, sharded=sharded, fsdp=fsdp, tensor_model_parallel_size=tp)
    dist_checkpointing.save(state_of(*run), folder, ("torch_dist", 1))


@pytest.mark.parametrize(
    ("tp", "sharded", "fsdp"),
    [(2, False, False), (1, True, False), (1, True, True)],
    ids=["tp", "ZeRO", "FSDP"],
)
def test_an_optimizer_goes_on_in_another_layout(
    tmp_path: Path, tp: int, sharded: bool, fsdp: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    run_ranks(_train_and_save, 2, str(first), tp, sharded, fsdp)
    wrapper, optimizer = trained(2, steps=1, sharded=False)
    loaded = dist_checkpointing.load(state_of(wrapper, optimizer), first)
    wrapper.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.scalar_state()["step"] == 2
    dist_checkpointing.save(state_of(wrapper, optimizer), second)
    before = dist_checkpointing.load_plain_tensors(first)
    after = dist_checkpointing.load_plain_tensors(second)
    assert before.keys() == after.keys()
    assert any(key.startswith("optimizer.state.fp32_param.decoder.layers.") for key in before)
    for key, values in after.items():
        if values.dtype == before[key].dtype:
            assert torch.equal(before[key], values), key
        else:  # FSDP saves weights in fp32
            assert fsdp
            torch.testing.assert_close(values.float(), before[key], rtol=2**-8, atol=0)
