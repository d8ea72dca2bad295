"""What of vLLM is overridden or read without being public, and why: a ledger.

`hooks.HOOKS` says what is wrapped; this says what our subclasses rely on. A method
that the next vLLM renames would otherwise be silently dead code in ours. `check_seams`
runs in the worker before its runner is built; `scripts/check_vllm.py` holds both
ledgers, and the bodies that we follow, against the source of any version.
"""

from vllm_duck.errors import DuckError
from vllm_duck.seam import seam_problem
from vllm_duck.vllm_seams.engine import ENGINE_SEAMS
from vllm_duck.vllm_seams.runner import RUNNER_SEAMS

# Releases whose source was held against the ledgers without a difference, and which no
# engine ran: there is no CPU wheel of them yet.
READ_NOT_RUN = ("0.33.0",)

SEAMS = (*ENGINE_SEAMS, *RUNNER_SEAMS)


def check_seams() -> None:
    """Look every name of the ledger up in the vLLM that is installed.

    Raises:
        DuckError: a name is gone, or takes other parameters.
    """
    for seam in SEAMS:
        problem = seam_problem(seam)
        if problem:
            raise DuckError(
                f"{seam.target} {problem} in this vLLM; vllm_duck relies on it "
                f"({seam.why}): see scripts/check_vllm.py"
            )
