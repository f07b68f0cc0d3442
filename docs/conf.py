"""Sphinx's settings for the site of the guide: `make site` writes it to build/site.

The pages are those that are read on GitHub.  The sections of index.md become the navigation, and
each module of ``_MODULES`` gets a page of its docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
# What is imported by programs that build on the library, by page of the reference.
_MODULES = {
    "parallel": """
        megatron.core.parallel.parallel_state megatron.core.parallel.process_groups_config
        megatron.core.parallel.hyper_comm_grid megatron.core.num_microbatches_calculator""",
    "tensor_parallel": """
        megatron.core.tensor_parallel.layers megatron.core.tensor_parallel.mappings
        megatron.core.tensor_parallel.cross_entropy megatron.core.tensor_parallel.random""",
    "models": """
        megatron.core.transformer.transformer_config megatron.core.models.gpt.gpt_model
        megatron.core.models.gpt.gpt_layer_specs megatron.core.models.bert.bert_model
        megatron.core.models.T5.t5_model megatron.core.models.mamba.mamba_model""",
    "layers": """
        megatron.core.transformer.transformer_block megatron.core.transformer.transformer_layer
        megatron.core.transformer.attention megatron.core.transformer.mlp
        megatron.core.transformer.moe.moe_layer megatron.core.transformer.moe.router
        megatron.core.transformer.spec_utils""",
    "training": """
        megatron.core.distributed.distributed_data_parallel
        megatron.core.distributed.finalize_model_grads megatron.core.optimizer
        megatron.core.optimizer.optimizer megatron.core.optimizer.optimizer_config
        megatron.core.optimizer_param_scheduler megatron.core.pipeline_parallel.schedules""",
    "checkpoints": """
        megatron.core.dist_checkpointing.serialization megatron.core.dist_checkpointing.mapping
        megatron.core.dist_checkpointing.module_state""",
    "generation": "megatron.inference.llm",
    "callbacks": "megatron.training.step.run megatron.training.callbacks.user",
}

project = "megatron-train"
html_title = project
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
# Modules list all their names for `import *`; the reference has what each of them defines.
autodoc_default_options = {"members": True, "ignore-module-all": True}
autodoc_typehints_format = "short"
add_module_names = False
# Links to files of the repository and to pages that are not written, dots in JSON, torch's labels.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure", "ref.ref"]


def setup(app: Any) -> None:
    """Register what makes the navigation and the reference."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", with_code_spans)


def write_reference(app: Any) -> None:
    """Write a page for each entry of ``_MODULES`` into docs/api."""
    folder = _HERE / "api"
    folder.mkdir(exist_ok=True)
    for name, modules in _MODULES.items():
        title = name.replace("_", " ").capitalize()
        parts = [f"{title}\n{'=' * len(title)}\n"]
        for module in modules.split():
            parts.append(f"{module}\n{'-' * len(module)}\n\n.. automodule:: {module}\n")
        (folder / f"{name}.rst").write_text("\n".join(parts))


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Append tables of contents, which are not shown, to the index."""
    if page != "index":
        return
    for caption, listed in re.findall(
        r"^([A-Z][^\n]*):\n\n(- .*?)(?=\n\n[A-Z]|\Z)", source[0], re.M | re.S
    ):
        pages = re.findall(r"\[[^]]+\]\((\w+)\.md\)", listed)
        source[0] += _toctree(caption, [p for p in pages if (_HERE / f"{p}.md").exists()])
    source[0] += _toctree("Reference", [f"api/{name}" for name in _MODULES])


def _toctree(caption: str, pages: list[str]) -> str:
    lines = "\n".join(pages)
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def with_code_spans(
    app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]
) -> None:
    """Show `names` in single quotes, and indented examples behind a colon, as code."""
    text = re.sub(r"(?<!`)`([^`<]+)`(?![`_])", r"``\1``", "\n".join(lines))
    lines[:] = re.sub(r"(?<!:):\n\n(?= {4})", "::\n\n", text).split("\n")
