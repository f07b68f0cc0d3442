"""Print the memory of weights, optimizer and activations by formula, from the flags of a run.

    WORLD_SIZE=64 python tools/report_theoretical_memory.py --num-layers 24 --hidden-size 2048 ...

`tools/plan.py` uses no formula: it counts stage by stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.estimates.parameters import known_padded_vocab_size
from megatron.training.estimates.theoretical_memory import print_memory
from megatron.training.process.rank_print import world_size


def main() -> None:
    """Print the memory; exit with status 2 if flags are refused or the vocabulary is unknown."""
    args = parse_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    try:
        config = resolve(args, args.check_world_size or world_size())
        vocab = known_padded_vocab_size(config)
        if vocab is None:
            raise ConfigError("the size of the vocabulary is not known: give --vocab-size")
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    batches = NumMicroBatchesCalculator.from_config(config.training, config.data_parallel_size)
    with device.simulate_device(config.distributed.device):
        print_memory(config, vocab, batches.num_microbatches(0), verbose=True)


if __name__ == "__main__":
    main()
