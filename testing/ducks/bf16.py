"""float32 in numpy rounded to bfloat16: the inverse of executor/wire/bf16.py."""

import numpy as np
import numpy.typing as npt

_QUIET_NAN = np.uint16(0x7FC0)


def f32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16 bits: to nearest, ties to even; NaN stays NaN."""
    wide = values.view(np.uint32)
    # Adding just under half of the dropped part, plus the kept part's last bit,
    # carries into the kept part exactly when rounding up is right.
    rounded = np.right_shift(wide, np.uint32(16))
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += wide
    rounded >>= np.uint32(16)
    bits = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        bits[is_nan] = _QUIET_NAN
    return bits
