"""A valid adapter, changed at random in more than thirty ways: refused with the right name, or equal.

Each mutation changes one thing and says which names a finding may then bear; None means that the meaning
stays, and then the pairs must be the same bit for bit. Nothing may be accepted with another meaning.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lanewise.loaders import InvalidAdapter, Inventory, convert, read_adapter, read_adapter_file

BASE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_experts": 3,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "mlp_only_layers": [0],
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
INVENTORY = Inventory.from_config(BASE)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    ],
}
PREFIX = "base_model.model."
FILE = "adapter_model.safetensors"
LAYOUTS = ("per_expert_2d", "stacked", "shared_outer", "target_parameters", "hybrid")


@dataclass
class Draft:
    """An adapter being changed; `pick` draws an index."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    layout: str
    pick: Callable[[int], int]
    inventory: Inventory = field(default=INVENTORY)

    def any_name(self, *parts: str) -> str:
        names = sorted(name for name in self.tensors if all(part in name for part in parts))
        return names[self.pick(len(names))]

    def rename(self, old: str, new: str) -> None:
        self.tensors = {new if name == old else name: t for name, t in self.tensors.items()}

    def change(self, name: str, to: Callable[[Tensor], Tensor]) -> None:
        self.tensors[name] = to(self.tensors[name]).clone().contiguous()


def other(name: str) -> str:
    return name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")


def pair_of(name: str) -> set[str]:
    return {name, other(name)}


def linear(draft: Draft) -> str:
    names = sorted(name for name in draft.tensors if ".experts" not in name)
    return names[draft.pick(len(names))]


