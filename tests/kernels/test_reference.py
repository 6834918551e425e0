"""The reference against a naive loop over tokens that merges each adapter into its weights, in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lanewise.kernels.lora import ExpertFactors, ExpertWeights, LinearFactors, lora_experts, lora_linear
from lanewise.kernels.tolerances import assert_close

HIDDEN, INNER, EXPERTS, SLOTS = 12, 10, 6, 3


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64)


def bank_of(random: torch.Generator) -> ExpertWeights:
    return ExpertWeights(
        normal(random, EXPERTS, 2 * INNER, HIDDEN) / 3, normal(random, EXPERTS, HIDDEN, INNER) / 3
    )


def factors_of(random: torch.Generator, rank: int, layout: str) -> ExpertFactors:
    outer = 1 if layout == "shared_outer" else EXPERTS
    return ExpertFactors(
        a13=normal(random, SLOTS, outer, 2 * rank, HIDDEN) / 3,
        b13=normal(random, SLOTS, EXPERTS, 2 * INNER, rank) / 3,
        a2=normal(random, SLOTS, EXPERTS, rank, INNER) / 3,
        b2=normal(random, SLOTS, outer, HIDDEN, rank) / 3,
        scale=torch.tensor([1.0, 0.5, 2.0]),
    )


def routes(random: torch.Generator, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Distinct experts for each token, and their weights, which sum to one."""
    scores = torch.rand(tokens, EXPERTS, generator=random, dtype=torch.float64)
    weights, experts = scores.softmax(1).topk(top_k)
    return experts, weights / weights.sum(1, keepdim=True)


def naive_experts(
    x: Tensor, experts: Tensor, weights: Tensor, bank: ExpertWeights, factors: ExpertFactors, slots: Tensor
) -> Tensor:
    """One token and one expert at a time, with W + s·B·A as the weight; gate and up taken apart."""
    rank, out = factors.rank, torch.zeros_like(x)
    for t, slot in enumerate(slots.tolist()):
        for e, p in zip(experts[t].tolist(), weights[t], strict=True):
            gate_w, up_w, down_w = bank.w13[e, :INNER], bank.w13[e, INNER:], bank.w2[e]
            if slot >= 0:
                s = factors.scale[slot].double()
                outer = 0 if factors.shared_outer else e
                a13, b13 = factors.a13[slot, outer], factors.b13[slot, e]
                gate_w = gate_w + s * b13[:INNER] @ a13[:rank]
                up_w = up_w + s * b13[INNER:] @ a13[rank:]
                down_w = down_w + s * factors.b2[slot, outer] @ factors.a2[slot, e]
            gate = gate_w @ x[t]
            h = gate * torch.sigmoid(gate) * (up_w @ x[t])
            out[t] += p * (down_w @ h)
    return out


@pytest.mark.parametrize("layout", ["shared_outer", "stacked"])
@pytest.mark.parametrize("rank", [1, 4])
# One token, a decode batch, and more than run through every expert at once.
@pytest.mark.parametrize("tokens", [1, 9, 90])
def test_experts_equal_merged_weights(random: torch.Generator, layout: str, rank: int, tokens: int) -> None:
    bank, factors = bank_of(random), factors_of(random, rank, layout)
    x = normal(random, tokens, HIDDEN)
    experts, weights = routes(random, tokens, top_k=3)
    slots = torch.arange(tokens) % (SLOTS + 1) - 1  # every adapter and base rows
    y = lora_experts(x, experts, weights, bank, factors, slots)
    assert_close(y, naive_experts(x, experts, weights, bank, factors, slots))


def test_a_long_prompt_of_one_adapter_equals_merged_weights(random: torch.Generator) -> None:
    bank, factors = bank_of(random), factors_of(random, 4, "shared_outer")
    x = normal(random, 200, HIDDEN)
    experts, weights = routes(random, 200, top_k=3)
    slots = torch.full((200,), 1)
    y = lora_experts(x, experts, weights, bank, factors, slots)
    assert_close(y, naive_experts(x, experts, weights, bank, factors, slots))


@pytest.mark.parametrize("tokens", [7, 70])
def test_all_tokens_may_go_to_one_expert(random: torch.Generator, tokens: int) -> None:
    bank, factors = bank_of(random), factors_of(random, 2, "shared_outer")
    x, weights = normal(random, tokens, HIDDEN), torch.ones(tokens, 1, dtype=torch.float64)
    experts, slots = torch.full((tokens, 1), 4), torch.arange(tokens) % SLOTS
    y = lora_experts(x, experts, weights, bank, factors, slots)
    assert_close(y, naive_experts(x, experts, weights, bank, factors, slots))


