"""Every rule has a command line that breaks it, and the error message that it then yields."""

from __future__ import annotations

import ast
import inspect
import re
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.config.rule import Rule
from megatron.core.transformer.config import rules as core_rules
from megatron.training.arguments import resolve as resolving
from megatron.training.arguments.parser import build_parser, parse_args
from megatron.training.arguments.resolve import RULES, resolve
from megatron.training.arguments.rules.model import problems_of_kind
from megatron.training.arguments.rules.requirements import REQUIREMENTS
from megatron.training.arguments.rules.rule import Settings
from megatron.training.arguments.sections import flags_and_defaults, options_by_dest
from tests.support.command_lines import argv, problems_of, run_of

Case = tuple[str, int, tuple[str, ...], str]  # words, world size, flags left out, message

# Rules about names that user code registers: tests of user code break them.
OF_USER_CODE = ("--dataset-type", "its update is not element-wise")


def read_cases() -> dict[str, list[Case]]:
    """Return subject -> command lines that break rules, from broken_command_lines.txt."""
    cases: dict[str, list[Case]] = {}
    name, words, world_size, without = "", "", 1, ()
    for line in (Path(__file__).parent / "broken_command_lines.txt").read_text().splitlines():
        mark, rest = line[:1], line[2:]
        if mark == "[":
            name = line.strip("[]")
        elif mark == "+":
            words, world_size, without = rest, 1, ()
        elif mark == "-":
            without = (*without, rest)
        elif mark == "@":
            world_size = int(rest)
        elif mark == "=":
            cases.setdefault(name, []).append((words, world_size, without, rest))
    return cases


BROKEN = read_cases()


def test_the_good_command_line_has_no_problem_and_no_warning() -> None:
    assert run_of().warnings == ()


