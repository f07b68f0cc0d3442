"""An argparse parser that reports all errors of a command line at once, with suggestions."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from megatron.core.config.errors import ConfigError
from megatron.core.config.parse import parse_table
from megatron.training.arguments import config_keys
from megatron.training.arguments.sections import options_by_dest
from megatron.training.arguments.value_rules import problem_of_type, shown

_EXPECTED: dict[object, str] = {int: "a whole number is needed", float: "a number is needed"}


class Parser(argparse.ArgumentParser):
    """An argparse parser that continues after a bad value and suggests spellings.

    ``problems`` collects the error messages, ``warnings`` the warnings.  ``replaced``: dests of the
    flags in whose place a program has put flags of its own.  ``flags_of_tool``: the flags that a
    program reads which does not train, for --help.  ``given``: dests that the command line or its
    file sets, to their defaults or to other values, and whether the command line does.
    """

    def __init__(self, *, description: str, usage: str) -> None:
        super().__init__(description=description, usage=usage, allow_abbrev=False, add_help=False)
        self.replaced: list[str] = []
        self.flags_of_tool: Sequence[str] = ()
        self.begin()

    def begin(self) -> None:
        """Forget the last command line: another one, maybe of another program, follows."""
        self.prog = os.path.basename(sys.argv[0])
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.given: dict[str, bool] = {}

    @contextlib.contextmanager
    def may_replace(self, flags: Collection[str]) -> Iterator[None]:
        """Let a program add flags of its own that replace ``flags``.

        Raises ConfigError at the end for another flag that is added a second time.
        """
        before = dict(self._option_string_actions)
        takers = self, self._optionals  # of new groups, and of flags outside of groups
        for taker in takers:
            taker.conflict_handler = "resolve"
        yield
        for taker in takers:
            taker.conflict_handler = "error"
        after = self._option_string_actions
        for flag, action in before.items():
            if flag not in flags and after.get(flag) is not action:
                raise ConfigError(
                    f"the program adds the flag {flag}, which exists: give its flag another name, "
                    "or read the value of this one"
                )
            if after.get(flag) is not action and not action.option_strings:
                self.replaced.append(action.dest)

    def read_value(self, action: argparse.Action, text: str) -> object:
        """Parse one word for ``action``; on an error record the message and return None."""
        value = self._get_value(action, text)
        self._check_value(action, value)
        return value

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self.given[action.dest] = True  # argparse calls this for switches too
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> object:
        parse = self._registry_get("type", action.type, action.type)
        value = None
        try:
            value = parse(arg_string)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            problem: str | None = _EXPECTED.get(parse, str(error))
        else:
            opt = options_by_dest().get(action.dest)
            is_ours = opt is not None and value != action.default
            problem = problem_of_type(value, opt) if is_ours and opt is not None else None
        if "\0" in arg_string:  # from a file or a program; no path can contain NUL
            problem = "it holds a NUL character: remove it"
        if problem is None:
            return value
        self.problems.append(f"{_name(action)} {shown(arg_string)}: {problem}")
        return None

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices or value is None:
            return
        near = difflib.get_close_matches(str(value), [str(c) for c in action.choices], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = ", ".join(str(c) for c in action.choices if c is not None)
        known = known or "the registered names: none is; see --import-module"
        self.problems.append(f"{_name(action)} {value}: not one of {known}{hint}")

    def unknown_dest(self, key: str) -> str:
        """Return the error message for a key of a file that is not a flag."""
        flags = (flag.lstrip("-").replace("-", "_") for flag in self._option_string_actions)
        known = [*(action.dest for action in self._actions), *flags, *config_keys.NAMES]
        return f"{key} is not a flag{suggestion(key, known)}"

    def unknown(self, words: Sequence[str]) -> list[str]:
        """Return an error message for each flag among ``words`` that is not declared."""
        names = [s for action in self._actions for s in action.option_strings]
        problems = []
        for before, word in zip(("", *words), words, strict=False):
            if word.startswith("--"):
                flag = word.split("=", 1)[0]
                problems.append(f"{flag} is not a flag{suggestion(flag, names)}")
            elif not before.startswith("--"):
                problems.append(f"{word!r} belongs to no flag")
        return problems

    def error(self, message: str) -> NoReturn:
        """Print all recorded errors and exit with status 2, like argparse."""
        problems = [*self.problems, *([message] if message else [])]
        lines = "\n".join(f"  - {p}" for p in problems)
        self.exit(2, f"{self.prog}: the command line cannot be read:\n{lines}\n")


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.dest)


# Suggestion -> flags of other programs (Hugging Face Trainer, DeepSpeed, torchtitan, NeMo, nanoGPT)
# and of other releases of Megatron-LM.
SYNONYMS = parse_table(
    """
