"""Faults at random while an engine decodes: its tokens stay the undisturbed ones."""
