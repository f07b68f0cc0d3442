"""What is reported, where and how often."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is reported, where and how often."""

    log_interval: int = option(
        100,
        "Steps between lines on the console.",
        group="training",
    )
    tensorboard_dir: str | None = option(
        None,
        "Directory of the TensorBoard files.",
        group="training",
    )
    metrics_file: str | None = option(
        None,
        "File that gets every number logged anywhere, one JSON object a line.",
        group="logging",
    )
    progress_bar: bool | None = option(
        None,
        "Show a progress bar on the terminal, also when standard error goes to a file; without the "
        "flag only when standard error is a terminal.",
        group="logging",
        both_ways=True,
    )
    moe_per_layer_logging: bool = option(
        False,
        "Log the auxiliary losses of each layer.",
        group="moe",
    )
    log_params_norm: bool = option(
        False,
        "Log the norm of all parameters.",
        group="logging",
    )
    log_params_hash_interval: int | None = option(
        None,
        "Steps between hashes of all weights in the log: equal weights, equal hash, in any layout.",
        group="logging",
    )
    log_throughput: bool = option(
        False,
        "Log TFLOP/s, tokens/s and MFU per device.",
        group="logging",
    )
    log_progress: bool = option(
        False,
        "Write steps, tokens and FLOPs to progress.txt beside the checkpoints.",
        group="logging",
    )
    timing_log_level: int = option(
        0,
        "Timers that run: 0 only whole steps, 1 also parts of a step, 2 everything.",
        group="logging",
        choices=(0, 1, 2),
    )
    log_energy: bool = option(
        False,
        "Log the energy that GPUs take, in joules.",
        group="logging",
    )
    timing_log_option: str = option(
        "minmax",
        "Which ranks' times are shown: the largest, smallest and largest, or all.",
        group="logging",
        choices=("max", "minmax", "all"),
    )
    tensorboard_log_interval: int = option(
        1,
        "Steps between values in TensorBoard.",
        group="logging",
    )
    tensorboard_queue_size: int = option(
        1000,
        "Values kept in memory before TensorBoard's file is written.",
        group="logging",
    )
    log_timers_to_tensorboard: bool = option(
        False,
        "Write timers to TensorBoard.",
        group="logging",
    )
    log_loss_scale_to_tensorboard: bool = option(
        True,
        "Do not write the loss scale to TensorBoard.",
        group="logging",
    )
    log_validation_ppl_to_tensorboard: bool = option(
        False,
        "Write validation perplexity to TensorBoard.",
        group="logging",
    )
    log_memory_to_tensorboard: bool = option(
        False,
        "Write memory in use to TensorBoard: the GPU's, or what a process on the CPU has.",
        group="logging",
    )
    log_world_size_to_tensorboard: bool = option(
        False,
        "Write the number of ranks to TensorBoard.",
        group="logging",
    )
    wandb_project: str = option(
        "",
        "Weights & Biases project; logging there is on if it is given.",
        group="logging",
    )
    wandb_exp_name: str = option(
        "",
        "Name of the run in Weights & Biases.",
        group="logging",
    )
    wandb_save_dir: str = option(
        "",
        "Directory for Weights & Biases' own files.",
        group="logging",
    )
    logging_level: int | None = option(
        None,
        "Level of Python's logging: 10 debug, 20 info, 30 warning, 40 error.",
        group="logging",
    )
    enable_one_logger: bool = option(
        True,
        "Report nothing to NVIDIA's one logger.",
        group="one logger",
        flag="--no-one-logger",
        ignored=states.ONE_LOGGER,
    )
    one_logger_project: str = option(
        "megatron-lm",
        "Project in one logger.",
        group="one logger",
        ignored=states.ONE_LOGGER,
    )
    one_logger_run_name: str | None = option(
        None,
        "Name of the run in one logger.",
        group="one logger",
        ignored=states.ONE_LOGGER,
    )
    one_logger_async: bool = option(
        False,
        "Report to one logger in the background.",
        group="one logger",
        ignored=states.ONE_LOGGER,
    )
    app_tag_run_name: str | None = option(
        None,
        "Tag of the run in one logger.",
        group="one logger",
        ignored=states.ONE_LOGGER,
    )
    app_tag_run_version: str = option(
        "0.0.0",
        "Version of the run in one logger.",
        group="one logger",
        ignored=states.ONE_LOGGER,
    )
