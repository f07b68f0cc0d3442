"""--compile: what PyTorch makes of the layers computes and trains as they do."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import MissingDependency
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.transformer import compiled
from tests.support import host_gpu, tolerances
from tests.support.one_process import tiny_config
from tests.support.ranks import run_ranks
from tests.support.runs import losses, run_gpt


def _gpt() -> GPTModel:
    torch.manual_seed(5)
    config = tiny_config(
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        num_query_groups=2,
    )
    spec = get_gpt_layer_local_spec(config=config)
    groups = create_process_groups(*make_grids(1))
    return GPTModel(config, spec, 64, 12, position_embedding_type="rope", pg_collection=groups)


def _gradients(model: GPTModel, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of the tokens, and the gradients of their sum."""
    ids = torch.randint(0, 64, (batch, 12), generator=torch.Generator().manual_seed(batch))
    model.zero_grad()
    loss = model(ids, torch.arange(12).expand(batch, 12), None, labels=ids.roll(-1, 1))
    loss.sum().backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _compare(rank: int, world_size: int) -> None:
    del rank, world_size
    plain, model = _gpt(), _gpt()
    names = list(model.state_dict())
    compiled.compile_layers(model, "layer")
    assert list(model.state_dict()) == names
    (loss, grads), (expected_loss, expected) = _gradients(model, 2), _gradients(plain, 2)
    torch.testing.assert_close(loss, expected_loss, **tolerances.of(torch.float32))
    torch.testing.assert_close(grads, expected, **tolerances.GRADIENT)


@pytest.mark.skipif(host_gpu.is_asked(), reason="torch compiles nothing for an emulated device")
@pytest.mark.feature("Speed: layers, or all layers of a stage, compiled by PyTorch")
def test_compiled_layers_have_the_values_gradients_and_names_of_eager_ones() -> None:
    run_ranks(_compare, 1, timeout_s=300)


def test_a_missing_compiler_is_named_at_the_start_with_the_cure() -> None:
    with (
        mock.patch.object(compiled.shutil, "which", return_value=None),
        pytest.raises(MissingDependency, match=r"--compile layer: the compiler .* install g\+\+"),
    ):
        compiled.compile_layers(nn.Linear(1, 1), "layer")


def _compile_where(rank: int, world_size: int, is_kept: bool) -> tuple[str, bool]:
    """The warning, and whether a layer is compiled."""
    del rank, world_size
    model = _gpt()
    with (
        mock.patch.object(compiled, "_KEEPS_GRADIENTS", is_kept),
        mock.patch.object(compiled, "warn_once") as warn,
    ):
        compiled.compile_layers(model, "layer")
    (text,) = warn.call_args.args
    return text, "forward" in vars(model.decoder.layers[0])


def test_what_compilation_costs_or_loses_is_reported() -> None:
    ((text, is_compiled),) = run_ranks(_compile_where, 1, False)
    assert "gradients of zero" in text
    assert not is_compiled, "torch 2.11 loses gradients"
    ((text, is_compiled),) = run_ranks(_compile_where, 1, True)
    assert "on a CPU slower" in text
    assert is_compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (
            "--compile layer --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            1,
        ),
        ("--compile layer --tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--compile layer --use-distributed-optimizer --overlap-grad-reduce", 2),
        ("--compile model --pipeline-model-parallel-size 2", 2),
    ],
    ids=["recompute", "tensor", "sharded", "pipeline"],
)
def test_a_compiled_run_has_the_losses_of_an_eager_one(
    tmp_path: Path, flags: str, ranks: int
) -> None:
    expected = losses(run_gpt(tmp_path / "eager", "--train-iters", "3"))
    found = losses(
        run_gpt(
            tmp_path / "compiled",
            "--train-iters",
            "3",
            *flags.split(),
            world_size=ranks,
            timeout_s=300,
        )
    )
    torch.testing.assert_close(found, expected, **tolerances.LAYOUT_LOSS)
