"""Every way trainers store factors gives the same pairs, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lanewise.loaders import Adapter, InvalidAdapter, Inventory, read_adapter_file

Factors = dict[str, tuple[Tensor, Tensor]]
Read = Callable[..., Adapter]
PREFIX = "base_model.model."
BANK = "model.layers.{}.mlp.experts"


@pytest.fixture(scope="session")
def base_config(base_config: dict[str, Any]) -> dict[str, Any]:
    """Every size its own, so that no two shapes can be confused by accident."""
    return base_config | {"moe_intermediate_size": 96, "num_hidden_layers": 2, "num_experts": 4}


@pytest.fixture(scope="session")
def inventory(base_config: dict[str, Any]) -> Inventory:
    return Inventory.from_config(base_config)


@pytest.fixture
def read(tmp_path: Path, inventory: Inventory, config: dict[str, Any]) -> Read:
    def from_tensors(tensors: dict[str, Tensor], base: Inventory = inventory, **change: Any) -> Adapter:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
        whole = config | {"target_modules": "all-linear"} | change
        return read_adapter_file(tmp_path / "a.safetensors", whole, base, max_rank=64)

    return from_tensors


def assert_same(adapter: Adapter, expected: Factors) -> None:
    assert adapter.modules == tuple(expected)
    for name, a, b, scale in adapter.pairs():
        assert torch.equal(a, expected[name][0]), name
        assert torch.equal(b, expected[name][1]), name
        assert scale == 2.0


def hybrid(pairs: Factors) -> dict[str, Tensor]:
    """XoRL's export in PEFT's names: what experts share beside what each has of its own, all 2-D."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    tensors: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        bank, _, last = module.rpartition(".experts.")
        for side, factor in zip("AB", pair, strict=True):
            if not bank:
                tensors[f"{PREFIX}{module}.lora_{side}.weight"] = factor
                continue
            for expert, piece in enumerate(factor):
                label = "shared" if len(factor) == 1 else expert
                name = f"{PREFIX}{bank}.experts.{label}.{names[last]}.lora_{side}.weight"
                tensors[name] = piece.clone()
    return tensors


def test_xorl_hybrid(read: Read, canonical: Callable[..., Factors]) -> None:
    pairs = canonical()
    adapter = read(hybrid(pairs))
    assert adapter.layout == "shared_outer"
    assert_same(adapter, pairs)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("experts.shared.gate_proj.lora_A", "experts.0.gate_proj.lora_A", "of one expert"),
        ("experts.0.gate_proj.lora_B", "experts.shared.gate_proj.lora_B", "is shared"),
        ("experts.shared.gate_proj.lora_A", None, "is missing"),
        ("experts.2.down_proj.lora_A", None, "is missing, 1 of 4"),
    ],
)
def test_a_broken_hybrid_names_the_tensor(
    read: Read, canonical: Callable[..., Factors], old: str, new: str | None, problem: str
) -> None:
    tensors = hybrid(canonical())
    for layer in range(2):
        name = f"{PREFIX}model.layers.{layer}.mlp.{old}.weight"
        moved = tensors.pop(name)
        if new is not None:
            tensors[name.replace(old, new)] = moved
    with pytest.raises(InvalidAdapter) as caught:
        read(tensors)
    findings = [f for f in caught.value.findings if problem in f.problem]
    assert findings
    assert all(f"mlp.{new or ''}" in f.where for f in findings)


@pytest.mark.parametrize("layout", ["shared_outer", "stacked"])
def test_in_first_banks(
    read: Read, canonical: Callable[..., Factors], spelled: Callable[..., dict[str, Tensor]], layout: str
) -> None:
    pairs = canonical(layout)
    tensors = {n: t.transpose(-1, -2) if t.ndim == 3 else t for n, t in spelled(pairs).items()}
    adapter = read(tensors)
    assert adapter.layout == layout
    assert_same(adapter, pairs)


def test_xorls_own_names_are_in_first(read: Read, canonical: Callable[..., Factors]) -> None:
    pairs = {name: pair for name, pair in canonical().items() if ".experts." in name}
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    tensors: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        bank, _, last = module.rpartition(".")
        for side, factor in zip("AB", pair, strict=True):
            tensors[f"{bank}.{names[last]}_lora_{side}"] = factor.transpose(1, 2)
    assert_same(read(tensors), pairs)


