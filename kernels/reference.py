"""The normative maths of the LoRA branch in plain torch. Every faster path is checked against this file.

It is also the CPU path and it is differentiable: a trainer runs the server's own forward. Sums are taken
in fp32 (or in fp64 for fp64 inputs) and rounded to the input's dtype once, at the end.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .lora import ExpertFactors, ExpertWeights

# Which of two ways of multiplying is faster, as measured on a CPU; neither changes a result's meaning.
_MAX_GATHER = 1 << 20  # elements: up to here, copying each row's matrix beats one GEMM per distinct matrix
_MAX_DENSE_TOKENS = 64  # up to here, every expert on every token beats one GEMM per expert that is used


def lora_linear(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, slots: Tensor) -> Tensor:
    """y[t] = base[t] + s·B·(A·x[t])  (LoRA, arXiv 2106.09685 eq. 3, with one adapter per row).

    Shapes: base [T, out], x [T, in], a [S, r, in], b [S, out, r], scale [S], slots [T] (−1: base row,
    returned bit for bit) → [T, out] in base's dtype. `x` is the activation before any quantisation.
    """
    wide = _accumulator(x)
    rows = (slots >= 0).nonzero().squeeze(1)
    slot = slots[rows]
    delta = _each(b, slot, _each(a, slot, x[rows].to(wide))) * scale[slot].unsqueeze(1)
    return base.to(wide).index_add(0, rows, delta.to(wide)).to(base.dtype)


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
        h_e   = silu(g_e) ⊙ v_e
        y     = Σ_e p_e·W2_e·h_e + s·B2·(Σ_e p_e·A2_e·h_e)

    With a per-expert B2 the last term is s·Σ_e p_e·B2_e·A2_e·h_e. Source: DESIGN's maths; the shared side
    is XoRL's hybrid-shared recipe, stored by SGLang as `shared_outer`.

    Shapes: x [T, H], experts [T, k], weights [T, k], slots [T] (−1: base row) → [T, H] in x's dtype;
    bank and factors as their classes say. A token's experts are distinct.
    """
    wide = _accumulator(x)
    full, xw = bank.dequantized(wide), x.to(wide)
    gate_up = _base_gate_up(xw, experts, full.w13)
    if factors is not None and slots is not None:
        gate_up = _add_gate_up_lora(gate_up, xw, experts, factors, slots)
    gate, up = gate_up.chunk(2, dim=2)
    ph = torch.nn.functional.silu(gate) * up * weights.to(wide).unsqueeze(2)  # p_e·h_e: [T, k, I]
    y = _base_down(ph, experts, full.w2)
    if factors is not None and slots is not None:
        y = _add_down_lora(y, ph, experts, factors, slots)
    return y.to(x.dtype)


def _base_gate_up(x: Tensor, experts: Tensor, w13: Tensor) -> Tensor:
    """W13_e·x[t] for the experts e of each token: x [T, H], experts [T, k] → [T, k, 2I]."""
    tokens, top_k = experts.shape
    if _dense(experts, len(w13)):
        every = torch.matmul(x, w13.mT)  # [E, T, 2I]
        return every[experts, torch.arange(tokens, device=x.device).unsqueeze(1)]
    return _grouped(w13, experts.flatten(), x.repeat_interleave(top_k, 0)).unflatten(0, (tokens, top_k))


def _base_down(ph: Tensor, experts: Tensor, w2: Tensor) -> Tensor:
    """Σ_e W2_e·(p_e·h_e) for each token: ph [T, k, I], experts [T, k] → [T, H]."""
    tokens, top_k, inner = ph.shape
    if _dense(experts, len(w2)):
        every = ph.new_zeros(len(w2), tokens, inner)
        token = torch.arange(tokens, device=ph.device).unsqueeze(1)
        return torch.matmul(every.index_put((experts, token), ph), w2.mT).sum(0)
    return _grouped(w2, experts.flatten(), ph.flatten(0, 1)).unflatten(0, (tokens, top_k)).sum(1)


