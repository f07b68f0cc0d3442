"""Export the weights of a GPT for TensorRT-LLM, each rank those that it holds.

    torchrun --nproc-per-node 4 \\
        examples/export/trtllm_export/distributed_export/gpt_distributed_gpu_export.py \\
        --output DIR --tensor-parallel 2 --pipeline-parallel 2

The files equal those of gpt_single_device_cpu_export.py.  It runs on CPUs too.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))  # installed or not

from examples.export.trtllm_export.single_device_export.gpt_single_device_cpu_export import (
    VOCAB_SIZE,
    helper_of,
    small_config,
    small_model,
)
from megatron.core import device, parallel_state
from megatron.core.export.data_type import DataType
from megatron.core.export.trtllm.trtllm_helper import save_rank


def main(argv: list[str] | None = None) -> None:
    """Entry point of each rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="new folder to write")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share a layer")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages")
    options = parser.parse_args(argv)
    tp = options.tensor_parallel
    pp = options.pipeline_parallel
    device.choose("auto", int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(device.default_backend())
    parallel_state.initialize_model_parallel(tp, pp)
    config = small_config(tp, pp)
    padded = -(-VOCAB_SIZE // (128 * tp)) * 128 * tp  # as training pads it
    model = small_model(
        config,
        padded,
        unpadded_vocab_size=VOCAB_SIZE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    weights, its_config = helper_of(config).get_trtllm_pretrained_config_and_model_weights(
        model_state_dict=model.state_dict(),
        dtype=DataType.bfloat16,
        on_device_distributed_conversion=True,
        vocab_size=VOCAB_SIZE,
    )
    if dist.get_rank() == 0:
        options.output.mkdir(parents=True)
    dist.barrier()
    save_rank(options.output, weights, its_config)
    print(f"rank {dist.get_rank()} wrote {len(weights)} tensors to {options.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
