"""How long a step may wait for lost ducks, so that vLLM does not give its worker up."""

from vllm import envs

from vllm_duck.config import KNOB, DuckConfig
from vllm_duck.errors import DuckConfigError

# For what a step does besides waiting.
_REST_S = 10.0


def step_wait_s(config: DuckConfig) -> float:
    """Seconds after a step's begin at which it gives its lost ducks up.

    A call that is sent just before has its deadline left.
    """
    return envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS - config.deadline_s - _REST_S


def check_step_limit(config: DuckConfig) -> None:
    """Refuse settings with which vLLM would end the engine first.

    Raises:
        DuckConfigError: recover_s and deadline_s are too long together.
    """
    if config.recover_s > 0 and config.recover_s > step_wait_s(config):
        raise DuckConfigError(
            f"duck.recover_s + duck.deadline_s + {_REST_S:g} must be at most vLLM's "
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="
            f"{envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS}, after which it ends the "
            f"engine, got {config.recover_s:g} + {config.deadline_s:g}; raise that "
            f'variable, or lower {KNOB}["recover_s"]'
        )
