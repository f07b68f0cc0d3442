"""Check of verl: python -m tools.dev.lib.library_verl PACKAGE MODEL FOLDER TP PP.

Its Megatron engine builds an actor by mbridge, and trains it by GRPO with the loss, advantages and
batches of verl.  In place of vLLM, transformers writes the answers, with the weights that the
engine exports.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils
from verl.utils.megatron_utils import (
    load_megatron_model_to_gpu,
    load_megatron_optimizer,
    offload_megatron_model_to_cpu,
    offload_megatron_optimizer,
)
from verl.workers.config import ActorConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from tools.dev.lib.library_models import SEQUENCE, differing, tokens
from tools.dev.lib.library_steps import done, join

PROMPT = SEQUENCE // 2
ANSWERS = 4  # per prompt
_MICRO = {"micro_batch_size_per_gpu": 4, "use_dynamic_bsz": False}
_BF16_ERROR = 0.1  # of a log probability


class Trial:
    """A GRPO step with a tiny model."""

    def __init__(self, path: Path, tp: int, pp: int) -> None:
        self.path = path
        self.model = HFModelConfig(path=str(path))
        self.layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        self.actor = self.new_engine()
        done("build")
        done("load")
        self.loss = partial(
            ppo_loss,
            ActorConfig(
                strategy="megatron",
                rollout_n=ANSWERS,
                use_kl_loss=True,
                use_dynamic_bsz=False,
                ppo_micro_batch_size_per_gpu=4,
                ppo_mini_batch_size=2 * ANSWERS,
            ),
        )

    def new_engine(self, **more: Any) -> Any:
        """Return an engine with the weights of the checkpoint."""
        engine = EngineRegistry.new(
            model_type="language_model",
            backend="megatron",
            model_config=self.model,
            engine_config=McoreEngineConfig(
                vanilla_mbridge=True,
                infer_micro_batch_size_per_gpu=4,
                **_MICRO,
                **self.layout,
                **more,
            ),
            optimizer_config=McoreOptimizerConfig(
                lr=1e-3, total_training_steps=10, lr_decay_style="constant"
            ),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
        return engine

    @torch.no_grad()
    def roll_out(self) -> None:
        """Let transformers answer with the actor's weights, which are those of the checkpoint."""
        exported = {name: w.clone() for name, w in self.actor.get_per_tensor_param()[0]}
        different = differing(self.path, exported)
        if different:
            raise ValueError(f"exported tensors differ: {different}")
        done("export")
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.bfloat16)
        prompts = tokens(2)[:, :PROMPT].repeat_interleave(ANSWERS, 0)
        torch.manual_seed(7)
        self.ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            min_new_tokens=SEQUENCE - PROMPT,
            max_new_tokens=SEQUENCE - PROMPT,
        )
        self.answers = self.ids[:, PROMPT:]
        logits = model(self.ids).logits[:, PROMPT - 1 : -1].float()
        self.wanted = logits.log_softmax(-1).gather(-1, self.answers[..., None]).squeeze(-1)

    def batch(self, **more: Tensor) -> TensorDict:
        """Return the batch as verl's trainer hands it to an engine."""
        data = TensorDict(
            {
                "prompts": self.ids[:, :PROMPT],
                "responses": self.answers,
                "input_ids": self.ids,
                "attention_mask": torch.ones_like(self.ids),
                "response_mask": torch.ones_like(self.answers),
                "position_ids": torch.arange(SEQUENCE).expand_as(self.ids),
                **more,
            },
            batch_size=len(self.ids),
        )
        data = left_right_2_no_padding(data)
        tensordict_utils.assign_non_tensor(
            data, temperature=1.0, global_batch_size=len(data), calculate_entropy=True, **_MICRO
        )
        return data

    def log_probs(self, engine: Any) -> Tensor:
        """Return the log probabilities of the answers [b, s] in every process."""
        with engine.eval_mode():
            data = self.batch()
            output = engine.infer_batch(data)
        found = None
        if engine.is_mp_src_rank_with_outputs():
            found = no_padding_2_padding(output["model_output"]["log_probs"].float(), data)
        everywhere: list[Tensor | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        return next(x for x in everywhere if x is not None)

    def score(self) -> None:
        """Compute what the step needs: old and reference log probabilities, and advantages."""
        self.old = self.log_probs(self.actor)
        error = (self.old - self.wanted).abs().max().item()
        if error > _BF16_ERROR:
            raise ValueError(f"log probabilities differ by {error}")
        done("logits", error=error)
        self.reference = self.log_probs(self.new_engine(forward_only=True))
        if not torch.equal(self.reference, self.old):
            raise ValueError("the reference policy has other log probabilities")
        done("reference policy")
        rewards = torch.zeros_like(self.old)
        rewards[:, -1] = (self.answers % 2 == 0).float().mean(-1)
        self.advantages, _ = compute_grpo_outcome_advantage(
            rewards, torch.ones_like(self.answers), np.repeat([0, 1], ANSWERS)
        )

    def step(self) -> dict[str, float]:
        """Train on the batch once; return verl's metrics where it has them."""
        scores = {
            "old_log_probs": self.old,
            "advantages": self.advantages,
            "ref_log_prob": self.reference,
        }
        with self.actor.train_mode():
            output = self.actor.train_batch(self.batch(**scores), self.loss)
            self.actor.lr_scheduler_step()
        metrics = output.get("metrics", {})
        return {k: v for k, v in metrics.items() if isinstance(v, float)}


def main(package: str, model: str, folder: Path, tp: int, pp: int) -> None:
    """Build, export, roll out, score, train, offload, save and load."""
    join()
    trial = Trial(folder / model, tp, pp)
    trial.roll_out()
    trial.score()
    done("step", **trial.step())
    new = trial.log_probs(trial.actor)
    objective = ((new - trial.old) * trial.advantages).sum().item()
    if objective <= 0:
        raise ValueError(f"better answers became less likely: {objective}")
    done("GRPO makes better answers more likely")
    engine = trial.actor
    offload_megatron_model_to_cpu(engine.module)
    offload_megatron_optimizer(engine.optimizer)
    load_megatron_model_to_gpu(engine.module)
    load_megatron_optimizer(engine.optimizer)
    if not torch.equal(new, trial.log_probs(engine)):
        raise ValueError("log probabilities differ after offload and onload")
    done("offload")
    checkpoint = folder / f"{package}_{model}_{tp}_{pp}"
    engine.save_checkpoint(str(checkpoint), global_step=1)
    done("save")
    trial.step()
    further = trial.log_probs(engine)
    engine.load_checkpoint(str(checkpoint))
    if not torch.equal(new, trial.log_probs(engine)):
        raise ValueError("log probabilities differ after loading")
    trial.step()
    if not torch.equal(further, trial.log_probs(engine)):
        raise ValueError("the step after loading differs")
    done("resume")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
