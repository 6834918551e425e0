"""The fused MoE layer against the normative reference.

On a GPU the kernels are compiled; elsewhere Triton's interpreter (see `tests/conftest.py`) runs them on small
shapes, where fp16 stands in for e4m3, which numpy has not. That is tight enough to see a wrong index.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lanewise.kernels import moe_layer as layer
from lanewise.kernels import reference
from lanewise.kernels.fp8 import quantize_blocks
from lanewise.kernels.lora import ExpertFactors, ExpertWeights, lora_experts
from lanewise.kernels.moe_layer import MoeWorkspace, moe_layer
from lanewise.kernels.moe_plan import GemmTile, MoeShape, Plan
from lanewise.kernels.tolerances import MOE_LAYER, relative_error

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a Hopper GPU")
FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """A bank, its factor pool and one batch; `run` is the fused layer, `expected` the reference."""

    shape: MoeShape
    bank: ExpertWeights
    factors: ExpertFactors
    x: Tensor
    experts: Tensor
    weights: Tensor
    slots: Tensor

    def run(self, space: MoeWorkspace, plan: Plan | None = None, lora: bool = True) -> Tensor:
        poison(space)
        out = torch.full_like(self.x, torch.nan)
        factors, slots = (self.factors, self.slots) if lora else (None, None)
        moe_layer(self.x, self.experts, self.weights, self.bank, factors, slots, space, out, plan)
        assert not space.counts.any(), "the routing counters must be left at zero"
        return out

    def expected(self, lora: bool = True) -> Tensor:
        factors, slots = (self.factors, self.slots.long()) if lora else (None, None)
        return reference.lora_experts(
            self.x.float(), self.experts.long(), self.weights, self.bank, factors, slots
        )

    def take(self, rows: Tensor) -> "Case":
        """The same bank and pool with only these rows of the batch."""
        return replace(
            self,
            x=self.x[rows],
            experts=self.experts[rows],
            weights=self.weights[rows],
            slots=self.slots[rows],
        )


def poison(space: MoeWorkspace) -> None:
    """NaN in every floating buffer: whatever is read must have been written in the same call."""
    for buffer in vars(space).values():
        if isinstance(buffer, Tensor) and buffer.is_floating_point():
            buffer.view(torch.uint8).fill_(0xFF)


def draw_case(
    shape: MoeShape, tokens: int, quant: bool = True, seed: int = 0, mix: str = "uniform", skew: bool = False
) -> Case:
    """Random weights of realistic magnitude; LoRA moves the output by about as much as the base is large."""
    device = "cuda" if GPU else "cpu"
    draw = torch.Generator(device=device).manual_seed(seed)
    act = torch.bfloat16 if GPU else torch.float16

    def normal(*size: int, fan: int) -> Tensor:
        return torch.randn(size, generator=draw, device=device) / fan**0.5

    H, I, E, S, r = shape.hidden, shape.inner, shape.experts, shape.slots, max(1, shape.rank)  # noqa: E741
    w13, w2 = normal(E, 2 * I, H, fan=H), normal(E, H, I, fan=I)
    bank = ExpertWeights(w13.to(act), w2.to(act))
    if quant:
        (q13, s13), (q2, s2) = quantize_blocks(w13), quantize_blocks(w2)
        stored = FP8 if GPU else act
        bank = ExpertWeights(q13.to(stored), q2.to(stored), s13, s2)
    factors = ExpertFactors(
        a13=normal(S, 1, 2 * r, H, fan=H).to(act),  # gate's A and up's A differ
        b13=normal(S, E, 2 * I, r, fan=4 * r).to(act),
        a2=normal(S, E, r, I, fan=I).to(act),
        b2=normal(S, 1, H, r, fan=r).to(act),
        scale=0.5 + torch.rand(S, generator=draw, device=device),
    )
    scores = torch.rand(tokens, E, generator=draw, device=device)
    if skew:  # everyone goes to the first top-k experts, the others stay empty
        scores[:, : shape.top_k] += 1
    weights = torch.rand(tokens, shape.top_k, generator=draw, device=device) + 0.2
    return Case(
        shape,
        bank,
        factors,
        x=normal(tokens, H, fan=1).to(act),
        experts=scores.topk(shape.top_k, dim=1).indices.int(),
        weights=weights / weights.sum(1, keepdim=True),
        slots=MIXES[mix](tokens, S, draw).int().to(device),
    )


def zipf(tokens: int, slots: int, draw: torch.Generator) -> Tensor:
    odds = 1 / torch.arange(1, slots + 1, device=draw.device)
    return torch.multinomial(odds, tokens, replacement=True, generator=draw)


# Popularity of adapters in a batch: slot per token, −1 for base rows.
MIXES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "base": lambda tokens, slots, draw: torch.full((tokens,), -1),
    "identical": lambda tokens, slots, draw: torch.full((tokens,), slots - 1),
    "distinct": lambda tokens, slots, draw: torch.arange(tokens) % slots,
    "uniform": lambda tokens, slots, draw: torch.randint(
        -1, slots, (tokens,), generator=draw, device=draw.device
    ),
    "zipf": zipf,
    "between": lambda tokens, slots, draw: torch.where(
        torch.arange(tokens) % 2 == 0, -1, torch.arange(tokens) % slots
    ),
}


def space_for(case: Case, tokens: int | None = None, deterministic: bool = False) -> MoeWorkspace:
    return MoeWorkspace(
        case.shape,
        tokens or len(case.x) + 3,
        dtype=case.x.dtype,
        weight_dtype=case.bank.w13.dtype,
        device=case.x.device,
        deterministic=deterministic,
    )


def check(case: Case, space: MoeWorkspace, plan: Plan | None = None, lora: bool = True) -> None:
    out, expected = case.run(space, plan, lora), case.expected(lora)
    assert relative_error(out, expected) <= MOE_LAYER[case.bank.w13.dtype]


SMALL = MoeShape(hidden=256, inner=128, experts=4, top_k=2, rank=16, slots=3)
ODD = MoeShape(hidden=384, inner=256, experts=5, top_k=3, rank=5, slots=4)
NARROW = GemmTile(columns=64)
INTERPRETED = {
    "direct": (
        3,
        Plan(direct=True, gate_up=replace(NARROW, splits=2), down=NARROW, shrink_splits=2, pdl=False),
    ),
    "pairs": (11, Plan(gate_up=NARROW, down=NARROW, pdl=False)),
    "tiles": (
        11,
        Plan(
            activation="tiles",
            lane_rows=32,
            expand_columns=0,
            gate_up=replace(NARROW, weights_first=False),
            down=NARROW,
            shrink_rows=32,
            pdl=False,
        ),
    ),
}


@pytest.fixture(params=[False, True], ids=["one-sorter", "many-sorters"])
def sorters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to sort the pairs, also where the batch is small."""
    if request.param:
        monkeypatch.setattr(layer, "_LARGE_SORT", 16)
        monkeypatch.setattr(layer, "_PAIR_CHUNK", 16)


