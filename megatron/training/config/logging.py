"""What is reported, where and how often."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import INT64_MAX, option

_training = partial(option, group="training")
_logging = partial(option, group="logging")
_one_logger = partial(option, group="one logger", ignored=flag_messages.ONE_LOGGER)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = _training(
        100, "Steps between lines on the console.", at_least=1, at_most=INT64_MAX
    )
    tensorboard_dir: str | None = _training(None, "Directory of the TensorBoard files.")
    metrics_file: str | None = _logging(
        None, "File that gets every number logged anywhere, one JSON object a line."
    )
    progress_bar: bool | None = _logging(
        None,
        "Show a progress bar on the terminal, also when standard error goes to a file; without the "
        "flag only when standard error is a terminal.",
        both_ways=True,
    )
    moe_per_layer_logging: bool = option(
        False,
        "Write the auxiliary losses of each MoE layer to TensorBoard, W&B and the metrics file.",
        group="moe",
    )
    log_params_norm: bool = _logging(False, "Log the norm of all parameters.")
    log_params_hash_interval: int | None = _logging(
        None,
        "Steps between hashes of all weights in the log: equal weights, equal hash, in any layout.",
        at_least=1,
        at_most=INT64_MAX,
    )
    log_throughput: bool = _logging(False, "Log TFLOP/s, tokens/s and MFU per device.")
    log_progress: bool = _logging(
        False, "Write steps, tokens and FLOPs to progress.txt beside the checkpoints."
    )
    timing_log_level: int = _logging(
        0,
        "Timers that run: 0 only whole steps, 1 also parts of a step, 2 everything.",
        choices=(0, 1, 2),
    )
    log_energy: bool = _logging(False, "Log the energy that GPUs take, in joules.")
    timing_log_option: str = _logging(
        "minmax",
        "Which ranks' times are shown: the largest, smallest and largest, or all.",
        choices=("max", "minmax", "all"),
    )
    tensorboard_log_interval: int = _logging(
        1, "Steps between values in TensorBoard.", at_least=1, at_most=INT64_MAX
    )
    tensorboard_queue_size: int = _logging(
        1000, "Values kept in memory before TensorBoard's file is written.", at_least=1
    )
    log_timers_to_tensorboard: bool = _logging(False, "Write timers to TensorBoard.")
    log_loss_scale_to_tensorboard: bool = _logging(
        True, "Do not write the loss scale to TensorBoard."
    )
    log_validation_ppl_to_tensorboard: bool = _logging(
        False, "Write validation perplexity to TensorBoard."
    )
    log_memory_to_tensorboard: bool = _logging(
        False, "Write memory in use to TensorBoard: the GPU's, or what a process on the CPU has."
    )
    log_world_size_to_tensorboard: bool = _logging(
        False, "Write the number of ranks to TensorBoard."
    )
    wandb_project: str = _logging(
        "", "Weights & Biases project; logging there is on if it is given."
    )
    wandb_exp_name: str = _logging("", "Name of the run in Weights & Biases.")
    wandb_save_dir: str = _logging("", "Directory for Weights & Biases' own files.")
    logging_level: int | None = _logging(
        None, "Level of Python's logging: 10 debug, 20 info, 30 warning, 40 error."
    )
    enable_one_logger: bool = _one_logger(
        True, "Report nothing to NVIDIA's one logger.", flag="--no-one-logger"
    )
    one_logger_project: str = _one_logger("megatron-lm", "Project in one logger.")
    one_logger_run_name: str | None = _one_logger(None, "Name of the run in one logger.")
    one_logger_async: bool = _one_logger(False, "Report to one logger in the background.")
    app_tag_run_name: str | None = _one_logger(None, "Tag of the run in one logger.")
    app_tag_run_version: str = _one_logger("0.0.0", "Version of the run in one logger.")
