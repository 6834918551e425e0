"""Rank and scale of each module, as PEFT itself decides them."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor

from lanewise.loaders import Adapter, AdapterConfig, InvalidAdapter, Inventory, read_adapter_file

Factors = dict[str, tuple[Tensor, Tensor]]
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


@pytest.fixture
def read(tmp_path: Path, inventory: Inventory, config: dict[str, Any]) -> Callable[..., Adapter]:
    def from_ranks(ranks: dict[str, int], **change: Any) -> Adapter:
        """An adapter of these modules, each with its rank."""
        tensors: dict[str, Tensor] = {}
        for name, rank in ranks.items():
            module = inventory.modules[name]
            lead_a, lead_b = () if module.experts is None else (1,), () if module.experts is None else (16,)
            if name.endswith("w2"):
                lead_a, lead_b = lead_b, lead_a
            a, b = (
                torch.ones(*lead_a, rank, module.in_features),
                torch.ones(*lead_b, module.out_features, rank),
            )
            tensors |= {
                f"base_model.model.{name}.lora_A.weight": a.bfloat16(),
                f"base_model.model.{name}.lora_B.weight": b.bfloat16() / 3,
            }
        save_file(tensors, tmp_path / "a.safetensors")
        whole = config | {"target_modules": "all-linear"} | change
        return read_adapter_file(tmp_path / "a.safetensors", whole, inventory, max_rank=64)

    return from_ranks


def scales(adapter: Adapter) -> dict[str, float]:
    return {name: scale for name, _, _, scale in adapter.pairs()}


def test_rank_stabilised_scaling(read: Callable[..., Adapter]) -> None:
    adapter = read({Q0: 8}, r=8, lora_alpha=16, use_rslora=True)
    assert scales(adapter) == {Q0: 16 / math.sqrt(8)}


def test_patterns_set_rank_and_alpha_per_module(read: Callable[..., Adapter]) -> None:
    adapter = read(
        {Q0: 4, Q1: 6},
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 6},
        alpha_pattern={"self_attn.q_proj": 3, "q_proj": 100},
    )
    assert scales(adapter) == {Q0: 3 / 4, Q1: 3 / 6}
    assert adapter.rank == 6
    assert [tuple(a.shape) for _, a, _, _ in adapter.pairs()] == [(4, 128), (6, 128)]


def test_a_rank_that_only_a_pattern_asks_for_is_held_against_the_limit(read: Callable[..., Adapter]) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        read({Q0: 4, Q1: 65}, rank_pattern={r"layers\.1\..*": 65})
    assert [finding.where for finding in caught.value.findings] == ["rank_pattern"]


def test_the_tensors_must_have_the_rank_of_the_pattern(read: Callable[..., Adapter]) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        read({Q0: 4, Q1: 4}, rank_pattern={r".*1\.self_attn\.q_proj": 6})
    assert {f.where for f in caught.value.findings} == {
        f"base_model.model.{Q1}.lora_{side}.weight" for side in "AB"
    }


PATTERNS = ["q_proj", r"layers\.1\.self_attn\.q_proj", "attn.q_proj", ".*q_proj", "_proj", r"(q|k)_proj"]
PATHS = [Q0, "model.layers.11.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "lm_head"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("first", PATTERNS)
def test_patterns_match_as_peft_matches_them(config: dict[str, Any], path: str, first: str) -> None:
    keys = dict.fromkeys([first, *PATTERNS])
    ranks = {key: number + 10 for number, key in enumerate(keys)}
    parsed = AdapterConfig.parse(config | {"rank_pattern": ranks})
    assert parsed.rank_of(path) == ranks.get(get_pattern_key(list(ranks), path), 4)


def test_scales_that_differ_inside_a_bank_are_multiplied_into_b(read: Callable[..., Adapter]) -> None:
    bank = "model.layers.0.mlp.experts"
    adapter = read(dict.fromkeys([f"{bank}.w1", f"{bank}.w2", f"{bank}.w3"], 4), alpha_pattern={"w2": 2.4})
    found = {name: (b, scale) for name, _, b, scale in adapter.pairs()}
    stored = (torch.ones(1).bfloat16() / 3).item()
    for name, (b, scale) in found.items():
        assert scale == 2.0
        meant = stored if not name.endswith("w2") else torch.tensor(stored * 0.6 / 2).bfloat16().item()
        assert torch.all(b == meant)
    assert {pair.scale for pair, _, _ in adapter.own_pairs()} == {2.0, 0.6}


# Regular expressions come from outside.

HOSTILE = ["(.*a){25}c", "(a+)+$", "(.+)+x", "((a|_|.)*)*!", r"(\w+\.?)+!"]


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "target_modules"])
@pytest.mark.parametrize("expression", HOSTILE)
def test_an_expression_that_would_never_end_is_refused_in_time(
    read: Callable[..., Adapter], field: str, expression: str
) -> None:
    started = time.perf_counter()
    value = expression if field == "target_modules" else {expression: 4}
    found = {2.0}
    try:
        found = set(scales(read({Q0: 4, Q1: 4}, **{field: value})).values())
    except InvalidAdapter as error:
        named = {finding.where for finding in error.findings}
    else:
        named = set[str]()
    assert found == {2.0}
    assert named <= {field, *(f"base_model.model.{q}.lora_{side}.weight" for q in (Q0, Q1) for side in "AB")}
    assert time.perf_counter() - started < 4


def test_a_target_expression_must_match_whole_paths(read: Callable[..., Adapter]) -> None:
    assert read({Q0: 4}, target_modules=r".*\.(q|k)_proj").modules == (Q0,)
    for expression in ("q_proj", r".*\.k_proj", r"model\.layers\.0"):
        with pytest.raises(InvalidAdapter, match="not in the config's target_modules"):
            read({Q0: 4}, target_modules=expression)
