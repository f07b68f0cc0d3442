"""Rules about batches, run length, schedules, the optimizer, precision, and recomputation."""

from __future__ import annotations

import math

from megatron.core.config.rule import first_of, given, rules, where
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.optimizer.update_rules import update_rule
from megatron.training.arguments.rules.rule import Settings
from megatron.training.config.run import OF_CONVERSATIONS


def _samples_of_ranks(c: Settings) -> int:
    """Return the samples of one micro-batch on every data-parallel rank."""
    return int(c.micro_batch_size * c.data_parallel_size)


def _steps_to_the_batch(c: Settings) -> bool:
    start, increment, _ = c.rampup_batch_size
    return bool(c.global_batch_size >= start and (c.global_batch_size - start) % increment == 0)


_BATCH = rules(
    where(
        lambda c: c.micro_batch_size >= 1 and c.global_batch_size >= 1,
        first_of(
            {
                "{--global-batch-size} is less than {--micro-batch-size} x {data_parallel_size} "
                "data-parallel ranks = {found}: raise it to {found}": lambda c: (
                    c.global_batch_size < (share := _samples_of_ranks(c)) and share
                ),
                "{--global-batch-size} is not a multiple of {--micro-batch-size} x "
                "{data_parallel_size} data-parallel ranks = {found}: use a multiple of {found}, "
                "or add --decrease-batch-size-if-needed": lambda c: (
                    not c.decrease_batch_size_if_needed
                    and c.global_batch_size % (share := _samples_of_ranks(c))
                    and share
                ),
            },
        ),
    ),
    where(
        "--rampup-batch-size",
        first_of(
            {
                "{--rampup-batch-size}: give three numbers, START INCREMENT SAMPLES": lambda c: (
                    len(c.rampup_batch_size) != 3
                ),
                "{--rampup-batch-size}: START and INCREMENT must be at least 1 and SAMPLES at "
                "least 0": lambda c: min(c.rampup_batch_size[:2]) < 1 or c.rampup_batch_size[2] < 0,
                "{--rampup-batch-size} does not reach {--global-batch-size} from "
                "{rampup_batch_size[0]} "
                "in steps of {rampup_batch_size[1]}": lambda c: not _steps_to_the_batch(c),
            },
        ),
        {
            "--rampup-batch-size {found[0]} is not a multiple of {--micro-batch-size} x "
            "{data_parallel_size} data-parallel ranks = "
            "{found[1]}: use a multiple of {found[1]}": lambda c: [
                (f"{name} {value}", share)
                for name, value in zip(("START", "INCREMENT"), c.rampup_batch_size, strict=False)
                if len(c.rampup_batch_size) == 3
                and not c.decrease_batch_size_if_needed
                and value > 0
                and (share := _samples_of_ranks(c)) >= 1
                and value % share
            ],
        },
    ),
)


def _find_mixtures(c: Settings) -> list[str]:
    """Return the flags that name several data sets."""
    blends = {flag: get_blend_from_list(c.value(flag)) for flag in _DATA_PATHS}
    return [flag for flag, blend in blends.items() if blend is not None and len(blend[0]) > 1]


_DATA_PATHS = ("--data-path", "--train-data-path")
_SAMPLES = "--train-samples --lr-decay-samples --lr-wsd-decay-samples --rampup-batch-size"

