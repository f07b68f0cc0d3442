"""Training programs by name: of ``megatron-train NAME``, and of the key ``train`` of a config file.

Imports no torch: the console commands choose a program before they start it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Program(NamedTuple):
    """Entry script, dest -> value of the objective, and a description of the model."""

    file: str
    settings: Mapping[str, bool | str]
    title: str

    @property
    def flags(self) -> list[str]:
        """Return ``settings`` as words of a command line."""
        return [
            word
            for dest, value in self.settings.items()
            for word in (f"--{dest.replace('_', '-')}", value)
            if isinstance(word, str)
        ]


PROGRAMS = {
    "gpt": Program("pretrain_gpt.py", {}, "a language model"),
    "sft": Program("pretrain_gpt.py", {"sft": True}, "a language model on conversations"),
    "dpo": Program("pretrain_gpt.py", {"dpo_beta": "0.1"}, "a language model on preferences"),
    "reward": Program("pretrain_gpt.py", {"reward_model": True}, "a model that scores answers"),
    "rl": Program("pretrain_rl.py", {}, "a language model by reinforcement learning (GRPO)"),
    "bert": Program("pretrain_bert.py", {}, "BERT"),
    "t5": Program("pretrain_t5.py", {}, "T5"),
    "mamba": Program("pretrain_mamba.py", {}, "Mamba-2 and hybrid models"),
    "retro": Program("pretrain_retro.py", {}, "a language model that reads retrieved passages"),
    "vlm": Program("pretrain_vlm.py", {}, "a model that reads images and text"),
    "vision": Program("pretrain_vision_classify.py", {}, "a classifier of images"),
}
_ROOT = Path(__file__).resolve().parents[3]
# At the beginning of a line; in JSON also after spaces or the first bracket.
_TRAIN = re.compile(
    r"""(?:^ ?["']?|^\ufeff?\s*\{?\s*"|\A\ufeff)train["']?\s*:[ "']*([\w.-]+)""", re.MULTILINE
)


def path_of(file: str) -> Path:
    """Return the path of a program or example, which a wheel has in ``megatron/programs``."""
    of_wheel = _ROOT / "megatron/programs"
    return (of_wheel if of_wheel.is_dir() else _ROOT) / file


def recipes() -> dict[str, str]:
    """Return the path of each recipe by its name."""
    return {path.stem: str(path) for path in path_of("examples/recipes").glob("*.yaml")}


def name_in(text: str) -> str | None:
    """Return the value of ``train`` in YAML or JSON, found without a parser; None if unset."""
    found = _TRAIN.search(text)
    return None if found is None or found[1] == "null" else found[1]


def problem_of(name: str, script: str) -> str | None:
    """Return why ``script`` must not train what a file names by ``train: name``, or None."""
    if name not in PROGRAMS:
        near = difflib.get_close_matches(name, PROGRAMS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"train: {name}: not one of {', '.join(PROGRAMS)}{hint}"
    file = PROGRAMS[name].file
    if script == file or all(script != program.file for program in PROGRAMS.values()):
        return None  # other scripts train or read what they like
    return f"train: {name} needs {file}, and this is {script}: start {file}, or remove the key"


def name_of(entry_script: str, asked: Mapping[str, object]) -> str | None:
    """Return the name of the program and objective of a run; None for a script without a name."""
    if asked.get("perform_rl_step"):
        return "rl"
    found = [name for name, program in PROGRAMS.items() if program.file == entry_script]
    with_objective = (n for n in found if any(asked.get(d) for d in PROGRAMS[n].settings))
    return next(with_objective, next(iter(found), None))
