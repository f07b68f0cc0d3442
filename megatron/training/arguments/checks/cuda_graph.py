"""Checks of CUDA graphs; `cuda_graph_capture` decides what runs eagerly instead."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig


def graphs_are_captured_after_warmup(run: RunConfig) -> Iterator[str]:
    """Require one capture flag and at least one eager warmup step."""
    m = run.model
    if m.enable_cuda_graph and m.external_cuda_graph:
        yield "--enable-cuda-graph and --external-cuda-graph enable the same CUDA graphs: keep one"
    if m.uses_graphs and m.cuda_graph_warmup_steps < 1:
        yield (
            f"--cuda-graph-warmup-steps {m.cuda_graph_warmup_steps}: use 1 or more; communicators "
            "are created and kernels chosen in steps that run eagerly"
        )


def a_captured_step_has_no_check_for_nan(run: RunConfig) -> Iterator[str]:
    """Refuse the NaN check of losses in a captured step.

    The check makes the host wait for each loss, which is not possible during capture.
    """
    m = run.model
    if m.uses_graphs and not m.captures_layers and run.ddp.check_for_nan_in_grad:
        yield (
            "--cuda-graph-scope full_iteration cannot check each loss for NaN inside the graph: "
            "give "
            "--no-check-for-nan-in-loss-and-grad, or use --cuda-graph-scope full"
        )
