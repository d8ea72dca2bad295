"""The duck_mtp1 proposer and the lanes."""
