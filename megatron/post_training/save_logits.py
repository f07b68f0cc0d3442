"""--logits-save-dir: run the model forward over the training samples and write the store.

Order of collectives: `prepare` one broadcast over all ranks; each step those of its forward passes,
then a gather of errors over all ranks after each file.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.collectives import all_or_none, broadcast_json
from megatron.post_training.logits_store import (
    LogitsStore,
    StoredRows,
    StoreSettings,
    prepare_store,
    write_rows,
)
from megatron.post_training.stored_distillation import top_k_of
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.phases import in_phase
from megatron.training.runtime.runtime import Runtime
from megatron.training.step.train_step import forward_backward

_FILE_BYTES = 256 << 20  # of one rank; entries are kept in host memory until they are written
_ENTRY_BYTES = 8


def prepare(run: Runtime) -> None:
    """Create the store, and skip the steps whose samples it has.  Collective over all ranks."""
    world = run.groups.world
    folder = _folder(run)
    known = all_or_none(partial(_known_steps, run, folder), str(folder), world)
    run.state.iteration, run.state.consumed_train_samples = broadcast_json(known, world)
    if run.state.iteration:
        print_rank_0(
            f"  {folder} has the samples of {run.state.iteration} steps: continuing after them"
        )


def _known_steps(run: Runtime, folder: Path) -> list[int]:
    """Return the number of steps, and of samples, that the store has completely; on rank 0."""
    if run.groups.world.rank():
        return [0, 0]
    prepare_store(folder, _settings(run))
    store = LogitsStore(str(folder), "--logits-save-dir")
    steps = 0
    samples = 0
    while steps < run.train_iters:
        size = run.batches.global_batch_size(samples)
        if not all(index in store for index in range(samples, samples + size)):
            break
        steps = steps + 1
        samples = samples + size
    return [steps, samples]


def _folder(run: Runtime) -> Path:
    folder = run.config.distillation.logits_save_dir
    assert folder is not None, "the run saves a store"
    return Path(folder)


def _settings(run: Runtime) -> StoreSettings:
    assert run.tokenizer is not None, "setup_tokenizer() builds it"
    kd = run.config.distillation
    return StoreSettings(
        vocab_size=run.tokenizer.vocab_size,
        seq_length=run.config.data.seq_length,
        top_k=top_k_of(kd.logits_save_top_k, run.tokenizer.vocab_size),
        dtype=kd.logits_save_dtype,
    )


@in_phase("saving log-probabilities")
def save_logits(run: Runtime) -> None:
    """Run all training steps forward and write the store.  Collective over all ranks."""
    for chunk in run.model_chunks:
        chunk.eval()
    rows: list[StoredRows] = []
    first = run.state.iteration + 1
    began_s = time.monotonic()
    while not run.finished():
        consumed = run.state.consumed_train_samples
        with torch.no_grad():
            rows += forward_backward(  # type: ignore[arg-type]
                run,
                run.train_data,
                run.batches.num_microbatches(consumed),
                forward_only=True,
                collect_non_loss_data=True,
            )
        run.state.iteration += 1
        run.state.consumed_train_samples += run.batches.global_batch_size(consumed)
        step = run.state.iteration
        if run.finished() or (step - first + 1) * _bytes_of_step(run) >= _FILE_BYTES:
            save = partial(_write, run, rows, (first, step))
            all_or_none(save, str(_folder(run)), run.groups.world)
            rows = []
            first = step + 1
        if step % run.config.logging.log_interval == 0 or run.finished():
            print_rank_0(
                f" step {step:8d}/{run.train_iters:8d} | log-probabilities of "
                f"{run.state.consumed_train_samples} samples | elapsed time (s): "
                f"{time.monotonic() - began_s:.1f}"
            )


def _bytes_of_step(run: Runtime) -> int:
    """Return the bytes of a step on one rank, at most: the same on all ranks."""
    settings = _settings(run)
    samples = run.batches.global_batch_size_wanted // run.groups.dp.size()
    return samples * settings.seq_length * settings.top_k * _ENTRY_BYTES


def _write(run: Runtime, rows: list[StoredRows], steps: tuple[int, int]) -> None:
    groups = run.groups
    if run.has_loss and groups.tp.rank() == 0 and groups.cp.rank() == 0:
        write_rows(_folder(run), rows, _settings(run).dtype, steps, groups.dp.rank())
