"""Figures of a running engine, on their way to the log and to /metrics."""
