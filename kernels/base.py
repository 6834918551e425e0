"""The frozen base: transformers' own model class, filled from the tensors of a Hugging Face checkpoint.

Checkpoints keep experts as 2-D weights, one per expert and projection; transformers 5 keeps each bank as two
3-D parameters. Block-FP8 weights are dequantised here, so y = dequant(W)·x with x never quantised: the
oracle that faster paths are compared with.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from .fp8 import dequantize_blocks

SCALE_SUFFIX = "_scale_inv"


@torch.no_grad()
def load_base(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """Build the model that `config` (a checkpoint's config.json) describes and fill it with `tensors`.

    An FP8 `X.weight` and its `X.weight_scale_inv` may come in either order. The model is frozen, in eval mode
    and in `dtype`. Raises ValueError naming every tensor that is missing, unknown, of a wrong shape or
    without its scale.
    """
    model = _empty_model(config, dtype, device)
    places = _places(model)
    wrong: list[str] = []
    waiting: dict[str, Tensor] = {}  # FP8 weights and scales whose other half has not come yet

    def fill(name: str, tensor: Tensor) -> None:
        place = places.pop(name, None)
        if place is None:
            wrong.append(f"{name}: not a tensor of this model, or given twice")
        elif place.shape != tensor.shape:
            wrong.append(f"{name}: is {list(tensor.shape)}, expected {list(place.shape)}")
        else:
            place.copy_(tensor)

    for name, tensor in tensors:
        weight_name = name.removesuffix(SCALE_SUFFIX)
        if weight_name == name and tensor.dtype != torch.float8_e4m3fn:
            fill(name, tensor)
            continue
        waiting[name] = tensor
        if weight_name in waiting and weight_name + SCALE_SUFFIX in waiting:
            q, scale = waiting.pop(weight_name), waiting.pop(weight_name + SCALE_SUFFIX)
            fill(weight_name, dequantize_blocks(q.to(device), scale.to(device)))
    wrong += [
        f"{name}: came without its {'weight' if name.endswith(SCALE_SUFFIX) else 'scale'}" for name in waiting
    ]
    wrong += [f"{name}: missing" for name in places if name not in waiting]
    if wrong:
        raise ValueError("the checkpoint does not fit its config: " + "; ".join(wrong))
    return model


def _empty_model(
    config: Mapping[str, Any], dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    # Without `quantization_config` transformers does not bring its own quantiser.
    fields = {key: value for key, value in config.items() if key != "quantization_config"}
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
        bank, _, leaf = name.rpartition(".")
        if state.ndim == 3 and leaf == "gate_up_proj":
            for e, expert in enumerate(state):
                places[f"{bank}.{e}.gate_proj.weight"], places[f"{bank}.{e}.up_proj.weight"] = expert.chunk(2)
        elif state.ndim == 3 and leaf == "down_proj":
            places |= {f"{bank}.{e}.down_proj.weight": expert for e, expert in enumerate(state)}
        else:
            places[name] = state
    return places
