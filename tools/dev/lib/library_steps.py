"""What the checks of tools/dev/library_projects.py share: processes, steps, and their numbers.

A check prints a line for each step that it has done; `library_projects` reads these lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from tools.dev.lib.library_models import LR, VOCABULARY, Reference, differing, tokens

MARK = "step done: "
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def join() -> None:
    """Join the other processes, if any, by gloo."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        return
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def start(tp: int, pp: int) -> None:
    """Join the other processes, and initialize model parallelism."""
    join()
    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def done(step: str, **numbers: object) -> None:
    """Print that a step is done, with its numbers."""
    if dist.get_rank() == 0:
        print(MARK + json.dumps({"step": step, **numbers}), flush=True)


@dataclass(frozen=True)
class Bridged:
    """A model that a project has built, with the weights of a checkpoint."""

    chunks: list[torch.nn.Module]  # in Megatron's wrapper for data parallelism
    weights: Callable[[], Iterable[tuple[str, Tensor]]]  # by Hugging Face's names
    write: Callable[[str], None]  # a checkpoint for transformers, into a folder


class Training:
    """A model that a project has built, trained by Megatron's functions beside transformers."""

    def __init__(
        self,
        bridged: Bridged,
        reference: Reference,
    ) -> None:
        self.chunks = bridged.chunks
        self.weights = bridged.weights
        self.reference = reference
        self.tolerance = TOLERANCE[reference.dtype]
        self.ids = tokens()
        is_bf16 = reference.dtype == torch.bfloat16
        config = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=0.0,
            clip_grad=1e9,
            use_distributed_optimizer=True,
            params_dtype=reference.dtype,
            bf16=is_bf16,
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        get_model_config(self.chunks[0]).finalize_model_grads_func = finalize_model_grads

    @torch.no_grad()
    def exported(self) -> dict[str, Tensor]:
        """Return copies of the weights by Hugging Face's names."""
        return {name: tensor.clone() for name, tensor in self.weights()}

    def compare_weights(self, path: Path) -> None:
        """Raise ValueError if the weights are not those of a checkpoint, bit for bit."""
        exported = self.exported()
        dist.barrier()  # until the checkpoint is written
        if different := differing(path, exported):
            raise ValueError(f"exported tensors differ: {different}")

    def compare_logits(self) -> None:
        """Raise ValueError if logits differ from those of transformers."""
        logits, _ = self.run(is_training=False)
        error = 0.0
        if logits is not None:
            error = (logits - self.reference.logits(self.ids)).abs().max().item()
        error = largest(error)
        if error > self.tolerance:
            raise ValueError(f"logits differ by {error}")
        done("logits", error=error)

    def take_steps(self) -> None:
        """Take two steps; losses and norms must be those of transformers and torch's AdamW."""
        for _ in range(2):
            loss, norm = self.step()
            wanted_loss, wanted_norm = self.reference.step(self.ids)
            self.require_close("loss", loss, wanted_loss)
            self.require_close("grad norm", norm, wanted_norm)
        done("step", loss=loss, norm=norm)

    def step(self) -> tuple[float, float]:
        """Take one step; return the loss and the norm of the gradient."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        _, loss = self.run(is_training=True)
        is_updated, norm, _ = self.optimizer.step()
        if not is_updated:
            raise ValueError("the optimizer took no step")
        return loss, norm

    def save_and_load(self, folder: Path) -> None:
        """Save, take a step, load, and take the step again: it must be the same, bit for bit."""
        folder.mkdir(exist_ok=True)
        dist_checkpointing.save(self.state(is_loading=False), str(folder))
        done("save")
        before = self.exported()
        first = self.step(), self.exported()
        loaded = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        self.chunks[0].load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.require_equal("loading", before, self.exported())
        second = self.step(), self.exported()
        self.require_equal("a step after loading", first[1], second[1])
        if first[0] != second[0]:
            raise ValueError(f"the step after loading differs: {first[0]} {second[0]}")
        done("resume")

    def state(self, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state of model and optimizer."""
        model = self.chunks[0].sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading)
        return {"model": model, "optimizer": optimizer}

    def run(self, *, is_training: bool) -> tuple[Tensor | None, float]:
        """Run the model by Megatron's schedule; return logits [b, s, v] and the loss.

        Only the last stage of the pipeline has logits; every process gets the loss.
        """
        found: list[Tensor] = []
        positions = torch.arange(self.ids.shape[1]).expand_as(self.ids)

        def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Any]:
            ids = next(iterator)

            def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                logits = tensor_parallel.gather_from_tensor_model_parallel_region(output)
                logits = logits[..., :VOCABULARY].float()
                found.append(logits.detach())
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
                )
                return loss, {"loss": loss.detach()}

            return chunk(ids, positions, None), loss_of

        rows, columns = self.ids.shape
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter([self.ids]) for _ in self.chunks],
            model=list(self.chunks),
            num_microbatches=1,
            seq_length=columns,
            micro_batch_size=rows,
            forward_only=not is_training,
        )
        loss = float(losses[0]["loss"]) if losses else 0.0
        return (found[0] if found else None), largest(loss)

    def require_close(self, name: str, found: float, wanted: float) -> None:
        """Raise ValueError if two numbers differ by more than the tolerance, relatively."""
        relative = abs(found - wanted) / max(abs(wanted), 1e-30)
        if relative > self.tolerance:
            raise ValueError(f"{name}: {found} is not {wanted} ({relative:.1e} relative)")

    @staticmethod
    def require_equal(name: str, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
        """Raise ValueError if tensors differ in any bit."""
        different = [key for key, tensor in old.items() if not torch.equal(tensor, new[key])]
        if different:
            raise ValueError(f"tensors differ after {name}: {different}")


def largest(value: float) -> float:
    """Return the largest of the values of all processes."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()
