"""The package's version, and vLLM's; setup.py reads both."""

__version__ = "0.1.0"
# The one version of vLLM that this package is written for.
VLLM_VERSION = "0.32.0"
