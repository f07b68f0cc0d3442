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
    """Refuse checks of results in a captured step.

    They make the host wait for each result, which is not possible during capture.
    """
    m = run.model
    if not m.uses_graphs or m.captures_layers:
        return
    others = {
        "--check-for-spiky-loss": run.resilience.check_for_spiky_loss,
        "--check-for-large-grads": run.ddp.check_for_large_grads,
        "--error-injection-rate": bool(run.resilience.error_injection_rate),
        "--rerun-mode report_stats": run.resilience.rerun_mode == "report_stats",
    }
    for flag in (flag for flag, is_given in others.items() if is_given):
        yield (
            f"{flag}: a step that --cuda-graph-scope full_iteration captures validates no results; "
            "use --cuda-graph-scope full"
        )
    if run.ddp.check_for_nan_in_grad:
        yield (
            "--cuda-graph-scope full_iteration cannot check each loss for NaN inside the graph: "
            "give "
            "--no-check-for-nan-in-loss-and-grad, or use --cuda-graph-scope full"
        )
