"""Write trl_grpo.json: losses and gradients that TRL's GRPOTrainer computes.

python tests/golden/trl_grpo.py      (in an environment with trl)

The policy is a bigram model, logits = W[token], so that gradients are those of a matrix [v, v].
TRL's own `_compute_loss` computes the loss of one micro-batch from the inputs in the file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl  # type: ignore[import-not-found,unused-ignore]
from trl.trainer.grpo_trainer import (  # type: ignore[import-not-found,unused-ignore]
    GRPOTrainer,
    nanstd,
)

TARGET = Path(__file__).with_suffix(".json")
ROWS = 6
PROMPT = 3
LENGTH = 7
VOCAB = 11
GROUP = 3
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"loss_type": kind} for kind in LOSS_TYPES},
    **{f"{kind} with KL": {"loss_type": kind, "beta": 0.3} for kind in LOSS_TYPES},
    "wide clip": {"loss_type": "dapo", "epsilon_low": 0.4, "epsilon_high": 1.5},
    "truncated weights": {"loss_type": "grpo", "truncation": 1.1, "beta": 0.1},
    "weights": {"loss_type": "dapo", "truncation": 1e9},
    "entropy": {"loss_type": "bnpo", "entropy": 0.2},
    "on policy": {"loss_type": "dapo", "on_policy": True, "beta": 0.05},
}


class Judge(GRPOTrainer):  # type: ignore[misc,unused-ignore]
    """GRPOTrainer without set-up, whose model is a matrix of logits."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.beta = case.get("beta", 0.0)
        self.loss_type = case["loss_type"]
        self.epsilon_low = case.get("epsilon_low", 0.1)
        self.epsilon_high = case.get("epsilon_high", 0.2)
        self.args = SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1
        )
        self.importance_sampling_level = "token"
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None
        self.aux_loss_enabled = False
        self.use_vllm = self.vllm_importance_sampling_correction = "truncation" in case
        self.max_completion_length = LENGTH
        self.current_gradient_accumulation_steps = 1
        self._entropy_bonus_enabled = "entropy" in case
        self.use_adaptive_entropy = False
        self.entropy_coef = case.get("entropy", 0.0)
        self._metrics = defaultdict(lambda: defaultdict(list))
        self.accelerator = SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
            sync_gradients=True,
        )

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        log_probs = model.weight[ids[:, :-1]].log_softmax(-1)
        chosen = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return chosen[:, -keep:], entropy[:, -keep:], None


def inputs() -> dict[str, torch.Tensor]:
    """Return made-up prompts, completions of different lengths, rewards and log-probabilities."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (ROWS, PROMPT + LENGTH), generator=generator)
    lengths = torch.tensor([7, 3, 5, 1, 6, 4])
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).int()
    weight = torch.randn(VOCAB, VOCAB, generator=generator)
    log_probs = weight[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None])[:, -LENGTH:, 0]
    near = [0.3 * torch.randn(log_probs.shape, generator=generator) for _ in range(3)]
    return {
        "ids": ids,
        "mask": mask,
        "weight": weight,
        "rewards": torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, -1.0]),
        "old": log_probs + near[0],
        "reference": log_probs + near[1],
        "sampled": log_probs + near[2],
    }


def advantages(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    """Return TRL's advantages (`_generate_and_score_completions`)."""
    groups = rewards.view(-1, GROUP)
    found = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        found = found / (nanstd(groups, dim=1)[:, None] + 1e-4)
    elif scale == "batch":
        found = found / (nanstd(rewards) + 1e-4)
    return found.flatten()


def judged(given: dict[str, torch.Tensor], case: dict[str, Any]) -> dict[str, Any]:
    """Return loss and gradient of a case."""
    trainer = Judge(case)
    model = SimpleNamespace(weight=given["weight"].clone().requires_grad_(), training=True)
    batch = {
        "prompt_ids": given["ids"][:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.int),
        "completion_ids": given["ids"][:, PROMPT:],
        "completion_mask": given["mask"],
        "advantages": advantages(given["rewards"], "group"),
        "num_items_in_batch": given["mask"].sum(),
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
    }
    if "on_policy" in case:
        del batch["old_per_token_logps"]
    if "truncation" in case:
        ratio = (given["old"] - given["sampled"]).exp()
        batch["importance_sampling_ratio"] = ratio.clamp(max=case["truncation"])
    trainer.model = model
    loss = trainer._compute_loss(model, batch)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return {
        "case": case,
        "loss": loss.item(),
        "gradient": model.weight.grad.tolist(),
        "clip fraction": metrics["clip_ratio/region_mean"],
        "entropy": metrics["entropy"],
        "kl": metrics.get("kl"),
    }


def main() -> None:
    """Write the file."""
    given = inputs()
    content = {
        "command": "python tests/golden/trl_grpo.py",
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
        "given": {name: tensor.tolist() for name, tensor in given.items()},
        "prompt": PROMPT,
        "group": GROUP,
        "advantages": {
            scale: advantages(given["rewards"], scale).tolist()
            for scale in ("group", "batch", "none")
        },
        "cases": {name: judged(given, case) for name, case in CASES.items()},
    }
    TARGET.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
