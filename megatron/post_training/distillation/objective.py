"""Distillation: the implementation of any objective, with a teacher beside the model.

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``v`` vocabulary, ``x/tp`` this rank's part.

Each pipeline stage runs the teacher's layers, without gradient, and then the student's.  Stages
send the hidden states of both, concatenated: [s, b, h of the student + h of the teacher].  The last
stage compares both models and returns the losses of each token, stacked: [n, b, s].  Row 0 is the
language-modeling loss, row 1 the divergence of the logits, row 2 (with intermediate layers) the
mean distance of hidden states.

Collectives of the last stage: for each chunk of tokens the two output layers', then the losses'
over tp; then the sums of the losses over cp.

The file of --export-kd-cfg says which outputs are compared, and how the losses are combined.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.schedules import Shape
from megatron.core.tensor_parallel.cross_entropy import kl_divergence
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.text_files import parse_yaml, read_text
from megatron.core.transformer.module import MegatronModule, frozen_models
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_attr_wrapped_model
from megatron.post_training.distillation.losses import (
    HIDDEN_LOSSES,
    balance_losses,
    distillation_loss,
    lm_losses,
    map_chunks,
    require_wrapper,
)
from megatron.post_training.reference import build_teacher, load_teacher, teacher_config
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import ModelImplementation
from megatron.training.models.registry import layers_of_stages

LOGITS = "output_layer"
_LAYER = re.compile(r"decoder\.(?:layers\.(\d{1,5})|final_layernorm)")


@cache
def add_teacher(inner: ModelImplementation) -> ModelImplementation:
    """Return the implementation that trains as ``inner`` does, but towards the teacher."""
    return replace(
        inner,
        build=partial(_build, inner),
        loss=partial(distillation_loss, _balance, inner),
        load_frozen=partial(_load_frozen, inner),
    )


class DistillationModel(MegatronModule):
    """One pipeline stage of the student, ``module``, and the teacher's stage of the same rank."""

    is_loaded = False  # whether the teacher has its weights
    reads_values = True  # a planner, which has no weights, sets it to False

    def __init__(self, student: LanguageModule, teacher: LanguageModule, kd: KDConfig) -> None:
        """Both models have the intermediate layers of ``kd`` on the last stage (`check_pairs`)."""
        super().__init__(student.config)
        self.module = student
        # A tuple hides it from optimizer, checkpoint and wrapper, which look for submodules.
        self.frozen = (teacher,)
        self.kd = kd
        self.pre_process = student.pre_process
        self.post_process = student.post_process
        self.vp_stage = student.vp_stage
        self._outputs: dict[tuple[int, int], Tensor] = {}  # (model, layer) -> its output
        self._target: Tensor | None = None  # the teacher's output in this pass
        if self.post_process:
            student.loss_runner = self._losses
            teacher.loss_runner = lambda hidden, _labels: hidden
            for pair in kd.intermediate_layer_pairs:
                self._keep_output(0, student, pair.student)
                self._keep_output(1, teacher, pair.teacher)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the hidden states of both models that the previous stage sent."""
        received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        (teacher,) = self.frozen
        widths = [self.config.residual_width, teacher.config.residual_width]
        for model, part in zip((self.module, teacher), received.split(widths, -1), strict=True):
            model.set_input_tensor([part.contiguous()])  # type: ignore[operator]

    def adjust_tensor_shapes(
        self, received: list[Shape], sent: list[Shape]
    ) -> tuple[list[Shape], list[Shape]]:
        """Add the width of the teacher's hidden states to the shapes that stages send."""
        more = self.frozen[0].config.residual_width
        return [(s, b, h + more) for s, b, h in received], [(s, b, h + more) for s, b, h in sent]

    def forward(self, *inputs: object, **kwargs: object) -> Tensor:
        """Run both models; return the losses [n, b, s], or both hidden states on other stages.

        Raises ConfigError if a program with its own train loop has not loaded the teacher.
        """
        if self.reads_values and not self.is_loaded:
            raise ConfigError(
                "--export-kd-teacher-load: this program has not loaded the teacher; build model "
                "and optimizer with megatron.training.training.setup_model_and_optimizer()"
            )
        with torch.no_grad():
            self._target = self.frozen[0](*inputs, **kwargs)
        output: Tensor = self.module(*inputs, **kwargs)
        target = self._target
        self._target = None
        self._outputs.clear()
        if self.post_process:
            return output
        assert target is not None
        return torch.cat([output, target], -1)

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Map the student's final hidden states [s, b, h] and labels [b, s] to [n, b, s]."""
        student, (teacher,), target = self.module, self.frozen, self._target
        assert isinstance(student, LanguageModule)
        assert target is not None, "forward() runs the teacher first"
        weight = student.output_weight()
        its_weight = teacher.output_weight()

        def losses_of(x: Tensor, y: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            """Map hidden states [c, b, h] of both models and labels [c, b] to losses [c, b]."""
            logits = student.sharded_logits(x, weight)
            with torch.no_grad():
                teaching = teacher.sharded_logits(y, its_weight)
            kl = kl_divergence(
                logits,
                teaching,
                self.kd.logit_kl_temperature,
                tp_group=student.tp_group,
                vocab_size=student.num_tokens,
            )
            return lm_losses(student, logits, labels, learns=not self.kd.skip_lm_loss), kl

        states = student.scaled(hidden), teacher.scaled(target)
        losses = torch.stack(map_chunks(student, losses_of, states, [labels]))
        if not self.kd.intermediate_layer_pairs:
            return losses
        distances = self._distances(hidden, target)
        if self.config.sequence_parallel:  # each rank computes the same from the gathered losses
            tp = student.tp_group
            distances = gather_from_sequence_parallel_region(distances, False, group=tp)
        return torch.cat([losses, distances.transpose(0, 1).unsqueeze(0)])

    def _distances(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the mean distance of the intermediate layers: [s, b], or [s/tp, b]."""
        final = (hidden, target)
        distances = []
        for pair in self.kd.intermediate_layer_pairs:
            outputs = (
                final[which] if index is None else self._outputs[which, index]
                for which, index in enumerate((pair.student, pair.teacher))
            )
            distances.append(HIDDEN_LOSSES[pair.loss](*outputs))
        return torch.stack(distances).mean(0)

    def _keep_output(self, which: int, model: LanguageModule, index: int | None) -> None:
        """Keep the output of layer ``index`` of each pass; None is the final norm, kept anyway."""
        if index is None:
            return
        decoder = model.decoder
        assert isinstance(decoder, TransformerBlock), "the checks admit GPT only"

        def keep(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[which, index] = output[0]

        decoder.layers[index - decoder.layer_range.start].register_forward_hook(keep)


def check_pairs(pairs: Sequence[LayerPair], student: RunConfig, teacher: RunConfig) -> None:
    """Raise ConfigError unless the last stages of both models have the layers of ``pairs``."""
    what = "intermediate_layer_pairs of --export-kd-cfg"
    mine = student.model.residual_width
    its = teacher.model.residual_width
    if pairs and mine != its:
        raise ConfigError(
            f"{what}: hidden states of width {mine} of the student and {its} of the teacher: only "
            "states of one width can be compared; leave the pairs out"
        )
    granularity = student.model.recompute_granularity
    if granularity == "full" and any(pair.student is not None for pair in pairs):
        raise ConfigError(
            f"{what}: --recompute-granularity {granularity} does not keep the outputs of layers: "
            "use selective, or compare decoder.final_layernorm"
        )
    for name, config, indices in (
        ("student", student, [pair.student for pair in pairs]),
        ("teacher", teacher, [pair.teacher for pair in pairs]),
    ):
        held = layers_of_stages(config)[-1]
        for index in indices:
            if index is not None and index not in held:
                raise ConfigError(
                    f"{what}: decoder.layers.{index} of the {name} is not on the last pipeline "
                    f"stage, which has layers {held.start} to {held.stop - 1}: choose one of these"
                )


def _build(
    inner: ModelImplementation,
    config: RunConfig,
    *,
    groups: ProcessGroupCollection,
    vp_stage: int | None = None,
    **stage: Any,
) -> DistillationModel:
    kd = read_kd_config(config.distillation.export_kd_cfg)
    its_config = teacher_config(config)
    check_pairs(kd.intermediate_layer_pairs, config, its_config)
    student = inner.build(config, groups=groups, vp_stage=vp_stage, **stage)
    teacher = build_teacher(its_config, groups=groups, vp_stage=vp_stage, **stage)
    assert isinstance(student, LanguageModule)
    return DistillationModel(student, teacher, kd)


def _load_frozen(inner: ModelImplementation, run: Any) -> None:
    inner.load_frozen(run)
    require_wrapper(run.model_chunks, DistillationModel, "--export-kd-teacher-load")
    load_teacher(run.config, list(frozen_models(run.model_chunks)), run.groups)
    for chunk in run.model_chunks:
        get_attr_wrapped_model(chunk, "frozen", return_model_obj=True).is_loaded = True


def _balance(config: RunConfig, groups: ProcessGroupCollection, sums: list[Tensor]) -> Tensor:
    """Return the loss of a micro-batch.  Collective over cp."""
    kd = read_kd_config(config.distillation.export_kd_cfg)
    return balance_losses(
        torch.stack(sums),
        skip_lm_loss=kd.skip_lm_loss,
        kd_loss_scale=kd.kd_loss_scale,
        cp_group=groups.cp,
    )


class LayerPair(NamedTuple):
    """Two outputs that a loss compares: indices of layers, or None after the final norm."""

    student: int | None
    teacher: int | None
    loss: str = "cosine"  # a key of `HIDDEN_LOSSES`


@dataclass(frozen=True, kw_only=True)
class KDConfig:
    """Settings of the distillation loss; the names and defaults are Megatron-LM's."""

    intermediate_layer_pairs: tuple[LayerPair, ...] = ()
    skip_lm_loss: bool = True
    kd_loss_scale: float = 1.0
    logit_kl_temperature: float = 1.0


@cache
def read_kd_config(path: str | None) -> KDConfig:
    """Return the settings of the file ``path``, which is read once; the defaults without one.

    Raises ConfigError.
    """
    if path is None:
        return KDConfig()
    what = f"--export-kd-cfg {path}"
    content = parse_yaml(
        read_text(path, what, ConfigError, "a YAML or JSON file"), what, ConfigError
    )
    if not isinstance(content, dict):
        raise ConfigError(
            f"{what}: a mapping of settings is needed, for example skip_lm_loss: true"
        )
    known = sorted({"logit_layers", *(f.name for f in fields(KDConfig))})
    for name, value in content.items():
        if name not in known:
            raise ConfigError(f"{what}: unknown setting {name!r}; use {', '.join(known)}")
        is_number = type(value) in (int, float) and 0 < value < float("inf")
        fits, wanted = {
            "logit_layers": (
                value == [LOGITS, LOGITS],
                f"the logits of both models are the outputs of {LOGITS}: write it twice",
            ),
            "intermediate_layer_pairs": (isinstance(value, list | None), "give a list of pairs"),
            "skip_lm_loss": (isinstance(value, bool), "write true or false"),
        }.get(name, (is_number, "a finite number above 0 is needed"))
        if not fits:
            raise ConfigError(f"{what}: {name} {value!r}: {wanted}")
    content.pop("logit_layers", None)
    pairs = content.pop("intermediate_layer_pairs", None) or []
    return KDConfig(intermediate_layer_pairs=tuple(_pair(p, what) for p in pairs), **content)


def _pair(pair: Any, what: str) -> LayerPair:
    """Return the pair [student, teacher] or [student, teacher, loss]."""
    if isinstance(pair, list) and len(pair) in (2, 3):
        layers = [_LAYER.fullmatch(str(part)) for part in pair[:2]]
        loss = str(pair[2]) if len(pair) == 3 else "cosine"
        if all(layers) and loss in HIDDEN_LOSSES:
            student, teacher = (int(found[1]) if found and found[1] else None for found in layers)
            return LayerPair(student, teacher, loss)
    raise ConfigError(
        f"{what}: intermediate_layer_pairs {pair!r}: write [student layer, teacher layer], and "
        "the loss cosine (default) or mse as third value; a layer is decoder.layers.N, its "
        "output, or decoder.final_layernorm"
    )
