"""What is reported, where and how often."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is reported, where and how often."""

    log_interval: int = option(100, "", group="training")
    tensorboard_dir: str | None = option(None, "", group="training")
    metrics_file: str | None = option(
        None,
        "File that gets every number logged anywhere, one JSON object a line.",
        group="logging",
    )
    progress_bar: bool | None = option(
        None,
        "Show a progress bar; without the flag only when standard error is a terminal.",
        group="logging",
        both_ways=True,
    )
    moe_per_layer_logging: bool = option(False, "", group="moe")
    log_params_norm: bool = option(False, "", group="logging")
    log_throughput: bool = option(False, "", group="logging")
    log_progress: bool = option(False, "", group="logging")
    timing_log_level: int = option(0, "", group="logging", choices=(0, 1, 2))
    log_energy: bool = option(False, "", group="logging")
    timing_log_option: str = option("minmax", "", group="logging", choices=("max", "minmax", "all"))
    tensorboard_log_interval: int = option(1, "", group="logging")
    tensorboard_queue_size: int = option(1000, "", group="logging")
    log_timers_to_tensorboard: bool = option(False, "", group="logging")
    log_loss_scale_to_tensorboard: bool = option(True, "", group="logging")
    log_validation_ppl_to_tensorboard: bool = option(False, "", group="logging")
    log_memory_to_tensorboard: bool = option(False, "", group="logging")
    log_world_size_to_tensorboard: bool = option(False, "", group="logging")
    wandb_project: str = option("", "", group="logging")
    wandb_exp_name: str = option("", "", group="logging")
    wandb_save_dir: str = option("", "", group="logging")
    logging_level: int | None = option(None, "", group="logging")
    enable_one_logger: bool = option(True, "", group="one logger", flag="--no-one-logger")
    one_logger_project: str = option("megatron-lm", "", group="one logger")
    one_logger_run_name: str | None = option(None, "", group="one logger")
    one_logger_async: bool = option(False, "", group="one logger")
    app_tag_run_name: str | None = option(None, "", group="one logger")
    app_tag_run_version: str = option("0.0.0", "", group="one logger")
