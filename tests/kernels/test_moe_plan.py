"""Which plan a batch gets: the nearest measured one, or a default that fits the shape."""

from dataclasses import replace

import pytest

from lanewise.kernels.moe_plan import DIRECT_TOKENS, MoeShape, default_plan, plan_for

H200 = "NVIDIA H200"
Q = MoeShape(hidden=2048, inner=512, experts=256, top_k=8, rank=16, slots=8)
TOKENS = [1, 2, 8, 16, 17, 128, 700, 4096, 16384]


def test_a_measured_shape_gets_its_own_plan() -> None:
    assert plan_for(Q, 1, H200).direct
    assert plan_for(Q, 8, H200).gate_up.stages == 5
    assert plan_for(Q, 4096, H200).rows == 64


def test_a_neighbour_gets_the_nearest_plan() -> None:
    assert plan_for(replace(Q, inner=768, experts=128), 128, H200) == plan_for(Q, 128, H200)
    assert plan_for(Q, 128, "NVIDIA H100 80GB HBM3") == plan_for(Q, 128, H200)


def test_a_far_shape_gets_the_default() -> None:
    far = MoeShape(hidden=256, inner=128, experts=4, top_k=2, rank=16, slots=3)
    assert plan_for(far, 64, H200) == default_plan(far, 64)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rank", [0, 1, 16, 64, 128])
def test_every_plan_can_run_its_batch(tokens: int, rank: int) -> None:
    shape = replace(Q, rank=rank)
    for plan in (plan_for(shape, tokens, H200), default_plan(shape, tokens)):
        assert not plan.direct or tokens <= DIRECT_TOKENS
        assert plan.direct or plan.gate_up.splits == 1
        assert max(plan.gate_up.columns, plan.down.columns) <= 128  # one weight scale per tile


def test_deterministic_mode_has_one_plan_for_all_sizes() -> None:
    assert len({plan_for(Q, tokens, H200, deterministic=True) for tokens in TOKENS}) == 1
