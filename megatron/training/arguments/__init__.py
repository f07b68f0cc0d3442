"""Parse a command line into a checked RunConfig.

Exports are imported on first use, because some of the submodules must work without torch.
"""

from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "parse_args": "megatron.training.compat.arguments",
        "validate_args": "megatron.training.compat.arguments",
        "core_transformer_config_from_args": "megatron.training.compat.arguments",
        "_add_tokenizer_args": "megatron.training.arguments.tokenizer_flags",
    },
)
