"""A training script as people have them for Megatron-LM core_v0.14.

Nothing of it knows this project: everything comes from the reference's paths, goes through
get_args() and hands over no process group.  `test_user_scripts.py` runs it like any script.
"""

import inspect
from contextlib import nullcontext
from functools import partial

import torch

import megatron.legacy.model  # noqa: F401
from megatron.core import mpu, parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import StragglerDetector
from megatron.training import (
    get_args,
    get_timers,
    get_tokenizer,
    inprocess_restart,
    pretrain,
    print_rank_0,
)
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_ltor_masks_and_position_ids,
    unwrap_model,
)
from megatron.training.yaml_arguments import core_transformer_config_from_yaml

stimer = StragglerDetector()
SPIKY_LOSS_FACTOR = 10
seen = {"num_microbatches": set(), "training": set(), "non_loss": [], "iterations": []}


def add_my_arguments(parser):
    group = parser.add_argument_group(title="my arguments")
    group.add_argument("--my-loss", choices=["mean", "sum", "old-batch"], default="sum")
    group.add_argument("--my-scale", type=float, default=None)
    group.add_argument("--my-switch", action="store_true")
    return parser


def model_provider(pre_process=True, post_process=True):
    args = get_args()
    use_te = args.transformer_impl == "transformer_engine"
    assert not args.use_legacy_models
    assert args.my_scale == 2.0, "args_defaults reach the flags of extra_args_provider"
    print_rank_0("building GPT model ...")
    if args.yaml_cfg is not None:
        config = core_transformer_config_from_yaml(args, "language_model")
    else:
        config = core_transformer_config_from_args(args)
    if args.spec is not None:
        transformer_layer_spec = import_module(args.spec)
    elif args.num_experts:
        transformer_layer_spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
        )
    elif args.heterogeneous_layers_config_path is not None:
        transformer_layer_spec = get_gpt_heterogeneous_layer_spec(config, use_te)
    elif use_te:
        transformer_layer_spec = get_gpt_layer_with_transformer_engine_spec(
            args.num_experts,
            args.moe_grouped_gemm,
            args.qk_layernorm,
            args.multi_latent_attention,
            moe_use_legacy_grouped_gemm=args.moe_use_legacy_grouped_gemm,
            qk_l2_norm=args.qk_l2_norm,
            use_kitchen=config.use_kitchen,
        )
    else:
        transformer_layer_spec = get_gpt_layer_local_spec(
            args.num_experts,
            args.moe_grouped_gemm,
            args.qk_layernorm,
            args.multi_latent_attention,
            moe_use_legacy_grouped_gemm=args.moe_use_legacy_grouped_gemm,
            normalization=args.normalization,
            use_kitchen=config.use_kitchen,
        )
    mtp_block_spec = None
    if args.mtp_num_layers is not None:
        mtp_block_spec = get_gpt_mtp_block_spec(
            config, transformer_layer_spec, use_transformer_engine=use_te
        )
    build_model_context = nullcontext
    if args.fp8_param_gather:
        from transformer_engine.pytorch import fp8_model_init

        assert "enabled" in inspect.signature(fp8_model_init).parameters
    with build_model_context():
        return GPTModel(
            config=config,
            transformer_layer_spec=transformer_layer_spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            mtp_block_spec=mtp_block_spec,
        )


def get_batch(data_iterator):
    if (not mpu.is_pipeline_first_stage()) and (not mpu.is_pipeline_last_stage()):
        return None, None, None, None, None
    batch = get_batch_on_this_tp_rank(data_iterator)
    batch = get_batch_on_this_cp_rank(batch)
    return batch.values()


def get_batch_as_before(data_iterator):
    """What get_batch() was before get_batch_on_this_tp_rank()."""
    args = get_args()
    tokenizer = get_tokenizer()
    data = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    data_b = tensor_parallel.broadcast_data(["tokens", "labels"], data, torch.int64)
    tokens, labels = data_b["tokens"].contiguous(), data_b["labels"].contiguous()
    attention_mask, loss_mask, position_ids = get_ltor_masks_and_position_ids(
        tokens,
        tokenizer.eod,
        args.reset_position_ids,
        args.reset_attention_mask,
        args.eod_mask_loss,
    )
    return tokens, labels, loss_mask, attention_mask, position_ids


def loss_func(loss_mask, output_tensor, model=None, non_loss_data=False):
    args = get_args()
    if non_loss_data:
        return {"mean": output_tensor.float().mean()}
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    if args.my_loss == "mean":
        loss = loss / loss_mask.sum()
        averaged_loss = average_losses_across_data_parallel_group([loss])
        return loss, {"lm loss": averaged_loss[0]}
    rerun_state_machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        rerun_state_machine.validate_result(
            result=loss,
            rejection_func=torch.isnan,
            message="found NaN in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    if args.check_for_spiky_loss:
        rerun_state_machine.validate_result(
            result=loss,
            rejection_func=partial(
                rerun_state_machine.is_unexpectedly_large,
                threshold=SPIKY_LOSS_FACTOR,
                context="loss",
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    reporting_loss = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": reporting_loss}


def forward_step(data_iterator, model):
    args = get_args()
    timers = get_timers()
    global stimer
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        if args.my_loss == "old-batch":
            batch = get_batch_as_before(data_iterator)
        else:
            batch = get_batch(data_iterator)
        tokens, labels, loss_mask, attention_mask, position_ids = batch
    timers("batch-generator").stop()
    seen["num_microbatches"].add(get_num_microbatches())
    seen["training"].add(unwrap_model(model).training)
    seen["iterations"].append(args.curr_iteration)
    with stimer:
        output_tensor = model(
            tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask
        )
    return output_tensor, partial(loss_func, loss_mask, model=model)


def process_non_loss_data(data, iteration, writer):
    writer.add_scalar("my mean", torch.stack([d["mean"] for d in data]).mean(), iteration)
    seen["non_loss"].append((iteration, len(data)))


def is_dataset_built_on_rank():
    return (
        parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    ) and parallel_state.get_tensor_model_parallel_rank() == 0


def core_gpt_dataset_config_from_args(args):
    tokenizer = get_tokenizer()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples):
    args = get_args()
    config = core_gpt_dataset_config_from_args(args)
    dataset_type = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    train_ds, valid_ds, test_ds = BlendedMegatronDatasetBuilder(
        dataset_type, train_val_test_num_samples, is_dataset_built_on_rank, config
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return train_ds, valid_ds, test_ds


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    wrapped_pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    wrapped_pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        process_non_loss_data_func=process_non_loss_data,
        extra_args_provider=add_my_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer", "my_scale": 2.0},
        store=store,
    )
