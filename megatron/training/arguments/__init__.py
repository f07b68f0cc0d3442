"""From a command line to a checked RunConfig.  Exports load when asked for: some need no torch."""

from megatron.core.lazy import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "parse_args": "megatron.training.arguments.legacy",
        "validate_args": "megatron.training.arguments.legacy",
        "core_transformer_config_from_args": "megatron.training.arguments.legacy",
        "_add_tokenizer_args": "megatron.training.arguments.tokenizer_flags",
    },
)
