"""Every place where vllm_duck touches vLLM."""


def install_hooks() -> None:
    """Install nothing yet."""
