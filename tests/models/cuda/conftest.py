"""The kernels, in Triton's interpreter."""

from testing.gpu.interpreter import import_kernels

import_kernels()
