"""Tiny checkpoints of the model families that have no bundled one, random, by name."""