@pytest.mark.parametrize("tokens", [9, 90])
def test_fp32_is_close_to_fp64(random: torch.Generator, tokens: int) -> None:
    bank, factors = bank_of(random), factors_of(random, 4, "shared_outer")
    x = normal(random, tokens, HIDDEN)
    experts, weights = routes(random, tokens, top_k=3)
    slots = torch.arange(tokens) % (SLOTS + 1) - 1
    single = ExpertFactors(
        factors.a13.float(), factors.b13.float(), factors.a2.float(), factors.b2.float(), factors.scale
    )
    y = lora_experts(x.float(), experts, weights.float(), bank.dequantized(), single, slots)
    assert_close(y, naive_experts(x, experts, weights, bank, factors, slots))


@pytest.mark.parametrize("tokens", [5, 90])
def test_base_rows_are_bit_for_bit_those_without_factors(random: torch.Generator, tokens: int) -> None:
    bank, factors = bank_of(random).dequantized(), factors_of(random, 4, "shared_outer")
    broken = replace(factors, b13=torch.full_like(factors.b13, torch.nan))  # must not leak into base rows
    x = normal(random, tokens, HIDDEN).float()
    experts, weights = routes(random, tokens, top_k=3)
    slots = torch.arange(tokens) % 2 - 1
    mixed = lora_experts(x, experts, weights, bank, broken, slots)
    alone = lora_experts(x, experts, weights, bank)
    assert torch.equal(mixed[slots < 0], alone[slots < 0])
    assert mixed[slots >= 0].isnan().any(dim=1).all()


def test_an_adapter_of_zeros_acts_as_the_base(random: torch.Generator) -> None:
    bank, factors = bank_of(random), factors_of(random, 2, "shared_outer")
    zeros = replace(factors, b13=torch.zeros_like(factors.b13), b2=torch.zeros_like(factors.b2))
    x = normal(random, 8, HIDDEN)
    experts, weights = routes(random, 8, top_k=2)
    y = lora_experts(x, experts, weights, bank, zeros, torch.zeros(8, dtype=torch.long))
    assert torch.equal(y, lora_experts(x, experts, weights, bank))


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("tokens", [1, 9, 90])
def test_linear_equals_merged_weights(random: torch.Generator, rank: int, tokens: int) -> None:
    weight, x = normal(random, 7, HIDDEN), normal(random, tokens, HIDDEN)
    a, b = normal(random, SLOTS, rank, HIDDEN), normal(random, SLOTS, 7, rank)
    scale, slots = torch.tensor([1.0, 0.5, 2.0]), torch.arange(tokens) % (SLOTS + 1) - 1
    y = lora_linear(x @ weight.T, x, LinearFactors(a, b, scale), slots)
    merged = [
        (weight if s < 0 else weight + scale[s].double() * b[s] @ a[s]) @ x[t]
        for t, s in enumerate(slots.tolist())
    ]
    assert_close(y, torch.stack(merged))
    assert torch.equal(y[slots < 0], (x @ weight.T)[slots < 0])


def test_the_delta_joins_a_bf16_base_with_one_rounding(random: torch.Generator) -> None:
    base, x = normal(random, 6, 7).bfloat16(), normal(random, 6, HIDDEN).bfloat16()
    a, b = normal(random, 1, 2, HIDDEN).bfloat16(), normal(random, 1, 7, 2).bfloat16()
    slots = torch.tensor([0, -1, 0, 0, -1, 0])
    y = lora_linear(base, x, LinearFactors(a, b, torch.ones(1)), slots)
    exact = base.double() + (x.double() @ a[0].double().T @ b[0].double().T) * (slots >= 0).unsqueeze(1)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize("layout", ["shared_outer", "stacked"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_gradients_of_experts(random: torch.Generator, layout: str, tokens: int) -> None:
    bank, factors = bank_of(random), factors_of(random, 1, layout)
    experts, weights = routes(random, tokens, top_k=2)
    slots = torch.arange(tokens) % (SLOTS + 1) - 1
    x = normal(random, tokens, HIDDEN).requires_grad_()
    leaves = [t.requires_grad_() for t in (factors.a13, factors.b13, factors.a2, factors.b2)]

    def run(x: Tensor, weights: Tensor, a13: Tensor, b13: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
        return lora_experts(x, experts, weights, bank, ExpertFactors(a13, b13, a2, b2, factors.scale), slots)

    assert torch.autograd.gradcheck(run, (x, weights.requires_grad_(), *leaves), fast_mode=True)


@pytest.mark.parametrize("tokens", [4, 20])
def test_gradients_of_a_linear(random: torch.Generator, tokens: int) -> None:
    a, b = normal(random, SLOTS, 2, HIDDEN), normal(random, SLOTS, 7, 2)
    slots, scale = torch.arange(tokens) % (SLOTS + 1) - 1, torch.tensor([1.0, 0.5, 2.0])
    inputs = [t.requires_grad_() for t in (normal(random, tokens, 7), normal(random, tokens, HIDDEN), a, b)]

    def run(base: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_linear(base, x, LinearFactors(a, b, scale), slots)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
