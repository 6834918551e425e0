"""A small random Qwen3-MoE of transformers' own, and its tensors as a checkpoint has them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Checkpoint:
    """`model` is transformers' own; `tensors` are its weights under a checkpoint's names, experts in 2-D."""

    config: PreTrainedConfig
    model: PreTrainedModel
    tensors: dict[str, Tensor]


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        initializer_range=0.15,
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return Checkpoint(config, model, checkpoint_tensors(model))


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
