"""The path under which scripts import the rerun state machine."""

from megatron.core.rerun.faults import COMPARISON_MATCH as COMPARISON_MATCH
from megatron.core.rerun.faults import COMPARISON_MISMATCH as COMPARISON_MISMATCH
from megatron.core.rerun.faults import QuickStats as QuickStats
from megatron.core.rerun.faults import RerunDiagnostic as RerunDiagnostic
from megatron.core.rerun.faults import RerunErrorInjector as RerunErrorInjector
from megatron.core.rerun.faults import RerunMode as RerunMode
from megatron.core.rerun.faults import RerunState as RerunState
from megatron.core.rerun.faults import RerunValidationStatus as RerunValidationStatus
from megatron.core.rerun.results import Call as Call
from megatron.core.rerun.results import Caller as Caller
from megatron.core.rerun.state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION as EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
)
from megatron.core.rerun.state_machine import (
    EXIT_CODE_RESUME_TO_DISAMBIGUATE as EXIT_CODE_RESUME_TO_DISAMBIGUATE,
)
from megatron.core.rerun.state_machine import RerunDataIterator as RerunDataIterator
from megatron.core.rerun.state_machine import RerunStateMachine as RerunStateMachine
from megatron.core.rerun.state_machine import (
    destroy_rerun_state_machine as destroy_rerun_state_machine,
)
from megatron.core.rerun.state_machine import get_rerun_state_machine as get_rerun_state_machine
from megatron.core.rerun.state_machine import (
    initialize_rerun_state_machine as initialize_rerun_state_machine,
)
