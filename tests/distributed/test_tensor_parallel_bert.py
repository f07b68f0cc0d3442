"""A BERT on two tensor-parallel ranks computes what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks
from tests.support.sharded import assemble_gradients, gradients

VOCABULARY = 101


def loss_and_gradients(groups: Any, padded: int, model: dict[str, Any], **layer: Any) -> Any:
    """fp64: the order of sums does not hide a term that is wrong or missing."""
    torch.manual_seed(1234)
    bert = BertModel(
        tiny_config(params_dtype=torch.float64, **layer),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=padded,
        max_sequence_length=16,
        pg_collection=groups,
        unpadded_vocab_size=VOCABULARY,
        **model,
    )
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
    labels = torch.where(torch.rand(2, 16, generator=generator) < 0.3, ids.flip(1), -1)
    mask = (torch.arange(16) < torch.tensor([[16], [11]])).long()
    losses, order = bert(ids, mask, (ids > 50).long(), lm_labels=labels)
    loss = (losses * torch.linspace(0.5, 1.5, 16)).sum()
    if order is not None:
        loss = loss + F.cross_entropy(order, torch.tensor([1, 0]))
    loss.backward()
    return losses.detach(), gradients(bert)


def one_of_two(rank: int, world_size: int, model: dict[str, Any], sequence_parallel: bool) -> Any:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    layer = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    return loss_and_gradients(groups, 128, model, **layer)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        {"share_embeddings_and_output_weights": True},
        {"add_binary_head": False, "position_embedding_type": "rope"},
    ],
    ids=["tied", "untied"],
)
def test_two_ranks_give_the_loss_and_gradients_of_one(
    model: dict[str, Any], sequence_parallel: bool
) -> None:
    losses, grads = loss_and_gradients(one_process_groups(), 104, model)
    ranks = run_ranks(one_of_two, 2, model, sequence_parallel)
    for rank in ranks:
        torch.testing.assert_close(rank[0], losses, **tolerances.of(torch.float64))
    split = assemble_gradients([rank[1] for rank in ranks])
    whole = assemble_gradients([grads])
    assert split.keys() == whole.keys()
    for name, grad in whole.items():
        close: Any = tolerances.of(torch.float64)
        torch.testing.assert_close(split[name], grad, **close, msg=lambda m, n=name: f"{n}: {m}")
        assert isinstance(grad, Tensor)
        assert grad.abs().max() > 0, f"{name} gets no gradient"