def _add_gate_up_lora(
    gate_up: Tensor, x: Tensor, experts: Tensor, factors: "ExpertFactors", slots: Tensor
) -> Tensor:
    """gate_up[t] + s·B13_e·(A13·x[t]): gate_up [T, k, 2I], x [T, H]; base rows are left as they are."""
    rows = (slots >= 0).nonzero().squeeze(1)
    slot, expert, top_k = slots[rows], experts[rows], experts.shape[1]
    pair = _pair_index(slot, expert, factors.b13.shape[1])
    a13 = factors.a13.flatten(0, 1)
    if factors.a13.shape[1] == 1:
        u = _each(a13, slot, x[rows]).unsqueeze(1).expand(-1, top_k, -1)
    else:
        u = _each(a13, pair, x[rows].repeat_interleave(top_k, 0))
    # Gate and up are two factor pairs that share one tensor: matrices 2·pair and 2·pair + 1 here.
    b13 = factors.b13.unflatten(2, (2, -1)).flatten(0, 2)  # [S·E·2, I, r]
    halves = torch.stack([2 * pair, 2 * pair + 1], dim=1).flatten()
    delta = _each(b13, halves, u.reshape(-1, factors.rank)).view(len(rows), top_k, factors.b13.shape[2])
    return gate_up.index_add(0, rows, (delta * factors.scale[slot].view(-1, 1, 1)).to(x.dtype))


def _add_down_lora(y: Tensor, ph: Tensor, experts: Tensor, factors: "ExpertFactors", slots: Tensor) -> Tensor:
    """y[t] + s·Σ_e B2_e·(A2_e·p_e·h_e): y [T, H], ph [T, k, I]; base rows are left as they are."""
    rows = (slots >= 0).nonzero().squeeze(1)
    slot, expert, per_token = slots[rows], experts[rows], (len(rows), experts.shape[1])
    pair = _pair_index(slot, expert, factors.a2.shape[1])
    low = _each(factors.a2.flatten(0, 1), pair, ph[rows].flatten(0, 1))  # [R·k, r]
    b2 = factors.b2.flatten(0, 1)
    if factors.b2.shape[1] == 1:
        delta = _each(b2, slot, low.unflatten(0, per_token).sum(1))
    else:
        delta = _each(b2, pair, low).unflatten(0, per_token).sum(1)
    return y.index_add(0, rows, (delta * factors.scale[slot].unsqueeze(1)).to(y.dtype))


def _pair_index(slots: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """Where a (token, expert) pair's factors lie once slots and experts are one axis: [T·k]."""
    return (slots.unsqueeze(1) * num_experts + experts).flatten()


def _dense(experts: Tensor, num_experts: int) -> bool:
    """Whether to run all experts on all tokens: few tokens, yet enough to use most of the experts."""
    tokens, top_k = experts.shape
    return tokens <= _MAX_DENSE_TOKENS and 2 * tokens * top_k >= num_experts


def _each(weight: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """weight[index[i]]·x[i] for every row: weight [G, N, K], index [P], x [P, K] → [P, N]."""
    rows, (matrices, n, k) = len(index), weight.shape
    if rows > 4 * matrices or rows * n * k > _MAX_GATHER:
        return _grouped(weight, index, x)
    own = weight.index_select(0, index).to(x.dtype)
    return torch.bmm(x.unsqueeze(1), own.mT).squeeze(1)  # a row times a matrix: faster than own·column


def _grouped(weight: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """The same as `_each` with one GEMM per matrix in use: rows are sorted by it, and sorted back."""
    order = index.argsort(stable=True)
    groups, counts = index[order].unique_consecutive(return_counts=True)
    matrices = weight.unbind()  # unlike weight[g], cheap to differentiate
    parts = zip(groups.tolist(), x.index_select(0, order).split(counts.tolist()), strict=True)
    rows = [part @ matrices[group].to(x.dtype).T for group, part in parts]
    out = torch.cat(rows) if rows else x.new_zeros(0, weight.shape[1])
    return out.index_select(0, order.argsort())


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
