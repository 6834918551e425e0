"""Attached models against transformers' own forward on merged weights, and what the pool refuses."""

import copy
import re
from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lanewise.kernels.attach import ExpertLayout, LanePool, attach
from lanewise.kernels.base import load_base
from lanewise.kernels.tolerances import assert_close

Pair = tuple[str, Tensor, Tensor, float]
LENGTH = 24
IDS = torch.arange(2 * LENGTH).view(2, LENGTH)
SCALE = 0.5
EXPERTS = "model.layers.0.mlp.experts"
ROUTER = "model.layers.0.mlp.gate"
QUERY = "model.layers.0.self_attn.q_proj"


class Checkpoint(Protocol):
    config: PreTrainedConfig
    model: PreTrainedModel
    tensors: dict[str, Tensor]


@pytest.fixture
def base(checkpoint: Checkpoint) -> PreTrainedModel:
    return load_base(checkpoint.config.to_dict(), checkpoint.tensors.items())


def random_pairs(pool: LanePool, rank: int, seed: int, wanted: Callable[[str], bool]) -> list[Pair]:
    random = torch.Generator().manual_seed(seed)
    pairs: list[Pair] = []
    for module in pool.modules:
        if wanted(module):
            a, b = pool.shapes(module)
            first = torch.randn(*a[:-2], rank, a[-1], generator=random) * 0.2
            second = torch.randn(*b[:-1], rank, generator=random) * 0.2
            pairs.append((module, first, second, SCALE))
    return pairs


def merged(model: PreTrainedModel, pairs: list[Pair]) -> PreTrainedModel:
    """A copy of transformers' own model with W + s·B·A for its weights."""
    model = copy.deepcopy(model)
    for module, a, b, scale in pairs:
        delta = scale * b @ a
        bank, _, leaf = module.rpartition(".")
        if leaf in ("w1", "w3"):
            gate_up = model.get_submodule(bank).gate_up_proj
            assert isinstance(gate_up, Tensor)
            gate_up.chunk(2, dim=1)["w1w3".index(leaf) // 2].add_(delta)
        elif leaf == "w2":
            down = model.get_submodule(bank).down_proj
            assert isinstance(down, Tensor)
            down.add_(delta)
        else:
            weight = model.get_submodule(module).weight
            assert isinstance(weight, Tensor)
            weight.add_(delta)
    return model


def test_modules_are_those_that_can_be_adapted(base: PreTrainedModel) -> None:
    modules = attach(base, slots=1, max_rank=2).modules
    attention = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]
    assert modules[:7] == [*attention, f"{EXPERTS}.w1", f"{EXPERTS}.w2", f"{EXPERTS}.w3"]
    assert [m for m in modules if m.startswith("model.layers.1.mlp.")] == [
        f"model.layers.1.mlp.{p}_proj" for p in ("gate", "up", "down")
    ]
    assert modules[-1] == "lm_head"
    assert len(modules) == 3 * 4 + 2 * 3 + 3 + 1  # no router


def test_attaching_changes_nothing(checkpoint: Checkpoint, base: PreTrainedModel) -> None:
    pool = attach(base, slots=2, max_rank=4)
    pool.write(0, random_pairs(pool, 4, 0, lambda _: True))
    bare = base(IDS).logits
    assert_close(bare, checkpoint.model(IDS).logits)
    for unused in (-1, 1):  # base rows, and a slot that was never written
        with pool.using(torch.full((IDS.numel(),), unused)):
            assert torch.equal(base(IDS).logits, bare)


@pytest.mark.parametrize("layout", ["shared_outer", "stacked"])
@pytest.mark.parametrize("wanted", ["experts", "self_attn", "layers.1.mlp", ""], ids=lambda w: w or "all")
def test_an_adapter_runs_as_its_merged_weights_do(
    checkpoint: Checkpoint, base: PreTrainedModel, layout: ExpertLayout, wanted: str
) -> None:
    pool = attach(base, slots=3, max_rank=4, expert_layout=layout)
    pairs = random_pairs(pool, 3, 1, lambda module: wanted in module)  # below max_rank: padded
    pool.write(2, pairs)
    with pool.using(torch.full((IDS.numel(),), 2)):
        y = base(IDS).logits
    expected = merged(checkpoint.model, pairs)(IDS).logits
    assert (expected - checkpoint.model(IDS).logits).abs().max() > 0.1
    assert_close(y, expected)


