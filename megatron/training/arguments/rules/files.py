"""Rules about required flags, data, checkpoints, logs, and restarts."""

from __future__ import annotations

from megatron.core.config.rule import first_of, given, rules, where
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.training.arguments.rules.rule import Settings, named, refusal
from megatron.training.arguments.value_rules import out_of_range
from megatron.training.config.data import parse_iterations
from megatron.training.config.run import GRPO

_SIZES = "--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size".split()
_FILES_OF_TOKENIZERS = {
    "GPT2BPETokenizer": "--vocab-file --merge-file",
    "BertWordPieceLowerCase": "--vocab-file",
    "BertWordPieceCase": "--vocab-file",
    "SentencePieceTokenizer": "--tokenizer-model",
    "GPTSentencePieceTokenizer": "--tokenizer-model",
    "HuggingFaceTokenizer": "--tokenizer-model",
    "Llama2Tokenizer": "--tokenizer-model",
    "TikTokenizer": "--tokenizer-model",
    "NullTokenizer": "--vocab-size",
    "NullMultimodalTokenizer": "--vocab-size",
}


def _find_two_sizes(c: Settings) -> list[str]:
    """Return --num-layers and --seq-length with another value of their second names."""
    if c.kind.reads_images:  # there the flags of the encoder are the encoder's
        return []
    return [
        f"--{name} {size} and --encoder-{name} {other}"
        for name in ("num-layers", "seq-length")
        if (size := c.asked[name.replace("-", "_")]) is not None
        and (other := c.asked[f"encoder_{name}".replace("-", "_")]) not in (None, size)
    ]


_REQUIRED = rules(
    {
        "{found} is required": lambda c: [flag for flag in _SIZES if not c.value(flag)],
        "{--tokenizer-type} needs {found}": lambda c: " and ".join(
            flag
            for flag in _FILES_OF_TOKENIZERS.get(c.tokenizer_type or "", "").split()
            if c.value(flag) is None
        ),
        "{found} set the same value: keep one of them": _find_two_sizes,
        "{found}": lambda c: list(out_of_range(c.asked)),
    },
)


def _find_data_sources(c: Settings) -> list[str]:
    """Return the flags that set the training data; those of the splits are one source."""
    splits = "--train-data-path", "--valid-data-path", "--test-data-path"
    before = "--mock-data", "--dataset-type", "--data-path", "--data-args-path"
    after = "--per-split-data-args-path", "--phase-data-args-path"
    groups = (*((flag,) for flag in before), splits, *((flag,) for flag in after))
    found = (" ".join(flag for flag in flags if c.value(flag)) for flags in groups)
    return [flags for flags in found if flags]


def _find_unequal_phases(c: Settings) -> str | None:
    """Return the number of phases and of their files, if they differ."""
    count = len(parse_iterations(c.phase_transition_iterations)) + 1
    files = c.phase_data_args_path
    return f"{count} phases and {len(files)} files" if files and len(files) != count else None


_PHASES = first_of(
    {
        "{found}": lambda c: refusal(parse_iterations, c.phase_transition_iterations),
        "--phase-data-args-path needs --phase-transition-iterations, where its phases begin": None,
        "--phase-transition-iterations: only pretraining of a left-to-right language model on data "
        "files has phases; leave it out": lambda c: not c.reads_documents,
        "--phase-transition-iterations with --phase-data-args-path: {found}; give one file for "
        "each phase, one more than there are transitions": _find_unequal_phases,
        "--phase-transition-iterations needs one global batch size and a number of iterations: "
        "leave {found} out": given("--rampup-batch-size --train-samples --epochs"),
        "--phase-transition-iterations: {found} would mix its phases; leave it out": lambda c: (
            c.dataloader_type == "cyclic" and "--dataloader-type cyclic"
        ),
    },
)


def _find_wrong_curriculum(c: Settings) -> str | None:
    """Return the values of --length-curriculum, if they are not a length and a number."""
    given = c.length_curriculum
    is_right = len(given) == 2 and 0 < given[0] <= c.seq_length and given[1] > 0
    return None if is_right else " ".join(map(str, given))


_CURRICULUM = rules(
    {
        "--length-curriculum {found}: give 1 to --seq-length tokens, and at least 1 sample": (
            _find_wrong_curriculum
        ),
        "--length-curriculum: only pretraining of a left-to-right language model on data files has "
        "contexts; leave it out": lambda c: not c.reads_documents,
        "--length-curriculum ends contexts as documents end: give --reset-attention-mask and "
        "--reset-position-ids": lambda c: not (c.reset_attention_mask and c.reset_position_ids),
        "--length-curriculum: --dataloader-type cyclic numbers samples anew; leave it out": (
            lambda c: c.dataloader_type == "cyclic"
        ),
    }
)

