"""`lanewise inspect` and `lanewise convert`, as a shell sees them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lanewise.loaders import Inventory, read_adapter, write_adapter

LANEWISE = Path(sys.executable).with_name("lanewise")
BASE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "moe_intermediate_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "experts"],
}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [LANEWISE, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "80"}
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(BASE))
    return tmp_path / "base"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """q_proj and all experts, shared_outer."""
    torch.manual_seed(0)
    factors: dict[str, torch.Tensor] = {}
    for name, module in Inventory.from_config(BASE).modules.items():
        if not name.endswith(("q_proj", "w1", "w2", "w3")):
            continue
        shapes = {"A": (4, module.in_features), "B": (module.out_features, 4)}
        for side, shape in shapes.items():
            lead: tuple[int, ...] = ()
            if module.experts is not None:
                lead = (1 if (side == "B") == name.endswith("w2") else module.experts,)
            factors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(*lead, *shape).bfloat16()
    return factors


@pytest.fixture
def adapter(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    write_adapter(tmp_path / "password", tensors, CONFIG)
    return tmp_path / "password"


def parsed(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_inspect_a_base(base: Path) -> None:
    for where in (base, base / "config.json"):
        result = run("inspect", "--base", where, "--json")
        assert result.returncode == 0
        inventory = Inventory.from_config(BASE)
        assert parsed(result) == {
            "architecture": "qwen3_moe",
            "modules": 15,
            "factors": 30,
            "regions": {"attention": 8, "routed_experts": 6, "lm_head": 1},
            "parameters_per_rank": inventory.parameters_per_rank,
        }
    shown = run("inspect", "--base", base).stdout
    assert "qwen3_moe" in shown
    assert f"{inventory.parameters_per_rank:,}" in shown


@pytest.mark.parametrize("with_base", [False, True])
def test_inspect_an_adapter(
    base: Path, adapter: Path, tensors: dict[str, torch.Tensor], with_base: bool
) -> None:
    option = ["--base", base] if with_base else []
    result = run("inspect", adapter, *option, "--json")
    assert result.returncode == 0, result.stdout
    numbers = sum(t.numel() for t in tensors.values())
    assert parsed(result) == {
        "layout": "shared_outer",
        "rank": 4,
        "scale": "alpha / r = 8 / 4 = 2",
        "modules": 8,
        "factors": 16,
        "regions": {"attention": 2, "routed_experts": 6},
        "parameters_per_rank": numbers // 4,
        "parameters": numbers,
        "bytes": 2 * numbers,
        "dtypes": {"BF16": 16},
        "values_read": True,
        "problems": [],
        "warnings": [],
    }
    shown = run("inspect", adapter, *option)
    assert shown.returncode == 0
    assert "shared_outer, rank 4, BF16" in shown.stdout
    assert "no problems" in shown.stdout
    assert f"{numbers:,}" in shown.stdout


def break_it(tensors: dict[str, torch.Tensor], how: str) -> str:
    """Changes one tensor and gives its name."""
    name = "base_model.model.model.layers.1.mlp.experts.w2.lora_A.weight"
    if how == "nan":
        tensors[name][3, 2, 1] = float("nan")
    elif how == "transposed":
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    elif how == "missing":
        del tensors[name]
    else:
        tensors[name.replace("w2", "w4")] = tensors[name].clone()
        name = name.replace("w2", "w4")
    return name


@pytest.mark.parametrize(
    ("how", "with_base"),
    [
        *((how, True) for how in ("nan", "transposed", "missing", "unknown")),
        ("nan", False),
        ("missing", False),
    ],
)
def test_inspect_names_what_is_wrong(
    base: Path, adapter: Path, tensors: dict[str, torch.Tensor], how: str, with_base: bool
) -> None:
    """Some of it also without a base."""
    name = break_it(tensors, how)
    save_file(tensors, adapter / "adapter_model.safetensors")
    option = ["--base", base] if with_base else []
    result = run("inspect", adapter, *option, "--json")
    assert result.returncode == 1
    problems = parsed(result)["problems"]
    assert [problem["tensor"] for problem in problems] == [name]
    assert all(problem["problem"] and problem["expected"] for problem in problems)
    shown = run("inspect", adapter, *option)
    assert shown.returncode == 1
    assert f"problem {name}" in shown.stdout


def test_inspect_reports_the_config_and_the_tensors_together(
    base: Path, adapter: Path, tensors: dict[str, torch.Tensor]
) -> None:
    name = break_it(tensors, "transposed")
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | {"use_dora": True}))
    (adapter / "added_tokens.json").write_text(json.dumps({"<old>": 3, "<new>": 320}))
    found = parsed(run("inspect", adapter, "--base", base, "--json"))
    assert [problem["tensor"] for problem in found["problems"]] == ["use_dora", "added_tokens.json", name]
    assert found["layout"] == "shared_outer"


@pytest.mark.parametrize("how", ["truncated", "pickle", "no config", "not JSON"])
def test_inspect_what_cannot_be_read(base: Path, adapter: Path, how: str) -> None:
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "pickle":
        file.rename(adapter / "adapter_model.bin")
    elif how == "no config":
        config.unlink()
    else:
        config.write_text("{")
    result = run("inspect", adapter, "--json", "--base", base)
    assert result.returncode == 1
    found = parsed(result)
    assert found["layout"] is None
    (problem,) = found["problems"]
    assert problem["tensor"] == (file.name if how in ("truncated", "pickle") else config.name)
    assert ("pickle" in problem["expected"]) == (how == "pickle")
    assert run("inspect", adapter).returncode == 1


def test_inspect_flags_factors_that_are_all_zero(adapter: Path, tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, adapter / "adapter_model.safetensors")
    result = run("inspect", adapter, "--json")
    assert result.returncode == 0
    assert [warning["tensor"] for warning in parsed(result)["warnings"]] == [name]
    assert parsed(run("inspect", adapter, "--json", "--no-values"))["warnings"] == []


def test_wrong_arguments(base: Path, tmp_path: Path) -> None:
    assert run("inspect").returncode == 2
    assert run("inspect", tmp_path / "nowhere").returncode == 1
    (base / "config.json").write_text('{"model_type": "gpt2"}')
    result = run("inspect", "--base", base)
    assert result.returncode == 1
    assert "gpt2" in result.stderr


@pytest.mark.parametrize("to", ["per_expert_2d", "stacked", "shared_outer", "target_parameters"])
def test_convert_there_and_back(base: Path, adapter: Path, tmp_path: Path, to: str) -> None:
    result = run("convert", adapter, tmp_path / "there", "--to", to, "--base", base)
    assert result.returncode == 0, result.stderr
    assert f"shared_outer → {to}" in result.stdout
    assert "bit for bit" in result.stdout
    assert run("inspect", tmp_path / "there", "--base", base).returncode == 0
    alone = parsed(run("inspect", tmp_path / "there", "--json"))
    assert (alone["layout"], alone["problems"]) == (to, [])
    # Without a base the adapter's own sizes do.
    result = run("convert", tmp_path / "there", tmp_path / "back", "--to", "shared_outer")
    assert result.returncode == 0, result.stderr
    inventory = Inventory.from_config(BASE)
    meant, found = (read_adapter(folder, inventory, max_rank=8) for folder in (adapter, tmp_path / "back"))
    for (name, a, b, scale), pair in zip(meant.pairs(), found.pairs(), strict=True):
        assert (name, scale) == (pair[0], pair[3])
        assert torch.equal(a, pair[1])
        assert torch.equal(b, pair[2])


def test_convert_casts_when_asked(base: Path, adapter: Path, tmp_path: Path) -> None:
    result = run("convert", adapter, tmp_path / "out", "--to", "stacked", "--dtype", "fp16")
    assert result.returncode == 0, result.stderr
    assert "cast to F16: worst relative error" in result.stdout
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118


def test_convert_refuses_and_leaves_nothing(
    base: Path, adapter: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    stacked = tmp_path / "stacked"
    assert run("convert", adapter, stacked, "--to", "stacked").returncode == 0
    again = run("convert", adapter, stacked, "--to", "stacked")
    assert again.returncode == 1
    assert "exists" in again.stderr
    name = "base_model.model.model.layers.0.mlp.experts.w1.lora_A.weight"
    with safe_open(stacked / "adapter_model.safetensors", framework="pt") as file:
        changed = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    changed[name][2] += 1
    save_file(changed, stacked / "adapter_model.safetensors")
    refused = run("convert", stacked, tmp_path / "out", "--to", "shared_outer", "--base", base)
    assert refused.returncode == 1
    assert f"problem {name}: differs between experts 0 and 2" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "password", "stacked"]
    break_it(tensors, "nan")
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert "NaN" in run("convert", adapter, tmp_path / "out", "--to", "stacked").stderr