@pytest.mark.parametrize("layout", ["shared_outer", "stacked"])
def test_in_every_architecture_each_module_alone_runs_as_merged(
    any_checkpoint: Checkpoint, layout: ExpertLayout
) -> None:
    checkpoint = any_checkpoint
    model = load_base(checkpoint.config.to_dict(), checkpoint.tensors.items())
    pool = attach(model, slots=1, max_rank=4, expert_layout=layout)
    bare, slots = checkpoint.model(IDS).logits, torch.zeros(IDS.numel(), dtype=torch.long)
    assert_close(model(IDS).logits, bare)
    for module in pool.modules:
        pairs = [(m, 5 * a, b, s) for m, a, b, s in random_pairs(pool, 3, 2, module.__eq__)]
        pool.write(0, pairs)
        with pool.using(slots):
            y = model(IDS).logits
        expected = merged(checkpoint.model, pairs)(IDS).logits
        assert (expected - bare).abs().max() > 1e-3, f"{module} is not heard"
        assert_close(y, expected)


def test_in_every_architecture_all_linears_but_routers_gates_and_indexers_are_adapted(
    any_checkpoint: Checkpoint,
) -> None:
    model = load_base(any_checkpoint.config.to_dict(), any_checkpoint.tensors.items())
    attach(model, slots=1, max_rank=1)
    left = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(".base") and name != "lm_head.base"
    }
    assert left <= {"shared_expert_gate", "wq_b", "wk", "weights_proj"}


def test_the_head_may_see_some_rows_only(checkpoint: Checkpoint, base: PreTrainedModel) -> None:
    pool = attach(base, slots=2, max_rank=4)
    head = random_pairs(pool, 4, 1, "lm_head".__eq__)
    pool.write(1, head)
    rows = torch.tensor([3, LENGTH - 1])
    slots = torch.full((LENGTH,), -1)
    slots[-1] = 1
    with pool.using(slots, head_rows=rows):
        y = base(IDS[:1], logits_to_keep=rows).logits[0]
    assert_close(y[0], checkpoint.model(IDS[:1]).logits[0, 3])
    assert_close(y[1], merged(checkpoint.model, head)(IDS[:1]).logits[0, -1])


def test_a_head_that_sees_other_rows_than_was_said_fails(base: PreTrainedModel) -> None:
    pool = attach(base, slots=1, max_rank=4)
    pool.write(0, random_pairs(pool, 4, 1, "lm_head".__eq__))
    with (
        pool.using(torch.zeros(LENGTH, dtype=torch.long)),
        pytest.raises(AssertionError, match="head's rows"),
    ):
        base(IDS[:1], logits_to_keep=2)


def test_a_tied_head_is_not_adapted(checkpoint: Checkpoint) -> None:
    tensors = {k: v for k, v in checkpoint.tensors.items() if k != "lm_head.weight"}
    model = load_base(checkpoint.config.to_dict() | {"tie_word_embeddings": True}, tensors.items())
    assert "lm_head" not in attach(model, slots=1, max_rank=1).modules


def test_each_row_of_a_batch_runs_its_own_adapter(checkpoint: Checkpoint, base: PreTrainedModel) -> None:
    pool = attach(base, slots=2, max_rank=4)
    attention = random_pairs(pool, 2, 1, lambda module: "self_attn" in module)
    experts = random_pairs(pool, 4, 2, lambda module: "experts" in module)
    pool.write(0, attention)
    pool.write(1, experts)
    ids = IDS[:1].expand(3, -1)
    with pool.using(torch.tensor([1, -1, 0]).repeat_interleave(LENGTH)):
        y = base(ids).logits
    assert_close(y[0], merged(checkpoint.model, experts)(IDS[:1]).logits[0])
    assert_close(y[1], checkpoint.model(IDS[:1]).logits[0])
    assert_close(y[2], merged(checkpoint.model, attention)(IDS[:1]).logits[0])


