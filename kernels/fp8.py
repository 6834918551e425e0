"""Block FP8: the storage format of the base's weights and the rounding of its activations.

Format: e4m3 values with one fp32 scale per 128×128 block of a weight and per 128-wide group of a row
of activations, as DeepSeek-V3 introduced it (arXiv 2412.19437 §3.3) and the `weight_scale_inv` tensors
of Hugging Face checkpoints store it. `scale` below always multiplies: value = float(q) · scale.
"""

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0
_SMALLEST = 1e-10  # keeps an all-zero block's scale finite


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to block FP8.

    Shapes: weight [..., N, K] → (q e4m3 [..., N, K], scale fp32 [..., ⌈N/128⌉, ⌈K/128⌉]).
    Edge blocks may be partial; they have a scale of their own like any other.
    """
    n, k = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., n', 128, k', 128]
    scale = blocks.abs().amax(dim=(-3, -1)).clamp(min=_SMALLEST) / E4M3_MAX
    q = (blocks / scale[..., :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    q = q.flatten(-2).flatten(-3, -2)[..., :n, :k]
    return q.to(torch.float8_e4m3fn).contiguous(), scale


def scale_shape(shape: torch.Size) -> tuple[int, ...]:
    """The shape of the scales of a weight of this shape: [..., N, K] → (..., ⌈N/128⌉, ⌈K/128⌉)."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def dequantize_blocks(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that block FP8 stands for: W[n,k] = float(q[n,k]) · scale[n/128, k/128].

    Shapes: q e4m3 [..., N, K], scale fp32 [..., ⌈N/128⌉, ⌈K/128⌉] → [..., N, K] in `dtype`.
    """
    n, k = q.shape[-2:]
    assert scale.shape == scale_shape(q.shape), f"scale {tuple(scale.shape)} does not cover {tuple(q.shape)}"
    wide = scale.repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
    return (q.float() * wide).to(dtype)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations the way the FP8 GEMMs do, one scale per row and group of 128 columns.

    Shapes: x [..., K] with K a multiple of 128 → (q e4m3 [..., K], scale fp32 [..., K/128]).
    """
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1).clamp(min=_SMALLEST) / E4M3_MAX
    q = (groups / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return q.flatten(-2).to(torch.float8_e4m3fn), scale


def dequantize_groups(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `quantize_groups`: q e4m3 [..., K], scale fp32 [..., K/128] → [..., K] in `dtype`."""
    return (q.float().unflatten(-1, (-1, BLOCK)) * scale.unsqueeze(-1)).flatten(-2).to(dtype)
