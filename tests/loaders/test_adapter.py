"""Whole adapters: what is accepted comes back bit for bit, what is wrong is named."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lanewise.loaders import (
    Adapter,
    Finding,
    InvalidAdapter,
    Inventory,
    UnsafeFile,
    digest_of,
    read_adapter,
    read_adapter_file,
    write_adapter,
)

Factors = dict[str, tuple[Tensor, Tensor]]
Read = Callable[..., Adapter]

ATTENTION = "base_model.model.model.layers.0.self_attn"
EXPERTS = "base_model.model.model.layers.1.mlp.experts"
Q_A, Q_B = f"{ATTENTION}.q_proj.lora_A.weight", f"{ATTENTION}.q_proj.lora_B.weight"


@pytest.fixture
def read(tmp_path: Path, inventory: Inventory, config: dict[str, Any]) -> Read:
    """Write tensors to a file and read them back as a push."""

    def from_tensors(tensors: dict[str, Tensor], max_rank: int = 64, **change: object) -> Adapter:
        file = tmp_path / "push.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        return read_adapter_file(file, config | change, inventory, max_rank=max_rank)

    return from_tensors


@pytest.fixture
def findings(read: Read) -> Callable[..., dict[str, Finding]]:
    """What is wrong with some tensors, by where."""

    def of(tensors: dict[str, Tensor], **change: Any) -> dict[str, Finding]:
        with pytest.raises(InvalidAdapter) as caught:
            read(tensors, **change)
        return {finding.where: finding for finding in caught.value.findings}

    return of


def assert_pairs(adapter: Adapter, expected: Factors) -> None:
    assert adapter.modules == tuple(expected)
    for name, a, b, scale in adapter.pairs():
        for found, wanted in zip((a, b), expected[name], strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted), name
        assert scale == 2.0


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("peft_names", [False, True])
@pytest.mark.parametrize("layout", ["shared_outer", "stacked", "per_expert_2d"])
def test_every_layout_and_spelling_gives_the_same_pairs(
    canonical: Callable[..., Factors],
    spelled: Callable[..., dict[str, Tensor]],
    read: Read,
    layout: str,
    peft_names: bool,
    inner: bool,
) -> None:
    pairs = canonical(layout)
    tensors = spelled(pairs, inner=inner, peft_names=peft_names, per_expert=layout == "per_expert_2d")
    adapter = read(tensors)
    assert adapter.layout == layout
    assert adapter.rank == 4
    assert adapter.nbytes == sum(t.nbytes for pair in pairs.values() for t in pair)
    assert_pairs(adapter, pairs)


def test_a_folder_is_read_as_the_same_push(
    folder: Path, inventory: Inventory, config: dict[str, Any]
) -> None:
    file = folder / "adapter_model.safetensors"
    by_folder = read_adapter(folder, inventory, max_rank=64)
    assert by_folder.digest == digest_of(config, file)
    pushed = read_adapter_file(file, config, inventory, max_rank=64, digest="taken while it arrived")
    assert pushed.digest == "taken while it arrived"
    assert pushed.modules == by_folder.modules


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_dtypes_are_kept(
    read: Read,
    canonical: Callable[..., Factors],
    spelled: Callable[..., dict[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    pairs = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in canonical().items()}
    assert_pairs(read(spelled(pairs)), pairs)


def test_part_of_the_inventory_is_enough(read: Read, tensors: dict[str, Tensor]) -> None:
    some = {name: tensor for name, tensor in tensors.items() if ".0.self_attn.q_proj." in name}
    adapter = read(some, target_modules=["q_proj"])
    assert (adapter.layout, adapter.modules) == ("linear", ("model.layers.0.self_attn.q_proj",))
    bank = {name: tensor for name, tensor in tensors.items() if ".1.mlp.experts.w2." in name}
    assert read(bank, target_modules="all-linear").layout == "shared_outer"


def test_factors_survive_the_renaming_and_deletion_of_their_file(
    folder: Path, inventory: Inventory, canonical: Callable[..., Factors]
) -> None:
    adapter = read_adapter(folder, inventory, max_rank=64)
    file = folder / "adapter_model.safetensors"
    file.rename(folder / "elsewhere")
    (folder / "elsewhere").unlink()
    assert_pairs(adapter, canonical())


@pytest.mark.parametrize("change", ["cut short", "overwritten"])
def test_a_file_changed_after_the_check_is_not_used(folder: Path, inventory: Inventory, change: str) -> None:
    adapter = read_adapter(folder, inventory, max_rank=64)
    file = folder / "adapter_model.safetensors"
    info = file.stat()
    if change == "cut short":
        os.truncate(file, info.st_size - 1)
    else:
        with file.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"x")
        os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns + 1))  # coarse clocks may not have ticked yet
    with pytest.raises(UnsafeFile, match="since it was checked"):
        list(adapter.pairs())


def test_an_unreferenced_adapter_closes_its_file(folder: Path, inventory: Inventory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        read_adapter(folder, inventory, max_rank=64)
    assert len(os.listdir("/proc/self/fd")) == before


# What is refused, and which tensor is named.

CHANGES: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    (Q_A, lambda t: t.T, "transposed"),
    (Q_A, lambda t: t[:, :64], "shape [4, 64]"),
    (Q_A, lambda t: t[:2], "rank 2"),
    (Q_B, lambda t: t[:, :2], "rank 2"),
    (Q_A, lambda t: t[None], "shape [1, 4, 128]"),
    (Q_A, lambda t: t.reshape(-1), "shape [512]"),
    (f"{EXPERTS}.w1.lora_B.weight", lambda t: t[:15], "shape [15, 128, 4]"),
    (f"{EXPERTS}.w1.lora_B.weight", lambda t: t.transpose(1, 2), "transposed"),
    (f"{EXPERTS}.w2.lora_A.weight", lambda t: t[:1], "shape [1, 4, 128]"),
    (f"{EXPERTS}.w2.lora_B.weight", lambda t: t[0], "shape [128, 4]"),
    (f"{EXPERTS}.w3.lora_A.weight", lambda t: t.expand(16, -1, -1), "shape [16, 4, 128]"),
    (Q_A, lambda t: t.to(torch.float8_e4m3fn), "dtype F8_E4M3"),
    (Q_A, lambda t: t.double(), "dtype F64"),
    (Q_A, lambda t: t.to(torch.int16), "dtype I16"),
]


def test_unmatched_names(findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor]) -> None:
    extra = {
        "model.layers.0.self_attn.q_proj.lora_A.weight": "factor's name",
        f"{ATTENTION}.q_proj.lora_A.default.weight": "factor's name",
        f"{ATTENTION}.q_proj.lora_magnitude_vector": "factor's name",
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": "no module",
        f"{ATTENTION}.rotary.lora_A.weight": "no module",
        f"{EXPERTS}.shared.w1.lora_A.weight": "is per_expert_2d among stacked",
        f"{EXPERTS}.w4.lora_A.weight": "no module",
        f"{EXPERTS}.16.gate_proj.lora_A.weight": "no expert 16",
    }
    found = findings(tensors | {name: torch.zeros(4, 128).bfloat16() for name in extra})
    for name, problem in extra.items():
        assert problem in found[name].problem


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_missing_half(
    findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor], side: str
) -> None:
    missing = f"{EXPERTS}.w2.lora_{side}.weight"
    del tensors[missing]
    assert findings(tensors).keys() == {missing}


def test_a_missing_expert(
    canonical: Callable[..., Factors],
    spelled: Callable[..., dict[str, Tensor]],
    findings: Callable[..., dict[str, Finding]],
) -> None:
    tensors = spelled(canonical("stacked"), per_expert=True)
    for side in "AB":
        del tensors[f"{EXPERTS}.5.up_proj.lora_{side}.weight"]
    del tensors[f"{EXPERTS}.6.down_proj.lora_B.weight"]
    found = findings(tensors)
    assert found.keys() == {f"{EXPERTS}.5.up_proj.lora_A.weight", f"{EXPERTS}.6.down_proj.lora_B.weight"}


@pytest.mark.parametrize(("name", "change", "problem"), CHANGES)
def test_one_wrong_tensor_is_the_one_named(
    findings: Callable[..., dict[str, Finding]],
    tensors: dict[str, Tensor],
    name: str,
    change: Callable[[Tensor], Tensor],
    problem: str,
) -> None:
    tensors[name] = change(tensors[name]).clone()
    found = findings(tensors)
    assert name in found
    assert found.keys() <= {Q_A, Q_B, name}
    assert problem in found[name].problem


def test_two_dtypes_in_one_pair(
    findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor]
) -> None:
    found = findings(tensors | {Q_B: tensors[Q_B].float()})
    assert len(found) == 1
    assert found.keys() < {Q_A, Q_B}
    assert "one dtype" in next(iter(found.values())).expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q_B, f"{EXPERTS}.w1.lora_A.weight"])
def test_a_value_that_is_not_finite(
    findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor], name: str, value: float
) -> None:
    tensors[name].view(-1)[-1] = value
    assert {where: f.problem for where, f in findings(tensors).items()} == {name: "holds NaN or Inf"}


def test_a_rank_over_the_limit(
    findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor]
) -> None:
    assert findings(tensors, max_rank=3).keys() == {"r"}


def test_a_config_of_another_rank_names_every_tensor(
    findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor]
) -> None:
    assert findings(tensors, r=8).keys() == tensors.keys()


def test_an_adapter_of_another_base(
    findings: Callable[..., dict[str, Finding]],
    tensors: dict[str, Tensor],
    base_config: dict[str, Any],
    tmp_path: Path,
    config: dict[str, Any],
) -> None:
    other = Inventory.from_config(base_config | {"hidden_size": 256})
    file = tmp_path / "a.safetensors"
    save_file(tensors, file)
    with pytest.raises(InvalidAdapter) as caught:
        read_adapter_file(file, config, other, max_rank=64)
    named = {finding.where for finding in caught.value.findings}
    assert Q_A in named
    assert Q_B not in named  # q_proj's output does not depend on the hidden size
    assert f"{EXPERTS}.w2.lora_B.weight" in named


def test_swapped_halves(findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor]) -> None:
    tensors[Q_A], tensors[Q_B] = tensors[Q_B], tensors[Q_A]
    assert findings(tensors).keys() == {Q_A, Q_B}


@pytest.mark.parametrize(
    ("name", "double"),
    [
        (Q_A, Q_A.replace("model.model.", "model.")),
        (f"{EXPERTS}.w1.lora_A.weight", f"{EXPERTS}.gate_proj.lora_A.weight"),
    ],
)
def test_one_factor_under_two_names(
    findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor], name: str, double: str
) -> None:
    found = findings(tensors | {double: tensors[name].clone()})
    assert len(found) == 1
    (finding,) = found.values()
    assert {finding.where, finding.problem.rpartition(" ")[2]} == {name, double}


def test_mixed_layouts(
    findings: Callable[..., dict[str, Finding]],
    tensors: dict[str, Tensor],
    canonical: Callable[..., Factors],
    spelled: Callable[..., dict[str, Tensor]],
) -> None:
    one = {"model.layers.2.mlp.experts.w1": canonical("stacked")["model.layers.2.mlp.experts.w1"]}
    mixed = {name: t for name, t in tensors.items() if "layers.2.mlp.experts.w1" not in name}
    extra = spelled(one, per_expert=True)
    found = findings(mixed | extra)
    assert found.keys() in (extra.keys(), {name for name in mixed if "experts" in name})


@pytest.mark.parametrize(
    ("layout", "per_expert", "claim"),
    [
        ("stacked", False, "shared_outer"),
        ("stacked", True, "shared_outer"),
        ("shared_outer", False, "stacked"),
        ("shared_outer", False, "per_expert_2d"),
    ],
)
def test_a_claimed_layout_that_the_shapes_contradict(
    findings: Callable[..., dict[str, Finding]],
    canonical: Callable[..., Factors],
    spelled: Callable[..., dict[str, Tensor]],
    layout: str,
    per_expert: bool,
    claim: str,
) -> None:
    tensors = spelled(canonical(layout), per_expert=per_expert)
    assert findings(tensors, _sglang_lora_format=claim).keys() == {"_sglang_lora_format"}


def test_a_claimed_layout_that_the_shapes_confirm(read: Read, tensors: dict[str, Tensor]) -> None:
    assert read(tensors, _sglang_lora_format="shared_outer").layout == "shared_outer"


def test_target_modules_must_say_what_the_tensors_say(
    findings: Callable[..., dict[str, Finding]], read: Read, tensors: dict[str, Tensor]
) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "experts", "lm_head"]
    assert read(tensors, target_modules=targets).rank == 4
    assert read(tensors, target_modules=[*targets[:4], "w1", "w2", "w3", "lm_head"]).rank == 4
    found = findings(tensors, target_modules=[*targets[1:], "kv_b_proj"])
    assert found["target_modules"].problem == "'kv_b_proj' has no factors"
    others = {f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in range(3)}
    assert {where.replace("lora_B", "lora_A") for where in found} == {"target_modules", *others}


def test_an_empty_file(findings: Callable[..., dict[str, Finding]]) -> None:
    assert findings({}).keys() >= {"adapter_model.safetensors"}


def test_every_problem_is_reported_in_file_order(
    findings: Callable[..., dict[str, Finding]], tensors: dict[str, Tensor]
) -> None:
    bad = [Q_A, f"{EXPERTS}.w1.lora_A.weight", f"{EXPERTS}.w3.lora_B.weight"]
    for name in bad:
        tensors[name] = tensors[name][..., :-1].clone()
    assert list(findings(tensors)) == bad


# Folders.


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_missing_file_is_named(folder: Path, inventory: Inventory, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InvalidAdapter, match=name):
        read_adapter(folder, inventory, max_rank=64)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("kind", ["symlink", "folder", "pipe"])
def test_only_regular_files_are_read(folder: Path, inventory: Inventory, name: str, kind: str) -> None:
    (folder / name).rename(folder.parent / name)
    if kind == "symlink":
        (folder / name).symlink_to(folder.parent / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        os.mkfifo(folder / name)
    with pytest.raises(UnsafeFile, match=name):
        read_adapter(folder, inventory, max_rank=64)


def test_a_config_file_over_a_megabyte_is_not_read(folder: Path, inventory: Inventory) -> None:
    with (folder / "adapter_config.json").open("r+b") as stream:
        stream.truncate(1 << 40)  # sparse
    with pytest.raises(UnsafeFile, match=r"adapter_config\.json"):
        read_adapter(folder, inventory, max_rank=64)


def test_a_version_on_disk_is_never_overwritten(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], inventory: Inventory
) -> None:
    before = read_adapter(folder, inventory, max_rank=64).digest
    with pytest.raises(OSError, match="not empty"):
        write_adapter(folder, {Q_A: tensors[Q_A] + 1}, config)
    assert read_adapter(folder, inventory, max_rank=64).digest == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_adapter(tmp_path / "adapter", tensors, {"lora_alpha": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_one_expert_is_still_a_bank(
    base_config: dict[str, Any], tmp_path: Path, config: dict[str, Any]
) -> None:
    lone = Inventory.from_config(base_config | {"num_experts": 1})
    prefix = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
    a, b = torch.ones(4, 128), torch.ones(128, 4)
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, tmp_path / "a.safetensors")
    adapter = read_adapter_file(
        tmp_path / "a.safetensors", config | {"target_modules": ["gate_proj"]}, lone, max_rank=4
    )
    ((_, found, _, _),) = adapter.pairs()
    assert found.shape == (1, 4, 128)
    assert replace(adapter.config, alpha=4.0).scale == 1.0
