"""Flags of Megatron-LM that a run refuses, or accepts without effect, as tables.

A row is ``name type default --flag | help | reason``.  Without type it is a switch that is off,
with ``both`` one with a --no- form, and a type with commas lists the choices; default and flag are
left out where they are None and that of the name.  A reason in capitals is one of `flag_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from typing import Any

from megatron.core.config import flag_messages
from megatron.core.config.option import option
from megatron.core.config.parse import parse_table, strict_bool

_REFUSED = {
    "network size": """
mtp_hsm | A variant of multi-token prediction in later releases of Megatron-LM. | no public
    description defines this variant; leave --mtp-hsm out
""",
    "vision": """
online_evaluation_config str | File of tasks that Megatron-LM evaluates during training. | tasks are
    not evaluated during training; use --eval-generate, or tools/run_vlm_text_generation.py with a
    checkpoint
swin_backbone_type tiny,base,h3 tiny | Size of a Swin model. | VISION
mask_type random,row random | How image patches are hidden for inpainting. | VISION
mask_factor float 1.0 | Size factor of hidden patches. | VISION
iter_per_epoch int 1250 | Steps that count as one epoch of images. | VISION
dino_local_img_size int 96 | Side of DINO's local crops in pixels. | VISION
dino_local_crops_number int 10 | Local crops of each image in DINO. | VISION
dino_head_hidden_size int 2048 | Width of DINO's head. | VISION
dino_bottleneck_size int 256 | Width of the bottleneck in DINO's head. | VISION
dino_freeze_last_layer float 1.0 | Epochs during which DINO's last layer is frozen. | VISION
dino_norm_last_layer | Normalize DINO's last layer. | VISION
dino_warmup_teacher_temp float 0.04 | First temperature of DINO's teacher. | VISION
dino_teacher_temp float 0.07 | Temperature of DINO's teacher after warm-up. | VISION
dino_warmup_teacher_temp_epochs int 30 | Epochs over which the teacher's temperature rises. | VISION
""",
    "checkpointing": """
load_model_opt_format | Load a checkpoint with state of NVIDIA's model optimizer. | the state of
    nvidia-modelopt is not read; use --load alone for a quantized checkpoint of this program or for
    the Hugging Face folder that ModelOpt has exported
""",
    "autoresume": """
adlr_autoresume | Let a service of NVIDIA's clusters end and resubmit the job. | that service is
    NVIDIA's own; use --exit-signal-handler or --exit-duration-in-mins
""",
    "workload inspector": """
run_workload_inspector_server | Serve live profiling on demand. | the workload inspector is NVIDIA's
    own; use --profile
""",
    "training": """
batch_size int | Removed; use --micro-batch-size. | it was renamed; use --micro-batch-size
checkpoint_activations | Removed; use --recompute-granularity full. | it was removed; use
    --recompute-granularity full --recompute-method uniform, or --recompute-activations
use_legacy_models | Use Megatron-LM's legacy models instead of its core library's. | LEGACY_MODELS
""",
    "learning rate": """
warmup int | Removed; use --lr-warmup-fraction. | it was removed; use --lr-warmup-fraction
""",
    "distributed": """
model_parallel_size int | Removed; use --tensor-model-parallel-size. | it was renamed; use
    --tensor-model-parallel-size
""",
    "ModelOpt": """
export_legacy_megatron | Write a checkpoint of Megatron-LM's legacy models. | LEGACY_MODELS
""",
    "biencoder": """
ict_head_size int | Width of the retriever's embeddings in ICT. | RETRIEVER
biencoder_projection_dim int 0 | Width of a projection behind the retriever; 0 means none. |
    RETRIEVER
biencoder_shared_query_context_model | Embed queries and contexts with one model. | RETRIEVER
ict_load str | Directory of an ICT checkpoint. | RETRIEVER
bert_load str | Directory of a BERT checkpoint that ICT starts from. | RETRIEVER
titles_data_path str | Data prefix of document titles. | RETRIEVER
query_in_block_prob float 0.1 | Probability that a query stays in its block. | RETRIEVER
use_one_sent_docs | Use documents of a single sentence too. | RETRIEVER
evidence_data_path str | File of evidence passages. | RETRIEVER
retriever_score_scaling | Divide retrieval scores by the root of the width. | RETRIEVER
block_data_path str | File of embedded blocks. | RETRIEVER
embedding_path str | File of embeddings for open retrieval. | RETRIEVER
indexer_batch_size int 128 | Samples in a batch while blocks are embedded. | RETRIEVER
indexer_log_interval int 1000 | Batches between lines while blocks are embedded. | RETRIEVER
""",
}

_IGNORED = {
    "vision": """
