"""The model on the host: everything but the routed experts."""
