"""Measure the share of MMLU's questions that a model answers correctly.

    python examples/post_training/modelopt/mmlu.py --load CHECKPOINT --mmlu-dataset FOLDER

The data are a folder of `datasets`, JSON lines or parquet with the columns question, choices,
answer (0 to 3) and subject, or the folder ``data`` of the original release with its csv files.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # installed or not

from examples.post_training.modelopt.common import (
    add_selection,
    first,
    open_llm,
    parse,
    print_rank_0,
    rows_of,
    run,
    with_progress,
)
from megatron.core.config.errors import DataError
from megatron.core.datasets.conversations import read_row
from megatron.core.inference.sampling_params import SamplingParams
from megatron.training.process.rank_print import is_rank0

LETTERS = "ABCD"
_FLAG = "--mmlu-dataset"


@dataclass(frozen=True)
class Question:
    """A question with four choices; ``answer`` is the letter of the correct one."""

    subject: str
    text: str
    choices: tuple[str, ...]
    answer: str

    def prompt(self) -> str:
        """Return the question with its choices, up to the answer."""
        lines = [
            f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True)
        ]
        return "\n".join([self.text, *lines, "Answer:"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags of MMLU; v0.14 does not have the last two."""
    group = parser.add_argument_group("MMLU")
    add_selection(group, "each subject's questions")
    group.add_argument(
        "--lower-bound", type=float, help="fail unless the average is above this share"
    )
    group.add_argument(
        _FLAG, default="cais/mmlu", help="folder of the questions, or a data set of the hub"
    )
    group.add_argument(
        "--few-shots", type=int, default=0, help="answered questions of the split dev in a prompt"
    )


def read_questions(name: str, split: str) -> dict[str, list[Question]]:
    """Return the questions of a split by subject.  Raises DataError."""
    found: dict[str, list[Question]] = defaultdict(list)
    for path in sorted(Path(name, split).glob("*.csv")):
        subject = path.stem.removesuffix(f"_{split}")
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), 1):
                if len(row) != 6 or row[5] not in LETTERS:
                    raise DataError(
                        f"{path}, row {number}: it has {len(row)} columns; a row is a question, "
                        "four choices and the letter of the answer"
                    )
                found[subject].append(Question(subject, row[0], tuple(row[1:5]), row[5]))
    if not found:
        for rows in rows_of(name, split, _FLAG):
            for i in range(len(rows)):
                question = read_row(rows, i, _question)
                found[question.subject].append(question)
    return found


def _question(row: Mapping[str, Any]) -> Question:
    try:
        choices = tuple(map(str, row["choices"]))
        if len(choices) != len(LETTERS):
            raise IndexError(f"{len(choices)} choices")
        answer = row["answer"]
        letter = answer if isinstance(answer, str) else LETTERS[int(answer)]
        return Question(str(row.get("subject", "all")), str(row["question"]), choices, letter)
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"a row needs question, 4 choices and answer (0 to 3); this one has {', '.join(row)}: "
            f"{error!r}"
        ) from None


def prompt_of(question: Question, shots: Sequence[Question]) -> str:
    """Return the text whose continuation is the letter of the answer."""
    subject = question.subject.replace("_", " ")
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    solved = "".join(f"{shot.prompt()} {shot.answer}\n\n" for shot in shots)
    return head + solved + question.prompt()


def main() -> None:
    """Answer the questions of each subject and report the shares of correct answers."""
    args = parse(add_flags)
    subjects = read_questions(args.mmlu_dataset, "test")
    shots = read_questions(args.mmlu_dataset, "dev") if args.few_shots else {}
    asked = {name: first(questions, args.percentage) for name, questions in subjects.items()}
    params = SamplingParams(top_k=1, num_tokens_to_generate=2)
    total = 0
    correct = 0
    with ExitStack() as watch:
        llm = open_llm(args, watch)
        for subject in with_progress(sorted(asked), "subjects", args):
            questions = asked[subject]
            solved = shots.get(subject, [])[: args.few_shots]
            answers = llm.generate([prompt_of(question, solved) for question in questions], params)
            pairs = zip(answers, questions, strict=False)  # rank 0 alone has answers
            right = sum(answer.text.strip().startswith(q.answer) for answer, q in pairs)
            report(subject, right, len(questions))
            correct += right
            total += len(questions)
    report("average", correct, total)
    llm.shut_down()
    if is_rank0() and args.lower_bound is not None and correct / total <= args.lower_bound:
        raise SystemExit(
            f"--lower-bound {args.lower_bound}: the average {correct / total:.3f} is not above it"
        )


def report(name: str, correct: int, total: int) -> None:
    """Print a row in Megatron-LM's form."""
    print_rank_0(f"{name:48}| {correct / total:.3f} | {correct:5}/{total:5}")


if __name__ == "__main__":
    run(main)
