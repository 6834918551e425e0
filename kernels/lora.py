"""The active LoRA path: two public ops, and the tensors they read.

`lora_linear` adapts a plain linear module, `lora_experts` a whole bank of MoE experts. Both take any mix
of adapters and base rows in one batch: `slots[t]` says which slot of the factor pool row t uses, −1 says
none. The maths is in `reference.py`; faster paths are checked against it and chosen here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from .fp8 import dequantize_blocks

BASE_SLOT = -1


@dataclass(frozen=True)
class ExpertWeights:
    """A bank of E frozen gated experts; gate rows come before up rows in `w13`.

    Shapes: w13 [E, 2I, H], w2 [E, H, I]; block-FP8 weights come with scales s13 [E, ⌈2I/128⌉, ⌈H/128⌉] and
    s2 [E, ⌈H/128⌉, ⌈I/128⌉] (fp32), unquantised ones without.
    """

    w13: Tensor
    w2: Tensor
    s13: Tensor | None = None
    s2: Tensor | None = None

    @property
    def quantized(self) -> bool:
        return self.s13 is not None

    def dequantized(self, dtype: torch.dtype = torch.float32) -> "ExpertWeights":
        """The same bank with its weights as plain tensors of `dtype`."""
        if self.s13 is None or self.s2 is None:
            return ExpertWeights(self.w13.to(dtype), self.w2.to(dtype))
        return ExpertWeights(
            dequantize_blocks(self.w13, self.s13, dtype), dequantize_blocks(self.w2, self.s2, dtype)
        )


@dataclass(frozen=True)
class LinearFactors:
    """Factor pool of one linear module: a [S, r, in], b [S, out, r], scale [S] fp32 (alpha / r).

    Adapters of a lower rank than the pool's r leave their last rows of `a` and columns of `b` zero.
    """

    a: Tensor
    b: Tensor
    scale: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True)
class ExpertFactors:
    """Factor pool of one expert bank, S slots; in `shared_outer` the outer sides have E' = 1, else E' = E.

    Shapes: a13 [S, E', 2r, H] (gate's A, then up's), b13 [S, E, 2I, r] (gate's B, then up's),
    a2 [S, E, r, I], b2 [S, E', H, r], scale [S] fp32 (alpha / r).
    """

    a13: Tensor
    b13: Tensor
    a2: Tensor
    b2: Tensor
    scale: Tensor

    @property
    def rank(self) -> int:
        return self.a2.shape[2]

    @property
    def shared_outer(self) -> bool:
        return self.a13.shape[1] == 1 and self.b2.shape[1] == 1


def lora_linear(base: Tensor, x: Tensor, factors: LinearFactors, slots: Tensor) -> Tensor:
    """y[t] = base[t] + s·B·(A·x[t]) with the factors of row t's slot; see `reference.lora_linear`.

    Shapes: base [T, out], x [T, in], slots [T] int (−1: base row) → [T, out] in base's dtype.
    """
    return reference.lora_linear(base, x, factors.a, factors.b, factors.scale, slots)


def lora_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    bank: ExpertWeights,
    factors: ExpertFactors | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """y[t] = Σ_e p_e·(W2_e·h_e + LoRA), with the factors of row t's slot; see `reference.lora_experts`.

    Shapes: x [T, H], experts [T, k] int (which experts), weights [T, k] (their p), slots [T] int (−1: base
    row) → [T, H] in x's dtype. Without factors the whole batch is base rows.
    """
    if x.is_cuda:
        from .moe_dispatch import fused_experts, fused_layer_fits  # Triton, which a CPU does without

        if fused_layer_fits(x, bank, factors):
            return fused_experts(x, experts, weights, bank, factors, slots)
    return reference.lora_experts(x, experts, weights, bank, factors, slots)
