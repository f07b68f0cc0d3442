"""The command line is read whole: every mistake in it is named, with the nearest spelling."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.config.parse import int_pair, layer_frequency, member_of, strict_bool
from megatron.core.enums import AttnBackend
from megatron.training.arguments.help import FIRST_RUN
from megatron.training.arguments.options import GROUPS
from megatron.training.arguments.parser import PARSE_WARNINGS, build_parser, parse_args
from megatron.training.arguments.resolve import resolve
from tests.support.command_lines import argv


def message_of(words: str, capsys: pytest.CaptureFixture[str], **settings: object) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv=words.split(), **settings)  # type: ignore[arg-type]
    assert ended.value.code == 2
    return [line.removeprefix("  - ") for line in capsys.readouterr().err.splitlines()[1:]]


def test_every_mistake_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--num-layers x --hidden-sise 64 --lr 1e-x --optimizer adma --timing-log-level 4 stray "
        "--attention-backend flush --no-rope-freq [1 --window-size 3"
    )
    assert message_of(words, capsys) == [
        "--num-layers x: a whole number is needed",
        "--lr 1e-x: a number is needed",
        "--optimizer adma: not one of adam, sgd, lion, muon, dist_muon, soap (did you mean adam?)",
        "--timing-log-level 4: not one of 0, 1, 2",
        "--attention-backend flush: not one of flash, fused, unfused, local, auto",
        "--no-rope-freq [1: a layer pattern is an int or a list expression like ([1]*3+[0])*2",
        "--window-size 3: give two integers such as 128,0",
        "--hidden-sise is not a flag: did you mean --hidden-size?",
        "'stray' belongs to no flag",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("--lr", "inf", "--lr inf: a finite number is needed"),
        ("--clip-grad", "nan", "--clip-grad nan: a finite number is needed"),
        ("--init-method-std", "nan", "--init-method-std nan: a finite number is needed"),
        ("--moe-aux-loss-coeff", "1e999", "--moe-aux-loss-coeff 1e999: a finite number is needed"),
        ("--seed", str(2**64), f"--seed {2**64}: a whole number of at most 64 bits is needed"),
        ("--seed", "9" * 5000, f"--seed {'9' * 100}... (5000 characters): a whole number"),
        ("--window-size", f"{2**64},0", f"--window-size {2**64},0: a whole number of at most 64"),
        ("--moe-layer-freq", "[1]*9999999999", "--moe-layer-freq [1]*9999999999: a layer pattern "),
        ("--moe-layer-freq", "(" * 5000, f"--moe-layer-freq {'(' * 100}... (5000 characters): "),
        ("--save", "", "--save '': the value is empty; check that the shell variable"),
        ("--data-path", " \t", "--data-path ' \\t': the value is empty"),
        ("--optimizer", "", "--optimizer '': the value is empty"),
    ],
)  # fmt: skip
def test_a_value_that_no_flag_takes_is_refused(
    flag: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(argv=[flag, value])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(f"  - {problem}")


def test_a_blank_default_and_an_infinite_clip_can_be_given() -> None:
    args = parse_args(argv=["--clip-grad", "inf", "--wandb-project", ""])
    assert (args.clip_grad, args.wandb_project) == (float("inf"), "")


def test_a_missing_value_is_reported_with_what_came_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = message_of("--num-layers x --hidden-size", capsys)
    assert problems[0] == "--num-layers x: a whole number is needed"
    assert problems[1] == "argument --hidden-size: expected one argument"


def test_an_abbreviated_flag_is_not_taken_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert message_of("--hidden-siz=64", capsys) == [
        "--hidden-siz is not a flag: did you mean --hidden-size?"
    ]


def test_an_outlandish_flag_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert message_of("--xqzzy 3 --foo", capsys) == ["--xqzzy is not a flag", "--foo is not a flag"]


def test_unknown_flags_can_be_left_to_others() -> None:
    args = parse_args(argv=["--hidden-size", "8", "--theirs", "3"], ignore_unknown_args=True)
    assert args.hidden_size == 8


def test_help_lists_every_flag_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv=["--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    parser = build_parser()
    for action in parser._actions:
        assert action.option_strings[0] in text
        assert action.help is not None
        assert action.help.count(".") >= 1 or action.dest == "help", action.dest
    headings = [line[:-1] for line in text.splitlines() if line[:-1] in GROUPS]
    assert headings == list(GROUPS)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what --help prints for ``words``."""
    with pytest.raises(SystemExit) as ended:
        parse_args(argv=["--lr", "1", "--help", *words])
    said = capsys.readouterr()
    assert (ended.value.code, said.err) in ((0, ""), (2, said.err))
    return said.out + said.err


def flags_in(text: str) -> set[str]:
    """Return the flags that ``text`` explains."""
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