_LENGTH = rules(
    {
        "--train-iters, --train-samples or --epochs is required (or --skip-train)": lambda c: (
            c.train_iters is None
            and c.train_samples is None
            and c.epochs is None
            and c.trains
            and not c.skip_train
        ),
        "--lr is required (or --skip-train)": lambda c: (
            c.lr is None and c.trains and not c.skip_train
        ),
    },
    where(
        lambda c: c.train_iters is not None or c.epochs is not None,
        {
            "{found[0]} counts samples and {found[1]}: use one unit for all": lambda c: [
                (
                    flag.split()[0],
                    "--train-iters counts steps" if c.epochs is None else "--epochs becomes steps",
                )
                for flag in (*given(_SAMPLES)(c), *given("--lr-warmup-samples", bool)(c))
            ],
        },
    ),
    where(
        lambda c: c.train_samples is not None and c.train_iters is None and c.epochs is None,
        {
            "{found} counts steps and --train-samples "
            "counts samples: use one unit for all": lambda c: [
                flag.split()[0]
                for flag in (
                    *given("--lr-decay-iters --lr-wsd-decay-iters")(c),
                    *given("--lr-warmup-iters", bool)(c),
                )
            ],
        },
    ),
    where(
        "--epochs",
        {
            "--epochs {epochs:g} is for --sft, --dpo-beta and --reward-model, whose data has rows "
            "to count: give --train-iters": lambda c: c.objective not in OF_CONVERSATIONS,
            "--epochs {epochs:g}: give a number above 0": lambda c: not 0 < c.epochs < math.inf,
            "--epochs {epochs:g} and {--train-iters} set the length: keep one": "--train-iters",
            "--epochs {epochs:g} with several paths in {found}: an epoch of a mixture has no "
            "length; give one folder with all files, or --train-iters": _find_mixtures,
            "--epochs {epochs:g} with {found}: "
            "name the data with --train-data-path": "--data-args-path --per-split-data-args-path",
        },
    ),
)


def _schedule_end(c: Settings, unit: str) -> tuple[str, int | None]:
    """Return the flag that ends the decay of the learning rate, and its value."""
    decay = f"--lr-decay-{unit}"
    flag = f"--train-{unit}" if c.value(decay) is None else decay
    return flag, c.value(flag)


def _find_long_warmups(c: Settings) -> list[str]:
    found = []
    for unit in ("iters", "samples"):
        flag, end = _schedule_end(c, unit)
        warmup = c.value(f"--lr-warmup-{unit}")
        if end is not None and warmup >= end > 0:
            found.append(f"--lr-warmup-{unit} {warmup} is not less than {flag} {end}")
    return found


def _find_wrong_decay_part(c: Settings) -> str:
    """Return what is wrong with the length of WSD's last part, in the unit of the run."""
    unit = "samples" if c.train_samples is not None else "iters"
    part = c.value(f"--lr-wsd-decay-{unit}")
    _, end = _schedule_end(c, unit)
    if part is None:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    if end is not None and part > end:
        return f"--lr-wsd-decay-{unit} {part} is longer than the {end} {unit} of the schedule"
    return ""


# With --epochs these hold when the data set is known.
SCHEDULE_LENGTHS = rules(
    {
        "--train-{found} 0 leaves nothing for the "
        "learning rate to follow: use --skip-train": lambda c: [
            unit
            for unit in ("iters", "samples")
            if _schedule_end(c, unit)[1] == 0 and not c.skip_train
        ],
        "{found}: shorten the warm-up": _find_long_warmups,
    },
    where(
        "--lr-decay-style WSD",
        {
            "{found}": _find_wrong_decay_part,
        },
    ),
)

_SCHEDULE = rules(
    where(
        "--lr-warmup-fraction",
        {
            "{found}: from 0 up to 1 is needed": given(
                "--lr-warmup-fraction", lambda share: not 0 <= share < 1
            ),
            "--lr-warmup-fraction and {found} both set the warmup: keep one": given(
                "--lr-warmup-iters --lr-warmup-samples", bool
            ),
        },
    ),
    SCHEDULE_LENGTHS,
    {
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
        "other: keep the first for the values of the command line, the second for those of the "
        "checkpoint": lambda c: (
            c.override_opt_param_scheduler and c.use_checkpoint_opt_param_scheduler
        ),
    },
)


# A bucket contains parts of parameters.  Besides Muon, user-defined optimizers may declare that
# their update is not element-wise.
def _find_splits_of_parameters(c: Settings) -> list[str]:
    if c.has_matrix_rule or update_rule(c.optimizer).is_element_wise:
        return []
    return [
        *(["--use-distributed-optimizer"] if c.config.optimizer.use_distributed_optimizer else ()),
        *(["fully sharded parameters (FSDP)"] if c.is_fully_sharded else ()),
        *given("--tensor-model-parallel-size", lambda size: size > 1)(c),
        *(["--bf16 or --fp16"] if c.bf16 or c.fp16 else ()),
        *given("--optimizer-cpu-offload")(c),
    ]


