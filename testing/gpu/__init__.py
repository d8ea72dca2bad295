"""A GPU that is none, for what must hold whenever its kernels run."""
