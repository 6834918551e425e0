"""The frozen base: transformers' own model class, filled from the tensors of a Hugging Face checkpoint.

Checkpoints keep experts as 2-D weights, one per expert and projection, or each bank as two 3-D ones;
transformers 5 has two 3-D parameters. Of a checkpoint that also sees images, the text model is taken.
Block-FP8 weights are dequantised here, so y = dequant(W)·x with x never quantised: the oracle that faster
paths are compared with. In fp32 that takes four times the checkpoint's memory. Dequantising at every call
would take a quarter of it, and far more time (measured on one core, 2048×2048: 33 ms instead of 0.7 for one
row, 30 ms instead of 7 for 64). For a base that does not fit, bf16 halves the memory and rounds once more.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from .fp8 import dequantize_blocks, scale_shape

SCALE_SUFFIX = "_scale_inv"

# Names on disk that differ from transformers' own: of a text model beside a vision tower, and Mixtral's.
_RENAMED = (
    (r"^model\.language_model\.", "model."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
    (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
    (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
)


@torch.no_grad()
def load_base(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """Build the model that `config` (a checkpoint's config.json) describes and fill it with `tensors`.

    An FP8 `X.weight` and its `X.weight_scale_inv` may come in either order. Tensors of a vision tower and of
    multi-token prediction are left out: answers are made from text, one token at a time. The model is frozen,
    in eval mode and in `dtype`. Raises ValueError naming every tensor that is missing, unknown, of a wrong
    shape or without its scale.
    """
    model = _empty_model(config, dtype, device)
    places = _places(model)
    unused = re.compile(rf"model\.visual\.|mtp\.|model\.layers\.{model.config.num_hidden_layers}\.")
    wrong: list[str] = []
    waiting: dict[str, Tensor] = {}  # FP8 weights and scales whose other half has not come yet

    def fill(name: str, tensor: Tensor) -> None:
        for part, value in _by_expert(name, tensor):
            place = places.pop(part, None)
            if place is None:
                wrong.append(f"{part}: not a tensor of this model, or given twice")
            elif place.shape != value.shape:
                wrong.append(f"{part}: is {list(value.shape)}, expected {list(place.shape)}")
            else:
                place.copy_(value)

    for name_on_disk, tensor in tensors:
        name = _renamed(name_on_disk)
        if unused.match(name):
            continue
        weight_name = name.removesuffix(SCALE_SUFFIX)
        scale_name = weight_name + SCALE_SUFFIX
        if weight_name == name and tensor.dtype != torch.float8_e4m3fn:
            fill(name, tensor)
            continue
        waiting[name] = tensor
        if weight_name not in waiting or scale_name not in waiting:
            continue
        q, scale = waiting.pop(weight_name).to(device), waiting.pop(scale_name).to(device)
        if scale.shape != scale_shape(q.shape):
            wrong.append(f"{scale_name}: is {list(scale.shape)}, expected {list(scale_shape(q.shape))}")
            scale = scale.new_ones(scale_shape(q.shape))  # to find what else is wrong
        fill(weight_name, dequantize_blocks(q, scale))
    wrong += [
        f"{name}: came without its {'weight' if name.endswith(SCALE_SUFFIX) else 'scale'}" for name in waiting
    ]
    wrong += [f"{name}: missing" for name in places if name not in waiting]
    if wrong:
        rest = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError("the checkpoint does not fit its config: " + "; ".join(wrong[:10]) + rest)
    return model


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _empty_model(
    config: Mapping[str, Any], dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    fields = {**config, **config.get("text_config", {})}
    # Its tensors are dequantised here, so transformers is not to bring a quantiser of its own.
    fields.pop("quantization_config", None)
    for part in ("text_config", "vision_config"):
        fields.pop(part, None)
    with torch.device(device), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype)
    model.tie_weights()  # left out where initialisation is
    return model.eval().requires_grad_(False)


def _places(model: PreTrainedModel) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes: its name → the parameter, or the part of one, it fills."""
    tied = {id(p) for p in model.parameters()}
    places: dict[str, Tensor] = {}
    for name, state in model.state_dict(keep_vars=True).items():
        if isinstance(state, torch.nn.Parameter) and id(state) not in tied:
            continue  # a second name of a tied weight
        tied.discard(id(state))
        places.update(_by_expert(name, state))
    return places


def _by_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A bank's 3-D weight as the 2-D weights of its experts, by their names; any other tensor as it is."""
    bank, _, leaf = name.rpartition(".")
    if tensor.ndim == 3 and leaf == "gate_up_proj":
        for e, expert in enumerate(tensor):
            gate, up = expert.tensor_split(2)
            yield f"{bank}.{e}.gate_proj.weight", gate
            yield f"{bank}.{e}.up_proj.weight", up
    elif tensor.ndim == 3 and leaf == "down_proj":
        for e, expert in enumerate(tensor):
            yield f"{bank}.{e}.down_proj.weight", expert
    else:
        yield name, tensor
