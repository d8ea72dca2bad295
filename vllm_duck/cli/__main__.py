"""`python -m vllm_duck.cli`: the `vllm-duck` command where no script is installed."""

import sys

from vllm_duck.cli import main

sys.exit(main())