def test_one_in_first_factor_among_others_is_a_mistake(
    read: Read, canonical: Callable[..., Factors], spelled: Callable[..., dict[str, Tensor]]
) -> None:
    tensors = spelled(canonical())
    name = f"{PREFIX}{BANK.format(1)}.w1.lora_B.weight"
    tensors[name] = tensors[name].transpose(1, 2)
    with pytest.raises(InvalidAdapter) as caught:
        read(tensors)
    assert [finding.where for finding in caught.value.findings] == [name]


def parameters(pairs: Factors, *, swapped: bool) -> dict[str, Tensor]:
    """PEFT's target_parameters. `swapped`: as up to 0.19.0, which takes [E, out, in] for [E, in, out]."""
    tensors: dict[str, Tensor] = {}
    for module, (a, b) in pairs.items():
        bank, _, last = module.rpartition(".")
        if not bank.endswith(".experts"):
            tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
            continue
        if last == "w3":
            continue
        if last == "w1":
            b = torch.cat([b, pairs[f"{bank}.w3"][1]], dim=1)
        if swapped:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        name = f"{PREFIX}{bank}{'' if last == 'w2' else '.base_layer'}"
        tensors[f"{name}.lora_A.weight"] = a.flatten(0, 1)
        tensors[f"{name}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return tensors


TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture
def fused(canonical: Callable[..., Factors]) -> Factors:
    """Stacked pairs whose gate and up share A, as one parameter's factors do."""
    pairs = canonical("stacked")
    for module in pairs:
        if module.endswith(".w3"):
            pairs[module] = pairs[module.replace(".w3", ".w1")][0], pairs[module][1]
    return pairs


@pytest.mark.parametrize("swapped", [False, True])
def test_target_parameters_in_both_conventions(read: Read, fused: Factors, swapped: bool) -> None:
    adapter = read(parameters(fused, swapped=swapped), target_parameters=TARGETS)
    assert adapter.layout == "target_parameters"
    assert_same(adapter, fused)


def test_target_parameters_as_peft_itself_multiplies_them(read: Read, fused: Factors) -> None:
    """The delta of the installed PEFT for the same tensors, against s · B · A of the pairs."""
    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 192, 128))

    config = LoraConfig(r=4, lora_alpha=8, target_parameters=TARGETS)
    wrapper = ParamWrapper(Experts(), "default", "gate_up_proj", config=config, r=4, lora_alpha=8)
    bank = BANK.format(1)
    stored = parameters(fused, swapped=False)
    for side, linear in (("A", wrapper.lora_A), ("B", wrapper.lora_B)):
        weight = stored[f"{PREFIX}{bank}.base_layer.lora_{side}.weight"]
        assert linear["default"].weight.shape == weight.shape
        linear["default"].weight.data = weight.float()
    delta = wrapper.get_delta_weight("default").detach()
    for name, a, b, scale in read(stored, target_parameters=TARGETS).pairs():
        if name in (f"{bank}.w1", f"{bank}.w3"):
            half = delta[:, :96] if name.endswith("w1") else delta[:, 96:]
            torch.testing.assert_close(scale * b.float() @ a.float(), half)


def test_one_target_parameter_has_no_base_layer_in_its_name(read: Read, fused: Factors) -> None:
    for keep, targets in (("w2", TARGETS[1:]), ("w13", TARGETS[:1])):
        some = {name: pair for name, pair in fused.items() if name.rpartition(".")[2] in ("w1", "w3", "w2")}
        stored = {
            name.replace(".base_layer", ""): tensor
            for name, tensor in parameters(some, swapped=False).items()
            if (".base_layer" in name) == (keep == "w13")
        }
        kept = {n: p for n, p in some.items() if n.endswith("w2") == (keep == "w2")}
        assert_same(read(stored, target_modules=[], target_parameters=targets), kept)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"target_parameters": None}, "base_layer.lora_A.weight"),
        ({"target_parameters": [*TARGETS, "mlp.gate.weight"]}, "target_parameters"),
        ({"r": 8}, "base_layer.lora_A.weight"),
    ],
)
def test_target_parameters_that_the_config_contradicts(
    read: Read, fused: Factors, change: dict[str, Any], where: str
) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        read(parameters(fused, swapped=False), **{"target_parameters": TARGETS} | change)
    assert any(finding.where.endswith(where) for finding in caught.value.findings)