language_model_type str | Megatron-LM's name of a language model. | the flags of the layers describe
    the language model and the projector (--swiglu, --normalization, --ffn-hidden-size, ...)
use_te | Build layers of Transformer Engine. | --transformer-impl transformer_engine, the default,
    builds them
packing_seq_length int 0 | Length of packed rows in Megatron-LM. | with --use-packed-sequence,
    --decoder-seq-length and --dataloader-seq-length limit a row
dataset_config str | File of settings of a data set. | OLD_SPELLING
eos_id int | Token that ends a generated text. | GENERATION
use_mcore_inference | Generate with Megatron Core's engine. | GENERATION
data_sharding bool True | Let every data-parallel rank draw from all images instead of its share. |
    in every layout the order of images is a function of the seed, and each image is read once per
    epoch
vision_pretraining | Pretrain a vision model. | the entry script, or --model-kind, decides what is
    trained
""",
    "training": """
memory_budget_fraction float 0.9 | Fraction of device memory for activations that are kept. |
    --check-only with --check-device-memory-gib finds the recomputation that fits
enable_gloo_process_groups bool True --disable-gloo-process-groups | Do not create gloo process
    groups beside the NCCL ones. | only groups that are used are made
deprecated_use_mcore_models --use-mcore-models | Deprecated; the models of Megatron-LM's core
    library are the only ones. | OLD_SPELLING
""",
    "inference": """
enable_chunked_prefill | Read a long prompt in several steps, beside the tokens of other requests. |
    ALWAYS_SO
decode_only_cuda_graphs | Capture CUDA graphs of decoding alone. | ALWAYS_SO
use_legacy_static_engine | Generate with an earlier static engine of Megatron Core. | the static
    engine has one implementation
use_flashinfer_fused_rope | Rotate keys and queries with a kernel of flashinfer. | NO_KERNEL
inference_dynamic_batching_sampling_backend torch,flashinfer torch | Kernels that sample tokens. |
    NO_KERNEL
inference_grouped_gemm_backend flashinfer,torch,vllm vllm | Kernels of experts. | NO_KERNEL
inference_moe_token_dispatcher_type nccl,nvls nvls | Collectives of experts. | NO_KERNEL
inference_fuse_tp_communication | Fuse the all-reduce of a layer with its norm. | NO_KERNEL
moe_pad_experts_for_cuda_graph_inference | Pad the tokens of experts, so that a CUDA graph can
    contain them. | steps of models with experts run without CUDA graphs, since the host has to know
    the token counts
inference_dynamic_batching_cuda_graph_sizing_distribution exponential,linear exponential | Spacing
    of the batch sizes that are captured. | they are evenly spaced (linear)
inference_dynamic_batching_async_sched_mode legacy,async legacy | Scheduler of the engine. | the
    engine has one scheduler
inference_dynamic_batching_prefix_caching_eviction_policy ref_zero,lru ref_zero | Cached pages that
    are freed first. | the least recently used pages are freed, when their memory is needed (lru)
inference_dynamic_batching_prefix_caching_coordinator_policy
    longest_prefix,first_prefix_block,load_balanced load_balanced | Replica that gets a request. |
    it is the replica with the fewest requests (load_balanced)
inference_dynamic_batching_unified_memory_level int 0 | 1: let the KV cache exceed the memory of the
    device. | the KV cache stays in device memory, and requests that it cannot hold wait
suspend_resume_interval int | Steps after which the engine is suspended and resumed, to test it. |
    the engine keeps its memory until it ends
suspend_timeout float 0.0 | Seconds that the engine stays suspended. | the engine keeps its memory
    until it ends
""",
    "Transformer-Engine": """
use_transformer_engine_op_fuser | Let Transformer Engine fuse the operations of an MLP. | NO_KERNEL
""",
    "tokenizer": """
trust_remote_code | Run the code in the folder of a tokenizer or model. | this program reads the
    files of a folder and never runs code in it
""",
    "distributed": """
megatron_fsdp_main_params_dtype fp32,bf16,fp16,auto fp32 | Type of FSDP's parameters. |
    FSDP stores parameters in fp32
megatron_fsdp_main_grads_dtype fp32,bf16,fp16,auto auto | Type of FSDP's gradients. |
    FSDP accumulates gradients in fp32
use_layer_wise_param_layout bool True --no-use-layer-wise-param-layout | Do not place complete
    matrices on ranks for dist_muon. | ranks share matrices by element and send parts to their owner
use_sharp | Let the network switches reduce gradients. | the environment variable
    NCCL_COLLNET_ENABLE=1 lets NCCL use the switches
