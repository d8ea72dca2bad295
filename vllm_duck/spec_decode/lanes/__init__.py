"""Lanes: a step's rows in parts, so that the host works while the ducks work."""