def test_ranks_of_target_parameters_come_from_patterns_on_the_parameter(read: Read, fused: Factors) -> None:
    doubled = dict(fused)
    for name, (a, b) in fused.items():
        if name.endswith((".w1", ".w3")):
            doubled[name] = torch.cat([a, a], dim=-2), torch.cat([b, b], dim=-1)
    adapter = read(
        parameters(doubled, swapped=False),
        target_parameters=TARGETS,
        rank_pattern={r".*\.gate_up_proj": 8},
        alpha_pattern={r".*\.gate_up_proj": 16},
    )
    assert_same(adapter, doubled)


@pytest.fixture
def square(base_config: dict[str, Any]) -> Inventory:
    """A base whose down_proj is square: sizes alone do not tell the convention."""
    return Inventory.from_config(base_config | {"moe_intermediate_size": 128})


@pytest.mark.parametrize(
    ("version", "swapped"),
    [("0.18.1", True), ("0.19.0", True), ("0.19.1", False), ("0.20.0", False), ("0.21.3.dev0", False)],
)
def test_a_square_parameter_alone_is_read_by_its_peft_version(
    read: Read, square: Inventory, version: str, swapped: bool
) -> None:
    a, b = torch.randn(4, 4, 128), torch.randn(4, 128, 4)
    pairs = {f"{BANK.format(0)}.w2": (a, b)}
    stored = parameters(pairs, swapped=swapped)
    settings = {"target_modules": [], "target_parameters": TARGETS[1:]}
    assert_same(read(stored, square, **settings, peft_version=version), pairs)
    for unclear in ({}, {"peft_version": "0.20.0.dev0"}, {"peft_version": "new"}):
        with pytest.raises(InvalidAdapter, match="PEFT up to"):
            read(stored, square, **settings, **unclear)


def test_a_square_parameter_beside_one_that_tells(read: Read, square: Inventory) -> None:
    name = BANK.format(0)
    a = torch.randn(4, 4, 128)
    pairs = {
        f"{name}.w1": (a, torch.randn(4, 128, 4)),
        f"{name}.w2": (torch.randn(4, 4, 128), torch.randn(4, 128, 4)),
        f"{name}.w3": (a, torch.randn(4, 128, 4)),
    }
    for swapped in (False, True):
        stored = parameters(pairs, swapped=swapped)
        adapter = read(stored, square, target_modules=[], target_parameters=TARGETS, peft_version="0.19.0")
        assert_same(adapter, pairs)


@pytest.mark.parametrize("spelling", ["lora_embedding_{}", "lora_embedding_{}.weight", "lora_{}.weight"])
@pytest.mark.parametrize("path", ["lm_head", "language_model.lm_head", "model.lm_head"])
def test_spellings_of_the_head(
    read: Read, canonical: Callable[..., Factors], spelling: str, path: str
) -> None:
    pair = canonical()["lm_head"]
    tensors = {f"{PREFIX}{path}.{spelling.format(s)}": t for s, t in zip("AB", pair, strict=True)}
    assert_same(read(tensors, target_modules=["lm_head"]), {"lm_head": pair})


@pytest.mark.parametrize(
    "path",
    [
        "layers.0",
        "model.layers.0",
        "model.language_model.layers.0",
        "language_model.model.layers.0",
        "language_model.layers.0",
    ],
)
def test_prefixes_of_layers(read: Read, canonical: Callable[..., Factors], path: str) -> None:
    name = "model.layers.0.self_attn.k_proj"
    pair = canonical()[name]
    stored = {f"{PREFIX}{path}.self_attn.k_proj.lora_{s}.weight": t for s, t in zip("AB", pair, strict=True)}
    assert_same(read(stored, target_modules=["k_proj"]), {name: pair})
    doubled = stored | {
        n.replace(path, "model.layers.0" if path == "layers.0" else "layers.0"): t.clone()
        for n, t in stored.items()
    }
    with pytest.raises(InvalidAdapter, match="same factor"):
        read(doubled, target_modules=["k_proj"])


