"""What a fleet will do before it is bought: bytes, milliseconds, tokens a second.

Arithmetic alone, from a config.json; docs/planning.md has the formulas.
"""
