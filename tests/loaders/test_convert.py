"""Layouts out: the same factors, bit for bit; what cannot be the same is refused or reported."""

import json
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lanewise.loaders import Adapter, InvalidAdapter, Inventory, convert, read_adapter, write_adapter

Factors = dict[str, tuple[Tensor, Tensor]]
LAYOUTS = ["per_expert_2d", "stacked", "shared_outer", "target_parameters"]


@pytest.fixture
def write(
    tmp_path: Path, inventory: Inventory, config: dict[str, Any], spelled: Callable[..., dict[str, Tensor]]
) -> Callable[..., Adapter]:
    """Store pairs as shared_outer or stacked and read them."""

    def adapter(pairs: Factors, **change: Any) -> Adapter:
        folder = tmp_path / f"in-{len(list(tmp_path.iterdir()))}"
        write_adapter(folder, spelled(pairs), config | change)
        return read_adapter(folder, inventory, max_rank=64)

    return adapter


@pytest.fixture
def again(tmp_path: Path, inventory: Inventory) -> Callable[..., Adapter]:
    """Convert and read the result."""

    def converted(adapter: Adapter, to: Any, **options: Any) -> Adapter:
        folder = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        report = convert(adapter, folder, to, **options)
        result = read_adapter(folder, inventory, max_rank=64)
        assert result.layout == report.after == to
        assert result.nbytes == report.bytes_after
        assert len(result._file.entries) == report.tensors  # pyright: ignore[reportPrivateUsage]
        return result

    return converted


def bits(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Every module's factors for every expert, and its scale."""
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    for pair, a, b in adapter.own_pairs():
        if pair.module.experts is not None:
            a, b = (t.expand(pair.module.experts, -1, -1) for t in (a, b))
        found[pair.module.name] = a, b, pair.scale
    return found


def assert_equal(one: Adapter, other: Adapter) -> None:
    expected, found = bits(one), bits(other)
    assert found.keys() == expected.keys()
    for name, (a, b, scale) in expected.items():
        assert torch.equal(found[name][0], a), name
        assert torch.equal(found[name][1], b), name
        assert found[name][2] == scale, name


def file_of(adapter: Adapter) -> bytes:
    return adapter._file.path.read_bytes()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("first", "second"), list(product(LAYOUTS, LAYOUTS)))
