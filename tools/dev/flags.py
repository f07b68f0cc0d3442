"""Write docs/flags.md: every flag with its default, its state and its help text.

python tools/dev/flags.py
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core.config.option import Option, dest_of, flag_of, options_of  # noqa: E402
from megatron.training.arguments.options import (  # noqa: E402
    GROUPS,  # noqa: E402
    default_text,
    state,
    state_text,
)
from megatron.training.arguments.sections import ALL_CLASSES  # noqa: E402

TARGET = ROOT / "docs/flags.md"
HEAD = """# The flags

Every flag of `pretrain_gpt.py`, under the headings of `--help`. Written by `tools/dev/flags.py`
(`make docs`) from the declarations; change those, not this page.

A flag is *implemented*, *refused* (asking for anything but the default stops the run with the
sentence that stands here) or *ignored* (asking for it prints one warning). Switches are off unless
given; an empty default means that nothing is set.
"""


def declared() -> list[tuple[dataclasses.Field[Any], Option]]:
    """Return all flags, in the order of their classes."""
    return [pair for config_class in ALL_CLASSES for pair in options_of(config_class)]


def render() -> str:
    """Return the page."""
    flags = declared()
    counts = {name: 0 for name in ("implemented", "refused", "ignored")}
    for _, opt in flags:
        counts[state(opt)] += 1
    total = ", ".join(f"{count} {name}" for name, count in counts.items())
    lines = [HEAD, f"{len(flags)} flags: {total}.", ""]
    for heading in GROUPS:
        lines += [
            f"## {heading}",
            "",
            "| flag | dest | default | state | |",
            "|---|---|---|---|---|",
        ]
        lines += [row for f, opt in flags if opt.group == heading for row in _rows(f, opt)]
        lines.append("")
    return "\n".join(lines)


def _rows(f: dataclasses.Field[Any], opt: Option) -> Iterator[str]:
    flag = flag_of(f, opt)
    spellings = [flag, *opt.aliases]
    if opt.both_ways:
        spellings += ["--no-" + spelling.removeprefix("--") for spelling in spellings]
    shown = " ".join(f"`{spelling}`" for spelling in spellings)
    text = " ".join(part for part in (opt.help, state_text(opt)) if part).replace("|", "\\|")
    default = default_text(f, opt)
    cells = (shown, f"`{dest_of(f, opt)}`", f"`{default}`" if default else "", state(opt), text)
    yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(render(), encoding="utf-8")
