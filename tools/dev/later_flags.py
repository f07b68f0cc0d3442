"""Count which flags of a later Megatron-LM our programs accept, weighted by its functional cases.

    python tools/dev/later_flags.py ../shared/reference/flags_head_new.csv

The table has one row per new flag: `program_or_module`, `option strings` and
`n_functional_configs`, the number of functional cases that give the flag.  The table lacks the
command lines, so the result counts pairs of flag and case, not accepted cases: a case is accepted
only if every flag that it gives is.  A flag is *done*, *announced* (one warning, no effect),
*refused* (an error with a fix) or *unknown*.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core.config import flag_messages  # noqa: E402
from megatron.training.arguments.options import state  # noqa: E402
from megatron.training.arguments.parser import build_parser  # noqa: E402
from megatron.training.arguments.sections import options_by_dest  # noqa: E402

# Beginning of `program_or_module` -> our program; COMMON rows are declared options.
PROGRAMS = {
    "megatron/inference/utils.py": "examples/inference/gpt/gpt_dynamic_inference.py",
    "examples/inference/": "examples/inference/offline_inference.py",
    "examples/mimo/": "examples/mimo/train.py",
    "examples/post_training/modelopt/prune.py": "examples/post_training/modelopt/prune.py",
    "examples/post_training/modelopt/quantize.py": "examples/post_training/modelopt/quantize.py",
    "pretrain_gpt.py + examples": "pretrain_gpt.py",
}
STATES = {"implemented": "done", "ignored": "announced", "refused": "refused"}
ORDER = (*STATES.values(), "unknown")


@cache
def declared() -> dict[str, str]:
    """Return flag -> state, for every spelling of every declared option.

    Flags that the programs that generate read, and training does not, are done.
    """
    found = {}
    for flag, action in build_parser()._option_string_actions.items():
        if (opt := options_by_dest().get(action.dest)) is not None:
            is_read = opt.ignored == flag_messages.GENERATION
            found[flag] = "done" if is_read else STATES[state(opt)]
    return found


@cache
def help_of(program: str) -> dict[str, str]:
    """Return flag -> state, as ``--help all`` of a program prints them."""
    command = [sys.executable, str(ROOT / program), "--help", "all"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for entry in re.split(r"\n  (?=-)", text):
        names = re.match(r"(?:--?[\w-]+[^,\n]*?(?:, |(?=  |\n|$)))+", entry)
        told = "announced" if "Without effect:" in entry else "done"
        told = "refused" if "Refused:" in " ".join(entry.split()) else told
        found |= dict.fromkeys(re.findall(r"--[\w-]+", names[0] if names else ""), told)
    return found


def state_of(program: str, spellings: list[str]) -> str:
    """Return the worst state of the spellings of a flag of ``program``."""
    flags = declared()
    if not program.startswith("COMMON"):
        ours = next((ours for start, ours in PROGRAMS.items() if program.startswith(start)), None)
        flags = help_of(ours) if ours else {}
    return max((flags.get(flag, "unknown") for flag in spellings), key=ORDER.index)


def main() -> None:
    """Print the counts, and the flags of the later version that are not done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="CSV file, one row per flag.")
    rows = csv.DictReader(parser.parse_args().table.read_text(encoding="utf-8").splitlines())
    flags: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    lacking = []
    common: set[str] = set()  # the table counts a spelling once more for each program that has it
    for row in rows:
        count = int(row["n_functional_configs"] or 0)
        is_common = row["program_or_module"].startswith("COMMON")
        common |= {row["option strings"]} if is_common else set()
        if not count or (not is_common and row["option strings"] in common):
            continue
        spellings = re.findall(r"--[\w-]+", row["option strings"].partition(" (")[0])
        found = state_of(row["program_or_module"], spellings)
        flags[found] += 1
        uses[found] += count
        if found != "done":
            lacking.append((ORDER.index(found), -count, f"{found:10}{count:4}  {spellings[0]}"))
    print("\n".join(line for _, _, line in sorted(lacking)))
    for name, counts in (("flags", flags), ("pairs of flag and case", uses)):
        shown = ", ".join(f"{counts[which]} {which}" for which in ORDER)
        accepted = counts["done"] + counts["announced"]
        print(f"{name}: {shown}; {accepted} of {counts.total()} accepted")


if __name__ == "__main__":
    main()
