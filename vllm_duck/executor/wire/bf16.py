"""bfloat16 in numpy, which has no such dtype: arrays of uint16 that hold the bits."""

import numpy as np
import numpy.typing as npt


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen bf16 bits to float32, exactly."""
    return np.left_shift(bits, np.uint32(16), dtype=np.uint32).view(np.float32)