--lr | learning-rate base-lr optimizer.lr optim.lr max-lr
--min-lr | min-learning-rate lr-min lr-scheduler.min-lr lr-end
--epochs (of fine-tuning; else --train-samples or --train-iters) | epoch num-epochs
    num-train-epochs max-epochs train-epochs trainer.max-epochs
--train-iters | steps max-steps num-steps total-steps train-steps training-steps training.steps
    iters max-iters num-iters iterations train-iterations trainer.max-steps num-train-steps
--micro-batch-size (samples of one rank in one pass) or --global-batch-size | batchsize bs bsz
--micro-batch-size | mbs per-device-train-batch-size per-gpu-train-batch-size
    train-micro-batch-size-per-gpu local-batch-size training.local-batch-size device-batch-size
    microbatch-size
--global-batch-size | gbs train-batch-size total-batch-size training.global-batch-size
--global-batch-size = --micro-batch-size x data-parallel ranks x accumulation steps |
    gradient-accumulation-steps grad-accumulation-steps grad-accum-steps grad-acc-steps
    accumulation-steps accumulate-grad-batches gas num-microbatches
--load (a Hugging Face folder, hf://org/name or a checkpoint) | model model-name model-path
    model-name-or-path pretrained-model-name-or-path base-model
--load | resume resume-from resume-from-checkpoint load-checkpoint load-dir load-path
    init-checkpoint restore-from ckpt-path from-checkpoint checkpoint.initial-load-path checkpoint
--save | output-dir save-dir save-path out-dir checkpoint.folder save-checkpoint
--save and --load with the same folder | auto-resume
--save and --load | checkpoint-dir checkpoint-path ckpt-dir
--keep-last-checkpoints | save-total-limit
--save-best | load-best-model-at-end
--best-metric | metric-for-best-model
--no-save-optim | save-only-model
--save-interval | save-strategy save-steps save-every save-freq checkpoint-interval
    checkpoint.interval
--eval-interval | eval-strategy evaluation-strategy eval-steps eval-every eval-freq val-interval
    val-check-interval
--eval-interval; no flag evaluates before the first step | eval-on-start
--eval-iters | val-iters eval-batches limit-val-batches
--log-interval | logging-steps log-every log-freq log-steps log-every-n-steps metrics.log-freq
--tensorboard-dir | logging-dir log-dir tb-dir tensorboard-log-dir
--tensorboard-dir, --wandb-project, --tracker or --metrics-file | report-to log-with
--wandb-project | wandb use-wandb
--tracker mlflow and --tracker-project | mlflow mlflow-experiment-name mlflow-experiment
--dpo-beta | beta
--grpo-group-size | num-generations
--sequence-parallel | sp
--wandb-exp-name or --tracker-run | run-name wandb-name wandb-run-name
--num-layers | layers n-layer n-layers nlayers num-hidden-layers depth
--hidden-size | hidden hidden-dim d-model dmodel n-embd embed-dim model-dim dim
--num-attention-heads | heads n-head n-heads nheads num-heads num-attn-heads
--group-query-attention and --num-query-groups | n-kv-heads num-kv-heads kv-heads
    num-key-value-heads
--ffn-hidden-size | ffn-dim ffn-size d-ff mlp-hidden-size intermediate-size
--seq-length | seq-len seqlen sequence-length max-seq-len max-seq-length max-length context-length
    block-size training.seq-len n-ctx
--hidden-dropout and --attention-dropout | dropout
--normalization RMSNorm | rmsnorm rms-norm use-rmsnorm use-rms-norm
--norm-epsilon | norm-eps rms-norm-eps layer-norm-eps layernorm-eps layer-norm-epsilon
--position-embedding-type rope | rope use-rope use-rotary rotary
--rotary-base | rope-theta rope-base
--disable-bias-linear | no-bias bias
--untie-embeddings-and-output-weights, or nothing: weights are tied by default | tie-word-embeddings
    tie-embeddings tie-weights
--num-experts | n-experts moe-num-experts num-local-experts
--moe-router-topk | moe-topk moe-top-k num-experts-per-tok num-experts-per-token
--clip-grad | gradient-clip max-grad-norm max-norm grad-clip grad-norm-clip gradient-clipping
    gradient-clip-val clip-grad-norm training.max-norm
--weight-decay | wd
--adam-beta1 | beta1
--adam-beta2 | beta2
--adam-eps | adam-epsilon
--lr-warmup-iters | warmup-steps warmup-iters num-warmup-steps lr-warmup-steps
    lr-scheduler.warmup-steps
--lr-warmup-fraction | warmup-ratio warmup-fraction
--lr-decay-style | scheduler lr-schedule lr-scheduler lr-scheduler-type
--data-path | data dataset datasets dataset-path data-dir data-prefix train-data train-file
    training.dataset training.dataset-path
--valid-data-path | val-data valid-data eval-data eval-dataset validation-file val-file
--tokenizer-type and --tokenizer-model | tokenizer tokenizer-path tokenizer-name
    tokenizer-name-or-path model.tokenizer-path
--mock-data | fake-data dummy-data synthetic-data
--num-workers | dataloader-num-workers
--seed | random-seed
--tensor-model-parallel-size | tp tp-size tp-degree tensor-parallel tensor-parallel-size
    tensor-parallel-degree parallelism.tensor-parallel-degree intra-layer-model-parallel-size
--pipeline-model-parallel-size | pp pp-size pp-degree pipeline-parallel pipeline-parallel-size
    pipeline-parallel-degree parallelism.pipeline-parallel-degree inter-layer-model-parallel-size
--context-parallel-size | cp cp-size cp-degree context-parallel-degree
    parallelism.context-parallel-degree ulysses-degree sequence-parallel-size
    ds-sequence-parallel-size
--expert-model-parallel-size | ep ep-size ep-degree expert-parallel expert-parallel-size
    moe-expert-parallel-size parallelism.expert-parallel-degree
fewer ranks for the model: data-parallel size is ranks / (tensor x pipeline x context) | dp dp-size
    data-parallel-size dp-degree
--use-torch-fsdp2 or --use-megatron-fsdp | fsdp fsdp2 use-fsdp use-fsdp2
--use-distributed-optimizer (ZeRO-1) or --use-torch-fsdp2 (ZeRO-3) | zero zero1 zero-1 zero2
    zero3 zero-stage deepspeed deepspeed-config ds-config use-deepspeed
--bf16 or --fp16 | precision mixed-precision dtype torch-dtype amp trainer.precision half
--fp8-format | fp8 use-fp8 enable-fp8
--attention-backend flash | flash flash-attn flash-attention use-flash-attention enable-flash-attn
--attention-backend | attn-impl attn-implementation attention-impl
--recompute-activations or --recompute-granularity full | gradient-checkpointing grad-checkpointing
    activation-checkpointing activation-checkpoint use-activation-checkpointing recompute
    activation-checkpoint.mode activations-checkpoint-granularity
--recompute-num-layers | checkpoint-num-layers activations-checkpoint-num-layers
--recompute-method | activations-checkpoint-method
--distribute-saved-activations | distribute-checkpointed-activations
--transformer-impl transformer_engine | te use-transformer-engine transformer-engine
--transformer-impl local | no-te
--device cpu | cpu no-cuda use-cpu
--exit-duration-in-mins | max-time
--optimizer-cpu-offload | cpu-optimizer offload-optimizer
--accumulate-allreduce-grads-in-fp32 | fp32-allreduce
--ckpt-format | checkpoint-format
--encoder-pipeline-model-parallel-size | pipeline-model-parallel-split-rank
--account-for-embedding-in-pipeline-split | standalone-embedding-stage
--deterministic-mode | deterministic
--enable-cuda-graph or --external-cuda-graph | cuda-graphs
--lora-rank | lora lora-r use-lora use-peft peft
--lora-rank with --lora-base-dtype | qlora load-in-4bit load-in-8bit
--optimizer | optim optimizer-type optim-type
--save-hf, whose folder you upload yourself | push-to-hub hub-model-id
a flag of the server (megatron-serve) | port host
a flag of tools/text_generation_cli.py (megatron-generate), or the field of a request to the
    server (megatron-serve); training does not sample text | temperature top-p top-k
    max-new-tokens max-tokens repetition-penalty do-sample num-beams prompt
torchrun's flag --nproc-per-node (megatron-launch), before the name of the script
    | gpus num-gpus n-gpus ngpus num-processes devices trainer.devices
torchrun's flag --nnodes (megatron-launch), before the name of the script | nodes num-nodes n-nodes
    trainer.num-nodes num-machines
no flag: this is the default | packing do-train dynamic-loss-scale scaled-masked-softmax-fusion
    bias-gelu-fusion no-query-key-layer-scaling scaled-upper-triang-masked-softmax-fusion
    resume-dataloader
no flag: samples of fine-tuning share sequences, so that none is padded | group-by-length
no flag: kernels are fused where they can be | torch-compile use-liger-kernel liger-kernel
no flag: data parallelism has one implementation | ddp-impl use-contiguous-buffers-in-local-ddp
    no-contiguous-buffers-in-local-ddp
torchrun's flag of this name, before the name of the script | nproc-per-node nnodes node-rank
    master-addr master-port rdzv-backend rdzv-endpoint
"""
)
_BY_NAME = {name: text for text, names in SYNONYMS.items() for name in names.split()}

_CLOSE = 0.85  # minimum ratio of equal letters: one wrong letter in seven
_SHARED_WORDS = 0.6  # minimum share of common words among the words of both names
_NEGATIONS = frozenset({"no", "disable"})
_SWITCH_WORDS = frozenset({"no", "disable", "use", "enable"})


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about ``name``, which is not in ``known``, or "".

    >>> suggestion("learning_rate", ["--lr"]) ': use --lr' >>> suggestion("hidden_sise",
    ["hidden_size"]) ': did you mean hidden_size?'
    """
    plain = _plain(name)
    if plain in _BY_NAME:
        return f": use {_BY_NAME[plain]}"
    spelt = {_plain(other): other for other in known if _may_mean(plain, _plain(other))}
    close = difflib.get_close_matches(plain, spelt, n=1, cutoff=_CLOSE)
    if not close:
        shared = {other: _shared_words(plain, other) for other in spelt}
        best = max(shared, key=lambda other: shared[other], default=None)
        close = [best] if best is not None and shared[best] >= _SHARED_WORDS else []
    return f": did you mean {spelt[close[0]]}?" if close else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _may_mean(name: str, other: str) -> bool:
    """Return whether both names agree in their numbers and in negation ("no", "disable")."""
    signs = (bool(_NEGATIONS & set(n.split("-"))) for n in (name, other))
    return len(set(signs)) == 1 and re.findall(r"\d+", name) == re.findall(r"\d+", other)


def _shared_words(name: str, other: str) -> float:
    """Return the share of common words among all words of both names.

    It is 0 if they have fewer than two words in common, unless all words agree.
    """
    words, others = (set(n.split("-")) - _SWITCH_WORDS for n in (name, other))
    both = words & others
    return len(both) / len(words | others) if len(both) > 1 or words == others else 0.0