_DATA = rules(
    where("--length-curriculum", _CURRICULUM),
    where(lambda c: c.phase_transition_iterations or c.phase_data_args_path, _PHASES),
    {
        "--pack-documents needs the lengths of all documents, which --index-free does not read: "
        "keep one of them": lambda c: c.pack_documents and c.index_free,
        "{found}: use a share from 0 to 1": given(
            "--fim-rate --fim-spm-rate --fim-fragment-rate", lambda share: not 0 <= share <= 1
        ),
    },
    {
        "{found} each set the training data: keep one": lambda c: (
            len(sources := _find_data_sources(c)) > 1 and " and ".join(sources)
        ),
    },
    where(
        "--split",
        {
            "{found}": lambda c: refusal(parse_and_normalize_split, c.split),
            "--split {split!r} divides the data of --data-path or --data-args-path, and each "
            "split has data of its own: keep --split with --data-path to divide one data set, or "
            "the paths of the splits alone": lambda c: (
                c.train_data_path
                or c.valid_data_path
                or c.test_data_path
                or c.per_split_data_args_path
            ),
        },
    ),
    {
        "--multiple-validation-sets needs --full-validation: add it": None,
        # causal attention without a mask does not separate documents
        "--reset-attention-mask and --no-create-attention-mask-in-dataloader exclude each other: "
        "keep the first to mask attention between documents, the second to build no masks for "
        "causal attention": None,
        "{found}: use a share greater than 0 and less than 1": given(
            "--mask-prob", lambda share: not 0 < share < 1
        ),
        "{found}: use a share from 0 to 1": given(
            "--short-seq-prob", lambda share: not 0 <= share <= 1
        ),
    },
)

# Formats of one file per rank.
_find_rank_files = given(
    "--ckpt-format --ckpt-convert-format", lambda name: name in ("torch", "torch_dcp")
)

_BEST = named("--save-best --early-stopping-patience")

_CHECKPOINTS = rules(
    where(
        lambda c: c.save is not None and c.save_retain_interval is not None,
        {
            "{--save-retain-interval} is not a multiple of {--save-interval}": lambda c: (
                c.save_interval is None or c.save_retain_interval % max(1, c.save_interval)
            ),
        },
    ),
    where(
        lambda c: c.load is None,
        {
            "{found} needs --load": named(
                "--use-checkpoint-args --ckpt-step --load-newest-valid --exit-on-missing-checkpoint"
            ),
            "--finetune needs --load or --pretrained-checkpoint": lambda c: (
                c.finetune and c.pretrained_checkpoint is None
            ),
        },
    ),
    {
        "--save-best needs --save, where the best checkpoint is kept": None,
        "--save-best with --async-save and {--async-save-when-busy}: the save of the best step "
        "could be skipped: use wait": lambda c: (
            c.save_best and c.async_save and c.async_save_when_busy == "skip"
        ),
        "--save-hf-interval needs --save-hf": None,
    },
    where(
        lambda c: c.save_best or c.early_stopping_patience is not None,
        {
            "{found} with {--ckpt-format}: the format does not hold the best evaluation: use "
            "safetensors_dist": lambda c: (
                c.save is not None and c.ckpt_format != "safetensors_dist" and _BEST(c)
            ),
            "{found} with {objective}: it compares the evaluations of other training; save with "
            "--save-interval": lambda c: c.objective == GRPO and _BEST(c),
            "{found} with --logits-save-dir, which does not train: leave it out": lambda c: (
                c.logits_save_dir is not None and _BEST(c)
            ),
        },
    ),
    {
        "--load-main-params-from-ckpt needs --no-load-optim: a loaded optimizer "
        "has main params": lambda c: c.load_main_params_from_ckpt and not c.no_load_optim,
        "--use-mp-args-from-checkpoint-args needs --use-checkpoint-args": None,
    },
    # such files hold all experts of a rank in one matrix, which is read alone
    where(
        lambda c: c.num_moe_experts is not None and c.moe_use_legacy_grouped_gemm,
        {
            "{found} with --moe-use-legacy-grouped-gemm is not available in this program: use "
            "torch_dist": _find_rank_files,
        },
    ),
    # the file of the last stage lacks the embedding that the MTP layers need there
    where(
        lambda c: c.mtp_num_layers is not None and c.pipeline_model_parallel_size > 1,
        {
            "{found} with --mtp-num-layers and {--pipeline-model-parallel-size} is not available "
            "in this program: use torch_dist": _find_rank_files,
        },
    ),
    # Megatron-LM stores them in a pickled object
    where(
        lambda c: c.fp8 is not None and c.fp8_recipe == "delayed",
        {
            "{found} with --fp8-recipe delayed cannot store its amax histories: use torch_dist, "
            "or --fp8-recipe tensorwise": _find_rank_files,
        },
    ),
    {
        "--ckpt-convert-save needs --ckpt-convert-format: add it, with the format to write": None,
    },
    where(
        "--ckpt-convert-format",
        {
            "{--ckpt-convert-format} needs {found}": lambda c: [
                f for f in ("--ckpt-convert-save", "--load") if c.value(f) is None
            ],
        },
    ),
    where(
        "--non-persistent-save-interval",
        {
            "{--non-persistent-save-interval} needs --non-persistent-ckpt-type: global, in a "
            "directory that all ranks share, local, in one of each node, or in_memory": None,
            "--non-persistent-ckpt-type global needs --save "
            "or --non-persistent-global-ckpt-dir": lambda c: (
                c.non_persistent_ckpt_type == "global"
                and c.save is None
                and c.non_persistent_global_ckpt_dir is None
            ),
        },
    ),
    {
        "--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir": None,
        "--non-persistent-ckpt-type in_memory needs --save: its path tells the folders in memory "
        "of different runs apart, and the last checkpoint goes there": None,
    },
    where(
        lambda c: c.non_persistent_ckpt_type in ("local", "in_memory"),
        {
            "{--non-persistent-ckpt-type} needs one process per rank: use torchrun instead of "
            "{found}, or use --non-persistent-ckpt-type global": "--virtual-ranks",
        },
    ),
    where(
        "--replication",
        {
            "--replication copies the checkpoints of nodes: add --non-persistent-ckpt-type local "
            "or in_memory": lambda c: c.non_persistent_ckpt_type not in ("local", "in_memory"),
        },
        first_of(
            {
                "--replication needs --replication-jump: how many ranks further the copies go, as "
                "a rule the ranks of a node": None,
                "{--replication-factor} with {--replication-jump} needs more than {found}, and "
                "the run has {world_size}: lower one of them": lambda c: (
                    (ranks := (c.replication_factor - 1) * c.replication_jump) >= c.world_size
                    and f"{ranks} ranks"
                ),
            },
        ),
    ),
)