@pytest.mark.skipif(GPU, reason="the GPU tests compile the same kernels")
class TestInterpreted:
    @pytest.mark.parametrize("name", INTERPRETED)
    def test_mixed_batch(self, name: str) -> None:
        tokens, plan = INTERPRETED[name]
        case = draw_case(SMALL, tokens)
        space = space_for(case)
        check(case, space, plan)
        check(case, space, plan, lora=False)

    @pytest.mark.parametrize("name", INTERPRETED)
    def test_unquantised_base(self, name: str) -> None:
        tokens, plan = INTERPRETED[name]
        case = draw_case(SMALL, tokens, quant=False)
        check(case, space_for(case), plan)

    @pytest.mark.usefixtures("sorters")
    @pytest.mark.parametrize("name", ["pairs", "tiles"])
    def test_odd_sizes_and_hot_experts(self, name: str) -> None:
        tokens, plan = INTERPRETED[name]
        case = draw_case(ODD, tokens, skew=True, mix="between")
        check(case, space_for(case), plan)

    @pytest.mark.parametrize("name", INTERPRETED)
    def test_base_rows_are_the_base(self, name: str) -> None:
        """Bit for bit: a batch of base rows with LoRA on, and with it off."""
        tokens, plan = INTERPRETED[name]
        case = draw_case(SMALL, tokens, mix="base")
        space = space_for(case)
        assert torch.equal(case.run(space, plan), case.run(space, plan, lora=False))


