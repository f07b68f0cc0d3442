"""RunConfig: the complete, immutable configuration of a run, built by ``resolve``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.plan import Placement, placement_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.adapters import AdaptersConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.distillation import DistillationConfig
from megatron.training.config.distributed import DistributedConfig
from megatron.training.config.inference import InferenceConfig
from megatron.training.config.language_model import LanguageModelConfig
from megatron.training.config.logging import LoggingConfig, ProfilingConfig
from megatron.training.config.mimo import MimoConfig
from megatron.training.config.preference import PreferenceConfig
from megatron.training.config.quantization import QuantizationFlags
from megatron.training.config.resilience import ResilienceConfig
from megatron.training.config.retro import RetroFlags
from megatron.training.config.rl import RLConfig
from megatron.training.config.scheduler import SchedulerConfig
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.config.training import ExtensionsConfig, TrainingConfig, ValidationConfig
from megatron.training.config.vision import ImageClassifierConfig, VisionConfig

PRETRAINING = "pretraining"
SFT = "sft"
GRPO = "grpo"
DPO = "dpo"
REWARD = "reward"
OF_CONVERSATIONS = (SFT, DPO, REWARD)  # objectives that read conversations


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a run, one section per subject.

    A field has the name of its flag's argparse dest unless its Option gives another.
    """

    model: TransformerConfig
    language_model: LanguageModelConfig
    vision: VisionConfig
    mimo: MimoConfig
    retro: RetroFlags
    adapters: AdaptersConfig
    preference: PreferenceConfig
    image_classifier: ImageClassifierConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    ddp: DistributedDataParallelConfig
    distributed: DistributedConfig
    training: TrainingConfig
    validation: ValidationConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    profiling: ProfilingConfig
    resilience: ResilienceConfig
    inference: InferenceConfig
    rl: RLConfig
    extensions: ExtensionsConfig
    distillation: DistillationConfig
    quantization: QuantizationFlags
    world_size: int
    extra: Mapping[str, Any] = field(default_factory=dict)  # values of extra_args_provider flags
    asked: Mapping[str, Any] = field(default_factory=dict)  # the parsed namespace, dest -> value
    warnings: tuple[str, ...] = ()  # one sentence per flag that was overridden or has no effect
    # False for a script that has not built an optimizer (yet), as one that generates text: what
    # training alone needs is not required of its flags; see `require_training`.
    trains: bool = True

    @property
    def placement(self) -> Placement:
        """Assignment of virtual pipeline stages to (pipeline rank, model chunk)."""
        m = self.model
        num_chunks = m.virtual_pipeline_model_parallel_size or 1
        return placement_of(m.pipeline_schedule, m.pipeline_model_parallel_size, num_chunks)

    @property
    def objective(self) -> str:
        """What training minimizes; a key of `ModelKind.objectives`, or PRETRAINING."""
        if self.rl.perform_rl_step:
            return GRPO
        if self.preference.dpo_beta is not None:
            return DPO
        if self.preference.reward_model:
            return REWARD
        return SFT if self.data.sft else PRETRAINING

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks."""
        m = self.model
        degrees = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
        return data_parallel_size(self.world_size, *degrees, m.context_parallel_size)


def data_parallel_size(world_size: int, tp: int, pp: int, cp: int) -> int:
    """Return the number of data-parallel ranks in a world of ``world_size`` ranks.

    The result is 1 if the other sizes do not fit into the world; the checks refuse such a run
    later.
    """
    return max(1, world_size // max(1, tp * pp * cp))
