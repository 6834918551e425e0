"""The normative maths of the LoRA branch in plain torch. Every faster path is checked against this file.

It is also the CPU path and it is differentiable: a trainer runs the server's own forward. Sums are taken
in fp32 (or in fp64 for fp64 inputs) and rounded to the input's dtype once, at the end.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .lora import ExpertFactors, ExpertWeights


def lora_linear(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, slots: Tensor) -> Tensor:
    """y[t] = base[t] + s·B·(A·x[t])  (LoRA, arXiv 2106.09685 eq. 3, with one adapter per row).

    Shapes: base [T, out], x [T, in], a [S, r, in], b [S, out, r], scale [S], slots [T] (−1: base row,
    returned bit for bit) → [T, out] in base's dtype. `x` is the activation before any quantisation.
    """
    wide = _accumulator(x)
    delta = torch.zeros(base.shape, dtype=wide, device=base.device)
    for slot in _slots_present(slots):
        rows = (slots == slot).nonzero().squeeze(1)
        u = x[rows].to(wide) @ a[slot].to(wide).T
        delta = delta.index_add(0, rows, (u @ b[slot].to(wide).T) * scale[slot])
    return (base.to(wide) + delta).to(base.dtype)


def lora_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    bank: "ExpertWeights",
    factors: "ExpertFactors | None" = None,
    slots: Tensor | None = None,
) -> Tensor:
    """One MoE layer's experts with the LoRA branch beside them.

        u     = A13·x                                  once per token where A13 is shared
        [g;v] = W13_e·x + s·B13_e·u                    for each of the token's experts e
        h_e   = silu(g) ⊙ v
        y     = Σ_e p_e·W2_e·h_e + s·B2·(Σ_e p_e·A2_e·h_e)

    With a per-expert B2 the last term is s·Σ_e p_e·B2_e·A2_e·h_e. Source: DESIGN's maths; the shared side
    is XoRL's hybrid-shared recipe, stored by SGLang as `shared_outer`.

    Shapes: x [T, H], experts [T, k], weights [T, k], slots [T] (−1: base row) → [T, H] in x's dtype;
    bank and factors as their classes say.
    """
    wide = _accumulator(x)
    full = bank.dequantized(wide)
    inner = full.w2.shape[2]
    tokens, top_k = experts.shape
    # A "pair" is one (token, expert); pairs are worked on in expert order so that each expert is one GEMM.
    pair_expert, order = experts.flatten().sort(stable=True)
    pair_token = order // top_k
    counts = torch.bincount(pair_expert, minlength=full.w13.shape[0]).tolist()
    xs = x.to(wide)[pair_token]

    gate_up = _per_expert(xs, full.w13, counts)
    if factors is not None and slots is not None:
        gate_up = gate_up + _expand_gate_up(x.to(wide), xs, pair_token, pair_expert, factors, slots)
    h = torch.nn.functional.silu(gate_up[:, :inner]) * gate_up[:, inner:]

    p = weights.flatten()[order].to(wide).unsqueeze(1)
    y = torch.zeros(tokens, x.shape[1], dtype=wide, device=x.device)
    y = y.index_add(0, pair_token, _per_expert(h, full.w2, counts) * p)
    if factors is not None and slots is not None:
        y = y + _down_delta(h, p, tokens, pair_token, pair_expert, factors, slots)
    return y.to(x.dtype)


def _expand_gate_up(
    x: Tensor, xs: Tensor, pair_token: Tensor, pair_expert: Tensor, factors: "ExpertFactors", slots: Tensor
) -> Tensor:
    """s·B13_e·(A13·x) for every pair: [P, 2I]; zero for base rows."""
    rank, wide = factors.rank, x.dtype
    pair_slot = slots[pair_token]
    inner = factors.b13.shape[2] // 2
    out = torch.zeros(len(xs), 2 * inner, dtype=wide, device=x.device)
    for slot in _slots_present(slots):
        pairs = (pair_slot == slot).nonzero().squeeze(1)
        e = pair_expert[pairs]
        if factors.a13.shape[1] == 1:
            u = (x @ factors.a13[slot, 0].to(wide).T)[pair_token[pairs]]
        else:
            u = _each(factors.a13[slot].to(wide), e, xs[pairs])
        b13 = factors.b13[slot].to(wide)
        delta = torch.cat(
            [_each(b13[:, :inner], e, u[:, :rank]), _each(b13[:, inner:], e, u[:, rank:])], dim=1
        )
        out = out.index_add(0, pairs, delta * factors.scale[slot])
    return out


def _down_delta(
    h: Tensor,
    p: Tensor,
    tokens: int,
    pair_token: Tensor,
    pair_expert: Tensor,
    factors: "ExpertFactors",
    slots: Tensor,
) -> Tensor:
    """s·B2·Σ_e p_e·A2_e·h_e for every token: [T, H]; zero for base rows."""
    wide, pair_slot = h.dtype, slots[pair_token]
    out = torch.zeros(tokens, factors.b2.shape[2], dtype=wide, device=h.device)
    for slot in _slots_present(slots):
        pairs = (pair_slot == slot).nonzero().squeeze(1)
        e, t = pair_expert[pairs], pair_token[pairs]
        low = _each(factors.a2[slot].to(wide), e, h[pairs]) * p[pairs]
        b2 = factors.b2[slot].to(wide)
        if len(b2) == 1:
            sums = torch.zeros(tokens, factors.rank, dtype=wide, device=h.device).index_add(0, t, low)
            out = out + (sums @ b2[0].T) * factors.scale[slot]
        else:
            out = out.index_add(0, t, _each(b2, e, low) * factors.scale[slot])
    return out


def _per_expert(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """x[i]·W_eᵀ for rows sorted by expert: x [P, K], weight [E, N, K], counts of rows per expert → [P, N]."""
    parts = x.split(counts)
    return torch.cat([part @ w.T for part, w in zip(parts, weight, strict=True)])


def _each(weight: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """weight[index[i]]·x[i] for every row: weight [E, N, K], index [P], x [P, K] → [P, N]."""
    return torch.bmm(weight[index], x.unsqueeze(2)).squeeze(2)


def _slots_present(slots: Tensor) -> list[int]:
    return [slot for slot in slots.unique().tolist() if slot >= 0]


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