def test_round_trips_are_bit_exact(
    write: Callable[..., Adapter],
    again: Callable[..., Adapter],
    canonical: Callable[..., Factors],
    first: str,
    second: str,
) -> None:
    """From shared factors, so that every layout can hold them; through two others and back."""
    source = write(canonical("shared_outer"))
    there = again(again(source, first), second)
    # target_parameters keeps gate and up in two blocks: its own pairs have twice the rank until read back.
    if second != "target_parameters":
        assert_equal(source, there)
    back = again(there, "shared_outer")
    assert_equal(source, back)
    assert file_of(back) == file_of(again(source, "shared_outer"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_survive_too(
    write: Callable[..., Adapter],
    again: Callable[..., Adapter],
    canonical: Callable[..., Factors],
    dtype: torch.dtype,
) -> None:
    source = write({name: (a.to(dtype), b.to(dtype)) for name, (a, b) in canonical("stacked").items()})
    assert_equal(source, again(again(again(source, "target_parameters"), "per_expert_2d"), "stacked"))


def test_gate_and_up_that_share_a_keep_their_rank_as_one_parameter(
    write: Callable[..., Adapter], again: Callable[..., Adapter], canonical: Callable[..., Factors]
) -> None:
    pairs = canonical("stacked")
    for name in pairs:
        if name.endswith("w3"):
            pairs[name] = pairs[name.replace("w3", "w1")][0].clone(), pairs[name][1]
    source = write(pairs)
    fused = again(source, "target_parameters")
    assert fused.rank == 4
    assert fused.config.rank_pattern == {}
    assert_equal(source, fused)
    assert_equal(source, again(fused, "stacked"))


def test_experts_that_differ_are_not_shared(
    tmp_path: Path, write: Callable[..., Adapter], canonical: Callable[..., Factors]
) -> None:
    pairs = canonical("shared_outer")
    name = "model.layers.1.mlp.experts.w2"
    a, b = pairs[name]
    b = b.repeat(16, 1, 1)
    b[5, 3, 1] += 1
    all_stacked = {
        n: (x.expand(16, -1, -1), y.expand(16, -1, -1)) if ".experts." in n else (x, y)
        for n, (x, y) in pairs.items()
    }
    adapter = write(all_stacked | {name: (a, b)})
    with pytest.raises(InvalidAdapter, match=r"layers\.1\.mlp\.experts\.w2\.lora_B.*experts 0 and 5"):
        convert(adapter, tmp_path / "out", "shared_outer")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


PATTERNS = {
    "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 4, "k_proj": 2, r"1\.mlp\.experts\.w2": 3},
    "alpha_pattern": {r"layers\.2\.self_attn\.q_proj": 5, "lm_head": 3.5, r"1\.mlp\.experts\.w3": 12},
    "use_rslora": True,
}


@pytest.fixture
def uneven(write: Callable[..., Adapter], canonical: Callable[..., Factors]) -> Adapter:
    """Ranks and scales that differ from module to module."""
    pairs = canonical("shared_outer")
    for name, (a, b) in pairs.items():
        rank = 2 if "k_proj" in name else 3 if "1.mlp.experts.w2" in name else 4
        pairs[name] = a[..., :rank, :], b[..., :rank]
    return write(pairs, **PATTERNS)


@pytest.mark.parametrize("to", ["per_expert_2d", "stacked", "shared_outer"])
def test_patterns_and_rank_stabilised_scales_survive(
    uneven: Adapter, again: Callable[..., Adapter], to: str
) -> None:
    assert len({scale for _, _, scale in bits(uneven).values()}) > 4
    assert_equal(uneven, again(uneven, to))
    assert_equal(uneven, again(again(uneven, to), "shared_outer"))


def test_one_parameter_cannot_have_two_scales(uneven: Adapter, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=r"layers\.1\.mlp\.experts\.w3\.lora_B.*fold the scale"):
        convert(uneven, tmp_path / "out", "target_parameters")


@pytest.mark.parametrize("to", LAYOUTS)
def test_folded_for_an_engine_that_knows_one_alpha_and_one_rank(
    uneven: Adapter, again: Callable[..., Adapter], tmp_path: Path, to: Any
) -> None:
    report = convert(uneven, tmp_path / "report", to, fold_scale=True)
    assert report.padded == 4
    assert report.folded > 4
    folded = again(uneven, to, fold_scale=True)
    raw = folded.config.raw
    assert "use_rslora" not in raw
    if to != "target_parameters":
        assert raw["rank_pattern"] == raw["alpha_pattern"] == {}
        assert {pair.rank for pair, _, _ in folded.own_pairs()} == {4}
    meant = bits(uneven)
    for name, (a, b, scale) in bits(folded).items():
        a0, b0, scale0 = meant[name]
        delta, exact = scale * b.double() @ a.double(), scale0 * b0.double() @ a0.double()
        torch.testing.assert_close(delta, exact, rtol=0, atol=float(exact.abs().max()) * 2**-7)
        if scale0 == scale and to != "target_parameters":  # which keeps gate and up in two blocks
            assert torch.equal(b[..., : b0.shape[-1]], b0)


def test_a_cast_reports_its_worst_rounding(
    write: Callable[..., Adapter],
    again: Callable[..., Adapter],
    canonical: Callable[..., Factors],
    tmp_path: Path,
) -> None:
    pairs = {name: (a.float(), b.float()) for name, (a, b) in canonical().items()}
    a, b = pairs["model.layers.1.self_attn.v_proj"]
    b[0, 0] = 1 + 2**-8 + 2**-16
    b[0, 1] = 0.0
    adapter = write(pairs)
    report = convert(adapter, tmp_path / "out", "shared_outer", dtype="BF16")
    assert report.worst_tensor == "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    assert report.worst_error == pytest.approx(2**-8, rel=0.02)
    assert report.bytes_after * 2 == report.bytes_before
    assert convert(adapter, tmp_path / "same", "shared_outer").worst_error is None
    assert convert(adapter, tmp_path / "none", "shared_outer", dtype="F32").worst_error == 0.0
    pairs["model.layers.1.self_attn.v_proj"] = a, b * 1e30
    with pytest.raises(InvalidAdapter, match="too large for"):
        convert(write(pairs), tmp_path / "half", "shared_outer", dtype="F16")


def test_progress_ends_at_one(folder: Path, inventory: Inventory, tmp_path: Path) -> None:
    for fold in (False, True):
        shares: list[float] = []
        adapter = read_adapter(folder, inventory, max_rank=64)
        convert(adapter, tmp_path / str(fold), "stacked", fold_scale=fold, on_progress=shares.append)
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_the_file_is_plain_safetensors_and_the_config_plain_peft(
    folder: Path, inventory: Inventory, tmp_path: Path
) -> None:
    convert(read_adapter(folder, inventory, max_rank=64), tmp_path / "out", "per_expert_2d")
    file = tmp_path / "out" / "adapter_model.safetensors"
    assert struct.unpack("<Q", file.read_bytes()[:8])[0] % 8 == 0
    with safe_open(file, framework="pt") as tensors:
        name = "base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight"
        assert tensors.get_tensor(name).shape == (4, 128)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    )
    assert "_sglang_lora_format" not in config


def test_an_existing_folder_is_never_overwritten(folder: Path, inventory: Inventory) -> None:
    adapter = read_adapter(folder, inventory, max_rank=64)
    before = file_of(adapter)
    with pytest.raises(OSError, match="not empty"):
        convert(adapter, folder, "stacked")
    assert file_of(adapter) == before