Mutation = Callable[[Draft], set[str] | None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


# Names.


@mutation
def drop_one(draft: Draft) -> set[str]:
    name = draft.any_name()
    del draft.tensors[name]
    return {name, *gaps(draft, name)}


@mutation
def drop_a_pair(draft: Draft) -> set[str] | None:
    """Fewer modules is another adapter, but a valid one; the config may then name too much."""
    name = linear(draft)
    for half in pair_of(name):
        del draft.tensors[half]
    return {"target_modules", "ANY PART"}


@mutation
def rename_to_unknown_module(draft: Draft) -> set[str]:
    name = linear(draft)
    new = name.replace(".lora_", "_extra.lora_")
    draft.rename(name, new)
    return {new, name}


@mutation
def rename_to_unknown_layer(draft: Draft) -> set[str]:
    name = draft.any_name("layers.1.")
    new = name.replace("layers.1.", "layers.7.")
    draft.rename(name, new)
    return {new, *pair_of(name), *gaps(draft, name)}


@mutation
def rename_to_another_suffix(draft: Draft) -> set[str]:
    name = draft.any_name()
    new = name.replace(".weight", ".default.weight")
    draft.rename(name, new)
    return {new, *pair_of(name), *gaps(draft, name)}


@mutation
def strip_the_prefix(draft: Draft) -> set[str]:
    name = draft.any_name()
    new = name.removeprefix(PREFIX)
    draft.rename(name, new)
    return {new, *pair_of(name), *gaps(draft, name)}


@mutation
def swap_names_of_a_and_b(draft: Draft) -> set[str]:
    name = linear(draft)
    draft.tensors[name], draft.tensors[other(name)] = draft.tensors[other(name)], draft.tensors[name]
    return pair_of(name)


@mutation
def add_a_bias(draft: Draft) -> set[str]:
    name = linear(draft).rpartition(".lora_")[0] + ".bias"
    draft.tensors[name] = torch.ones(4)
    return {name}


@mutation
def add_a_dora_magnitude(draft: Draft) -> set[str]:
    name = linear(draft).rpartition(".lora_")[0] + ".lora_magnitude_vector"
    draft.tensors[name] = torch.ones(4)
    return {name}


@mutation
def add_a_router_pair(draft: Draft) -> set[str]:
    name = f"{PREFIX}model.layers.1.mlp.gate.lora_{{}}.weight"
    draft.tensors |= {name.format("A"): torch.ones(4, 24), name.format("B"): torch.ones(3, 4)}
    return {name.format("A"), name.format("B")}


@mutation
def add_embedding_factors(draft: Draft) -> set[str]:
    name = f"{PREFIX}model.embed_tokens.lora_embedding_{{}}"
    draft.tensors |= {name.format("A"): torch.ones(4, 50), name.format("B"): torch.ones(24, 4)}
    return {name.format("A"), name.format("B")}


@mutation
def add_a_whole_module(draft: Draft) -> set[str]:
    draft.tensors[f"{PREFIX}lm_head.weight"] = torch.ones(50, 24)
    return {f"{PREFIX}lm_head.weight"}


@mutation
def add_something_else(draft: Draft) -> set[str]:
    draft.tensors["optimizer.step"] = torch.ones(1)
    return {"optimizer.step"}


@mutation
def duplicate_under_another_prefix(draft: Draft) -> set[str]:
    name = draft.any_name("layers.")
    new = name.replace("model.layers", "model.language_model.layers", 1)
    draft.tensors[new] = draft.tensors[name].clone()
    return {name, new}


@mutation
def duplicate_the_head_as_an_embedding(draft: Draft) -> set[str]:
    name = draft.any_name("lm_head")
    new = name.replace("lora_", "lora_embedding_").removesuffix(".weight")
    draft.tensors[new] = draft.tensors[name].clone()
    return {name, new}


@mutation
def respell_one_prefix(draft: Draft) -> None:
    name = draft.any_name("layers.")
    draft.rename(name, name.replace("model.layers", "language_model.layers", 1))


@mutation
def respell_the_head(draft: Draft) -> None:
    name = draft.any_name("lm_head")
    draft.rename(name, name.replace("lora_", "lora_embedding_").removesuffix(".weight"))


@mutation
def shuffle_the_file(draft: Draft) -> None:
    names = sorted(draft.tensors, key=lambda name: hash((name, draft.pick(1000))))
    draft.tensors = {name: draft.tensors[name] for name in names}


# Shapes.


def shaped(draft: Draft, to: Callable[[Tensor], Tensor]) -> set[str]:
    name = draft.any_name()
    before = draft.tensors[name].shape
    draft.change(name, to)
    assert draft.tensors[name].shape != before
    return pair_of(name)


@mutation
def transpose(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: t.transpose(-1, -2))


@mutation
def one_input_less(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: t[..., :-1])


@mutation
def one_row_less(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: t[..., :-1, :])


@mutation
def one_row_more(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: torch.cat([t, t[..., :1, :]], dim=-2))


@mutation
def one_dimension_more(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: t[None])


@mutation
def flatten(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: t.flatten())


@mutation
def empty(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: t[..., :0])


@mutation
def scalar(draft: Draft) -> set[str]:
    return shaped(draft, lambda t: t.flatten()[0])


@mutation
def half_the_rank_of_one_half(draft: Draft) -> set[str]:
    name = linear(draft)
    draft.change(name, lambda t: t[:2] if "lora_A" in name else t[:, :2])
    return {name}


@mutation
def half_the_rank_of_a_pair(draft: Draft) -> set[str]:
    name = linear(draft)
    for half in pair_of(name):
        draft.change(half, lambda t, half=half: t[:2] if "lora_A" in half else t[:, :2])
    return pair_of(name)


@mutation
def one_expert_less(draft: Draft) -> set[str]:
    name = draft.any_name(".experts")
    if draft.tensors[name].ndim == 3:
        draft.change(name, lambda t: t[:-1] if len(t) > 1 else t[:0])
    else:
        del draft.tensors[name]
    return {name, *pair_of(name), *gaps(draft, name)}


@mutation
def an_expert_too_many(draft: Draft) -> set[str]:
    name = draft.any_name(".experts")
    if draft.tensors[name].ndim == 3:
        draft.change(name, lambda t: torch.cat([t, t[:1], t[:1], t[:1]]))
        return {name}
    if ".0." not in name.partition(".experts")[2]:
        draft.change(name, lambda t: t[..., :-1, :])
        return pair_of(name)
    new = name.replace(".experts.0.", ".experts.3.")
    draft.tensors[new] = draft.tensors[name].clone()
    return {new}


@mutation
def another_bases_hidden_size(draft: Draft) -> set[str]:
    draft.inventory = Inventory.from_config(BASE | {"hidden_size": 32})
    return set(draft.tensors)


@mutation
def another_bases_expert_count(draft: Draft) -> set[str]:
    draft.inventory = Inventory.from_config(BASE | {"num_experts": 5})
    return {name for name in draft.tensors if ".experts" in name} | EXPERT_GAPS


@mutation
def another_bases_layer_count(draft: Draft) -> set[str]:
    draft.inventory = Inventory.from_config(BASE | {"num_hidden_layers": 1})
    return {name for name in draft.tensors if ".layers.1." in name}


@mutation
def a_base_whose_head_is_tied(draft: Draft) -> set[str]:
    draft.inventory = Inventory.from_config(BASE | {"tie_word_embeddings": True})
    return {name for name in draft.tensors if "lm_head" in name} | {"target_modules"}


# Values and dtypes.


def poisoned(draft: Draft, value: float) -> set[str]:
    name = draft.any_name()
    flat = draft.tensors[name].view(-1)
    flat[draft.pick(len(flat))] = value
    return {name}


@mutation
def a_nan(draft: Draft) -> set[str]:
    return poisoned(draft, float("nan"))


@mutation
def an_infinity(draft: Draft) -> set[str]:
    return poisoned(draft, float("-inf"))


@mutation
def another_dtype_in_one_half(draft: Draft) -> set[str]:
    name = draft.any_name()
    draft.change(name, lambda t: t.float())
    return {name, *pair_of(name), *(n for n in draft.tensors if n.partition(".experts")[0] in name)}


@mutation
def quantised(draft: Draft) -> set[str]:
    name = draft.any_name()
    draft.change(name, lambda t: t.to(torch.float8_e4m3fn))
    return {name, *pair_of(name), *(n for n in draft.tensors if n.partition(".experts")[0] in name)}


@mutation
def integers(draft: Draft) -> set[str]:
    name = linear(draft)
    draft.change(name, lambda t: t.to(torch.int16))
    return pair_of(name)


@mutation
def all_in_fp32(draft: Draft) -> None:
    """Exactly the same numbers."""
    draft.tensors = {name: t.float() for name, t in draft.tensors.items()}


# The config.


def configured(draft: Draft, **change: object) -> set[str]:
    draft.config |= change
    return {*change, *draft.tensors}


@mutation
def config_of_another_rank(draft: Draft) -> set[str]:
    return configured(draft, r=8)


@mutation
def config_with_dora(draft: Draft) -> set[str]:
    return configured(draft, use_dora=True)


@mutation
def config_with_saved_modules(draft: Draft) -> set[str]:
    return configured(draft, modules_to_save=["lm_head"])


@mutation
def config_of_another_method(draft: Draft) -> set[str]:
    return configured(draft, peft_type="ADALORA")


@mutation
def config_with_a_target_too_many(draft: Draft) -> set[str]:
    return configured(draft, target_modules=[*draft.config["target_modules"], "kv_b_proj"])


@mutation
def config_with_a_target_too_few(draft: Draft) -> set[str]:
    return configured(draft, target_modules=["k_proj", "v_proj", "o_proj"])


@mutation
def config_with_a_rank_pattern_that_lies(draft: Draft) -> set[str]:
    return configured(draft, rank_pattern={"q_proj": 2})


@mutation
def config_claiming_another_layout(draft: Draft) -> set[str]:
    wrong = {"stacked": "shared_outer"}.get(draft.layout, "stacked")
    return configured(draft, _sglang_lora_format=wrong)


@mutation
def config_with_all_linear(draft: Draft) -> None:
    draft.config["target_modules"] = "all-linear"


@mutation
def config_with_an_expression(draft: Draft) -> None:
    draft.config["target_modules"] = r".*(_proj|lm_head|\.w[123]|experts)"


@mutation
def config_with_a_pattern_that_matches_nothing(draft: Draft) -> None:
    patterns = {"nothing": 9, **draft.config.get("rank_pattern", {})}
    draft.config |= {"rank_pattern": patterns, "use_rslora": False}


EXPERT_GAPS = {
    f"{PREFIX}model.layers.1.mlp.experts.{expert}.{name}.lora_{side}.weight"
    for expert in (*range(5), "shared")
    for name in ("gate_proj", "up_proj", "down_proj")
    for side in "AB"
}


def gaps(draft: Draft, name: str) -> set[str]:
    """What may be named when one expert's factor is gone: the gap, or the halves that now miss it."""
    return EXPERT_GAPS if ".experts" in name else set()


class Valid:
    """One adapter in every layout: tensors and config."""

    def __init__(self, by_layout: dict[str, tuple[dict[str, Tensor], dict[str, Any]]]) -> None:
        self._by_layout = by_layout

    def draft(self, layout: str, pick: Callable[[int], int]) -> Draft:
        tensors, config = self._by_layout[layout]
        return Draft({name: t.clone() for name, t in tensors.items()}, dict(config), layout, pick)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Valid:

    random = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for name, module in INVENTORY.modules.items():
        for side, shape in (("A", (4, module.in_features)), ("B", (module.out_features, 4))):
            lead = () if module.experts is None else (1 if module.outer("A" if side == "A" else "B") else 3,)
            tensors[f"{PREFIX}{name}.lora_{side}.weight"] = torch.randn(
                *lead, *shape, generator=random
            ).bfloat16()
    folder = tmp_path_factory.mktemp("valid")
    save_file(tensors, folder / FILE)
    adapter = read_adapter_file(folder / FILE, CONFIG, INVENTORY, max_rank=8)
    result: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {}
    for layout in ("per_expert_2d", "stacked", "shared_outer", "target_parameters"):
        convert(adapter, folder / layout, layout)
        config = read_adapter(folder / layout, INVENTORY, max_rank=8).config
        result[layout] = load_file(folder / layout / FILE), dict(config.raw)
    hybrid = {
        name.replace(".experts.0.", ".experts.shared.") if shared else name: tensor
        for name, tensor in result["per_expert_2d"][0].items()
        for shared in [("down_proj" in name) == ("lora_B" in name) and ".experts." in name]
        if not shared or ".experts.0." in name
    }
    return Valid(result | {"hybrid": (hybrid, result["per_expert_2d"][1])})


def read(draft: Draft) -> dict[str, tuple[Tensor, Tensor, float]]:
    """What would reach an engine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE
        save_file(draft.tensors, file)
        adapter = read_adapter_file(file, draft.config, draft.inventory, max_rank=8)
        return {name: (a.clone(), b.clone(), scale) for name, a, b, scale in adapter.pairs()}


@pytest.mark.parametrize("how", MUTATIONS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=st.sampled_from(LAYOUTS), picks=st.lists(st.integers(0), min_size=3, max_size=3))
def test_a_changed_adapter_is_refused_by_name_or_means_the_same(
    valid: Valid, how: str, layout: str, picks: list[int]
) -> None:
    left = list(picks)
    draft = valid.draft(layout, lambda size: (left.pop() if left else 0) % size)
    meant = read(draft)
    allowed = MUTATIONS[how](draft)
    findings: set[str] = set()
    found = {}
    try:
        found = read(draft)
    except InvalidAdapter as error:
        findings = {finding.where for finding in error.findings}
    if findings:
        assert allowed is not None, f"{how} was refused: {findings}"
        assert findings <= allowed
        return
    assert allowed is None or "ANY PART" in allowed, f"{how} was accepted"
    if allowed is None:
        assert found.keys() == meant.keys()
    for name, (a, b, scale) in found.items():
        assert torch.equal(a, meant[name][0].to(a.dtype))
        assert torch.equal(b, meant[name][1].to(b.dtype))
        assert scale == meant[name][2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_are_enough_ways_and_each_starts_from_a_valid_adapter(valid: Valid, layout: str) -> None:
    assert len(MUTATIONS) >= 30
    assert read(valid.draft(layout, lambda size: 0)).keys() == INVENTORY.modules.keys()
