"""The MoE kernel, and what its weights are packed from."""
