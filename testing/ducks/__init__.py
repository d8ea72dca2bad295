"""Ducks for tests and benchmarks: small models, references, peers that misbehave."""
