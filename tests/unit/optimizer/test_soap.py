"""SOAP against pytorch-optimizer's."""

from __future__ import annotations

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.unit.optimizer.test_muon import Model, noise

SOAP = {"optimizer": "soap", "lr": 0.02, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 0.0}


@pytest.mark.feature("Optimizer: SOAP for matrices, complete in every layout")
def test_matrices_are_moved_as_pytorch_optimizers_soap_moves_them(alone: ProcessGroupCollection):
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = Model(), Model()
    config = OptimizerConfig(**SOAP, weight_decay=0.0, soap_precondition_frequency=3)
    optimizer = get_megatron_optimizer(config, [ours], pg_collection=alone)
    reference = library.SOAP(
        [theirs.wide, theirs.tall],
        lr=0.02,
        betas=(0.9, 0.95),
        shampoo_beta=0.95,
        weight_decay=0.0,
        precondition_frequency=3,
    )
    begin = theirs.wide.detach().clone()
    for step in range(8):
        for model in (ours, theirs):
            for name, param in model.named_parameters():
                param.grad = noise(step, name, param)
        optimizer.step()
        reference.step()
    for name in ("wide", "tall"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-5)
    assert (ours.wide - begin).abs().mean() > 0.05
