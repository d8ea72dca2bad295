"""Directories that hold one duck's share of a checkpoint."""
