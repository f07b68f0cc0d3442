"""Draw loss, throughput, memory, gradient norm, learning rate and expert load of runs.

    tools/plot_run.py RUN [RUN ...] --output loss.png
    tools/plot_run.py a=runs/a/metrics.jsonl b=runs/b.log --output runs.html

RUN is a metrics file (--metrics-file), a folder with metrics.jsonl, a TensorBoard folder, or a log
of this project or of Megatron-LM; NAME=RUN names its curves.  The suffix of --output chooses the
form: .png, .svg, .pdf, or .html, one page with the picture and a table of the last values.
docs/tracking.md has an example.
"""

from __future__ import annotations

import argparse
import html
import io
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import MissingDependency
from megatron.core.optional import require
from tools.lib.run_values import METRICS_FILE, SAMPLES, TOKENS, Curve, Curves, NoValues, read_run

# Okabe and Ito's colors, which color-blind readers tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
FORMS = (".png", ".svg", ".pdf", ".html")
_NO_LOSS = ("loss-scale", "z_loss", "load_balancing_loss", "moe/")
_LOAD = "moe/load_layer_"
_BYTES = "mem-max-allocated-bytes"
_SAME_NAMES = (METRICS_FILE, "log.txt", "tensorboard", "tb")  # of files of any run
_POINTS = 400  # above this number of steps a line is a moving mean, with the values behind it


@dataclass
class Run:
    """A run and its curves."""

    name: str
    color: str
    curves: Curves

    def last(self, tag: str) -> float | None:
        """Return the last value of a curve."""
        curve = self.curves.get(tag)
        return None if not curve else curve[max(curve)]


@dataclass(frozen=True)
class Panel:
    """One diagram.  ``missing`` says how a run gets values for it."""

    title: str
    draw: Callable[[Any, Run], bool]  # returns whether the run has values
    missing: str = ""
    scale: str = ""  # "log", or "zero": begin at 0


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the runs; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="file or folder, or NAME=RUN")
    parser.add_argument(
        "--output", type=Path, default=Path("run.png"), help="file to write (default: run.png)"
    )
    parser.add_argument("--from-step", type=int, default=0, help="leave out the steps before it")
    options = parser.parse_args(argv)
    if options.output.suffix not in FORMS:
        parser.error(f"--output {options.output}: its suffix must be one of {', '.join(FORMS)}")
    try:
        pyplot = _pyplot()
        runs = load(options.runs, options.from_step)
    except (NoValues, MissingDependency) as error:
        parser.error(str(error))
    figure, missing = draw(pyplot, runs)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.output.suffix == ".html":
        options.output.write_text(page(figure, runs))
    else:
        figure.savefig(options.output, dpi=150)
    pyplot.close(figure)
    print(f"wrote {options.output}")
    for title, cure in missing.items():
        print(f"no {title}: {cure}")
    return 0


