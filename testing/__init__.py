"""What tests and benchmarks share: engines, references, peers that misbehave."""