def test_a_shared_side_is_expanded_into_a_stacked_pool(checkpoint: Checkpoint, base: PreTrainedModel) -> None:
    shared_pool = attach(copy.deepcopy(base), slots=1, max_rank=4)
    pairs = random_pairs(shared_pool, 4, 3, lambda module: "experts" in module)
    pool = attach(base, slots=1, max_rank=4, expert_layout="stacked")
    pool.write(0, pairs)
    with pool.using(torch.zeros(IDS.numel(), dtype=torch.long)):
        assert_close(base(IDS).logits, merged(checkpoint.model, pairs)(IDS).logits)


def test_a_slot_forgets_what_it_held(base: PreTrainedModel) -> None:
    pool = attach(base, slots=1, max_rank=4)
    bare, slots = base(IDS).logits, torch.zeros(IDS.numel(), dtype=torch.long)
    pool.write(0, random_pairs(pool, 4, 0, lambda _: True))
    small = random_pairs(pool, 1, 1, lambda module: module == QUERY)
    pool.write(0, small)
    assert pool.read(0).keys() == {QUERY}
    a, b = pool.read(0)[QUERY]
    assert torch.equal(a[:1], small[0][1])
    assert torch.equal(b[:, :1], small[0][2])
    assert a[1:].count_nonzero() == b[:, 1:].count_nonzero() == 0
    pool.clear(0)
    with pool.using(slots):
        assert torch.equal(base(IDS).logits, bare)


def test_nbytes_counts_every_factor_once(base: PreTrainedModel) -> None:
    pool = attach(base, slots=3, max_rank=2)
    numbers = sum(a.numel() + b.numel() for a, b in map(pool.shapes, pool.modules))
    assert pool.nbytes == 3 * numbers * 4


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((ROUTER, (2, 32), (6, 2)), f"{ROUTER}: not a module of this base that can be adapted"),
        ((QUERY, (5, 32), (32, 5)), f"{QUERY}: rank 5 is over this server's limit of 4"),
        ((QUERY, (2, 31), (32, 2)), f"{QUERY}: lora_A is [2, 31], expected [r, 32]"),
        ((QUERY, (2, 32), (32, 3)), f"{QUERY}: lora_B is [32, 3], expected [32, r]"),
        ((QUERY, (32,), (32, 2)), f"{QUERY}: lora_A is [32], expected [r, 32]"),
        ((f"{EXPERTS}.w1", (2, 32), (6, 16, 2)), "experts.w1: lora_A is [2, 32], expected [1, r, 32]"),
        ((f"{EXPERTS}.w1", (1, 2, 32), (5, 16, 2)), "experts.w1: lora_B is [5, 16, 2], expected [6, 16, r]"),
        ((f"{EXPERTS}.w3", (6, 2, 32), (6, 16, 2)), "start the server with --expert-layout stacked"),
        ((f"{EXPERTS}.w2", (6, 2, 16), (6, 32, 2)), "start the server with --expert-layout stacked"),
    ],
)
def test_a_misfit_is_refused_by_name_and_changes_nothing(
    base: PreTrainedModel, pair: tuple[str, tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    pool = attach(base, slots=1, max_rank=4)
    pool.write(0, random_pairs(pool, 4, 0, lambda _: True))
    before = pool.read(0)
    module, a, b = pair
    with pytest.raises(ValueError, match=re.escape(message)):
        pool.write(0, [(module, torch.ones(a), torch.ones(b), 1.0)])
    after = pool.read(0)
    assert all(torch.equal(x, y) for m in before for x, y in zip(before[m], after[m], strict=True))


def test_one_bank_has_one_scale(base: PreTrainedModel) -> None:
    pool = attach(base, slots=1, max_rank=4)
    first, second, *_ = random_pairs(pool, 4, 0, lambda module: module.startswith(EXPERTS))
    with pytest.raises(ValueError, match="must share their scale"):
        pool.write(0, [first, (*second[:3], 2 * SCALE)])


def test_the_pool_serves_one_forward_at_a_time_and_is_freed_by_a_failure(base: PreTrainedModel) -> None:
    pool = attach(base, slots=1, max_rank=4)
    slots = torch.zeros(3, dtype=torch.long)
    with pytest.raises(RuntimeError, match="the forward failed"), pool.using(slots):
        raise RuntimeError("the forward failed")
    with pool.using(slots), pytest.raises(AssertionError, match="already running"), pool.using(slots):
        pass
    with pytest.raises(AssertionError, match="slots"), pool.using(slots + 1):
        pass
