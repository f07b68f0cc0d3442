"""A router that chooses experts by token id: the first layers of DeepSeek-V4.

A fixed table names the experts of each token id.  The weights of the experts are computed from
scores, as in other routers, and only these are trained.  Every rank holds the complete table; a
checkpoint has it, since published models have tables of their own.

Token ids are [b, s/cp]; with sequence parallelism a rank routes its part of them, [s/(cp tp), b].
No communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.core.transformer.transformer_config import TransformerConfig


class HashRouter(TopKRouter):
    """Routes each token to the experts that ``tid2eid`` [vocabulary, k] has for its id."""

    tid2eid: Tensor

    @library_call("config model_comm_pgs")
    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection=pg_collection)
        # A bias changes choices, and these are fixed.
        self.enable_expert_bias = False
        self.expert_bias = self.local_tokens_per_expert = None
        self.register_buffer("tid2eid", torch.empty(0, self.topk, dtype=torch.int64))

    def make_table(self, vocab_size: int) -> None:
        """Choose the experts of ``vocab_size`` token ids, by the number of the layer alone."""
        if torch.get_default_device().type == "meta":
            self.tid2eid = torch.empty(vocab_size, self.topk, dtype=torch.int64)
            return
        generator = torch.Generator().manual_seed(self.layer_number)
        keys = torch.rand(
            vocab_size, self.num_experts, generator=generator, device=generator.device
        )
        self.tid2eid = keys.topk(self.topk).indices.to(device.current())

    def is_aux_loss_enabled(self) -> bool:
        """Return False: the load does not depend on the scores."""
        return False

    def forward(
        self,
        input: Tensor,
        padding_mask: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        **more: Any,
    ) -> RoutingResult:
        """Route hidden states [s, b, h] with the ids [b, s] of all tokens of tp; see `TopKRouter`.

        Raises ValueError without ids.
        """
        if token_ids is None:
            raise ValueError("a layer with hash routing needs the token ids: pass input_ids")
        ids = token_ids.transpose(0, 1)
        if self.is_sequence_sharded:
            tp = self.groups.tp
            ids = ids.chunk(tp.size())[tp.rank()]
        experts = self.tid2eid[ids.flatten()]
        return super().forward(input, padding_mask, experts=experts, **more)