_OPTIMIZER = rules(
    where(
        "--lr",
        {
            "{--min-lr} is greater than {--lr}: lower it": lambda c: c.min_lr > c.lr,
            "{--lr-warmup-init} does not lie between 0 and {--lr}": lambda c: (
                not 0 <= c.lr_warmup_init <= c.lr
            ),
        },
    ),
    {
        "{--head-lr-mult}: the output layer shares its weight with the word embedding; add "
        "--untie-embeddings-and-output-weights": lambda c: (
            c.head_lr_mult != 1.0 and not c.untie_embeddings_and_output_weights
        ),
    },
    where(
        "--weight-decay-incr-style constant",
        {
            "{found} needs --weight-decay-incr-style linear or cosine: for constant use "
            "--weight-decay": lambda c: [
                f"{flag} {value}"
                for flag, value in (
                    ("--start-weight-decay", c.asked["start_weight_decay"]),
                    ("--end-weight-decay", c.asked["end_weight_decay"]),
                )
                if value is not None
            ],
        },
    ),
    where(
        lambda c: c.weight_decay_incr_style != "constant",
        first_of(
            {
                "{--weight-decay-incr-style} needs --start-weight-decay "
                "and --end-weight-decay": lambda c: (
                    None in (c.asked["start_weight_decay"], c.asked["end_weight_decay"])
                ),
                "{--start-weight-decay} and {--end-weight-decay}: "
                "0 <= start <= end is needed": lambda c: (
                    not 0 <= c.asked["start_weight_decay"] <= c.asked["end_weight_decay"]
                ),
            },
        ),
    ),
    where(
        lambda c: c.has_matrix_rule,
        {
            "--overlap-param-gather-with-optimizer-step and {--optimizer}: its step needs "
            "complete matrices, not buckets; "
            "use --overlap-param-gather alone": "--overlap-param-gather-with-optimizer-step",
            # these formats number the parameters as a single Adam optimizer does
            "{--ckpt-format} cannot store the two kinds of state of {--optimizer}: use "
            "safetensors_dist "
            "or torch_dist": lambda c: c.save and c.ckpt_format in ("torch", "torch_dcp"),
            "--optimizer-cpu-offload and {--optimizer} exclude each other: its matmuls run on the "
            "GPU; keep the first with --optimizer adam, or use --use-distributed-optimizer, "
            "which shards its state over data-parallel ranks": "--optimizer-cpu-offload",
        },
    ),
    where(
        "--use-mup",
        {
            "--use-mup with {kind.title}: the widths of its parts do not grow together; use "
            "pretrain_gpt.py": lambda c: c.model_kind != "gpt",
            "--use-mup and {found} exclude each other: --use-mup sets the same scale; keep "
            "one": lambda c: [
                f"--{name.replace('_', '-')}"
                for name in ("softmax_scale", "embedding_scale", "output_scale")
                if c.asked[name] is not None
            ],
            "--use-mup and {found} exclude each other: the width of adapters does not grow with "
            "the model's; keep one": "--lora-rank",
            "--use-mup with {--optimizer} and {--muon-scale-mode}: the update would grow with the "
            "square root of the width; use --muon-scale-mode unit_rms_norm": lambda c: (
                "muon" in c.optimizer and c.muon_scale_mode == "spectral"
            ),
            "--use-mup with --optimizer sgd and {--num-experts}: routers would need a learning "
            "rate of their own; use --optimizer adam": lambda c: (
                c.optimizer == "sgd" and c.num_moe_experts
            ),
        },
    ),
    where(
        "--qk-clip",
        {
            "--qk-clip and {found} exclude each other: it scales complete updated weights on the "
            "device; keep one": (
                "--optimizer-cpu-offload --overlap-param-gather-with-optimizer-step"
            ),
            "--qk-clip and {found} exclude each other: adapters do not train the query and key "
            "weights that it scales; keep one": "--lora-rank",
        },
    ),
    {
        "{found} with {--optimizer}: its update is not element-wise and needs complete parameters "
        "on one device; use data parallelism "
        "without it, or an element-wise optimizer such as adam": _find_splits_of_parameters,
    },
)


