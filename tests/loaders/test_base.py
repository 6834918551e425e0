import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lanewise.loaders import BaseCheckpoint, UnsupportedBase

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return {
        "model.norm.weight": torch.randn(128).bfloat16(),
        "lm_head.weight": torch.randn(320, 128),
        "model.layers.0.q.weight": torch.randn(128, 128).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def base(tmp_path: Path, base_config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(base_config | {"quantization_config": FP8}))
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def shard(base: Path, weights: dict[str, Tensor]) -> None:
    (base / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, (name, tensor) in enumerate(weights.items()):
        file = f"model-{number + 1:05}-of-{len(weights):05}.safetensors"
        save_file({name: tensor}, base / file)
        weight_map[name] = file
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_come_back_bit_for_bit(base: Path, weights: dict[str, Tensor], sharded: bool) -> None:
    if sharded:
        shard(base, weights)
    checkpoint = BaseCheckpoint.open(base)
    found = dict(checkpoint.tensors())
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    assert checkpoint.inventory.architecture == "qwen3_moe"
    assert checkpoint.config["vocab_size"] == 320


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'"),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
    ],
)
def test_an_unsupported_config_names_the_field(
    base: Path, base_config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    (base / "config.json").write_text(json.dumps(base_config | change))
    with pytest.raises(UnsupportedBase, match=words):
        BaseCheckpoint.open(base)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_config_that_is_not_an_object_is_refused(base: Path, text: str) -> None:
    (base / "config.json").write_text(text)
    with pytest.raises(UnsupportedBase, match=r"config\.json"):
        BaseCheckpoint.open(base)


def test_missing_files_are_named(base: Path, weights: dict[str, Tensor]) -> None:
    shard(base, weights)
    (base / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UnsupportedBase, match="model-00002-of-00003"):
        BaseCheckpoint.open(base)
    (base / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedBase, match="no weights found"):
        BaseCheckpoint.open(base)
    (base / "config.json").unlink()
    with pytest.raises(UnsupportedBase, match=r"config\.json"):
        BaseCheckpoint.open(base)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": "../model.safetensors"}, {"a": 3}])
def test_an_index_stays_in_its_folder(base: Path, weight_map: object) -> None:
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UnsupportedBase, match=r"index\.json"):
        BaseCheckpoint.open(base)


def test_a_tensor_the_index_promises_but_no_file_holds_is_named(
    base: Path, weights: dict[str, Tensor]
) -> None:
    (base / "model.safetensors").rename(base / "other.safetensors")
    index = {"weight_map": dict.fromkeys([*weights, "model.absent"], "other.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedBase, match=r"model\.absent"):
        list(BaseCheckpoint.open(base).tensors())


def test_a_truncated_weight_file_is_named(base: Path) -> None:
    whole = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UnsupportedBase, match=r"model\.safetensors"):
        list(BaseCheckpoint.open(base).tensors())
