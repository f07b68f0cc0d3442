"""Rules about fine-tuning, preference learning, RL, adapters, draft heads and distillation."""

from __future__ import annotations

from megatron.core.config.rule import first_of, given, rules, where
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.peft.lora import SAVED_MODULES
from megatron.training.arguments.rules.rule import Settings, named, several
from megatron.training.config.preference import SIGMOID
from megatron.training.config.run import DPO, OF_CONVERSATIONS, PRETRAINING, REWARD, SFT

_FLAGS_OF_METHODS = {
    "teacher": "--export-kd-teacher-load",
    "store": "--logits-load-dir",
    "save": "--logits-save-dir",
}


_CONVERSATIONS = where(
    lambda c: c.objective in OF_CONVERSATIONS,
    {
        "--reset-position-ids with {flag_of_objective}: each conversation starts at position 0: "
        "leave it out": "--reset-position-ids",
        "--reset-attention-mask with {flag_of_objective}: conversations do not see each other: "
        "leave it out": "--reset-attention-mask",
        "--eod-mask-loss with {flag_of_objective}: the loss is on the turns of the assistant "
        "alone: leave it out": "--eod-mask-loss",
        "{--dataset-type} with {flag_of_objective}: {flag_of_objective} reads the conversations of "
        "--data-path; use one of the two: leave it out": "--dataset-type",
        "{--dataloader-type} with {flag_of_objective}: {flag_of_objective} reads the conversations "
        "of --data-path; use single or cyclic: leave it out": "--dataloader-type external",
        "--enable-cuda-graph and --external-cuda-graph with {flag_of_objective}: a graph has fixed "
        "shapes, and each row has another number of conversations: "
        "leave it out": lambda c: c.uses_graphs,
    },
    where(
        lambda c: c.sft_alignment is not None and c.sft_alignment >= 1,
        first_of(
            {
                "{--sft-alignment} with {--context-parallel-size}: each packed conversation is "
                "split into {found} parts: give a multiple of {found}": lambda c: (
                    c.sft_alignment % (parts := sequence_divisor(cp=c.context_parallel_size))
                    and parts
                ),
                "{--seq-length}: rows consist of conversations that are padded to multiples of "
                "{sft_alignment} (--sft-alignment): "
                "give a multiple of it": lambda c: c.seq_length % c.sft_alignment,
            },
        ),
    ),
)

_EVALUATION = where(
    "--eval-generate",
    {
        "--eval-generate with {kind.title}: it is for models that continue a text": lambda c: (
            not c.kind.writes_text or c.kind.reads_images or c.kind.has_encoder
        ),
        "{--eval-generate-tokens}: {--seq-length} is the length of prompt and answer together: "
        "give a smaller number": lambda c: c.eval_generate_tokens >= c.seq_length,
    },
)

_PREFERENCE = rules(
    {
        "{found}: a run has one objective: give one of them": lambda c: (
            len(flags := named(_OBJECTIVES)(c)) > 1 and " and ".join(flags)
        ),
        "{found}: give a number above 0, such as 0.1": given(
            "--dpo-beta", lambda beta: not 0 < beta < float("inf")
        ),
    },
    first_of(
        {
            "{found}: give a probability of at least 0 and below 0.5": given(
                "--dpo-label-smoothing", lambda share: not 0 <= share < 0.5
            ),
            f"{{--dpo-label-smoothing}} with {{--dpo-loss-type}}: only the loss {SIGMOID} has "
            "label smoothing: leave one of the flags out": lambda c: (
                c.dpo_label_smoothing and c.dpo_loss_type != SIGMOID
            ),
        },
    ),
    where(
        lambda c: c.objective in (DPO, REWARD),
        {
            "{found} with pairs of answers: multi-token prediction would learn the rejected "
            "answers too: leave it out": "--mtp-num-layers",
        },
    ),
)
_OBJECTIVES = "--sft --dpo-beta --reward-model --perform-rl-step"