def _find_missing_moments(c: Settings) -> list[tuple[str, str, str]]:
    """Return flag and dtype of moments that the optimizer of vectors does not have."""
    flag = "--muon-scalar-optimizer" if c.has_matrix_rule else "--optimizer"
    lacking = {"sgd": "--exp-avg-dtype --exp-avg-sq-dtype", "lion": "--exp-avg-sq-dtype"}
    moments = lacking.get(c.value(flag), "")
    return [(moment, flag, c.shown(flag)) for moment in given(moments, _is_reduced)(c)]


def _is_reduced(dtype: str) -> bool:
    return dtype != "fp32"


def _find_unsupported_widths(c: Settings) -> list[tuple[str, int, int, int]]:
    """Return name, width, ranks and needed multiple of what quantized GEMMs cannot split.

    The kernels operate on complete blocks of values.
    """
    tp = c.tensor_model_parallel_size
    heads = c.num_attention_heads
    channels = heads * (c.kv_channels or 0)
    widths = [("--hidden-size", c.hidden_size, 1)]
    if c.multi_latent_attention:
        place = c.qk_pos_emb_head_dim
        widths += [
            ("--q-lora-rank", c.q_lora_rank or 0, 1),
            ("--kv-lora-rank", c.kv_lora_rank, 1),
            ("--kv-lora-rank and --qk-pos-emb-head-dim, together", c.kv_lora_rank + place, 1),
            ("width of all queries", heads * (c.qk_head_dim + place), tp),
            ("width of keys and values", heads * (c.qk_head_dim + c.v_head_dim), tp),
            ("width of all values", heads * c.v_head_dim, tp),
        ]
    else:
        keys = 2 * (c.num_query_groups or heads) * (c.kv_channels or 0)
        widths.append(("width of all heads", channels, tp))
        widths.append(("width of queries, keys and values", channels + keys, tp))
    if c.num_moe_experts is None:
        widths.append(("--ffn-hidden-size", c.ffn_hidden_size or 0, tp))
    else:
        shared = c.moe_shared_expert_intermediate_size or 0
        etp = c.expert_tensor_parallel_size or 1
        widths.append(("--moe-ffn-hidden-size", c.moe_ffn_hidden_size or 0, etp))
        widths.append(("--moe-latent-size", c.moe_latent_size or 0, 1))
        widths.append(("--moe-shared-expert-intermediate-size", shared, tp))
    return [
        (name, width, ranks, c.width_multiple * ranks)
        for name, width, ranks in widths
        if width % (c.width_multiple * max(1, ranks))
    ]


def _find_partial_blocks(c: Settings) -> list[tuple[str, int, int]]:
    """Return length, ranks and block size where a rank has parts of blocks of tokens.

    The input that sequence parallelism gathers for a weight gradient is quantized along its tokens.
    """
    size = 16 if c.fp4 is not None else {"blockwise": 128, "mxfp8": 32}.get(c.fp8_recipe, 1)
    ranks = c.tensor_model_parallel_size * c.context_parallel_size
    return [
        (c.shown(flag), ranks, size)
        for flag in ("--seq-length", "--decoder-seq-length")
        if (flag == "--seq-length" or c.kind.has_encoder)
        and (c.value(flag) or 0) * c.micro_batch_size % (ranks * size)
    ]