sharp_enabled_group dp,dp_replica | Process group that --use-sharp serves. | it only adjusts
    --use-sharp, which is not available in this program
""",
    "experimental": """
enable_experimental | Allow the reference's experimental features. | nothing here waits for it
""",
    "data and dataloader": """
retriever_seq_length int 256 | Tokens of a retriever's sample. | only retrieval models read it
fim_pad_token str <fim_pad> | Token that pads reordered samples. | reordered samples keep their
    length, so nothing pads them
fim_eod_token str <|endoftext|> | Token that ends a document. | the end-of-document token of the
    tokenizer ends documents
sample_rate float 1.0 | Share of the samples that a retriever's training uses. | only retrieval
    models read it
""",
    "msc": """
enable_msc bool True --disable-msc | Treat msc:// paths as plain file names. | only names that begin
    with msc:// are treated as such, by an extra package
""",
    "checkpointing": """
ckpt_incremental | Write frozen tensors only to the first checkpoint. | every checkpoint is
    complete; --lora-rank saves the adapters alone, and --keep-last-checkpoints limits the space
strict_fsdp_dtensor_load bool True | Allow missing keys when an fsdp_dtensor checkpoint is loaded. |
    --dist-ckpt-strictness says for every format what may be missing
dist_ckpt_optim_fully_reshardable | Save optimizer state that loads in any layout. | ALWAYS_SO
distrib_optim_fully_reshardable_mem_efficient | Gather less optimizer state at a time, for
    --dist-ckpt-optim-fully-reshardable. | no rank gathers the state of others
async_strategy nvrx,mcore nvrx | Package that writes with --async-save. | a thread of each rank
    writes
async_ckpt_use_cpu_shm | Pass tensors to the process that writes in shared memory. | a thread of
    each rank writes, from buffers of its own process
ckpt_drop_redundant_extra_state | Do not save extra state of layers that others can stand in for. |
    the extra state of this program's layers is empty
ckpt_fully_parallel_load_per_rank_objects | Also read the objects of ranks in parallel. | each rank
    reads its own objects, which are small
verify_integrity | Save checksums, and verify them at load. | this program
    always does so; formats of PyTorch have the checksums of torch.save
ckpt_load_validate_sharding_integrity bool True --no-ckpt-load-validate-sharding-integrity | Do not
    check that the shards of a tensor cover it. | the check reads no data and is always made
auto_detect_ckpt_format | Detect the format of the loaded checkpoint. | ALWAYS_SO
ckpt_convert_update_legacy_dist_opt_format | Rewrite the distributed optimizer's state while
    converting. | it is always written in the present arrangement
use_dist_ckpt_deprecated --use-dist-ckpt | Deprecated; use --ckpt-format instead of this switch. |
    OLD_SPELLING
dist_ckpt_format_deprecated str --dist-ckpt-format | Deprecated; use --ckpt-format. | OLD_SPELLING
ckpt_fully_parallel_save_deprecated --ckpt-fully-parallel-save | Deprecated; saving is distributed
    over data-parallel ranks by default. | OLD_SPELLING
""",
    "one logger": """
enable_one_logger bool True --no-one-logger | Do not report to NVIDIA's one logger. | ONE_LOGGER
one_logger_project str megatron-lm | Project in one logger. | ONE_LOGGER
one_logger_run_name str | Name of the run in one logger. | ONE_LOGGER
one_logger_async | Report to one logger in the background. | ONE_LOGGER
app_tag_run_name str | Tag of the run in one logger. | ONE_LOGGER
app_tag_run_version str 0.0.0 | Version of the run in one logger. | ONE_LOGGER
""",
    "autoresume": """
adlr_autoresume_interval int 1000 | Steps between questions to the resubmission service. | it only
    adjusts --adlr-autoresume, which is not available in this program
""",
    "rl": """
refit_method nccl,gloo,nvshmem gloo | How rollouts get the weights of training. | a rank copies the
    weights that it holds, and the others are sent by --distributed-backend
rl_sequence_packing_algo fifo,round-robin fifo | Order in which --rl-use-sequence-packing packs. |
    UNPACKED
rl_submission_granularity R,G,B B | What makes place for new prompts when it has ended: an answer,
    a group, or a round. | the engine starts the next answer as soon as one ends (R), and prompts
    are submitted in rounds
rl_kv_cache_management_mode persist,offload,recompute persist | KV cache of unfinished answers while
    the weights change. | the new weights compute it again (recompute)
rl_inference_model_unified_memory_level int 0 | 1: keep the model of rollouts in unified memory. |
    MODEL_OF_ROLLOUTS