_TIED = {"lm_head", "embed_tokens", "output_layer", "word_embeddings"}
_ADAPTERS = where(
    lambda c: c.lora is not None,
    {
        "{found}: use a probability of at least 0 and less than 1": given(
            "--lora-dropout", lambda p: p >= 1
        ),
        "--lora-rank is not available for {--model-kind}, only for gpt and mamba: train the "
        "complete model": lambda c: c.model_kind not in ("gpt", "mamba"),
    },
    where(
        "--lora-modules-to-save",
        {
            "{--lora-modules-to-save}: use some of " + " ".join(SAVED_MODULES): lambda c: (
                not SAVED_MODULES.keys() >= set(c.lora_modules_to_save)
            ),
            "{--lora-modules-to-save} with embedding and output layer that share one weight: give "
            "--untie-embeddings-and-output-weights, or leave both out": lambda c: (
                not c.untie_embeddings_and_output_weights
                and bool(_TIED & set(c.lora_modules_to_save))
            ),
            "--lora-modules-to-save and {found} exclude each other: the reference policy is the "
            "model without adapters; leave it out": given("--dpo-beta --perform-rl-step"),
        },
    ),
    where(
        "--lora-use-dora",
        {
            "{--lora-use-dora} is not available with fully sharded parameters (FSDP): use tensor "
            "parallelism, or leave it out": lambda c: c.is_fully_sharded,
            "--lora-use-dora and {found} exclude each other: the reference policy is the model "
            "with adapters of zeros, which DoRA has not; leave it out": given(
                "--dpo-beta --perform-rl-step"
            ),
        },
    ),
    where(
        "--lora-base-dtype",
        {
            "{--lora-base-dtype} and --{format_flag} exclude each other: the first stores weights "
            "in few bits to save memory, "
            "the second multiplies in few bits": lambda c: c.fp8 is not None or c.fp4 is not None,
            "{--lora-base-dtype} is not available with fully sharded parameters (FSDP): use "
            "tensor parallelism, or leave it out and shard the base": lambda c: c.is_fully_sharded,
        },
    ),
    {
        "--lora-rank and {--ckpt-format} exclude each other: a checkpoint of adapters has "
        "--ckpt-format safetensors_dist or torch_dist": lambda c: (
            c.save is not None and c.ckpt_format not in ("safetensors_dist", "torch_dist")
        ),
        "--lora-rank and {found} exclude each other: adapters are small, save them with "
        "--save-interval, or use --non-persistent-ckpt-type global": given(
            "--non-persistent-ckpt-type", lambda name: name in ("local", "in_memory")
        ),
        "--lora-rank and --moe-use-upcycling exclude each other: adapters are trained on a model "
        "as it was saved; save the model with experts first": None,
    },
)

