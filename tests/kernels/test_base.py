"""`load_base` against transformers' own loading, and what it says of checkpoints that do not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lanewise.kernels.base import load_base
from lanewise.kernels.fp8 import dequantize_blocks, quantize_blocks


class Checkpoint(Protocol):
    config: PreTrainedConfig
    model: PreTrainedModel
    tensors: dict[str, Tensor]


IDS = torch.arange(40).view(2, 20)
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint with its linears and experts in block FP8."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            result[name], result[f"{name}_scale_inv"] = quantize_blocks(tensor)
        else:
            result[name] = tensor
    return result


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: dequantize_blocks(tensor, tensors[f"{name}_scale_inv"])
        if f"{name}_scale_inv" in tensors
        else tensor.clone()
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def fp8_config(config: PreTrainedConfig) -> dict[str, Any]:
    return config.to_dict() | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}


def test_an_fp8_checkpoint_runs_as_its_dequantised_weights_do_in_transformers(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    tensors = quantized(checkpoint.tensors)
    config = checkpoint.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(dequantized(tensors), tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = load_base(fp8_config(checkpoint.config), tensors.items())
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert torch.equal(ours(IDS).logits, theirs.eval()(IDS).logits)


def test_the_base_is_frozen_and_in_eval_mode(checkpoint: Checkpoint) -> None:
    model = load_base(checkpoint.config.to_dict(), checkpoint.tensors.items(), dtype=torch.bfloat16)
    assert not model.training
    assert all(not p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())


def test_the_order_of_tensors_does_not_matter(checkpoint: Checkpoint) -> None:
    tensors = list(quantized(checkpoint.tensors).items())
    forward = load_base(fp8_config(checkpoint.config), tensors)
    backward = load_base(fp8_config(checkpoint.config), reversed(tensors))
    assert torch.equal(forward(IDS).logits, backward(IDS).logits)


def test_tied_embeddings_need_no_lm_head(checkpoint: Checkpoint) -> None:
    tensors = {k: v for k, v in checkpoint.tensors.items() if k != "lm_head.weight"}
    model = load_base(checkpoint.config.to_dict() | {"tie_word_embeddings": True}, tensors.items())
    head = model.get_submodule("lm_head").weight
    assert isinstance(head, Tensor)
    assert torch.equal(head, tensors["model.embed_tokens.weight"])


def test_every_architecture_is_filled_whole(any_checkpoint: Checkpoint) -> None:
    """Linears and experts in block FP8 where it applies; what is not FP8 is taken as it is, bf16 too."""
    tensors = {
        name: tensor.bfloat16() if name.endswith("norm.weight") else tensor
        for name, tensor in quantized(any_checkpoint.tensors).items()
    }
    ours = load_base(fp8_config(any_checkpoint.config), tensors.items()).state_dict()
    wanted = load_base(any_checkpoint.config.to_dict(), dequantized(tensors).items()).state_dict()
    assert ours.keys() == wanted.keys() == any_checkpoint.model.state_dict().keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert all(torch.isfinite(tensor).all() for tensor in ours.values())


def test_banks_may_be_3d_on_disk(any_checkpoint: Checkpoint) -> None:
    model = load_base(any_checkpoint.config.to_dict(), any_checkpoint.model.state_dict().items())
    assert torch.equal(model(IDS).logits, any_checkpoint.model(IDS).logits)


def test_the_text_model_of_a_composite_checkpoint_is_taken(
    make_checkpoint: Callable[[str], Checkpoint],
) -> None:
    text = make_checkpoint("qwen3_5_moe_text")
    config = {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text.config.to_dict(),
        "vision_config": {"model_type": "qwen3_5_moe_vision"},
    }
    tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in text.tensors.items()}
    tensors |= {"model.visual.blocks.0.norm1.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    assert torch.equal(load_base(config, tensors.items())(IDS).logits, text.model(IDS).logits)


def test_layers_that_predict_further_tokens_are_left_out(
    make_checkpoint: Callable[[str], Checkpoint],
) -> None:
    glm = make_checkpoint("glm_moe_dsa")
    tensors = glm.tensors | {"model.layers.4.eh_proj.weight": torch.ones(2)}
    assert torch.equal(load_base(glm.config.to_dict(), tensors.items())(IDS).logits, glm.model(IDS).logits)
    with pytest.raises(ValueError, match=r"model\.layers\.5\.eh_proj\.weight: not a tensor of this model"):
        load_base(glm.config.to_dict(), [*glm.tensors.items(), ("model.layers.5.eh_proj.weight", IDS)])


def test_every_misfit_is_named(checkpoint: Checkpoint) -> None:
    tensors = dict(checkpoint.tensors)
    del tensors[EXPERT], tensors["model.norm.weight"]
    tensors["model.layers.9.mystery"] = torch.ones(1)
    tensors["lm_head.weight"] = torch.ones(2, 2)
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load_base(checkpoint.config.to_dict(), tensors.items())
    message = str(caught.value)
    assert f"{EXPERT}: missing" in message
    assert "model.norm.weight: missing" in message
    assert "model.layers.9.mystery: not a tensor of this model" in message
    assert "lm_head.weight: is [2, 2], expected [64, 32]" in message


def test_an_fp8_weight_without_its_scale_is_refused(checkpoint: Checkpoint) -> None:
    tensors = quantized(checkpoint.tensors)
    del tensors[f"{EXPERT}_scale_inv"]
    with pytest.raises(ValueError, match=r"experts\.3\.up_proj\.weight: came without its scale"):
        load_base(fp8_config(checkpoint.config), tensors.items())


@pytest.mark.parametrize("shape", [(2, 1), (1,), (1, 1, 1)])
def test_scales_that_do_not_cover_their_weight_are_refused(
    checkpoint: Checkpoint, shape: tuple[int, ...]
) -> None:
    tensors = quantized(checkpoint.tensors)
    tensors[f"{EXPERT}_scale_inv"] = torch.ones(shape)
    message = f"{EXPERT}_scale_inv: is {list(shape)}, expected [1, 1]"
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        load_base(fp8_config(checkpoint.config), tensors.items())


def test_a_tensor_given_twice_is_refused(checkpoint: Checkpoint) -> None:
    twice = [*checkpoint.tensors.items(), ("model.norm.weight", torch.ones(32))]
    with pytest.raises(ValueError, match="given twice"):
        load_base(checkpoint.config.to_dict(), twice)