def load(words: Sequence[str], from_step: int = 0) -> list[Run]:
    """Read the runs of a command line.  Raise NoValues."""
    pairs = []
    for word in words:
        name, is_named, path = word.partition("=")
        pairs.append((name, Path(path)) if is_named and not Path(word).exists() else ("", word))
    names = iter(short_names([Path(path) for given, path in pairs if not given]))
    runs = []
    for i, (given, path) in enumerate(pairs):
        found = read_run(Path(path))
        curves = {t: {s: v for s, v in c.items() if s >= from_step} for t, c in found.items()}
        runs.append(Run(given or next(names), COLORS[i % len(COLORS)], curves))
    return runs


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return names that tell the runs apart: the parts of the paths that differ."""
    if not paths:
        return []
    parts = [[p for p in path.parts if p not in _SAME_NAMES] or [path.name] for path in paths]
    for count in range(1, 1 + max(map(len, parts))):
        names = [str(Path(*p[-count:])) for p in parts]
        if len({*names}) == len(names):
            break
    return names


# -- panels ---------------------------------------------------------------------------------


def _losses(ax: Any, run: Run) -> bool:
    """Draw training losses as lines and those of evaluations as points on dashed lines."""
    tags = [t for t in run.curves if "loss" in t and not any(word in t for word in _NO_LOSS)]
    tags = [t for t in tags if not t.endswith(" ppl")]
    of_training = [t for t in tags if not _split_of(t)]
    for tag in tags:
        kind = _split_of(tag) or "train"
        loss = "" if len(of_training) < 2 else f" {tag.removesuffix(' ' + kind)}"
        style: dict[str, Any] = {}
        if kind != "train":
            marker = "s" if kind.startswith("test") else "o"
            style = {"marker": marker, "linestyle": "--", "markersize": 4, "linewidth": 1}
        elif len(of_training) > 1:
            style = {"linestyle": ("-", ":", "-.")[of_training.index(tag) % 3]}
        _line(ax, run, run.curves[tag], f"{kind}{loss}", **style)
    return bool(tags)


def _split_of(tag: str) -> str:
    last = tag.rpartition(" ")[2]
    return last if last.startswith(("validation", "test")) else ""


def _curve(*tags: str, scale: float = 1.0) -> Callable[[Any, Run], bool]:
    """Return a function that draws the first of ``tags`` that the run has."""

    def draw_first(ax: Any, run: Run) -> bool:
        curve = next((run.curves[tag] for tag in tags if tag in run.curves), None)
        if curve is not None:
            _line(ax, run, {step: value * scale for step, value in curve.items()}, "")
        return curve is not None

    return draw_first


def _load(ax: Any, run: Run) -> bool:
    """Draw the mean over layers, and a band from the least to the most loaded layer."""
    layers = [curve for tag, curve in run.curves.items() if tag.startswith(_LOAD)]
    if not layers:
        return False
    steps = sorted(set.intersection(*({*layer} for layer in layers)))
    rows = [[layer[step] for layer in layers] for step in steps]
    if len(layers) > 1:
        low, high = [min(r) for r in rows], [max(r) for r in rows]
        ax.fill_between(steps, low, high, color=run.color, alpha=0.15, linewidth=0)
    means = (sum(r) / len(r) for r in rows)
    _line(ax, run, dict(zip(steps, means, strict=True)), "")
    return True


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels; throughput is in a unit that as many runs as possible have."""
    counts = {tag: sum(tag in run.curves for run in runs) for tag in (TOKENS, SAMPLES)}
    rate = TOKENS if counts[TOKENS] >= counts[SAMPLES] else SAMPLES
    has_load = any(tag.startswith(_LOAD) for run in runs for tag in run.curves)
    expert = Panel(
        "load of the fullest expert / mean",
        _load,
        "with experts, add --moe-per-layer-logging to the run",
    )
    balance = Panel("load-balancing loss", _curve("load_balancing_loss"), expert.missing)
    return [
        Panel("loss", _losses),
        Panel(rate, _curve(rate), "add --log-throughput to the run", "zero"),
        Panel("gradient norm", _curve("grad-norm"), scale="log"),
        Panel("learning rate", _curve("learning-rate")),
        Panel(
            "peak memory of the last rank (GiB)",
            _curve(_BYTES, scale=2.0**-30),
            "add --log-memory-to-tensorboard to the run",
            "zero",
        ),
        expert if has_load else balance,
    ]


def draw(pyplot: Any, runs: Sequence[Run]) -> tuple[Any, dict[str, str]]:
    """Return the figure, and what no run has values for with the way to get them."""
    panels = panels_of(runs)
    trial, ax = pyplot.subplots()
    found = [panel for panel in panels if [run for run in runs if panel.draw(ax, run)]]
    pyplot.close(trial)
    columns = min(2, len(found)) or 1
    rows = math.ceil(len(found) / columns) or 1
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.6 * columns, 3.2 * rows + 0.4), squeeze=False
    )
    for ax, panel in zip(axes.flat, found, strict=False):
        for run in runs:
            panel.draw(ax, run)
        _finish(ax, panel)
    for ax in axes.flat[len(found) :]:
        ax.axis("off")
    _legend(pyplot, figure, runs)
    return figure, {p.title: p.missing for p in panels if p not in found and p.missing}