_NOT_WITH_HEADS = (
    "--dpo-beta --reward-model --perform-rl-step --export-kd-teacher-load --logits-load-dir "
    "--logits-save-dir --use-torch-fsdp2 --use-megatron-fsdp --enable-cuda-graph "
    "--external-cuda-graph --save-hf"
)
_KINDS_OF_HEADS = "--export-num-medusa-heads --export-num-eagle-layers --export-num-mtp"
_HEADS = rules(
    {
        "--freeze-base-for-mtp needs --mtp-num-layers: no layers would be trained": lambda c: (
            c.freeze_base_for_mtp and not c.mtp_num_layers
        ),
    },
    where(
        lambda c: c.has_heads,
        {
            "{found} exclude each other: a run trains one kind of draft heads, and adapters in a "
            "run of their own; keep one of them": several(f"{_KINDS_OF_HEADS} --lora-rank"),
            "{found} with {--model-kind} is not available: draft heads are implemented for "
            "pretrain_gpt.py": lambda c: c.model_kind not in (None, "gpt") and _heads_of(c),
            "{found} needs --load or --pretrained-checkpoint: draft heads are trained on a model "
            "that is trained already": lambda c: (
                _trains(c) and not (c.load or c.pretrained_checkpoint) and _heads_of(c)
            ),
            "{found} with draft heads is not available: they are trained by pretraining or --sft, "
            "with tensor and data parallelism; leave it out": named(_NOT_WITH_HEADS),
            "{found} with {--pipeline-model-parallel-size} is not available: stages without heads "
            "would have nothing to train; use tensor and data parallelism": lambda c: (
                c.pipeline_model_parallel_size > 1 and (_trains(c) or c.has_eagle) and _heads_of(c)
            ),
            "{found} and {--ckpt-format} exclude each other: a checkpoint of draft heads has "
            "--ckpt-format safetensors_dist or torch_dist": lambda c: (
                c.save is not None
                and c.ckpt_format not in ("safetensors_dist", "torch_dist")
                and _heads_of(c)
            ),
        },
    ),
    where(
        lambda c: bool(c.export_num_medusa_heads or c.has_eagle),
        {
            "{--mtp-num-layers} with draft heads: the engine drafts by one of the two; leave one "
            "of the flags out": "--mtp-num-layers",
        },
    ),
    where(
        lambda c: c.has_eagle,
        {
            "{--export-num-eagle-layers} with --export-eagle-algorithm eagle3: the head has one "
            "layer; give 1": lambda c: c.export_num_eagle_layers > 1,
            "--export-eagle-algorithm eagle3 with {--position-embedding-type}: its layer rotates "
            "queries and keys; use a model with rope, or "
            "--export-num-medusa-heads": lambda c: c.position_embedding_type != "rope",
            "--export-eagle-algorithm eagle3 and --multi-latent-attention exclude each other: its "
            "layer has the heads of grouped-query attention; use --export-num-medusa-heads": None,
            "--export-eagle-algorithm eagle3 with {--context-parallel-size} is not available: its "
            "steps attend to the complete row; use 1": lambda c: c.context_parallel_size > 1,
            "{--export-draft-vocab-size} with {--tensor-model-parallel-size}: each rank has an "
            "equal part of the draft vocabulary; give a multiple of it": lambda c: (
                (c.export_draft_vocab_size or 0) % c.tensor_model_parallel_size
            ),
        },
    ),
)


def _heads_of(c: Settings) -> str:
    """Return the flag by which a run has draft heads."""
    return next(iter(named(_KINDS_OF_HEADS)(c)), "")


def _trains(c: Settings) -> bool:
    return bool(c.config.trains and not c.skip_train)


_RL = where(
    "--perform-rl-step",
    {
        "{--grpo-prompts-per-step} x {--grpo-group-size} = {found} rollouts is not a multiple of "
        "{--global-batch-size}: change one of them": lambda c: (
            c.global_batch_size
            and (count := int(c.grpo_prompts_per_step * c.grpo_group_size)) % c.global_batch_size
            and count
        ),
        "--rampup-batch-size: "
        "--perform-rl-step needs steps of one size: leave it out": "--rampup-batch-size",
        "--perform-rl-step "
        "needs --langrl-env-config, a YAML file that lists environments: add it": None,
        "--grpo-kl-beta {grpo_kl_beta:g} needs a reference policy, the weights in "
        "--pretrained-checkpoint or --load: add one "
        "of these flags, or use --grpo-kl-beta 0": lambda c: (
            c.grpo_kl_beta
            and c.lora_rank is None  # with adapters the frozen model is the reference
            and not (c.pretrained_checkpoint or c.load)
        ),
        "--rl-default-temperature 0: all answers of a group would be equal, and their advantages "
        "0: use a number above 0": lambda c: c.rl_default_temperature == 0,
        "--rl-default-top-p {rl_default_top_p:g}: give a probability, 0 to 1": lambda c: (
            c.rl_default_top_p > 1
        ),
    },
    where(
        "--rl-inference-logprobs-is-correction",
        {
            "--rl-inference-logprobs-is-correction with --rl-default-temperature "
            "{rl_default_temperature:g}: the engine returns log-probabilities before sampling "
            "filters and temperature: leave one of them "
            "out": lambda c: c.rl_default_temperature != 1,
            "--rl-inference-logprobs-is-correction with {--rl-default-top-k}: the engine returns "
            "log-probabilities before sampling filters and temperature: leave one of them "
            "out": lambda c: c.rl_default_top_k > 0,
            "--rl-inference-logprobs-is-correction with --rl-default-top-p {rl_default_top_p:g}: "
            "the engine returns log-probabilities before sampling filters and temperature: leave "
            "one of them out": lambda c: 0 < c.rl_default_top_p < 1,
        },
    ),
    {
        "{found}: --perform-rl-step trains on answers to the "
        "prompts of environments: leave it out": named(
            "--sft --data-path --dataset-type --reset-attention-mask"
        ),
        "{found}: the engine needs the weights of the base in the precision of the run: leave it "
        "out": "--lora-base-dtype",
        "{found}: --perform-rl-step "
        "does not train multi-token prediction: leave it out": "--mtp-num-layers",
        "{found}: the "
        "engine of --perform-rl-step needs a process per rank: use torchrun": "--virtual-ranks",
        "{found}: the rollouts of --perform-rl-step come later: leave it out": "--rehearse-memory",
        "--cuda-graph-scope full_iteration: --perform-rl-step also runs passes without a step: "
        "use another scope": lambda c: c.uses_graphs and not c.captures_layers,
    },
)

