"""When the fused MoE layer applies, and the workspaces it runs in."""

import torch
import triton
from torch import Tensor

from .fp8 import BLOCK
from .lora import ExpertFactors, ExpertWeights
from .moe_layer import MoeWorkspace, moe_layer
from .moe_plan import MoeShape

MAX_RANK = 128
_spaces: dict[tuple[object, ...], MoeWorkspace] = {}


def fused_layer_fits(x: Tensor, bank: ExpertWeights, factors: ExpertFactors | None) -> bool:
    """True where `fused_experts` computes this layer: Hopper, bf16, blocks of 128, shared_outer, no gradient.

    Everything else (per-expert outer sides, training, other chips) is the reference's.
    """
    tensors = [x, *(() if factors is None else (factors.a13, factors.b13, factors.a2, factors.b2))]
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and all(t.dtype == torch.bfloat16 for t in tensors)
        and bank.w13.dtype in (torch.float8_e4m3fn, torch.bfloat16)
        and x.shape[1] % BLOCK == bank.w2.shape[2] % BLOCK == 0
        and (factors is None or (factors.shared_outer and factors.rank <= MAX_RANK))
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def fused_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    bank: ExpertWeights,
    factors: ExpertFactors | None,
    slots: Tensor | None,
) -> Tensor:
    """`lora.lora_experts` by the fused layer; see `moe_layer.moe_layer` for shapes.

    Workspaces are made at a shape's first use, one per power of two of tokens, and shared by all layers that
    run on the same stream. They are kept, since captured graphs point into them; so run a batch once before
    capturing it.
    """
    if factors is None or slots is None:
        factors = slots = None
    size = bank.w2.shape
    shape = MoeShape(
        hidden=size[1],
        inner=size[2],
        experts=size[0],
        top_k=experts.shape[1],
        rank=0 if factors is None else factors.rank,
        slots=0 if factors is None else len(factors.scale),
    )
    tokens = triton.next_power_of_2(len(x))
    key = (shape, tokens, bank.w13.dtype, x.device, torch.cuda.current_stream(x.device).cuda_stream)
    if key not in _spaces:
        _spaces[key] = MoeWorkspace(shape, tokens, x.dtype, bank.w13.dtype, x.device)
    return moe_layer(
        x.contiguous(),
        experts.contiguous(),
        weights.float().contiguous(),
        bank,
        factors,
        None if slots is None else slots.contiguous(),
        _spaces[key],
    )
