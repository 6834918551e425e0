from typing import Any

import pytest

from lanewise.loaders import Inventory, Module, UnsupportedBase


def test_a_moe_base_has_attention_and_three_bank_modules_per_layer(inventory: Inventory) -> None:
    assert (inventory.architecture, inventory.hidden_size, inventory.context_length) == (
        "qwen3_moe",
        128,
        4096,
    )
    assert len(inventory.modules) == 3 * (4 + 3) + 1
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
    modules = list(Inventory.from_config(config).modules.values())[:-1]
    regions = {m.name.split(".")[2]: m.region for m in modules}
    assert regions == {"0": "dense_mlp", "1": "routed_experts", "2": "dense_mlp", "3": "dense_mlp"}


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
SHARED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = SHARED | {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
DELTA_NET = EXPERTS | {
    "num_experts": 4,
    "shared_expert_intermediate_size": 80,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "mlp_only_layers": [1]},
    "qwen3_next": DELTA_NET | {"head_dim": 32, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": DELTA_NET,
    "glm4_moe": SHARED | {"head_dim": 24},
    "deepseek_v3": LATENT,
    "glm_moe_dsa": LATENT | {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16},
}
FROZEN = ("embed_tokens", ".bias", "norm", ".gate", "shared_expert_gate", "conv1d", "A_log", "dt_bias")


@pytest.mark.parametrize("written", ["by hand", "by transformers"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_modules_and_shapes_are_those_of_transformers_own_model(model_type: str, written: str) -> None:
    """Exactly those: what the inventory leaves out is on the list of what stays frozen."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = SIZES | FAMILIES[model_type]
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {name.removesuffix(".weight"): tuple(p.shape) for name, p in model.named_parameters()}
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        if name.endswith("gate_up_proj"):
            experts, rows, hidden = shape
            bank = name.removesuffix(".gate_up_proj")
            expected |= {
                f"{bank}.w1": (experts, rows // 2, hidden),
                f"{bank}.w3": (experts, rows // 2, hidden),
            }
        elif name.endswith(".experts.down_proj"):
            expected[name.replace("down_proj", "w2")] = shape
        elif not name.endswith(FROZEN) and ".indexer." not in name:
            expected[name] = shape
    by_hand = fields | {"model_type": model_type}
    inventory = Inventory.from_config(by_hand if written == "by hand" else config.to_dict())
    found: dict[str, tuple[int, ...]] = {}
    for module in inventory.modules.values():
        lead = () if module.experts is None else (module.experts,)
        found[module.name] = (*lead, module.out_features, module.in_features)
    assert found == expected
    if "linear_key_head_dim" in fields:
        assert inventory.regions["linear_attention"] == 3 * (3 if model_type == "qwen3_next" else 5)


def test_glm_5_2_has_850_modules() -> None:
    """Source: the base's config.json and the arithmetic of XoRL's published contract for this base."""
    inventory = Inventory.from_config(
        {
            "model_type": "glm_moe_dsa",
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 78,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "vocab_size": 154880,
            "max_position_embeddings": 1_048_576,
            "num_nextn_predict_layers": 1,
        }
    )
    assert len(inventory.modules) == 850
    assert inventory.regions == {
        "attention": 390,
        "dense_mlp": 9,
        "routed_experts": 225,
        "shared_experts": 225,
        "lm_head": 1,
    }
    assert inventory.parameters_per_rank == 128_151_680
    assert sum(module.parameters(64) for module in inventory.modules.values()) == 8_201_707_520


def test_qwen3_5_35b_a3b_has_the_sizes_of_published_adapters() -> None:
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
    }
    inventory = Inventory.from_config({"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}})
    assert inventory.modules == Inventory.from_config(text).modules
    assert (inventory.architecture, inventory.hidden_size) == ("qwen3_5_moe", 2048)
    experts = [m for m in inventory.modules.values() if m.region == "routed_experts"]
    assert sum(module.parameters(16) for module in experts) == 255_590_400
    assert sum(module.parameters(16, "stacked") for module in experts) == 1_258_291_200
    attention = [m for m in inventory.modules.values() if m.region == "attention"]
    assert sum(module.parameters(16) for module in attention) == 3_440_640
    assert inventory.regions == {
        "linear_attention": 30 * 5,
        "attention": 10 * 4,
        "routed_experts": 40 * 3,
        "shared_experts": 40 * 3,
        "lm_head": 1,
    }


def test_a_tied_head_is_not_in_the_inventory(base_config: dict[str, Any]) -> None:
    tied = Inventory.from_config(base_config | {"tie_word_embeddings": True})
    assert tied.tied_head
    assert "lm_head" not in tied.modules


def test_latent_attention_without_query_compression_has_one_query_module() -> None:
    config = SIZES | LATENT | {"model_type": "deepseek_v3", "q_lora_rank": None}
    modules = Inventory.from_config(config).modules
    assert modules["model.layers.0.self_attn.q_proj"].out_features == 4 * (12 + 8)
    assert "model.layers.0.self_attn.q_a_proj" not in modules


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_dense_base_has_seven_modules_per_layer(base_config: dict[str, Any], model_type: str) -> None:
    inventory = Inventory.from_config(base_config | {"model_type": model_type})
    assert len(inventory.modules) == 3 * 7 + 1
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
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"text_config": "x"}, "text_config is 'x'"),
        ({"model_type": "glm4_moe"}, "first_k_dense_replace is None"),
        ({"model_type": "glm4_moe", "mlp_layer_types": ["sparse"]}, "mlp_layer_types is not one of"),
    ],
)
def test_an_unusable_config_names_the_field(
    base_config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedBase, match=words):
        Inventory.from_config(base_config | change)
