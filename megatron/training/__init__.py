"""The training application: flags, setup, train loop, callbacks, checkpoints, tokenizers."""

from megatron.core.compat.import_paths import install
from megatron.core.optional import lazy_exports
from megatron.training.compat.names import NAMES

_GLOBALS = ("get_args", "get_tokenizer", "get_timers", "get_tensorboard_writer", "get_wandb_writer")
_UTILS = ("print_rank_0", "print_rank_last", "is_last_rank", "is_rank0")

__getattr__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(_GLOBALS, "megatron.training.compat.global_vars"),
        **dict.fromkeys(_UTILS, "megatron.training.compat.utils"),
        "initialize_megatron": "megatron.training.initialize",
        "pretrain": "megatron.training.training",
        "get_model": "megatron.training.compat.train_loop",
        "get_train_valid_test_num_samples": "megatron.training.compat.train_loop",
        "inprocess_restart": "megatron.training.inprocess_restart",
    },
)
install(NAMES)