MEDIUM = MoeShape(hidden=640, inner=384, experts=48, top_k=6, rank=16, slots=8)
Q = MoeShape(hidden=2048, inner=512, experts=256, top_k=8, rank=16, slots=8)
G = MoeShape(hidden=6144, inner=256, experts=256, top_k=8, rank=64, slots=8)
TOKENS = [1, 2, 7, 8, 31, 32, 128, 513, 4096]


@needs_gpu
@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("rank", [1, 8, 16, 64, 128])
    @pytest.mark.parametrize("tokens", TOKENS)
    def test_ranks(self, tokens: int, rank: int) -> None:
        case = draw_case(replace(MEDIUM, rank=rank), tokens)
        check(case, space_for(case))

    @pytest.mark.parametrize("shape", [Q, G], ids="QG")
    @pytest.mark.parametrize("tokens", TOKENS)
    def test_served_shapes(self, tokens: int, shape: MoeShape) -> None:
        case = draw_case(shape, tokens)
        space = space_for(case)
        check(case, space)
        check(case, space, lora=False)

    @pytest.mark.parametrize("slots", [1, 8, 32, 64])
    @pytest.mark.parametrize("mix", MIXES)
    def test_popularity(self, mix: str, slots: int) -> None:
        for tokens in (8, 128, 2048):
            case = draw_case(replace(MEDIUM, slots=slots), tokens, mix=mix)
            check(case, space_for(case))

    @pytest.mark.parametrize("tokens", [8, 128, 2048])
    def test_hot_and_empty_experts(self, tokens: int) -> None:
        case = draw_case(MEDIUM, tokens, skew=True)
        check(case, space_for(case))

    @pytest.mark.parametrize("tokens", [8, 128, 2048])
    def test_a_captured_graph_follows_its_inputs(self, tokens: int) -> None:
        """Routing, slots and activations are data: the graph of one batch serves the next."""
        first, second = (draw_case(MEDIUM, tokens, mix=mix) for mix in ("identical", "uniform"))
        space, out = space_for(first), torch.empty_like(first.x)
        batch = replace(first, x=first.x.clone(), experts=first.experts.clone(), slots=first.slots.clone())

        def step() -> None:
            moe_layer(
                batch.x, batch.experts, batch.weights, batch.bank, batch.factors, batch.slots, space, out
            )

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        shuffled = torch.randperm(tokens, device="cuda")
        batch.x.copy_(second.x[shuffled])
        batch.experts.copy_(second.experts[shuffled])
        batch.slots.copy_(second.slots)
        graph.replay()
        assert relative_error(out, batch.expected()) <= MOE_LAYER[FP8]

    @pytest.mark.parametrize("tokens", [1, 8, 128, 2048])
    def test_unquantised_base(self, tokens: int) -> None:
        case = draw_case(MEDIUM, tokens, quant=False)
        check(case, space_for(case))

    @pytest.mark.parametrize("tokens", [8, 128, 2048])
    def test_base_rows_are_the_base(self, tokens: int) -> None:
        """Bit for bit in deterministic mode: base rows among adapters, and the base alone."""
        case = draw_case(MEDIUM, tokens, mix="between")
        space = space_for(case, deterministic=True)
        base = case.slots < 0
        assert torch.equal(case.run(space)[base], case.run(space, lora=False)[base])

    def test_the_public_op_takes_the_fused_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = draw_case(MEDIUM, 32)
        expected = case.expected()
        arguments = (case.x, case.experts.long(), case.weights, case.bank, case.factors, case.slots.long())
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.delattr(reference, "lora_experts")
            assert relative_error(lora_experts(*arguments), expected) <= MOE_LAYER[FP8]
        case.factors.a2.requires_grad_()
        assert lora_experts(*arguments).requires_grad  # a trainer's forward is the reference's

    def test_deterministic_rows(self) -> None:
        """In deterministic mode a row's bytes depend on nothing beside it: alone, in any batch, anywhere."""
        case = draw_case(MEDIUM, 512)
        space = space_for(case, deterministic=True)
        alone = torch.cat([case.take(torch.tensor([row])).run(space) for row in range(len(case.x))])
        draw = torch.Generator().manual_seed(1)
        for _ in range(1000):
            tokens = int(torch.randint(1, 400, (), generator=draw))
            rows = torch.randint(0, len(case.x), (tokens,), generator=draw)
            assert torch.equal(case.take(rows).run(space), alone[rows])
