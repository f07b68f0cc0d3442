"""Console commands: each starts a program of this project in place of its own process.

    megatron-train gpt --lr 1e-3                starts pretrain_gpt.py --lr 1e-3
    megatron-launch --nproc-per-node 8 gpt ...  starts 8 ranks of it (tools/launch.py)
    eval "$(megatron-train completion bash)"    the shell completes names and flags

The programs are files beside this one; a wheel has them in ``megatron/programs``.  This module
imports nothing that takes time.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# Name of `megatron-train` -> file, flags that choose the objective, and what it trains.
TRAINING: dict[str, tuple[str, tuple[str, ...], str]] = {
    "gpt": ("pretrain_gpt.py", (), "a language model"),
    "sft": ("pretrain_gpt.py", ("--sft",), "a language model on conversations"),
    "dpo": ("pretrain_gpt.py", ("--dpo-beta", "0.1"), "a language model on preferences"),
    "reward": ("pretrain_gpt.py", ("--reward-model",), "a model that scores answers"),
    "rl": ("pretrain_rl.py", (), "a language model by reinforcement learning (GRPO)"),
    "bert": ("pretrain_bert.py", (), "BERT"),
    "t5": ("pretrain_t5.py", (), "T5"),
    "mamba": ("pretrain_mamba.py", (), "Mamba-2 and hybrid models"),
    "vlm": ("pretrain_vlm.py", (), "a model that reads images and text"),
    "vision": ("pretrain_vision_classify.py", (), "a classifier of images"),
}
# Command -> its file.
TOOLS = {
    "megatron-launch": "tools/launch.py",
    "megatron-preprocess": "tools/preprocess_data.py",
    "megatron-convert": "tools/checkpoint/convert.py",
    "megatron-generate": "tools/text_generation_cli.py",
    "megatron-serve": "tools/run_text_generation_server.py",
    "megatron-plan": "tools/plan.py",
}


def program(file: str) -> str:
    """Return the path of a program."""
    here = Path(__file__).resolve().parent
    of_wheel = here / "megatron" / "programs"
    return str((of_wheel if of_wheel.is_dir() else here) / file)


def command_line(words: Sequence[str]) -> list[str]:
    """Return ``words`` with the name of `megatron-train` that they begin with as file and flags."""
    if not words or words[0] not in TRAINING or Path(words[0]).exists():
        return [*words]
    file, flags, _ = TRAINING[words[0]]
    return [program(file), *flags, *words[1:]]


def train() -> None:
    """Start the training program that the first argument names."""
    words = sys.argv[1:]
    if words[:1] == ["completion"]:
        print(completion(*words[1:2] or ["bash"]))
    elif words and words[0] in TRAINING:
        _replace_process(command_line(words))
    else:
        _explain(words)


def tool() -> None:
    """Start the program of the console command under which this process runs."""
    _replace_process([program(TOOLS[Path(sys.argv[0]).stem]), *sys.argv[1:]])


def _replace_process(command: Sequence[str]) -> NoReturn:
    # The process keeps its number, so signals of launchers and of the terminal reach the program.
    os.execv(sys.executable, [sys.executable, *command])


def _explain(words: Sequence[str]) -> NoReturn:
    lines = "\n".join(f"  {name:8}{what}" for name, (_, _, what) in TRAINING.items())
    usage = f"usage: megatron-train NAME [flags]\n\nNAME is what is trained:\n{lines}"
    if not words or words[0] in ("-h", "--help"):
        print(f"{usage}\n\nmegatron-train NAME --help explains the flags.")
        sys.exit(0 if words else 2)
    near = difflib.get_close_matches(words[0], TRAINING, n=1)
    hint = f": did you mean {near[0]}?" if near else ""
    print(f"megatron-train: {words[0]} names no model{hint}\n\n{usage}", file=sys.stderr)
    sys.exit(2)


_COMPLETION = """
_megatron_flags() {{
    case "$1" in
{cases}
    esac
}}
_megatron_complete() {{
    local name="${{COMP_WORDS[0]##*/}}" word="${{COMP_WORDS[COMP_CWORD]}}" choices=
    if [[ $name == megatron-train && $COMP_CWORD == 1 ]]; then
        choices="{names} completion"
    elif [[ $word == -* ]]; then
        choices="$(_megatron_flags "$name")"
    fi
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o default -F _megatron_complete megatron-train {tools}
""".strip()


def completion(shell: str) -> str:
    """Return a script for bash, or for zsh with bashcompinit, that completes the commands.

    The programs print their flags once, so that no key press starts Python.
    """
    if shell not in ("bash", "zsh"):
        print(f"megatron-train completion {shell}: use bash or zsh", file=sys.stderr)
        sys.exit(2)
    commands = {"megatron-train": "pretrain_gpt.py", **TOOLS}
    asked = {
        name: subprocess.Popen(
            [sys.executable, program(file), "--help", "all"], stdout=subprocess.PIPE, text=True
        )
        for name, file in commands.items()
    }
    cases = []
    for name, process in asked.items():
        text, _ = process.communicate()
        flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", text)))
        cases.append(f"        {name}) echo '{' '.join(flags)}' ;;")
    setup = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    body = _COMPLETION.format(
        cases="\n".join(cases), names=" ".join(TRAINING), tools=" ".join(TOOLS)
    )
    return setup + body


if __name__ == "__main__":
    train()
