"""Training after pretraining: fine-tuning on conversations and pairs of answers, distillation,
pruning and reinforcement learning.

Importing the package registers its objectives; programs that build their models import it.
"""

from megatron.training.config.run import DPO, GRPO, REWARD, SFT
from megatron.training.models.registry import register_objectives

register_objectives(
    {
        SFT: "megatron.post_training.sft.objective:GPT_SFT",
        DPO: "megatron.post_training.preference.objective:DPO",
        REWARD: "megatron.post_training.preference.objective:REWARD",
        GRPO: "megatron.post_training.rl.objective:GRPO",
        "teacher": "megatron.post_training.distillation.objective:add_teacher",
        "store": "megatron.post_training.distillation.stored_distillation:add_stored_logits_loss",
        "eval_generate": "megatron.post_training.eval_generate:EvalGenerate",
        "save": "megatron.post_training.distillation.stored_distillation:save_top_tokens",
    }
)
