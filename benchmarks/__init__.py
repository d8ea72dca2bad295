"""Benchmarks: each runs our side and the peer's side in one run and prints ratios."""