def test_an_embedding_and_a_tied_head_are_refused_with_the_reason(
    read: Read, base_config: dict[str, Any]
) -> None:
    tied = Inventory.from_config(base_config | {"tie_word_embeddings": True})
    a, b = torch.ones(4, 128), torch.ones(320, 4)
    head = {f"{PREFIX}lm_head.lora_A.weight": a, f"{PREFIX}lm_head.lora_B.weight": b}
    with pytest.raises(InvalidAdapter, match="tied to the embedding"):
        read(head, tied)
    embedding = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": b.T,
        f"{PREFIX}model.embed_tokens.lora_embedding_B": a.T,
    }
    with pytest.raises(InvalidAdapter, match="embedding stays frozen"):
        read(embedding)
    with pytest.raises(InvalidAdapter, match=r"\[320, 4\] for lm_head"):
        read(head | {f"{PREFIX}lm_head.lora_B.weight": torch.ones(322, 4)})
    with pytest.raises(InvalidAdapter, match="would replace a weight"):
        read(head | {f"{PREFIX}model.embed_tokens.weight": torch.ones(322, 128)})


@pytest.mark.parametrize(
    ("merged", "parts"),
    [("in_proj_qkvz", ["in_proj_qkv", "in_proj_z"]), ("in_proj_ba", ["in_proj_b", "in_proj_a"])],
)
def test_merged_delta_net_linears_are_split_for_a_base_that_keeps_them_apart(
    read: Read, base_config: dict[str, Any], merged: str, parts: list[str]
) -> None:
    base = Inventory.from_config(
        base_config
        | {
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 96,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        }
    )
    prefix = "model.layers.0.linear_attn"
    rows = [base.modules[f"{prefix}.{part}"].out_features for part in parts]
    a, b = torch.randn(4, 128), torch.randn(sum(rows), 4)
    stored = {f"{PREFIX}{prefix}.{merged}.lora_A.weight": a, f"{PREFIX}{prefix}.{merged}.lora_B.weight": b}
    expected = {f"{prefix}.{p}": (a, part) for p, part in zip(parts, b.split(rows), strict=True)}
    assert_same(read(stored, base), expected)
    double = f"{PREFIX}{prefix}.{parts[1]}.lora_{{}}.weight"
    with pytest.raises(InvalidAdapter, match="each module once"):
        read(stored | {double.format("A"): a.clone(), double.format("B"): b[-rows[1] :].clone()}, base)


def test_fused_gate_and_up_banks(read: Read, canonical: Callable[..., Factors]) -> None:
    bank = BANK.format(0)
    pairs = {name: pair for name, pair in canonical().items() if name.startswith(bank) and "w2" not in name}
    a = pairs[f"{bank}.w1"][0]
    pairs[f"{bank}.w3"] = a, pairs[f"{bank}.w3"][1]
    b = torch.cat([pairs[f"{bank}.w1"][1], pairs[f"{bank}.w3"][1]], dim=1)
    name = f"{PREFIX}{bank}.gate_up_proj.lora_{{}}.weight"
    assert_same(read({name.format("A"): a, name.format("B"): b}), pairs)


def test_mixtral_under_its_old_module_names(read: Read, base_config: dict[str, Any]) -> None:
    base = Inventory.from_config(base_config | {"model_type": "mixtral", "num_local_experts": 2})
    bank = "model.layers.0.block_sparse_moe.experts"
    a, b = torch.randn(2, 4, 128), torch.randn(2, 256, 4)
    stored = {
        f"{PREFIX}{bank}.{e}.w1.lora_{s}.weight": t[e].clone()
        for e in range(2)
        for s, t in (("A", a), ("B", b))
    }
    assert_same(read(stored, base, target_modules=["w1"]), {f"{BANK.format(0)}.w1": (a, b)})


def test_all_zero_factors_are_flagged_not_refused(read: Read, canonical: Callable[..., Factors]) -> None:
    name = "model.layers.0.self_attn.k_proj"
    a, b = canonical()[name]
    stored = {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": torch.zeros_like(b)}
    adapter = read(stored)
    assert [str(warning) for warning in adapter.warnings] == [
        f"{PREFIX}{name}.lora_B.weight: is all zeros; expected a trained factor"
    ]


def test_dtypes_may_be_limited(tmp_path: Path, inventory: Inventory, config: dict[str, Any]) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.k_proj"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 128), f"{name}.lora_B.weight": torch.ones(128, 4)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(InvalidAdapter, match=r"has dtype F32; expected one of BF16; .*casts"):
        read_adapter_file(
            tmp_path / "a.safetensors",
            config | {"target_modules": ["k_proj"]},
            inventory,
            max_rank=4,
            dtypes=["BF16"],
        )
