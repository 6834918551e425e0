"""How far a result may be from the reference: one table, used by every test and never widened silently.

`rtol` and `atol` mean what `torch.testing.assert_close` means by them. The key is the dtype that a result is
stored in; the reference is always evaluated in fp32 or wider from the same inputs. `atol` is for values of
order one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(rtol=1e-9, atol=1e-10),  # other order of summation
    torch.float32: Tolerance(rtol=1e-4, atol=1e-5),  # other order of summation, over a few layers
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),  # 8 bits: one rounding is 2⁻⁸ ≈ 4e-3
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless `actual` is as near to `expected` as `actual`'s dtype allows."""
    allowed = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=allowed.rtol, atol=allowed.atol)


# The fused MoE layer, by the dtype of its weights: ‖out − reference‖ / ‖reference‖ over the whole tensor.
# FP8: x and h are rounded to e4m3 (3 mantissa bits) in groups of 128, which is nearly all of the error.
MOE_LAYER: dict[torch.dtype, float] = {
    torch.float16: 2e-3,  # in Triton's interpreter, where fp16 stands in for e4m3
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 5e-2,
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖; NaN if `actual` holds one."""
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())
