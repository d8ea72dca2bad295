"""A checkpoint's routed experts: where they lie, who holds which, how they load."""