def test_help_begins_with_a_first_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = told(capsys)
    assert flags_in(text) == {*FIRST_RUN} - {"--config"} | {"--yaml-cfg"}  # of one flag
    assert len(text.splitlines()) < 100
    assert max(map(len, text.splitlines())) <= 100
    assert "One of BertWordPieceLowerCase" in " ".join(text.split())
    (example,) = re.findall(r"example.*?\n\n", text, re.DOTALL)
    words = shlex.split(example.replace("\\\n", " "))
    args = parse_args(argv=words[words.index("--mock-data") :])
    assert args.mock_data
    assert args.train_iters == 50


@pytest.mark.parametrize("word", ["--lora-rank", "lora-rank", "lora_rank"])
def test_help_explains_a_flag(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert flags_in(told(capsys, word)) == {"--lora-rank"}


def test_help_explains_a_topic_and_what_a_word_has_to_do_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapters = flags_in(told(capsys, "adapters"))
    assert {"--lora-rank", "--lora-alpha"} <= adapters
    assert "--lr" not in adapters
    assert flags_in(told(capsys, "learning", "rate")) >= {"--lr", "--min-lr"}
    assert flags_in(told(capsys, "mrope")) == {"--mrope-section", "--mrope-interleaved"}
    assert "flags have to do with size; --help FLAG" in told(capsys, "size")
    assert "--help epohcs: no flag has to do with it" in told(capsys, "epohcs")
    assert "no flag has to do with it: use --load" in told(capsys, "resume-from-checkpoint")


def test_a_switch_both_ways_knows_three_answers() -> None:
    assert parse_args(argv=[]).progress_bar is None
    assert parse_args(argv=["--progress-bar"]).progress_bar is True
    assert parse_args(argv=["--no-progress-bar"]).progress_bar is False


def test_a_users_flags_join_the_parser() -> None:
    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        group = parser.add_argument_group(title="mine")
        group.add_argument("--my-ratio", type=float, default=0.5)
        return parser

    assert parse_args(provide, argv=["--my-ratio", "0.25"]).my_ratio == 0.25
    assert parse_args(lambda parser: None, argv=[]).hidden_size is None


def test_program_defaults_fill_only_what_is_unset() -> None:
    defaults = {"tokenizer_type": "GPT2BPETokenizer", "log_interval": 7, "no_load_rng": True}
    args = parse_args(argv=["--tokenizer-type", "NullTokenizer"], args_defaults=defaults)
    assert (args.tokenizer_type, args.log_interval, args.no_load_rng) == (
        "NullTokenizer",
        100,
        True,
    )
    assert vars(args)[PARSE_WARNINGS] == [
        "--log-interval is 100; this program's default 7 needs --log-interval 7",
    ]


def test_the_last_of_two_equal_flags_counts() -> None:
    assert parse_args(argv=argv("--num-layers 8")).num_layers == 8


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("[1,0]", (1, 0)),
        ("([1]*3+[0])*2", (1, 1, 1, 0, 1, 1, 1, 0)),
        ("2*[0]+[1]", (0, 0, 1)),
    ],
)
def test_layer_patterns_are_evaluated(text: str, value: int | tuple[int, ...]) -> None:
    assert layer_frequency(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "[1]+", "([1],[0])", "[[1]]", "1+1", "[1]+1", "[1]**2", "[1,0][0]"),
        *("[1", "[1] # comment", "[0x1]", "[1]*1if 1else[0]", "", "+" * 100_000 + "1"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^a layer pattern is an int or a list expression like"):
        layer_frequency(text)


def test_spellings_that_scripts_of_megatron_lm_send_are_accepted() -> None:
    words = ["--context-parallel-size", "2", "--cp-comm-type", "all_gather", "--split", "'99,1,0'"]
    words += ["--pipeline-model-parallel-size", "2"]
    words += ["--pipeline-model-parallel-layout", r"Et*2\|ttL"]
    run = resolve(parse_args(argv=[*argv(), *words]), 4)
    assert run.model.cp_comm_types == ("allgather",)
    assert run.model.virtual_pipeline_model_parallel_size is None


def test_words_for_truth_are_strict() -> None:
    assert strict_bool("False") is False
    assert strict_bool("yes") is True
    with pytest.raises(ValueError, match="'maybe' is neither true nor false"):
        strict_bool("maybe")


def test_pairs_and_members_are_read() -> None:
    assert int_pair("(128, 0)") == int_pair("128,0") == (128, 0)
    assert member_of(AttnBackend)("flash") is AttnBackend.flash


def test_a_program_may_have_a_flag_that_only_another_program_reads() -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("mine").add_argument("--model-provider", choices=("gpt", "mamba"))
        return parser

    args = parse_args(add, argv=["--model-provider", "mamba"])
    assert args.model_provider == "mamba"
    assert parse_args(argv=[]).model_provider == "mock"


def test_a_program_cannot_replace_other_flags() -> None:
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--seed", type=int)
        return parser

    with pytest.raises(ConfigError, match="the program adds the flag --seed, which exists"):
        parse_args(add, argv=[])
