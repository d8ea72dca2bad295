"""The host's layers on a CPU: C++ kernels on a pool of threads."""
