"""Console commands: each starts a program of this project in place of its own process.

    megatron-train gpt --lr 1e-3                starts pretrain_gpt.py --lr 1e-3
    megatron-launch --nproc-per-node 8 gpt ...  starts 8 ranks of it (tools/launch.py)
    megatron-train --config sft-lora            starts what the recipe or file names by `train:`
    megatron-train recipes [FOLDER]             lists the recipes, or writes them and a tiny model
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

from megatron.training.arguments.programs import PROGRAMS, name_in, path_of, problem_of, recipes

# Command -> its file.
TOOLS = {
    "megatron-launch": "tools/launch.py",
    "megatron-preprocess": "tools/preprocess_data.py",
    "megatron-convert": "tools/checkpoint/convert.py",
    "megatron-generate": "tools/text_generation_cli.py",
    "megatron-serve": "tools/run_text_generation_server.py",
    "megatron-plan": "tools/plan.py",
}


def command_line(words: Sequence[str]) -> list[str]:
    """Return ``words`` with the file and flags of the program that they name.

    Its name in `megatron-train` is the first word, or ``train`` of the file of --config.
    """
    if words[:1] == ["recipes"] and words[1:]:
        return [str(path_of("examples/recipes/copy_recipes.py")), *words[1:]]
    name = words[0] if words and words[0] in PROGRAMS and not Path(words[0]).exists() else None
    flags = [*words[1:]] if name else [*words]
    at = next((i for i, word in enumerate(flags) if word.partition("=")[0] == "--config"), None)
    if name is None and (at is None or not flags[0].startswith("-")):
        return flags  # a script of the user
    file = None
    if at is not None:
        flags[at : at + 1] = flags[at].split("=", 1)
        if at + 1 == len(flags):
            _end("--config needs a file or a recipe; megatron-train recipes lists them")
        file = flags[at + 1] = config_file(flags[at + 1])
    text = Path(file).read_text(encoding="utf-8", errors="replace") if file else ""
    in_file = name_in(text)
    if name is None and in_file is None:
        _end(f"{file} names no program: add a line such as 'train: sft' ({', '.join(PROGRAMS)})")
    if in_file is not None and name not in (None, in_file):
        _end(f"{name} --config {file}: the file has train: {in_file}; leave {name} out")
    name = name or in_file
    if problem := problem_of(name, PROGRAMS[name].file if name in PROGRAMS else ""):
        _end(f"{file}: {problem}")
    keys = text.replace("-", "_")
    found = PROGRAMS[name]
    is_set = in_file or any(re.search(rf"^\W*{key}\b", keys, re.M) for key in found.settings)
    return [str(path_of(found.file)), *([] if is_set else found.flags), *flags]


def config_file(name: str) -> str:
    """Return ``name``, or the path of the recipe with this name if there is no such file."""
    if Path(name).is_file():
        return name
    if name not in (known := recipes()):
        near = difflib.get_close_matches(Path(name).stem, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        _end(f"--config {name}: no such file or recipe; {hint}megatron-train recipes lists them")
    return known[name]


def train() -> None:
    """Start the training program that the first argument, or the file of --config, names."""
    words = sys.argv[1:]
    if words[:1] == ["completion"]:
        print(completion(*words[1:2] or ["bash"]))
    elif words == ["recipes"]:
        for name, path in sorted(recipes().items()):
            print(f"{name:22}{Path(path).read_text().splitlines()[0].removeprefix('# ')}")
    elif (command := command_line(words)) != words:
        _replace_process(command)
    else:
        _explain(words)


def tool() -> None:
    """Start the program of the console command under which this process runs."""
    _replace_process([str(path_of(TOOLS[Path(sys.argv[0]).stem])), *sys.argv[1:]])


def _replace_process(command: Sequence[str]) -> NoReturn:
    # The process keeps its number, so signals of launchers and of the terminal reach the program.
    os.execv(sys.executable, [sys.executable, *command])


def _explain(words: Sequence[str]) -> NoReturn:
    lines = "\n".join(f"  {name:8}{program.title}" for name, program in PROGRAMS.items())
    usage = (
        "usage: megatron-train NAME [flags]\n"
        "       megatron-train --config FILE_OR_RECIPE [flags]\n"
        f"       megatron-train recipes [FOLDER]\n\nNAME is what is trained:\n{lines}"
    )
    if not words or words[0] in ("-h", "--help"):
        print(f"{usage}\n\nmegatron-train NAME --help explains the flags.")
        sys.exit(0 if words else 2)
    near = difflib.get_close_matches(words[0], PROGRAMS, n=1)
    hint = f": did you mean {near[0]}?" if near else ""
    _end(f"{words[0]} names no model{hint}\n\n{usage}")


def _end(problem: str) -> NoReturn:
    print(f"megatron-train: {problem}", file=sys.stderr)
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
        choices="{names} completion recipes --config"
    elif [[ ${{COMP_WORDS[COMP_CWORD - 1]}} == --config ]]; then
        choices="{recipes}"
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
            [sys.executable, str(path_of(file)), "--help", "all"], stdout=subprocess.PIPE, text=True
        )
        for name, file in commands.items()
    }
    cases = []
    for name, process in asked.items():
        text, _ = process.communicate()
        flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", text)))
        cases.append(f"        {name}) echo '{' '.join(flags)}' ;;")
    setup = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    lists = {"names": PROGRAMS, "tools": TOOLS, "recipes": sorted(recipes())}
    body = _COMPLETION.format(
        cases="\n".join(cases), **{name: " ".join(words) for name, words in lists.items()}
    )
    return setup + body


if __name__ == "__main__":
    train()
