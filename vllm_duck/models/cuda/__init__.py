"""The host's layers on one GPU: CUDA graphs, and memory that the sockets share."""
