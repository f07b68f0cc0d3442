"""What scripts import from Megatron-LM core_v0.14 is here, or in the list of what comes later.

``imports.json`` holds module -> name -> uses in the reference's own scripts, ``imports_later.json``
feature -> module -> names.  The list of later names only shrinks.
"""

from __future__ import annotations

import importlib
import json

import pytest

from tests.repo.source import ROOT

WANTED = {
    (module, name)
    for module, names in json.loads((ROOT / "tests/golden/imports.json").read_text()).items()
    for name in names
}
LATER = json.loads((ROOT / "tests/golden/imports_later.json").read_text())
LATER_NAMES = {
    (module, name)
    for modules in LATER.values()
    for module, names in modules.items()
    for name in names
}

# Names that many scripts import besides those of the reference's own.
ALSO_WANTED = [
    ("megatron.core.datasets.indexed_dataset", "IndexedDataset"),
    ("megatron.core.datasets.indexed_dataset", "IndexedDatasetBuilder"),
    ("megatron.core.distributed", "DistributedDataParallel"),
    ("megatron.core.distributed", "DistributedDataParallelConfig"),
    ("megatron.core.distributed", "finalize_model_grads"),
    ("megatron.core.models.common.embeddings.language_model_embedding", "LanguageModelEmbedding"),
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    ("megatron.core.models.common.language_module.language_module", "LanguageModule"),
    ("megatron.core.num_microbatches_calculator", "get_num_microbatches"),
    ("megatron.core.optimizer", "OptimizerConfig"),
    ("megatron.core.optimizer", "get_megatron_optimizer"),
    ("megatron.core.optimizer_param_scheduler", "OptimizerParamScheduler"),
    ("megatron.core.packed_seq_params", "PackedSeqParams"),
    ("megatron.core.pipeline_parallel", "get_forward_backward_func"),
    ("megatron.core.process_groups_config", "ProcessGroupCollection"),
    ("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy"),
    ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear"),
    ("megatron.core.tensor_parallel.random", "model_parallel_cuda_manual_seed"),
    ("megatron.core.timers", "Timers"),
    ("megatron.core.transformer", "ModuleSpec"),
    ("megatron.core.transformer.attention", "SelfAttention"),
    ("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    ("megatron.core.transformer.enums", "AttnMaskType"),
    ("megatron.core.transformer.identity_op", "IdentityOp"),
    ("megatron.core.transformer.module", "Float16Module"),
    ("megatron.core.transformer.module", "MegatronModule"),
    ("megatron.core.transformer.transformer_block", "TransformerBlock"),
    ("megatron.core.transformer.transformer_layer", "TransformerLayer"),
    ("megatron.core.utils", "get_attr_wrapped_model"),
    ("megatron.core.utils", "get_model_config"),
    ("megatron.training.checkpointing", "load_checkpoint"),
    ("megatron.training.global_vars", "get_tensorboard_writer"),
    ("megatron.training.global_vars", "get_wandb_writer"),
    ("megatron.training.theoretical_memory_usage", "report_theoretical_memory"),
    ("megatron.training.tokenizer", "build_tokenizer"),
    ("megatron.training.tokenizer.tokenizer", "build_tokenizer"),
    ("megatron.training.training", "get_model"),
    ("megatron.training.training", "pretrain"),
]


def is_importable(module: str, name: str) -> bool:
    """Whether ``from module import name`` works."""
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def test_every_name_is_here_or_comes_later():
    missing = sorted(m_n for m_n in WANTED - LATER_NAMES if not is_importable(*m_n))
    assert not missing, "neither importable nor in imports_later.json:\n" + "\n".join(
        f"from {module} import {name}" for module, name in missing
    )


def test_the_list_of_later_names_only_shrinks():
    here = sorted(m_n for m_n in LATER_NAMES if is_importable(*m_n))
    assert not here, f"importable now, take it out of imports_later.json: {here}"
    assert WANTED >= LATER_NAMES, f"nobody asked for {sorted(LATER_NAMES - WANTED)}"


def test_every_later_name_has_one_reason():
    count = sum(len(names) for modules in LATER.values() for names in modules.values())
    assert count == len(LATER_NAMES)
    assert all(len(reason) > 5 for reason in LATER)


@pytest.mark.parametrize(("module", "name"), ALSO_WANTED, ids=lambda part: part.split(".")[-1])
def test_other_names_that_scripts_import_are_here(module, name):
    assert is_importable(module, name)


@pytest.mark.parametrize(
    ("alias", "home"),
    [
        ("megatron.core.parallel_state", "megatron.core.parallel.parallel_state"),
        ("megatron.core.process_groups_config", "megatron.core.parallel.process_groups_config"),
        ("megatron.core.hyper_comm_grid", "megatron.core.parallel.hyper_comm_grid"),
        ("megatron.core.timers", "megatron.core.diagnostics.timers"),
    ],
)
def test_import_paths_of_megatron_lm_name_the_same_module(alias, home):
    assert importlib.import_module(alias) is importlib.import_module(home)
