"""A pretraining script of somebody who knows only the reference's public names.

It reaches everything through get_args() and mpu and hands over no process group;
`test_user_scripts.py` runs it as a program and reads ``seen`` afterwards.  ``--my-loss`` picks one
of the conventions for batches and losses that scripts have used over the years.
"""

from dataclasses import dataclass, fields
from functools import partial

import torch

from megatron.core import mpu, parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.compat import utils as helpers

seen = {"num_microbatches": set(), "training": set(), "non_loss": [], "iterations": []}

# Our batches have one order of keys, however they were read.
BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
# What a GPTDatasetConfig calls differently than the command line does.
SPELT = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
}


@dataclass(frozen=True)
class Convention:
    """How a batch is read and what the loss function returns."""

    reads_by_hand: bool
    returns_mean: bool


CONVENTIONS = {
    "sum": Convention(reads_by_hand=False, returns_mean=False),
    "mean": Convention(reads_by_hand=False, returns_mean=True),
    "old-batch": Convention(reads_by_hand=True, returns_mean=False),
}


def my_flags(parser):
    mine = parser.add_argument_group("mine")
    mine.add_argument("--my-loss", choices=list(CONVENTIONS), default="sum")
    mine.add_argument("--my-scale", type=float)
    mine.add_argument("--my-switch", action="store_true")
    return parser


def layers_of(args):
    if args.transformer_impl == "local":
        return specs.get_gpt_layer_local_spec(None, False, args.qk_layernorm)
    return specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)


def build(pre_process=True, post_process=True):
    args = get_args()
    assert args.my_scale == 2.0, "args_defaults reach the flags of extra_args_provider"
    positions = {name: vars(args)[name] for name in ("position_embedding_type", "rotary_percent")}
    return GPTModel(
        core_transformer_config_from_args(args),
        layers_of(args),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        **positions,
    )


def read(source):
    if not CONVENTIONS[get_args().my_loss].reads_by_hand:
        found = helpers.get_batch_on_this_cp_rank(helpers.get_batch_on_this_tp_rank(source))
        return {key: found[key] for key in BATCH}
    args = get_args()
    sample = next(source) if mpu.get_tensor_model_parallel_rank() == 0 else None
    ids = tensor_parallel.broadcast_data(["tokens", "labels"], sample, torch.int64)
    derived = helpers.get_ltor_masks_and_position_ids(
        ids["tokens"], get_tokenizer().eod, args.reset_position_ids, args.reset_attention_mask,
        args.eod_mask_loss,
    )  # fmt: skip
    names = ("attention_mask", "loss_mask", "position_ids")
    return {**ids, **dict(zip(names, derived, strict=True))}


def score(weights, token_losses, non_loss_data=False):
    if non_loss_data:
        return {"mean": token_losses.mean()}
    total, count = (token_losses.float() * weights).sum(), weights.sum()
    if CONVENTIONS[get_args().my_loss].returns_mean:
        shared = helpers.average_losses_across_data_parallel_group([total / count])
        return total / count, {"lm loss": shared[0]}
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}


def step(source, model):
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = read(source)
    timer.stop()
    seen["num_microbatches"].add(get_num_microbatches())
    seen["training"].add(helpers.unwrap_model(model).training)
    seen["iterations"].append(get_args().curr_iteration)
    weights = batch.pop("loss_mask")
    token_losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return token_losses, partial(score, weights)


def show(collected, iteration, writer):
    means = torch.stack([entry["mean"] for entry in collected])
    writer.add_scalar("my mean", means.mean(), iteration)
    seen["non_loss"].append((iteration, len(collected)))


def reads_data():
    at_an_end = (
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
    )
    return any(at_an_end) and parallel_state.get_tensor_model_parallel_rank() == 0


def data(num_samples):
    args = get_args()
    blend, blend_per_split = helpers.get_blend_and_blend_per_split(args)
    given = {"blend": blend, "blend_per_split": blend_per_split, "tokenizer": get_tokenizer()}
    for field in fields(GPTDatasetConfig):
        flag = SPELT.get(field.name, field.name)
        if field.init and field.name not in given and flag in vars(args):
            given[field.name] = vars(args)[flag]
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"my data: {kind.__name__}")
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, reads_data, GPTDatasetConfig(**given)
    ).build()


if __name__ == "__main__":
    data.is_distributed = True
    pretrain(
        data,
        build,
        ModelType.encoder_or_decoder,
        step,
        process_non_loss_data_func=show,
        extra_args_provider=my_flags,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer", "my_scale": 2.0},
    )
