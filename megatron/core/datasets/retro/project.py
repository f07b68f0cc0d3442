"""Settings and folders of a RETRO project, which preprocessing writes and training reads.

    <project>/config.json                the settings of preprocessing
    <project>/data/                      the corpora; relative data paths start in this folder
    <project>/db/                        the chunks of all documents (`db`)
    <project>/index/<type>/<string>/     embeddings and the index of the training chunks (`index`)
    <project>/query/<split>_<hash>/      the neighbors of each chunk of each sample (`query`)

Neighbors belong to samples by their number, so training must read the samples of preprocessing.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_cache import write_atomically
from megatron.core.datasets.utils import Blend, get_blend_from_list

# Fields that may differ from call to call: no result depends on them.
OF_A_CALL = frozenset(
    "retro_project_dir retro_tasks retro_task_validate retro_bert_batch_size "
    "retro_gpt_data_cache_path retro_index_delete_training_embeddings "
    "retro_index_delete_added_codes".split()
)
_PROGRAM = "tools/retro/preprocess_data.py"
T = TypeVar("T")


@dataclass(kw_only=True)
class RetroPreprocessingConfig:
    """Settings of preprocessing; names and defaults are Megatron-LM's, helps are in the tool."""

    retro_project_dir: str | None = None
    retro_tasks: str = "build"
    retro_task_validate: float | None = None
    retro_block_size: int = 100_000  # chunks
    retro_doc_block_size: int = 100_000  # documents
    # Of the training run.
    retro_gpt_seed: int = 1234
    retro_gpt_data_path: tuple[str, ...] | None = None
    retro_gpt_data_cache_path: str | None = None
    retro_gpt_split: str = "969,30,1"
    retro_gpt_train_samples: int | None = None
    retro_gpt_eval_interval: int | None = None
    retro_gpt_eval_iters: int | None = None
    retro_gpt_tokenizer_type: str | None = None
    retro_gpt_tokenizer_model: str | None = None
    retro_gpt_vocab_file: str | None = None
    retro_gpt_merge_file: str | None = None
    retro_gpt_seq_length: int | None = None
    retro_gpt_global_batch_size: int | None = None
    retro_gpt_chunk_length: int = 64
    # Of the BERT model that embeds chunks.
    retro_bert_tokenizer_type: str | None = None
    retro_bert_vocab_file: str | None = None
    retro_bert_batch_size: int = 128
    retro_bert_max_chunk_length: int = 256  # BERT tokens
    retro_index_type: str = "faiss-par-add"
    retro_index_str: str | None = None  # index factory string of faiss
    retro_index_ntrain: int | None = None  # chunks; None for all
    retro_index_train_load_fraction: float = 1.0
    retro_index_add_load_fraction: float = 1.0
    retro_index_delete_training_embeddings: bool = True
    retro_index_delete_added_codes: bool = True
    retro_query_ef_search: int = 256
    retro_query_nprobe: int = 65536
    retro_query_num_neighbors_query: int = 200
    retro_query_num_neighbors_save: int = 20
    retro_bert_load: str | None = None  # --load of the BERT model
    retro_neighbor_dirs: dict[str, str] = field(default_factory=dict)  # split -> folder in query/

    @property
    def blend(self) -> Blend:
        """The data paths, joined to the project's data folder, and their weights."""
        found = get_blend_from_list(self.retro_gpt_data_path)
        assert found, "--retro-gpt-data-path is missing"
        data_dir = get_gpt_data_dir(self.project_dir)
        return [os.path.join(data_dir, prefix) for prefix in found[0]], found[1]

    @property
    def project_dir(self) -> str:
        """The folder of the project."""
        assert self.retro_project_dir, "--retro-project-dir is missing"
        return self.retro_project_dir

    @property
    def chunks_per_sample(self) -> int:
        """Number of chunks in the input tokens of a sample."""
        return (self.retro_gpt_seq_length or 0) // self.retro_gpt_chunk_length


def get_config_path(project_dir: str) -> str:
    """Return the path of the settings."""
    return os.path.join(project_dir, "config.json")


def get_gpt_data_dir(project_dir: str) -> str:
    """Return the folder that relative data paths start in."""
    return os.path.join(project_dir, "data")


def load_project(project_dir: str) -> RetroPreprocessingConfig:
    """Read config.json.  Raises DataError if it is missing or holds other settings."""

    def parse(saved: dict[str, Any]) -> RetroPreprocessingConfig:
        paths = tuple(saved.pop("retro_gpt_data_path"))
        saved |= {"retro_project_dir": project_dir, "retro_gpt_data_path": paths}
        return RetroPreprocessingConfig(**saved)

    cure = f"run {_PROGRAM} with this --retro-project-dir first"
    return read_json(get_config_path(project_dir), parse, cure)


def save_project(config: RetroPreprocessingConfig) -> None:
    """Write config.json."""
    values = dataclasses.asdict(config)
    kept = {name: value for name, value in values.items() if name not in OF_A_CALL}
    write_json(get_config_path(config.project_dir), kept)


def read_json(path: str, parse: Callable[[Any], T], cure: str) -> T:
    """Return what ``parse`` makes of a file of the project.  Raises DataError with ``cure``."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse(json.load(file))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: {cure}") from error
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(f"{path} is damaged, or of another program ({error}): {cure}") from error


def write_json(path: str, value: object) -> None:
    """Write a file of the project completely or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    text = json.dumps(value, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
