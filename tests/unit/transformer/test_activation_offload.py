"""Activations in host memory: the same bits, and what travels.

The ways of a GPU are taken with the CPU's memory in both places.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.core.transformer import activation_offload
from megatron.core.transformer.activation_offload import MODULES, _OffloadedStorage
from megatron.core.transformer.config.execution import OFFLOAD_MODULES
from tests.distributed.test_tensor_parallel_model import build, loss_and_gradients
from tests.support.one_process import one_process_groups
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt

OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
MODULE_FLAGS = (
    "--fine-grained-activation-offloading",
    "--offload-modules",
    "qkv_linear",
    "core_attn",
    "mlp_norm",
)
LARGE = 1024  # bytes


@pytest.fixture(autouse=True)
def _host_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "host_is_apart", lambda: True)
    monkeypatch.setattr(activation_offload, "MIN_BYTES", LARGE)


def trained(case: str = "llama", **kind: Any) -> tuple[Tensor, dict[str, Tensor], GPTModel]:
    model_parallel_seed(3, tp_rank=0)
    model = build(case, one_process_groups(), 104, num_layers=3, **kind)
    loss, _ = loss_and_gradients(model)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss, grads, model


def bytes_saved_by(model: GPTModel, num_layers: int) -> int:
    """Of large storages that are no parameter's, each counted once."""
    kept: dict[int, tuple[int, Tensor]] = {}
    params = {p.untyped_storage()._cdata for p in model.parameters()}
    tables = model.rotary_table(16, None)
    if tables is not None:
        params |= {t.untyped_storage()._cdata for t in (tables.cos, tables.sin)}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= LARGE and storage._cdata not in params:
            kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    for layer in model.decoder.layers[:num_layers]:
        run = layer.forward

        def noted(*args: Any, run: Any = run, **more: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
                return run(*args, **more)

        layer.forward = noted
    loss_and_gradients(model)
    return sum(size for size, _ in kept.values())


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that will hold the bytes of each storage that is offloaded."""
    sizes: list[int] = []
    create = _OffloadedStorage.__init__

    def counted(self: _OffloadedStorage, tensor: Tensor, *more: Any) -> None:
        sizes.append(tensor.untyped_storage().nbytes())
        create(self, tensor, *more)

    monkeypatch.setattr(_OffloadedStorage, "__init__", counted)
    return sizes


@pytest.mark.feature("Memory: activations of the first layers in host memory, the same bits")
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_activations_that_were_away_give_the_same_bits(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    loss, grads, plain = trained(case, **dropout)
    num_bytes = count_bytes(monkeypatch)
    away_loss, away_grads, away = trained(case, **dropout, **OFFLOAD)
    assert torch.equal(away_loss, loss)
    for name, grad in grads.items():
        assert torch.equal(away_grads[name], grad), name
    assert sum(num_bytes) == bytes_saved_by(plain, 2)
    hidden = 16 * 2 * away.config.hidden_size * 8
    assert sum(num_bytes) > 2 * 8 * hidden, "inputs of norms and products, and more"


HIDDEN = 16 * 2 * 32 * 8  # bytes of hidden states
BYTES = {  # that a layer saves in each module; each token goes to two experts
    "attn_norm": HIDDEN,
    "qkv_linear": HIDDEN,
    "core_attn": range(4 * HIDDEN, 6 * HIDDEN),
    "attn_proj": HIDDEN,
    "mlp_norm": HIDDEN,
    "expert_fc1": 2 * HIDDEN,
    "moe_act": range(8 * HIDDEN, 20 * HIDDEN),
}


@pytest.mark.feature("Memory: activations of chosen modules in host memory, the same bits")
def test_modules_whose_activations_were_away_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BYTES.keys() == MODULES.keys() == {*OFFLOAD_MODULES}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2}
    loss, grads, _ = trained(**experts)
    sizes = count_bytes(monkeypatch)
    flags = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": LARGE // 8}
    for module, expected in BYTES.items():
        away_loss, away_grads, _ = trained(**experts, **flags, offload_modules=(module,))
        assert torch.equal(away_loss, loss)
        for name, grad in grads.items():
            assert torch.equal(away_grads[name], grad), (module, name)
        of_layer = sum(sizes) // 2  # the last of three layers keeps its own
        assert of_layer in expected if isinstance(expected, range) else of_layer == expected, module
        sizes.clear()
    trained(**experts, **flags, offload_modules=("mlp_norm",), activation_offload_fraction=0.5)
    assert sizes == [HIDDEN]


def test_backward_reads_what_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[_OffloadedStorage] = []
    leave = _OffloadedStorage.leave

    def spoil(offloaded: _OffloadedStorage) -> None:
        leave(offloaded)
        left.append(offloaded)
        assert offloaded._on_host is not None
        offloaded._on_host.zero_()

    _, grads, _ = trained(**OFFLOAD)
    monkeypatch.setattr(_OffloadedStorage, "leave", spoil)
    _, spoilt, _ = trained(**OFFLOAD)
    assert left
    layers = [torch.equal(spoilt[n], g) for n, g in grads.items() if ".layers.2." in n]
    assert all(layers), "the last layer keeps its own"
    assert not any(torch.equal(spoilt[n], g) for n, g in grads.items() if "0.mlp.linear_fc" in n)


def test_one_layer_comes_back_at_a_time() -> None:
    order: list[str] = []
    leave, come_back = activation_offload._Pass.leave, activation_offload._Pass.come_back

    def left(self: Any, layer: int) -> None:
        order.append(f"leave {layer}")
        leave(self, layer)

    def came(self: Any, layers: Sequence[int], grad: Tensor) -> None:
        order.append(f"back {layers}")
        come_back(self, layers, grad)
        assert not any(self._layers[layer] for layer in layers)

    with (
        mock.patch.object(activation_offload._Pass, "leave", left),
        mock.patch.object(activation_offload._Pass, "come_back", came),
    ):
        trained(**OFFLOAD)
    assert order == ["leave 0", "leave 1", "back [1]", "back [0]"]


def test_weights_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = count_bytes(monkeypatch)
    *_, model = trained(**OFFLOAD, cpu_offloading_activations=False)
    assert model.decoder.offload is not None
    assert not num_bytes


def pipeline(rank: int, world_size: int, argv: Sequence[str]) -> None:
    with (
        mock.patch.object(device, "host_is_apart", return_value=True),
        mock.patch.object(activation_offload, "MIN_BYTES", LARGE),
    ):
        train_gpt(rank, world_size, argv)


def test_several_micro_batches_in_flight_do_not_mix(tmp_path: Path) -> None:
    found = []
    for name, more in (
        ("plain", ()),
        ("away", ("--cpu-offloading", "--cpu-offloading-num-layers", "2")),
        ("modules away", (*MODULE_FLAGS, "--min-offloaded-tensor-size", "1")),
    ):
        path = tmp_path / name
        flags = "--num-layers 4 --pipeline-model-parallel-size 2 --train-iters 2 --eval-iters 0"
        words = [*TINY, *flags.split(), "--hidden-dropout", "0.1", "--metrics-file", str(path)]
        run_ranks(pipeline, 2, [*words, *more])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([(line["lm loss"], line["grad-norm"]) for line in lines])
    assert found[0] == found[1] == found[2]