_DISTILLATION = rules(
    where(
        lambda c: c.export_kd_teacher_load is None,
        {
            "{found} needs --export-kd-teacher-load: "
            "which checkpoint is the teacher?": "--export-kd-cfg --export-kd-teacher-ckpt-format",
        },
    ),
    {
        "{found} exclude each other: keep one of them": several(
            "--export-kd-teacher-load --logits-load-dir --logits-save-dir"
        ),
    },
    where(
        lambda c: c.method in _FLAGS_OF_METHODS,
        {
            "{found} with {kind.title}: distillation is implemented for pretrain_gpt.py; use that "
            "program, or leave the flag out": lambda c: (
                c.model_kind not in (None, "gpt") and _FLAGS_OF_METHODS[c.method]
            ),
            "{found} with {objective}: distillation replaces the loss of pretraining or --sft; "
            "leave one of the two out": lambda c: (
                c.objective not in (PRETRAINING, SFT) and _FLAGS_OF_METHODS[c.method]
            ),
        },
    ),
    where(
        lambda c: c.dataloader_type not in (None, "single"),
        {
            "{found} with {--dataloader-type}: a store has samples in order; use single": named(
                "--logits-save-dir --logits-load-dir"
            ),
        },
    ),
    {
        "--logits-save-dir with --load needs --finetune: the teacher then reads the training "
        "samples from the first one on": lambda c: (
            c.logits_save_dir is not None and c.load and not c.finetune
        ),
    },
)

_QUANTIZATION = where(
    lambda c: c.has_quantizers,
    {
        "{found} with --export-quant-cfg or --kitchen-config-file: a layer has one low precision; "
        "leave one of them out": named("--fp8-format --fp4-format --lora-base-dtype"),
        "{found} with --export-quant-cfg or --kitchen-config-file: the scales belong to weights "
        "that are trained or served as a whole; leave one of them out": named(
            "--lora-rank --perform-rl-step --moe-use-upcycling --export-num-medusa-heads "
            "--export-num-eagle-layers --export-num-mtp"
        ),
        "{--ckpt-format} has no place for the scales of --export-quant-cfg: use safetensors_dist "
        "or torch_dist": lambda c: (
            c.save is not None and c.ckpt_format not in ("safetensors_dist", "torch_dist")
        ),
        "--export-kv-cache-quant: latent attention has no keys and values to round; leave it "
        "out": lambda c: c.export_kv_cache_quant and c.multi_latent_attention,
        "--export-quant-cfg is not available with fully sharded parameters (FSDP): use "
        "--use-distributed-optimizer": lambda c: c.is_fully_sharded,
    },
)

RULES = rules(
    _CONVERSATIONS,
    _EVALUATION,
    _PREFERENCE,
    _ADAPTERS,
    _HEADS,
    _RL,
    _DISTILLATION,
    _QUANTIZATION,
)
