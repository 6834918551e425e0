from typing import Any

import pytest

from lanewise.loaders import Inventory, Module, UnsupportedBase


def test_a_moe_base_has_attention_and_three_bank_modules_per_layer(inventory: Inventory) -> None:
    assert (inventory.architecture, inventory.hidden_size, inventory.context_length) == (
        "qwen3_moe",
        128,
        4096,
    )
    assert len(inventory.modules) == 3 * (4 + 3)
    layer = "model.layers.2"
    assert inventory.modules[f"{layer}.self_attn.q_proj"] == Module(
        f"{layer}.self_attn.q_proj", "linear", 128, 256, None, "attention"
    )
    assert inventory.modules[f"{layer}.self_attn.k_proj"].out_features == 2 * 64
    assert inventory.modules[f"{layer}.self_attn.o_proj"].in_features == 4 * 64
    assert inventory.modules[f"{layer}.mlp.experts.w2"] == Module(
        f"{layer}.mlp.experts.w2", "expert", 128, 128, 16, "routed_experts"
    )


def test_sparse_step_and_mlp_only_layers_make_dense_layers(base_config: dict[str, Any]) -> None:
    config = base_config | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    regions = {m.name.split(".")[2]: m.region for m in Inventory.from_config(config).modules.values()}
    assert regions == {"0": "dense_mlp", "1": "routed_experts", "2": "dense_mlp", "3": "dense_mlp"}


def test_every_module_exists_in_transformers_own_model(base_config: dict[str, Any]) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = {key: value for key, value in base_config.items() if key != "model_type"}
    config = Qwen3MoeConfig(**fields, mlp_only_layers=[1])
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    shapes = {name.removesuffix(".weight"): tuple(p.shape) for name, p in model.named_parameters()}
    inventory = Inventory.from_config(config.to_dict())
    for module in inventory.modules.values():
        if module.kind == "linear":
            assert shapes[module.name] == (module.out_features, module.in_features)
        elif module.name.endswith("w2"):
            shape = (module.experts, module.out_features, module.in_features)
            assert shapes[module.name.replace("w2", "down_proj")] == shape
    assert {m.region for m in inventory.modules.values()} == {"attention", "dense_mlp", "routed_experts"}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_dense_base_has_seven_modules_per_layer(base_config: dict[str, Any], model_type: str) -> None:
    inventory = Inventory.from_config(base_config | {"model_type": model_type})
    assert len(inventory.modules) == 3 * 7
    assert inventory.modules["model.layers.0.mlp.down_proj"].in_features == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'.*qwen3_moe"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": "128"}, "hidden_size is '128'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"head_dim": True}, "head_dim is True"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ],
)
def test_an_unusable_config_names_the_field(
    base_config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedBase, match=words):
        Inventory.from_config(base_config | change)
