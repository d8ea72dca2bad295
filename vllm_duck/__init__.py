"""vllm_duck: DeepSeek-V3.2 in vLLM, with the routed experts on other machines."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""
    from vllm_duck.hooks import install_hooks

    install_hooks()
