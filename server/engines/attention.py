"""Attention of a step's rows, each to its own seat. transformers' models call it by the name `ATTENTION`."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .seats import LayerMemory, PerToken, Step

ATTENTION = "lanewise"


def attention_memory(kv_heads: int, key_dim: int, value_dim: int) -> LayerMemory:
    return {"keys": PerToken(kv_heads, key_dim), "values": PerToken(kv_heads, value_dim)}


def attend(
    step: Step,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    selected: Tensor | None = None,
) -> Tensor:
    """Store the new keys and values, then attend: each row to its own seat, up to its own position.

    Shapes: query [heads, T, Dk], key [kv heads, T, Dk], value [kv heads, T, Dv] → [T, heads, Dv].
    `selected` [T, longest] bool narrows what each row sees; it is part of `step.sees`.
    """
    keys, values = step.memory(layer, "keys"), step.memory(layer, "values")
    keys[step.row_seats, :, step.positions] = key.transpose(0, 1)
    values[step.row_seats, :, step.positions] = value.transpose(0, 1)
    parts: list[Tensor] = []
    if step.decode:
        parts.append(_attend_decode(step, query, keys, values, scaling, selected))
    for span, rows in zip(step.prefill, step.rows[len(step.decode) :], strict=True):
        mask = None  # plain causality is enough
        if selected is not None:
            mask = selected[rows, : span.end]
        elif span.start:
            mask = step.sees[rows, : span.end]
        out = scaled_dot_product_attention(
            query[None, :, rows],
            keys[None, span.seat, :, : span.end],
            values[None, span.seat, :, : span.end],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _attend_decode(
    step: Step, query: Tensor, keys: Tensor, values: Tensor, scaling: float, selected: Tensor | None
) -> Tensor:
    """All decode rows at once. Heads that share a key-value head become its queries: no key is copied."""
    rows, heads, kv_heads = len(step.decode), query.shape[0], keys.shape[1]
    longest = max(span.end for span in step.decode)
    sees = step.sees if selected is None else selected
    out = scaled_dot_product_attention(
        query[:, :rows].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, -1),
        keys[step.decode_seats, :, :longest],
        values[step.decode_seats, :, :longest],
        attn_mask=sees[:rows, None, None, :longest],
        scale=scaling,
    )
    return out.reshape(rows, heads, -1)


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: Step,
    indices: Tensor | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, Dk] → [1, T, heads, Dv], and no weights.

    `indices` is what a sparse attention's indexer chose: see `sparse_attention.py`.
    """
    assert attention_mask is None or indices is not None, "no mask is made but for an indexer"
    assert sliding_window is None, "the torch engine refuses sliding windows when it loads a base"
    layer = module.layer_idx
    assert isinstance(layer, int)
    selected = None if indices is None else indices[0]
    return attend(step, layer, query[0], key[0], value[0], scaling, selected)[None], None


AttentionInterface.register(ATTENTION, _interface)
