"""Command lines of Megatron-LM v0.14's example scripts: accepted, or rightly refused.

`megatron_v014_scripts.json` has the 15 scripts that call one of the four entry programs, on the
ranks they start (mixtral: on the fewest its layout allows), with short paths.  ``refused`` is part
of each error; Megatron-LM v0.14 refuses the same scripts: flags that it has dropped, a ramp-up
beside --train-iters, more pipeline stages than ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.planning.check import check_only
from tests.support.runs import defaults_of

SCRIPTS = json.loads((Path(__file__).parent / "megatron_v014_scripts.json").read_text())
ACCEPTED = {s["script"]: s for s in SCRIPTS if not s["refused"]}


@pytest.mark.feature("Examples: the launch scripts of Megatron-LM v0.14 itself")
@pytest.mark.parametrize("script", SCRIPTS, ids=[s["script"] for s in SCRIPTS])
def test_the_script_is_accepted_or_refused_for_a_right_reason(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        resolve(_parsed(script), script["world_size"])
        message = ""
    except (ConfigError, SystemExit) as error:
        message = f"{error} {capsys.readouterr().err}"
    problems = [line for line in message.splitlines() if line.startswith("  - ")]
    assert len(problems) == len(script["refused"]), message
    for part in script["refused"]:
        assert part in message


@pytest.mark.parametrize(
    "name", ["t5/train_t5_220m_distributed.sh", "mixtral/train_mixtral_8x7b_distributed.sh"]
)
def test_its_plan_names_the_files_that_are_missing(name: str) -> None:
    args, said = _parsed(ACCEPTED[name]), []
    args.check_world_size = ACCEPTED[name]["world_size"]
    assert check_only(args, said.append) == 0, "\n".join(said)
    assert said[0] == f"this run can start on {args.check_world_size} ranks"
    assert any("tokens of" in line and "are assumed" in line for line in said)
    assert any(line.startswith("  - --data-path ") for line in said)


def _parsed(script: dict[str, Any]) -> Any:
    return parse_args(argv=script["words"], args_defaults=defaults_of(script["entry"]))