_PRECISION = rules(
    {
        "--fp16-lm-cross-entropy needs --fp16, and the loss is computed in fp32 with it too: use "
        "--loss-chunk-size to reduce the memory of logits": None,
        "--fp32-residual-connection needs --bf16 or --fp16: without them "
        "hidden states are fp32": lambda c: c.fp32_residual_connection and not (c.fp16 or c.bf16),
        "--grad-reduce-in-bf16 needs --bf16: add it; gradients of fp16 and fp32 parameters cannot "
        "be reduced in bf16": None,
    },
    {
        "{found[0]}: {found[2]} has no such state; use {found[1]} adam": _find_missing_moments,
    },
    where(
        lambda c: c.main_params_dtype != "fp32",
        {
            "{--main-params-dtype} needs --bf16 or --fp16: fp32 parameters have no separate main "
            "parameters": lambda c: not (c.bf16 or c.fp16),
            "{--main-params-dtype}: fully sharded parameters have fp32 main parameters only; use "
            "--use-distributed-optimizer instead of FSDP": lambda c: c.is_fully_sharded,
        },
    ),
    where(
        lambda c: c.main_grads_dtype != "fp32",
        {
            "{--main-grads-dtype} needs --bf16: add it": None,
            "{--main-grads-dtype} and --accumulate-allreduce-grads-in-fp32 exclude each other: "
            "keep the first to save memory, the second for fp32 gradient sums": None,
        },
    ),
    {},
    where(
        lambda c: c.is_quantized,
        {
            "--{format_flag}: {found[0]} {found[1]} on {found[2]} tensor-parallel ranks is not a "
            "multiple of {width_multiple} "
            "on each: use a width that is a multiple of {found[3]}": _find_unsupported_widths,
            "{found[0]} times {--micro-batch-size}, split over {found[1]} ranks by "
            "--sequence-parallel, is not a multiple of the {found[2]} values that share a scale "
            "in --{format_flag}: change one of them, or use --fp8-format with --fp8-recipe "
            "tensorwise": lambda c: (
                _find_partial_blocks(c) if c.sequence_parallel and c.fp8_wgrad else ()
            ),
        },
    ),
    {
        "--fp8-param-gather needs --bf16 or --fp16: fp32 weights have no main parameters apart, "
        "so the update itself would be rounded": lambda c: (
            c.fp8 is not None and c.fp8_param and not (c.bf16 or c.fp16)
        ),
    },
)

_EXECUTION = rules(
    where(
        lambda c: c.recompute_granularity != "full",
        {"{found} needs --recompute-granularity full": "--recompute-method"},
    ),
    where(
        lambda c: c.recompute_granularity is None,
        {"{found} needs --recompute-granularity full": "--recompute-num-layers"},
    ),
    {
        "--recompute-modules names no module: give some of core_attn, mlp, layernorm, moe, "
        "moe_act, shared_experts, mla_up_proj": lambda c: c.recompute_modules == (),
        "--recompute-modules needs --recompute-granularity selective": None,
        "--distribute-saved-activations needs --tensor-model-parallel-size greater than 1 and "
        "--recompute-granularity full": lambda c: (
            c.distribute_saved_activations
            and (c.tensor_model_parallel_size == 1 or c.recompute_granularity != "full")
        ),
        "{found} and fully sharded parameters (FSDP) exclude each other: keep the first "
        "to move activations to host memory, the second to shard parameters": lambda c: (
            c.is_fully_sharded and given("--cpu-offloading --fine-grained-activation-offloading")(c)
        ),
    },
    # Checks of results make the host wait for each result, which capture does not allow.
    where(
        lambda c: c.uses_graphs and not c.captures_layers,
        {
            "{found}: a step that --cuda-graph-scope full_iteration captures validates no "
            "results; use --cuda-graph-scope full": lambda c: [
                *given("--check-for-spiky-loss --check-for-large-grads")(c),
                *given("--error-injection-rate", bool)(c),
                *given("--rerun-mode", lambda mode: mode == "report_stats")(c),
            ],
            "--cuda-graph-scope full_iteration cannot check each loss for NaN inside the graph: "
            "give --no-check-for-nan-in-loss-and-grad, "
            "or use --cuda-graph-scope full": lambda c: c.check_for_nan_in_grad,
        },
    ),
)

RULES = rules(
    _BATCH,
    _LENGTH,
    _SCHEDULE,
    _OPTIMIZER,
    _PRECISION,
    _EXECUTION,
)