rl_offload_inference_model_weights_when_idle both | Move the model of rollouts to host memory while
    training. | MODEL_OF_ROLLOUTS
rl_persist_cuda_graphs both | Keep the CUDA graphs of rollouts while training. | each round captures
    its graphs, and training gets their memory
rl_training_cuda_graphs both | Capture CUDA graphs of training too. | --cuda-graph-impl decides for
    training and rollouts
rl_offload_optimizer_during_inference | Move the optimizer state to host memory during rollouts. |
    the optimizer state stays where it is; see --optimizer-cpu-offload
""",
    "Logits Distillation": """
logits_load_decode_threads int 4 | Threads that decode a store. | samples of a store are read by the
    --num-workers of the data loader
logits_load_prefetch_factor int 3 | Micro-batches that are read ahead from a store. | samples of a
    store are read by the --num-workers of the data loader
logits_load_msc_prefetch_depth int 2 | Files of a store that are fetched ahead from object storage.
    | samples of a store are read by the --num-workers of the data loader
""",
    "network size": """
mtp_standalone | Give MTP layers a pipeline stage of their own. | MTP layers are computed with the
    loss, on the last stage; --pipeline-model-parallel-layout can leave decoder layers out of it
add_position_embedding bool True --no-position-embedding | Do not add learned positions; deprecated,
    use --position-embedding-type. | --position-embedding-type sets the position embedding
""",
    "moe": """
moe_hybridep_num_sms int | SMs (GPU multiprocessors) of --moe-flex-dispatcher-backend hybridep. |
    DeepEP or PyTorch dispatches tokens; see --moe-deepep-num-sms
moe_extended_tp | Old spelling of --expert-tensor-parallel-size. | OLD_SPELLING
""",
    "ModelOpt": """
export_te_mcore_model | Build the layers of Transformer Engine in a script of ModelOpt. |
    --transformer-impl transformer_engine, the default, builds them
export_default_te_spec | Build the default layers of Transformer Engine. |
    --transformer-impl transformer_engine, the default, builds them
export_force_local_attention | Build Megatron Core's own attention in a script of ModelOpt. |
    --attention-backend chooses the attention
export_parallel_draft_step int 1 | Tokens that EAGLE drafts in one pass of its layer. | the layer
    drafts one token in each pass
export_model_type str GPTModel | Class of the model in a script of ModelOpt. | the entry program, or
    --model-kind, chooses the model
finetune_hf_dataset str | Conversations for the programs of examples/post_training/modelopt. |
    EXAMPLES_DATA
finetune_data_split str train | Split of --finetune-hf-dataset. | EXAMPLES_DATA
""",
}

_TYPES: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: text == "True",
}


def _fields(state: str, tables: dict[str, str]) -> Iterator[tuple[str, object, Any]]:
    """Yield name, type and option of each row of ``tables``, group -> rows."""
    for group, text in tables.items():
        for key, words in parse_table(text).items():
            name, *spelling = key.split()
            help, reason = words.split(" | ")
            more: dict[str, Any] = {state: vars(flag_messages).get(reason, reason)}
            if spelling and spelling[-1].startswith("--"):
                more["flag"] = spelling.pop()
            kind, *default = spelling or ("bool", "False")
            if "," in kind:
                more["choices"] = tuple(kind.split(","))
            if kind == "both":
                more["both_ways"] = True
                kind, default = "bool", ["False"]
            parse = _TYPES.get(kind, str)
            value = parse(default[0]) if default else None
            hint = bool if kind == "bool" else parse
            yield name, hint, option(value, help, group=group, **more)


@dataclass(frozen=True, kw_only=True)
class _OtherFlags:
    """Flags with values that a table does not have."""

    onnx_safe: bool | None = option(
        None,
        "Avoid operations that ONNX cannot express.",
        group="network size",
        parse=strict_bool,
        ignored=flag_messages.OLD_SPELLING,
    )
    progress_bar: bool | None = option(
        None,
        "Show a progress bar.",
        group="logging",
        both_ways=True,
        harmless=(False,),
        ignored="the log has a line with the iteration for each --log-interval",
    )
    retriever_report_topk_accuracies: tuple[int, ...] = option(
        (),
        "Values of k whose retrieval accuracy is reported.",
        group="biencoder",
        nargs="+",
        refused=flag_messages.RETRIEVER,
    )


OutOfScopeFlags = make_dataclass(
    "OutOfScopeFlags",
    [*_fields("refused", _REFUSED), *_fields("ignored", _IGNORED)],
    bases=(_OtherFlags,),
    frozen=True,
    kw_only=True,
)
