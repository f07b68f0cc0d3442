"""Flags of logging and profiling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import INT64_MAX, option

_training = partial(option, group="training")
_logging = partial(option, group="logging")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = _training(
        100, "Steps between training log lines.", at_least=1, at_most=INT64_MAX
    )
    log_style: str = _logging(
        "auto",
        "Log on the console: megatron (Megatron-LM's lines), short (a summary of the run, short "
        "lines, and on a terminal a line that follows each step) or auto, which is short if one "
        "process without a launcher prints to a terminal.",
        choices=("auto", "megatron", "short"),
    )
    print_args: bool = _logging(
        False, "Print all arguments at the start with --log-style short too."
    )
    tensorboard_dir: str | None = _training(None, "Directory for TensorBoard event files.")
    metrics_file: str | None = _logging(None, "JSON lines file that receives every logged metric.")
    moe_per_layer_logging: bool = option(
        False,
        "Log the auxiliary losses of each MoE layer, and the load of its fullest expert (tokens "
        "over the mean), to TensorBoard, trackers and the metrics file.",
        group="moe",
    )
    log_params_norm: bool = _logging(False, "Log the L2 norm of the parameters.")
    log_params_hash_interval: int | None = _logging(
        None,
        "Steps between logged hashes of all parameters; the hash does not depend on the "
        "parallel layout.",
        at_least=1,
        at_most=INT64_MAX,
    )
    log_throughput: bool = _logging(
        False, "Log TFLOP/s, tokens/s and, on known GPUs, MFU per device."
    )
    log_loss_by_source: bool = _logging(
        False,
        "Log the mean loss of each data path of a blend over the --log-interval, and the tokens "
        "with loss that were read from it so far.",
    )
    log_progress: bool = _logging(
        False, "Write steps, tokens and FLOPs to progress.txt beside the checkpoints."
    )
    timing_log_level: int = _logging(
        0,
        "Level of timers to log: 0 (complete steps), 1 (also the phases of a step) or 2 (all).",
        choices=(0, 1, 2),
    )
    log_energy: bool = _logging(False, "Log the energy consumption of the GPUs in joules.")
    timing_log_option: str = _logging(
        "minmax",
        "Timer statistics over ranks: max, minmax (smallest and largest) or all (each rank).",
        choices=("max", "minmax", "all"),
    )
    tensorboard_log_interval: int = _logging(
        1, "Steps between TensorBoard values.", at_least=1, at_most=INT64_MAX
    )
    tensorboard_queue_size: int = _logging(
        1000, "TensorBoard values kept in memory before they are written.", at_least=1
    )
    log_timers_to_tensorboard: bool = _logging(False, "Log timers to TensorBoard.")
    log_loss_scale_to_tensorboard: bool = _logging(
        True, "Do not log the loss scale to TensorBoard."
    )
    log_validation_ppl_to_tensorboard: bool = _logging(
        False, "Log validation perplexity to TensorBoard."
    )
    log_memory_to_tensorboard: bool = _logging(
        False, "Log memory use to TensorBoard: of the GPU, or of the process on a CPU."
    )
    log_memory_interval: int | None = _logging(
        None,
        "Steps between lines with the memory of each GPU, on the first data-parallel rank; by "
        "default one line after the first --log-interval.",
        at_least=1,
    )
    log_world_size_to_tensorboard: bool = _logging(False, "Log the world size to TensorBoard.")
    wandb_project: str = _logging(
        "", "Weights & Biases project; enables logging to it. Needs --wandb-exp-name."
    )
    wandb_entity: str = _logging("", "Weights & Biases team or user that owns the project.")
    wandb_exp_name: str = _logging("", "Name of the run in Weights & Biases.")
    wandb_save_dir: str = _logging("", "Directory for Weights & Biases' own files.")
    tracker: tuple[str, ...] = _logging(
        (),
        "Experiment trackers that receive all values of TensorBoard, next to Weights & Biases "
        "(--wandb-project). Their environment variables, such as MLFLOW_TRACKING_URI, set servers "
        "and keys.",
        nargs="+",
        choices=("mlflow", "trackio", "comet", "clearml"),
    )
    tracker_project: str | None = _logging(
        None, "Project (MLflow: experiment) in the trackers of --tracker; default: the client's."
    )
    tracker_run: str | None = _logging(
        None, "Name of the run in the trackers of --tracker; default: the client's."
    )
    logging_level: int | None = _logging(
        None, "Level of Python's logging: 10 debug, 20 info, 30 warning, 40 error."
    )


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    profile: bool = _training(
        False, "Profile the steps between --profile-step-start and --profile-step-end."
    )
    profile_step_start: int = _training(10, "First step that is profiled.")
    profile_step_end: int = _training(12, "Step at which profiling ends, not profiled itself.")
    use_pytorch_profiler: bool = _training(
        False,
        "Write a PyTorch profiler trace to --tensorboard-dir instead of NVTX ranges for "
        "Nsight Systems.",
    )
    profile_ranks: tuple[int, ...] = _training((0,), "Global ranks to profile.", nargs="+")
    record_memory_history: bool = _training(
        False,
        "Record GPU memory allocations. The last rank writes --memory-snapshot-path at each "
        "--log-interval, and each rank writes oom_rank-RANK_FILE beside it when memory runs "
        "out.",
    )
    memory_snapshot_path: str = _training(
        "snapshot.pickle", "Output file of --record-memory-history, for pytorch.org/memory_viz."
    )
