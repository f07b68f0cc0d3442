"""A layer of experts, plainly: every expert computes every token, and what was not chosen counts 0.

One process, all tokens of a micro-batch, loops instead of tables; no code of the layer is used.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig


def top(values: list[float], k: int, allowed: set[int] | None = None) -> list[int]:
    """The k highest, the first of equals first."""
    places = [i for i in range(len(values)) if allowed is None or i in allowed]
    return sorted(places, key=lambda i: (-values[i], i))[:k]


def scores_of(logits: Tensor, c: TransformerConfig) -> Tensor:
    name = c.moe_router_score_function
    if name == "sqrtsoftplus":
        return torch.log1p(torch.exp(logits)) ** 0.5
    return torch.sigmoid(logits) if name == "sigmoid" else torch.softmax(logits, -1)


def weights_table(logits: Tensor, c: TransformerConfig, bias: Tensor | None = None) -> Tensor:
    """[N, E]: the weight of each visit, 0 elsewhere."""
    k = c.moe_router_topk
    is_softmax = c.moe_router_score_function == "softmax"
    rows = []
    for x in logits:
        scores = scores_of(x, c)
        by = (scores if bias is None else scores + bias).tolist()
        allowed = None
        if c.moe_router_num_groups:
            size = len(by) // c.moe_router_num_groups
            groups = [by[i : i + size] for i in range(0, len(by), size)]
            per_group = k // c.moe_router_group_topk
            sums = [sum(sorted(g)[-per_group:]) for g in groups]
            allowed = {
                g * size + i for g in top(sums, c.moe_router_group_topk) for i in range(size)
            }
        chosen = top(by, k, allowed)
        if not is_softmax:
            w = scores[chosen]
            w = w / w.sum() if k > 1 else w
        else:
            w = scores[chosen] if c.moe_router_pre_softmax else torch.softmax(x[chosen], -1)
        row = torch.zeros_like(x)
        row[chosen] = w * (c.moe_router_topk_scaling_factor or 1.0)
        rows.append(row)
    return torch.stack(rows)


def kept(table: Tensor, c: TransformerConfig) -> Tensor:
    """Which visits fit into each expert's capacity; tokens in the order of ``table``."""
    assert c.moe_expert_capacity_factor is not None
    n, e = table.shape
    capacity = math.ceil(n * c.moe_router_topk / e * c.moe_expert_capacity_factor)
    result = torch.zeros_like(table)
    for j in range(e):
        visits = [i for i in range(n) if table[i, j] > 0]
        if c.moe_token_drop_policy == "probs":
            visits.sort(key=lambda i: (-round(float(table[i, j]) * 4096), i))
        result[visits[:capacity], j] = 1
    return result


def aux_losses(
    logits: Tensor, c: TransformerConfig, b: int, before: list[Tensor]
) -> dict[str, Tensor]:
    """Losses of tokens [N, E], each of which belongs to sequence i % b.

    ``before``: the choices of micro-batches of the step so far; that of this one is added.
    """
    scores = scores_of(logits, c)
    scores = scores / scores.sum(-1, keepdim=True)
    k, e = c.moe_router_topk, logits.shape[1]
    chosen = torch.zeros_like(scores)
    for i, x in enumerate(scores.tolist()):
        chosen[i, top(x, k)] = 1

    def balance(s: Tensor, m: Tensor) -> Tensor:
        return e / k * (s.mean(0) * m.mean(0)).sum()

    before.append(chosen)
    per_sequence = [balance(scores[i::b], chosen[i::b]) for i in range(b)]
    return {
        "load_balancing_loss": balance(scores, chosen),
        "global_load_balancing_loss": balance(scores, torch.cat(before)),
        "seq_load_balancing_loss": torch.stack(per_sequence).mean(),
        "z_loss": torch.logsumexp(logits, -1).square().mean(),
    }


def experts(x: Tensor, table: Tensor, weights: dict[str, Tensor], c: TransformerConfig) -> Tensor:
    """[N, h] -> [N, h], narrower inside if there are projections."""
    if "fc1_latent_proj.weight" in weights:
        first, second = (
            (weights[f"{name}_latent_proj.weight"], weights.get(f"{name}_latent_proj.bias"))
            for name in ("fc1", "fc2")
        )
        inner = {name: w for name, w in weights.items() if "latent" not in name}
        return F.linear(experts(F.linear(x, *first), table, inner, c), *second)
    y = torch.zeros_like(x)
    for j in range(table.shape[1]):
        name = f"experts.local_experts.{j}"
        w = table[:, j : j + 1]
        seen = x * w if c.moe_apply_probs_on_input else x
        first, second = (
            (weights[f"{name}.{m}.weight"], weights.get(f"{name}.{m}.bias"))
            for m in ("linear_fc1", "linear_fc2")
        )
        gate, up = F.linear(seen, *first).chunk(2, -1)
        limit = c.activation_func_clamp_value or math.inf
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = F.linear(c.activation_func(gate) * (up + c.glu_linear_offset), *second)
        y = y + (out * (w > 0) if c.moe_apply_probs_on_input else out * w)
    return y


def shared(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """[N, h] -> [N, h]: the experts that all tokens visit, weighed by a gate."""
    gate, up = F.linear(x, weights["shared_experts.linear_fc1.weight"]).chunk(2, -1)
    out = F.linear(F.silu(gate) * up, weights["shared_experts.linear_fc2.weight"])
    return out * torch.sigmoid(F.linear(x, weights["shared_experts.gate_weight"]))