def test_broken_rules_yield_their_messages_and_every_rule_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One test, as to resolve the command lines takes seconds."""
    unbroken = dict.fromkeys(range(len(RULES)))

    def record(rules: tuple[Rule, ...], settings: Settings) -> list[str]:
        problems = [list(rule.problems(settings)) for rule in rules]
        for i, found in enumerate(problems):
            if found:
                unbroken.pop(i, None)
        return [problem for found in problems for problem in found]

    monkeypatch.setattr(resolving, "problems_of", record)
    wrong = [
        f"{name}: {words}: {message!r} is not in {problems}"
        for name, cases in BROKEN.items()
        for words, world_size, without, message in cases
        if message not in (problems := problems_of(words, world_size, without))
    ]
    assert not wrong, "\n".join(wrong)
    messages = [RULES[i].message for i in unbroken if RULES[i].breach is not problems_of_kind]
    assert [m for m in messages if not any(words in m for words in OF_USER_CODE)] == []


def test_rules_name_flags_and_fields_that_exist() -> None:
    settings = Settings(run_of())
    for rule in RULES:
        conditions = [c for c in (rule.breach, *rule.where) if isinstance(c, str)]
        flags = re.findall(r"--[\w-]+", " ".join([rule.message, *conditions]))
        assert all(settings.shown(flag) for flag in flags if f"{{{flag}}}" in rule.message)
        assert all(settings.shown(flag) for flag in flags if flag in " ".join(conditions))
    files = Path(inspect.getfile(Settings)).parent.glob("*.py")
    for file in (*files, Path(inspect.getfile(core_rules))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "c":
                assert hasattr(settings, node.attr), f"{file.name}: {node.attr}"


NUMBERS = {
    action.dest: action.type
    for action in build_parser()._actions
    if action.type in (int, float) and action.nargs is None and action.choices is None
}


def numbers(*kinds: type) -> list[str]:
    """The dests of implemented flags that take one number of one of ``kinds``."""
    options = options_by_dest()
    return [
        dest
        for dest, kind in NUMBERS.items()
        if kind in kinds and not (options[dest].refused or options[dest].ignored)
    ]


def test_each_number_below_its_smallest_value_is_named() -> None:
    smallest = {
        flags_and_defaults()[dest][0]: least
        for dest in numbers(int, float)
        if (least := options_by_dest()[dest].at_least) is not None
    }
    problems = problems_of(" ".join(f"{flag} {least - 1}" for flag, least in smallest.items()))
    named = [
        flag
        for flag, least in smallest.items()
        for problem in problems
        if problem.startswith(f"{flag} ") and f"at least {least} is needed" in problem
    ]
    assert len(smallest) > 100
    assert named == list(smallest)


@pytest.mark.parametrize(
    "words",
    [
        "--clip-grad -1",
        "--exit-interval 0",
        "--train-sync-interval 0",
        "--log-interval 10000000000",
        "--eval-interval 1000000000000",
        "--save checkpoints --save-interval 10000000000",
        "--position-embedding-type rope --rotary-base 10000000000",
        "--num-experts 4 --disable-bias-linear --moe-expert-capacity-factor -1",
    ],
)
def test_numbers_that_switch_something_off_or_put_it_off_for_ever_are_taken(words: str) -> None:
    assert not problems_of(words)


def test_numbers_that_no_size_can_have_are_refused_together() -> None:
    problems = problems_of(
        "--seed 4294967296 --hidden-size 4611686018427387904 --num-layers 100001"
    )
    assert sorted(problems) == [
        "--hidden-size 4611686018427387904: at most 2147483647 is possible",
        "--num-layers 100001: at most 100000 is possible",
        "--seed 4294967296: at most 4294967295 is possible",
    ]


def test_modules_that_adapters_cannot_save_are_refused() -> None:
    flags = "--lora-rank 2 --lora-modules-to-save"
    (problem,) = problems_of(f"{flags} q_proj norm")
    assert problem.startswith("--lora-modules-to-save q_proj norm: use some of lm_head ")
    (problem,) = problems_of(f"{flags} lm_head")
    assert "--untie-embeddings-and-output-weights" in problem
    assert not problems_of(f"{flags} lm_head norm --untie-embeddings-and-output-weights")


def test_the_maximum_of_a_fraction_is_that_of_its_flag() -> None:
    flags = "--sft --mock-data --logits-load-dir store --logits-load-kd-loss-alpha"
    (problem,) = problems_of(f"{flags} 1.5")
    assert problem == "--logits-load-kd-loss-alpha 1.5: at most 1 is possible"
    assert "--lora-dropout 2.0: at most 1 is possible" in problems_of("--lora-dropout 2")


@pytest.mark.parametrize(
    ("kind", "number"),
    [(int, n) for n in (0, 1, 2**31 - 1, 2**62)] + [(float, x) for x in (0.0, 1e-320, 1e308)],
)
def test_any_number_is_taken_or_refused_with_a_message(kind: type, number: float) -> None:
    good = vars(parse_args(argv=argv()))
    for dest in numbers(kind):
        try:
            resolve(Namespace(**{**good, dest: number}), 2)
        except ConfigError:
            continue


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_namespace_of_a_program_is_checked_too(number: float) -> None:
    args = parse_args(argv=argv())
    args.lr = number
    with pytest.raises(ConfigError, match="--lr .*: a finite number is needed"):
        resolve(args, 1)


@pytest.mark.feature("Command line: all conflicts at once, each with its cure")
def test_all_problems_come_at_once() -> None:
    problems = problems_of(
        "--bf16 --fp16 --log-interval 0 --use-legacy-models --tensor-model-parallel-size 3",
        world_size=4,
    )
    starts = ("--use-legacy-models", "--log-interval", "4 ranks", "--num-att", "--bf16")
    for start in starts:
        assert any(p.startswith(start) for p in problems), (start, problems)


NEEDS = [need for need in REQUIREMENTS if "hybrid-override-pattern" not in need.words]
WHOLE_GRADIENTS = next(n.dests for n in NEEDS if n.words.startswith("gradient buckets"))


HALVES = (
    "adam_beta1 adam_beta2 lion_beta1 lion_beta2 muon_momentum soap_shampoo_beta rotary_percent "
    "mask_prob optimizer_offload_fraction short_seq_prob hybrid_attention_ratio "
    "hybrid_mlp_ratio"
).split()
# Where 5 is no value that another check lets pass.
FRACTIONS = (
    "classes_fraction data_per_class_fraction lora_dropout logits_save_top_p "
    "logits_load_kd_loss_alpha"
).split()
VALUES = dict.fromkeys([*HALVES, *FRACTIONS], "0.5") | {
    "muon_num_ns_steps": "3",
    "profile_ranks": "3",
    "cp_comm_type": "a2a",
    "hierarchical_context_parallel_sizes": "1 1",
    "hybrid_override_pattern": "MM",
    "moe_layer_freq": "2",
    "dpo_label_smoothing": "0.4",
    "fim_rate": "0.4",
    "fim_spm_rate": "0.4",
    "fim_fragment_rate": "0.4",
}
BESIDE = {
    "error_injection_rate": "--rerun-mode disabled",
    "rehearse_memory": "--skip-train",
    "cpu_offloading": "--cpu-offloading-num-layers 1",
    "fine_grained_activation_offloading": "--offload-modules core_attn",
    "overlap_param_gather": "--overlap-grad-reduce",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather --overlap-grad-reduce",
    "reset_position_ids": "--position-embedding-type rope",
    "mock_data": "--perform-rl-step --langrl-env-config environments --grpo-kl-beta 0",
}
ACTIONS = {action.dest: action for action in build_parser()._actions}


def another_value(dest: str) -> str:
    """The flag of ``dest``, with a value that is not its default."""
    action = ACTIONS[dest]
    flag = action.option_strings[-1 if action.default is True else 0]
    if action.nargs == 0:
        return flag
    others = [c for c in action.choices or () if c not in (None, action.default)]
    return f"{flag} {VALUES.get(dest) or next(iter(others), '5')}"


@pytest.mark.parametrize("dest", [dest for need in NEEDS for dest in need.dests])
def test_a_flag_whose_partner_is_missing_gets_a_warning(dest: str) -> None:
    words = f"{another_value(dest)} {BESIDE.get(dest, '')}"
    warning = f"{words.split()[0]} is without effect: it needs "
    if dest in next(need.dests for need in NEEDS if need.words == "a GPU"):
        words += " --device cpu"
    if dest.startswith("adam"):
        words += " --optimizer sgd"
    if dest in (*WHOLE_GRADIENTS, "check_weight_hash_across_dp_replicas_interval"):
        words += " --use-torch-fsdp2"
    without: tuple[str, ...] = ()
    if dest.endswith("_samples"):
        words, without = words + " --train-samples 100", ("--train-iters",)
    assert any(w.startswith(warning) for w in run_of(words, without=without).warnings)


def test_tensor_parallelism_ignores_sizes_of_layers_that_a_hybrid_does_not_have() -> None:
    words = "--model-kind mamba --num-layers 2 --tensor-model-parallel-size 2 --mamba-num-groups 2 "
    words += "--num-attention-heads 1 --ffn-hidden-size 1 --hybrid-override-pattern "
    assert problems_of(words + "MM", 2, ()) == []
    assert len(problems_of(words + "M*", 2, ())) == 1
    assert len(problems_of(words + "M-", 2, ())) == 1


@pytest.mark.parametrize(
    ("pattern", "idle"), [("MMMM", 14), ("MM*M", 2 + 1), ("MM-M", 1 + 11), ("M*EM", 1)]
)
def test_what_no_layer_of_a_hybrid_reads_gets_a_warning(pattern: str, idle: int) -> None:
    words = (
        "--group-query-attention --num-query-groups 2 --window-size 4,0 --qk-layernorm "
        "--attn-logit-softcapping 30 --position-embedding-type rope --rotary-base 500 "
        "--rotary-percent 0.5 --apply-query-key-layer-scaling --no-rope-freq 2 "
        "--window-attn-skip-freq 2 --softmax-type learnable --ffn-hidden-size 512 --swiglu"
    )
    if "E" in pattern:
        words += " --num-experts 2"
    run = run_of(
        f"--model-kind mamba --hybrid-override-pattern {pattern} --num-layers 4 {words} "
        "--hybrid-mlp-ratio 0.5 --mamba-num-groups 2"
    )
    found = [w for w in run.warnings if "hybrid-override-pattern" in w]
    assert len(found) == idle, found


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1", 1),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", 1),
        ("--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1", 0),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", 1),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax", 1),
        ("--moe-router-load-balancing-type none --moe-router-pre-softmax", 0),
        (
            "--moe-router-force-load-balancing --moe-router-num-groups 2 --moe-router-group-topk 1 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            3,
        ),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-topk 1 "
         "--moe-router-score-function sigmoid", 0),
    ],
)  # fmt: skip
def test_what_a_router_does_not_read_gets_a_warning(words: str, idle: int) -> None:
    warnings = run_of(f"--num-experts 4 {words}").warnings
    assert len([w for w in warnings if "is without effect: it needs " in w]) == idle, warnings
