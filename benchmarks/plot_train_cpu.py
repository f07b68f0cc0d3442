"""Draw docs/train_cpu.svg from the tables of benchmarks/train_cpu.md.

    python -m benchmarks.plot_train_cpu

One group of bars for each table that compares with plain PyTorch: tokens per second of each
implementation divided by those of the compiled baseline of the same table.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES, TARGET = ROOT / "benchmarks/train_cpu.md", ROOT / "docs/train_cpu.svg"
BASELINE = "plain PyTorch, torch.compile"
SHOWN = {  # row of a table -> label and color
    "plain PyTorch, eager": ("PyTorch, eager", "#bbbbbb"),
    BASELINE: ("PyTorch, torch.compile", "#888888"),
    "ours": ("this project", "#0072b2"),
}
_HEADER = re.compile(r"\| (\d+ M, \w+) \| tokens/s a core ")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 260, 40, 40, 30


def tables() -> dict[str, dict[str, float]]:
    """Return title -> row -> tokens per second; the first of tables with equal titles is used."""
    found: dict[str, dict[str, float]] = {}
    title = None
    for line in TABLES.read_text().splitlines():
        if match := _HEADER.match(line):
            title = None if match[1] in found else match[1]
            if title is not None:
                found[title] = {}
        elif not line.startswith("|"):
            title = None
        elif title is not None and not line.startswith("|---"):
            name, rate, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            found[title][name] = float(rate)
    return {title: rows for title, rows in found.items() if BASELINE in rows}


def render() -> str:
    """Return the figure as SVG."""
    found = tables()
    ratios = {
        title: {name: rows[name] / rows[BASELINE] for name in SHOWN if name in rows}
        for title, rows in found.items()
    }
    highest = max(max(rows.values()) for rows in ratios.values())
    floor, scale = _HEIGHT - _BOTTOM, (_HEIGHT - _BOTTOM - _TOP) / highest
    step = (_WIDTH - _LEFT) / len(ratios)
    bar = step / (len(SHOWN) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="12">Tokens per second on one CPU core, torch.compile = 1</text>',
    ]
    for i, (label, color) in enumerate(SHOWN.values()):
        x = _LEFT + 160 * i
        parts.append(f'<rect x="{x}" y="20" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="29">{label}</text>')
    for i, (title, rows) in enumerate(ratios.items()):
        left = _LEFT + i * step
        for j, (name, (_, color)) in enumerate(SHOWN.items()):
            if name not in rows:
                continue
            x, height = left + j * bar, rows[name] * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{floor - height:.1f}" width="{bar * 0.9:.1f}" '
                f'height="{height:.1f}" fill="{color}"/>'
            )
            parts.append(f'<text x="{x:.1f}" y="{floor - height - 3:.1f}">{rows[name]:.2f}</text>')
        parts.append(f'<text x="{left:.1f}" y="{_HEIGHT - 12}">{title}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(render())
