"""Block FP8 against hand-computed cases and the rounding that e4m3 allows."""

import pytest
import torch

from lanewise.kernels.fp8 import (
    E4M3_MAX,
    dequantize_blocks,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
)

HALF_STEP = 2**-4  # e4m3 keeps 3 bits after the point: normal numbers are off by at most 1/16 of themselves
SUBNORMAL = 2**-10  # and those near zero by half of the smallest step, 2⁻⁹


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (130, 5), (100, 300), (3, 200, 129)])
def test_blocks_come_back_within_e4m3s_rounding(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q, scale = quantize_blocks(weight)
    n, k = shape[-2:]
    assert q.dtype == torch.float8_e4m3fn
    assert q.shape == weight.shape
    assert scale.shape == (*shape[:-2], -(-n // 128), -(-k // 128))
    error = (dequantize_blocks(q, scale) - weight).abs()
    assert (error <= weight.abs() * HALF_STEP + SUBNORMAL * scale.amax()).all()


def test_each_block_has_the_scale_of_its_own_largest_value() -> None:
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[0, 128], weight[129, 0], weight[129, 128] = 448.0, -224.0, 44.8, 7.0
    q, scale = quantize_blocks(weight)
    torch.testing.assert_close(scale, torch.tensor([[1.0, 0.5], [0.1, 7 / 448]]))
    assert q[0, 0].item() == E4M3_MAX
    assert q[0, 128].item() == -E4M3_MAX
    assert q[129, 0].item() == E4M3_MAX
    assert q[129, 128].item() == E4M3_MAX


def test_dequantising_multiplies_each_block_by_its_scale() -> None:
    q = torch.ones(130, 257).to(torch.float8_e4m3fn)
    weight = dequantize_blocks(q, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert weight.dtype == torch.float32
    assert weight[0, [0, 127, 128, 255, 256]].tolist() == [1, 1, 2, 2, 3]
    assert weight[128, [0, 127, 128, 255, 256]].tolist() == [4, 4, 5, 5, 6]


def test_an_all_zero_block_stays_zero() -> None:
    q, scale = quantize_blocks(torch.zeros(128, 256))
    assert scale.isfinite().all()
    assert dequantize_blocks(q, scale).count_nonzero() == 0


def test_a_scale_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(1, 1\) does not cover \(130, 128\)"):
        dequantize_blocks(torch.zeros(130, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))


def test_groups_come_back_within_e4m3s_rounding() -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    x[2, :128] = 0
    q, scale = quantize_groups(x)
    assert scale.shape == (5, 2)
    torch.testing.assert_close(scale[0, 1], x[0, 128:].abs().amax() / E4M3_MAX)
    error = (dequantize_groups(q, scale) - x).abs()
    assert (error <= x.abs() * HALF_STEP + SUBNORMAL * scale.amax()).all()
    assert dequantize_groups(q, scale)[2, :128].count_nonzero() == 0
