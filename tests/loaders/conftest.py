"""A tiny base's inventory and adapters that fit it, in every layout and spelling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lanewise.loaders import Inventory, write_adapter

PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.fixture(scope="session")
def base_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
    }


@pytest.fixture(scope="session")
def inventory(base_config: dict[str, Any]) -> Inventory:
    return Inventory.from_config(base_config)


@pytest.fixture
def config() -> dict[str, Any]:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}


@pytest.fixture
def canonical(inventory: Inventory) -> Callable[..., dict[str, tuple[Tensor, Tensor]]]:
    """Factors by module name, as `Adapter.pairs` should give them back."""

    def make(layout: str = "shared_outer", rank: int = 4) -> dict[str, tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(7)
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in inventory.modules.items():
            lead_a: tuple[int, ...] = () if module.experts is None else (module.experts,)
            lead_b = lead_a
            if layout == "shared_outer" and module.experts is not None:
                lead_a, lead_b = (lead_a, (1,)) if name.endswith("w2") else ((1,), lead_b)
            a = torch.randn(*lead_a, rank, module.in_features, generator=generator)
            b = torch.randn(*lead_b, module.out_features, rank, generator=generator)
            pairs[name] = a.bfloat16(), b.bfloat16()
        return pairs

    return make


@pytest.fixture
def spelled() -> Callable[..., dict[str, Tensor]]:
    """Canonical factors under the names a trainer gives them."""

    def spell(
        pairs: dict[str, tuple[Tensor, Tensor]],
        *,
        prefix: str = "base_model.model.",
        inner: bool = False,
        peft_names: bool = False,
        per_expert: bool = False,
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for module, pair in pairs.items():
            bank, _, last = module.rpartition(".experts.")
            if bank and (peft_names or per_expert):
                last = PROJECTIONS[last]
            for side, tensor in zip("AB", pair, strict=True):
                if tensor.ndim == 3 and per_expert:
                    for expert, piece in enumerate(tensor):
                        tensors[f"{bank}.experts.{expert}.{last}.lora_{side}.weight"] = piece.clone()
                else:
                    name = f"{bank}.experts.{last}" if bank else module
                    tensors[f"{name}.lora_{side}.weight"] = tensor
        # Another prefix than PEFT's usual one: the trainer wrapped the inner model.
        return {f"{prefix}{name.removeprefix('model.') if inner else name}": t for name, t in tensors.items()}

    return spell


@pytest.fixture
def tensors(
    canonical: Callable[..., dict[str, tuple[Tensor, Tensor]]], spelled: Callable[..., dict[str, Tensor]]
) -> dict[str, Tensor]:
    """A whole shared_outer adapter of rank 4."""
    return spelled(canonical())


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """The same on disk."""
    write_adapter(tmp_path / "adapter", tensors, config)
    return tmp_path / "adapter"
