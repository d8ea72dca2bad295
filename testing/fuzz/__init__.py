"""Damaged input for everything that reads what others wrote: an error or the truth."""