def _line(ax: Any, run: Run, curve: Curve, label: str, **style: Any) -> None:
    steps, values = list(curve), list(curve.values())
    if len(steps) > _POINTS:
        ax.plot(steps, values, color=run.color, alpha=0.2, linewidth=0.6)
        values = moving_mean(values, len(values) // 100)
    style = {"linewidth": 1.4, "marker": "." if len(steps) < 2 else None, **style}
    ax.plot(steps, values, color=run.color, label=label or None, **style)


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Return for each value the mean of it and its neighbors, ``width`` on each side."""
    means = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - width) : i + width + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _finish(ax: Any, panel: Panel) -> None:
    ax.set_title(panel.title, loc="left", fontsize=10)
    ax.set_xlabel("step", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.grid(color="#e6e6e6", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if panel.scale == "zero":
        ax.set_ylim(bottom=0, top=1.08 * ax.get_ylim()[1])
    if panel.scale == "log" and all(v > 0 for line in ax.lines for v in line.get_ydata()):
        ax.set_yscale("log")
    labels = dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    if len(labels) > 1:
        legend = ax.legend(labels.values(), labels.keys(), fontsize=8, frameon=False)
        for handle in legend.legend_handles:
            handle.set_color("#333333")  # the kind of line, of any run


def _legend(pyplot: Any, figure: Any, runs: Sequence[Run]) -> None:
    top = 1.0 if len(runs) == 1 else 1 - 0.32 / figure.get_figheight()
    figure.tight_layout(rect=(0, 0, 1, top), w_pad=2, h_pad=1.5)
    if len(runs) == 1:
        return
    lines = [pyplot.Line2D([], [], color=run.color, linewidth=2.5) for run in runs]
    figure.legend(
        lines,
        [run.name for run in runs],
        loc="upper left",
        ncols=min(4, len(runs)),
        frameon=False,
        fontsize=9,
    )


# -- pages ----------------------------------------------------------------------------------

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1100px;margin:24px auto;"
    "padding:0 16px}svg{width:100%;height:auto}table{border-collapse:collapse;margin-top:16px}"
    "td,th{padding:4px 14px 4px 0;text-align:right;border-bottom:1px solid #e6e6e6}"
    "td:first-child,th:first-child{text-align:left}i{display:inline-block;width:12px;height:12px;"
    "margin-right:8px;border-radius:2px}"
)


def page(figure: Any, runs: Sequence[Run]) -> str:
    """Return a page without links: the picture as SVG, and the last values of each run."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    picture = text.getvalue()
    tags = ("lm loss", "lm loss validation", "lm loss test", TOKENS, SAMPLES)
    tags = tuple(tag for tag in tags if any(run.curves.get(tag) for run in runs))
    head = "".join(f"<th>{html.escape(tag)}</th>" for tag in ("run", "steps", *tags))
    rows = []
    for run in runs:
        steps = max((max(c) for c in run.curves.values() if c), default=0)
        cells = [str(steps), *(_shown(run.last(tag)) for tag in tags)]
        name = f'<i style="background:{run.color}"></i>{html.escape(run.name)}'
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (name, *cells)) + "</tr>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Runs</title>'
        f"<style>{_STYLE}</style><body>{picture[picture.index('<svg') :]}"
        f"<table><tr>{head}</tr>{''.join(rows)}</table></body></html>\n"
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _pyplot() -> Any:
    """Import matplotlib without a display.  Raise MissingDependency."""
    require("matplotlib", "tools/plot_run.py").use("Agg")
    return require("matplotlib.pyplot", "tools/plot_run.py")


if __name__ == "__main__":
    sys.exit(main())
