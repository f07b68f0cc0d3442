"""A script with its own train loop, as users have them for Megatron-LM core_v0.14.

``--my-loop steps`` calls train_step() and the functions around it; ``--my-loop bare`` builds
optimizer and scheduler from the library and calls the schedule itself.  `test_user_scripts.py` runs
both.
"""

import dataclasses
from functools import partial

import torch

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_tensorboard_writer
from megatron.training.initialize import initialize_megatron
from megatron.training.training import (
    build_train_valid_test_data_iterators,
    build_train_valid_test_datasets,
    evaluate_and_print_results,
    get_model,
    get_optimizer_param_scheduler,
    save_checkpoint_and_time,
    setup_model_and_optimizer,
    train_step,
    training_log,
    update_train_iters,
)
from megatron.training.utils import (
    calc_params_l2_norm,
    get_batch_on_this_tp_rank,
    print_rank_0,
    unwrap_model,
)

losses = []


def add_my_arguments(parser):
    group = parser.add_argument_group("mine")
    group.add_argument("--my-loop", default="steps")
    group.add_argument("--my-end", type=int, default=6)
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


def datasets_provider(num_samples):
    """Not marked ``is_distributed``: the reference calls it where a rank reads data."""
    assert mpu.get_tensor_model_parallel_rank() == 0
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=get_tokenizer(),
        split="99,1,0",
        path_to_cache=args.data_cache_path,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, [num_samples[0], num_samples[1], 0], lambda: True, config
    ).build()


def loss_func(loss_mask, output_tensor):
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask.view(-1)) / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


def forward_step(data_iterator, model):
    batch = get_batch_on_this_tp_rank(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(loss_func, batch["loss_mask"])


def steps():
    args, timers = get_args(), get_timers()
    update_train_iters(args)
    model, optimizer, scheduler = setup_model_and_optimizer(
        model_provider, ModelType.encoder_or_decoder, scale_lr_cond=lambda name, param: False
    )
    config = get_model_config(model[0])
    assert config is unwrap_model(model)[0].config
    train_iter, valid_iter, test_iter = build_train_valid_test_data_iterators(datasets_provider)
    assert test_iter is None
    timers("interval-time", log_level=0).start(barrier=True)
    iteration = args.iteration
    while iteration < args.my_end:
        args = get_args()
        loss_dict, skipped, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros = (
            train_step(forward_step, train_iter, model, optimizer, scheduler, config)
        )
        assert (skipped, should_checkpoint, should_exit, exit_code) == (0, False, False, 0)
        iteration += 1
        losses.append(float(loss_dict["lm loss"]))
        training_log(
            loss_dict,
            {},
            optimizer.param_groups[0]["lr"],
            None,
            iteration,
            optimizer.get_loss_scale().item(),
            True,
            skipped,
            grad_norm,
            calc_params_l2_norm(model) if args.log_params_norm else None,
            num_zeros,
        )
        if get_tensorboard_writer():
            get_tensorboard_writer().add_scalar("mine", losses[-1], iteration)
        if iteration % args.eval_interval == 0:
            prefix = f"iteration {iteration}"
            evaluate_and_print_results(
                prefix, forward_step, valid_iter, model, iteration, None, config, False
            )
        if args.save and iteration % args.save_interval == 0:
            save_checkpoint_and_time(
                iteration,
                model,
                optimizer,
                scheduler,
                args.num_floating_point_operations_so_far,
                checkpointing_context={},
            )


def bare():
    args = get_args()
    model = get_model(model_provider, ModelType.encoder_or_decoder)
    kwargs = {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(OptimizerConfig)
        if hasattr(args, f.name)
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**kwargs), model, None, None, 1.0)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=0,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )
    iteration = 0
    if args.load is not None:
        iteration, _ = load_checkpoint(model, optimizer, scheduler)
    dataset = None
    if mpu.get_tensor_model_parallel_rank() == 0:
        dataset, _, _ = build_train_valid_test_datasets(datasets_provider)
    forward_backward_func = get_forward_backward_func()
    per_step = args.global_batch_size // mpu.get_data_parallel_world_size()
    assert get_num_microbatches() * args.micro_batch_size == per_step
    while iteration < args.my_end:
        data_iterator = None
        if dataset is not None:
            first = iteration * args.global_batch_size
            samples = torch.utils.data.Subset(dataset, range(first, first + per_step))
            data_iterator = iter(torch.utils.data.DataLoader(samples, args.micro_batch_size))
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reported = forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=False,
            adjust_tensor_shapes_fn=None,
        )
        finalize_model_grads(model)
        success, grad_norm, num_zeros = optimizer.step()
        assert success
        scheduler.step(increment=args.global_batch_size)
        iteration += 1
        losses.append(float(sum(r["lm loss"] for r in reported) / len(reported)))
        print_rank_0(f"{iteration}: {losses[-1]} {grad_norm}")
    assert get_attr_wrapped_model(model[0], "pre_process") is True
    if args.save:
        save_checkpoint(iteration, model, optimizer, scheduler, 0)


if __name__ == "__main__":
    initialize_megatron(
        extra_args_provider=add_my_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    assert get_optimizer_param_scheduler is not None
    {"steps": steps, "bare": bare}[get_args().my_loop]()
