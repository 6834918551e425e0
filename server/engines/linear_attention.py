"""Gated delta-nets, Qwen3-Next's and Qwen3.5's linear attention: their memory of a choice does not grow.

transformers' layer takes its batch for one sequence per row and keeps one state per row. Here the projections
run on the flattened batch, with the LoRA branch of every row, and only what carries state is run by choice:
all decode rows as one batch of single tokens, every prefill span as a batch of its own.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus
from transformers import PreTrainedConfig
from transformers.activations import SiLUActivation
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeGatedDeltaNet,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from .seats import LayerMemory, PerChoice, Step


def delta_net_memory(config: PreTrainedConfig) -> LayerMemory:
    """The last inputs of the convolution, and the recurrent state, which is summed in fp32."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return {
        "conv": PerChoice((2 * keys + values, config.linear_conv_kernel_dim - 1)),
        "recurrent": PerChoice(state, torch.float32),
    }


def recur_by_choice(model: nn.Module) -> None:
    """Make the model's delta-net layers take steps, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Qwen3NextGatedDeltaNet | Qwen3_5MoeGatedDeltaNet):
            model.set_submodule(name, SteppedDeltaNet(module))


class SteppedDeltaNet(nn.Module):
    """transformers' gated delta-net, on the rows of a step."""

    def __init__(self, base: Qwen3NextGatedDeltaNet | Qwen3_5MoeGatedDeltaNet) -> None:
        super().__init__()
        assert base.activation == "silu" or isinstance(base.activation, SiLUActivation)
        self.base = base

    def forward(self, hidden_states: Tensor, *, step: Step, **_: object) -> Tensor:
        """hidden_states [1, T, H] → [1, T, H]."""
        base, x = self.base, hidden_states[0]
        qkv, z, b, a = self._project(x)
        beta = b.sigmoid()
        decay = -base.A_log.float().exp() * softplus(a.float() + base.dt_bias)
        count = len(step.decode)
        parts: list[Tensor] = []
        if count:
            rows = (part[:count, None] for part in (qkv, beta, decay))
            parts.append(self._run(step, step.decode_seats, *rows)[:, 0])
        for span, at in zip(step.prefill, step.rows[count:], strict=True):
            rows = (part[None, at] for part in (qkv, beta, decay))
            parts.append(self._run(step, slice(span.seat, span.seat + 1), *rows)[0])
        mixed = torch.cat(parts)  # [T, value heads, Dv]
        gated = base.norm(mixed.flatten(0, 1), z.reshape(-1, base.head_v_dim))
        return base.out_proj(gated.view(len(x), -1))[None]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, H] → qkv [T, 2·keys + values], z [T, values], b and a [T, value heads]."""
        base = self.base
        if isinstance(base, Qwen3_5MoeGatedDeltaNet):
            return base.in_proj_qkv(x), base.in_proj_z(x), base.in_proj_b(x), base.in_proj_a(x)
        merged = base.in_proj_qkvz(x)[None], base.in_proj_ba(x)[None]
        *qkv, z, b, a = (part.flatten(2)[0] for part in base.fix_query_key_value_ordering(*merged))
        return torch.cat(qkv, dim=-1), z, b, a

    def _run(self, step: Step, seats: Tensor | slice, qkv: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """B spans of L tokens, each from its seat's state on, which is moved along.

        Shapes: qkv [B, L, 2·keys + values], beta and decay [B, L, value heads] → [B, L, value heads, Dv].
        """
        base, length = self.base, qkv.shape[1]
        conv, recurrent = (step.memory(base.layer_idx, name) for name in ("conv", "recurrent"))
        window = torch.cat([conv[seats], qkv.mT], dim=-1)
        conv[seats] = window[..., length:]
        mixed = silu(conv1d(window, base.conv1d.weight, base.conv1d.bias, groups=base.conv_dim)).mT
        query, key, value = mixed.split([base.key_dim, base.key_dim, base.value_dim], dim=-1)
        rule = torch_recurrent_gated_delta_rule if length == 1 else torch_chunk_gated_delta_rule
        out, recurrent[seats] = rule(
            query.unflatten(-1, (-1, base.head_k_dim)),
            key.unflatten(-1, (-1, base.head_k_dim)),
            value.unflatten(-1, (-1, base.head_v_dim)),
            g=decay,
            beta=beta,
            initial_state=recurrent[seats],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out
