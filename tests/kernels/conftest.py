"""Small random models of transformers' own, and their tensors as checkpoints have them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": ATTENTION,
    "qwen3": ATTENTION,
    "qwen3_moe": {
        **ATTENTION,
        **EXPERTS,
        "num_experts": 6,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "glm_moe_dsa": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 6,
        "first_k_dense_replace": 1,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 8,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
    },
    "qwen3_5_moe_text": {
        **ATTENTION,
        **EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 24,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


@dataclass(frozen=True)
class Checkpoint:
    """`model` is transformers' own; `tensors` are its weights under a checkpoint's names, experts in 2-D."""

    config: PreTrainedConfig
    model: PreTrainedModel
    tensors: dict[str, Tensor]


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[[str], Checkpoint]:
    """model_type → the same small checkpoint every time."""

    @cache
    def make(model_type: str) -> Checkpoint:
        torch.manual_seed(0)
        common = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "pad_token_id": None,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        }
        config = AutoConfig.for_model(model_type, **common | FIELDS[model_type])
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        return Checkpoint(config, model, checkpoint_tensors(model))

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return make_checkpoint("qwen3_moe")


@pytest.fixture(scope="session", params=FIELDS)
def any_checkpoint(
    request: pytest.FixtureRequest, make_checkpoint: Callable[[str], Checkpoint]
) -> Checkpoint:
    """One of every architecture."""
    return make_checkpoint(request.param)


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        bank = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                tensors[f"{bank}.{e}.gate_proj.weight"] = gate.clone()
                tensors[f"{bank}.{e}.up_proj.weight"] = up.clone()
        elif name.endswith("experts.down_proj"):
            tensors |= {f"{bank}.{e}.down_proj.weight": expert.clone() for e, expert in enumerate(tensor)}
        else:
            tensors[name] = tensor.clone()
    return tensors
