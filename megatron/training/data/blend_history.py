"""Which blend the training data had from which step on; saved in checkpoints.

A blend is a function of the sample number.  With other weights, a run that resumes reads on where
the new blend is at this number: a source with a larger share leaves samples out, one with a smaller
share reads some again.  Nothing here communicates: every rank reads the same flags and files.
"""

from __future__ import annotations

from typing import Any

from megatron.core.config.value_types import JsonObject
from megatron.core.datasets.utils import Blend, normalize
from megatron.training.preprocess.corpus import is_text
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import RunContext

_MOST_LINES = 16  # sources that the message names


def note_blend(run: RunContext, blends: list[Blend | None], starts: list[int]) -> None:
    """Add the blend of each phase to the run's history; report what changed since the checkpoint.

    ``starts``: first sample of each phase.
    """
    phases = [
        {"begins": start, "shares": _shares_of(blend)}
        for start, blend in zip(starts, blends, strict=True)
    ]
    history = [entry for entry in run.blends if _is_entry(entry)]
    paths = [path for blend in blends if blend is not None for path in blend[0]]
    if not paths:
        return
    index_free = run.config.data.index_free or all(map(is_text, paths))
    entry: JsonObject = {
        "iteration": run.state.iteration,
        "samples": run.state.consumed_train_samples,
        "phases": phases,
    }
    if history and history[-1]["phases"] == phases:
        return
    if history and run.state.iteration:
        for line in _describe_change(history[-1], entry, index_free=index_free):
            print_rank_0(line)
    run.blends = [*history, entry] if run.state.iteration else [entry]


def _is_entry(entry: Any) -> bool:
    """Return whether an entry of a checkpoint has the form that `note_blend` writes."""
    phases = entry.get("phases") if isinstance(entry, dict) else None
    return (
        isinstance(phases, list)
        and all(isinstance(phase, dict) and {"begins", "shares"} <= {*phase} for phase in phases)
        and all(type(phase["begins"]) is int for phase in phases)
        and all(isinstance(phase["shares"], dict) for phase in phases)
        and all(type(s) in (float, type(None)) for p in phases for s in p["shares"].values())
        and bool(phases)
        and phases[0]["begins"] == 0
    )


def _shares_of(blend: Blend | None) -> JsonObject:
    """Return data path -> share of the samples; None without weights, as lengths decide then."""
    if blend is None:
        return {}
    paths, weights = blend
    if weights is None:
        return dict.fromkeys(paths, 1.0 if len(paths) == 1 else None)
    shares: dict[str, float] = dict.fromkeys(paths, 0.0)
    for path, weight in zip(paths, normalize(weights), strict=True):
        shares[path] += weight
    return dict(shares)


def _describe_change(before: JsonObject, now: JsonObject, *, index_free: bool) -> list[str]:
    samples = now["samples"]
    begin_before, old = _phase_at(before, samples)
    begin, new = _phase_at(now, samples)
    if old == new and begin == begin_before:
        return ["NOTE: phases of the training data that come later have changed"]
    lines = [
        f"NOTE: the blend of the training data has changed after {samples} samples (iteration "
        f"{now['iteration']}); sample {samples} is the next one, of the new blend:"
    ]
    for path in [*old, *(path for path in new if path not in old)]:
        if old.get(path) == new.get(path) and begin == begin_before:
            continue
        change = f"  {path}: {_percent(old.get(path, 0.0))} -> {_percent(new.get(path, 0.0))}"
        shares = old.get(path, 0.0), new.get(path, 0.0)
        if new.get(path) and None not in shares:
            read = round(shares[0] * (samples - begin_before))
            place = round(shares[1] * (samples - begin))
            change += f", continues at about its sample {place}; {read} were read"
            if place != read:
                change += f", {abs(place - read)} are {'left out' if place > read else 'repeated'}"
        lines.append(change)
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  and {len(lines) - _MOST_LINES} others"]
    if not index_free:
        lines.append("  a source that needs another number of epochs now has another order")
    return [
        *lines,
        "  --phase-transition-iterations begins a blend at its first samples instead",
    ]


def _phase_at(entry: JsonObject, sample: int) -> tuple[int, dict[str, Any]]:
    """Return the first sample and the shares of the phase of a sample."""
    phase = [each for each in entry["phases"] if each["begins"] <= sample][-1]
    return phase["begins"], phase["shares"]


def _percent(share: float | None) -> str:
    return "by its length" if share is None else f"{100 * share:.4g} %"
