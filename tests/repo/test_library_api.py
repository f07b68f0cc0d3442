"""The library is that of Megatron Core, but for the differences that a file lists with reasons.

`tests/golden/library_differences.json` only shrinks: an entry that no longer differs must go.
"""

from __future__ import annotations

import json

import pytest

from tests.repo import library_api
from tests.repo.source import ROOT

RECORD = ROOT / "tests/golden/library_differences.json"  # reason -> the places that differ
REASONS = {p: why for why, places in json.loads(RECORD.read_text()).items() for p in places}


STARS = {  # what mbridge takes by ``from module import *``
    "transformer.attention": "SelfAttention Tensor Optional Union Tuple BaseInferenceContext "
    "PackedSeqParams deprecate_inference_params",
    "transformer.transformer_block": "TransformerBlock Tensor PackedSeqParams Union Optional "
    "BaseInferenceContext deprecate_inference_params WrappedTensor make_viewless_tensor "
    "nullcontext get_fp8_context te_checkpoint Fp8Recipe tensor_parallel parallel_state torch",
    "models.common.embeddings.rope_utils": "TransformerConfig Tensor fused_apply_rotary_pos_emb",
}


@pytest.mark.parametrize("module", STARS)
def test_an_import_of_everything_has_what_projects_use(module):
    names: dict = {}
    exec(f"from megatron.core.{module} import *", names)
    assert [name for name in STARS[module].split() if name not in names] == []


def test_names_signatures_and_fields_are_those_of_megatron_core():
    found = library_api.differences()
    assert {place: text for place, text in found.items() if place not in REASONS} == {}
    assert [place for place in REASONS if place not in found] == [], "these no longer differ"
    assert all(len(reason.split()) > 3 for reason in REASONS.values())


def test_a_missing_argument_a_required_argument_and_another_default_are_found():
    def function(input_, extra, group=None): ...

    problems = library_api.signature_problems("(input_, weight, group=None)", function)
    assert problems == [
        "argument 1 is extra, not weight",
        "does not accept weight",
        "requires extra",
    ]
