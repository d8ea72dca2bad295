"""The `vllm-duck` command."""


def main() -> int:
    raise SystemExit("vllm-duck: no command yet")