_LOGS = rules(
    {
        "{--wandb-project} needs --wandb-exp-name": None,
    },
    where(
        "--profile",
        {
            "{--profile-step-start} must be less than {--profile-step-end}": lambda c: (
                not 0 <= c.profile_step_start < c.profile_step_end
            ),
            "{found}": lambda c: (
                (ranks := [str(rank) for rank in c.profile_ranks if not 0 <= rank < c.world_size])
                and f"--profile-ranks {' '.join(ranks)}: the run has ranks 0 to {c.world_size - 1}"
            ),
            "--use-pytorch-profiler needs --tensorboard-dir, where the trace is written": None,
        },
    ),
)

_TIMES_IN_ORDER = (  # the first must be the shorter one
    ("--inprocess-soft-timeout", "--inprocess-hard-timeout"),
    ("--inprocess-hard-timeout", "--inprocess-barrier-timeout"),
    ("--inprocess-progress-watchdog-interval", "--inprocess-soft-timeout"),
    ("--inprocess-monitor-thread-interval", "--inprocess-soft-timeout"),
    ("--inprocess-monitor-process-interval", "--inprocess-soft-timeout"),
    ("--inprocess-heartbeat-interval", "--inprocess-heartbeat-timeout"),
)

_RESTARTS = where(
    "--inprocess-restart",
    {
        "--inprocess-restart "
        "needs one process per rank: use torchrun instead of {found}": "--virtual-ranks",
        "--inprocess-restart with --enable-ft-package: both look for hanging ranks and act on "
        "them: omit one of the two": "--enable-ft-package",
        "{found}": lambda c: [
            f"{c.shown(low)} must be less than {c.shown(high)}"
            for low, high in _TIMES_IN_ORDER
            if c.value(low) >= c.value(high)
        ],
        "{found}: a time above 0 is needed": given(
            " ".join(dict.fromkeys(low for low, _ in _TIMES_IN_ORDER)), lambda time: time == 0
        ),
    },
)

RULES = rules(
    _REQUIRED,
    _DATA,
    _CHECKPOINTS,
    _LOGS,
    _RESTARTS,
)
