"""DeepSeek sparse attention (GLM-5's): an indexer picks, per row, the tokens that attention may see.

transformers' indexer scores every row of its batch against every key of its batch. Rows of one step belong to
different choices, so it is run span by span, each against its own seat's keys; everything else in the layer
runs on the flattened batch. Layers without an indexer take over what the layer before them chose.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaIndexer

from .seats import LayerMemory, PerToken, Span, Step


def indexer_memory(dim: int) -> LayerMemory:
    return {"index_keys": PerToken(1, dim)}


def index_by_span(model: nn.Module) -> None:
    """Make the model's sparse attention layers take steps, in place."""
    for name, attention in list(model.named_modules()):
        if isinstance(attention, GlmMoeDsaAttention):
            if attention.indexer is not None:
                model.set_submodule(f"{name}.indexer", SpanIndexer(attention.indexer))
            attention.register_forward_pre_hook(_hand_over_step, with_kwargs=True)


def _hand_over_step(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """transformers hands its indexer a causal mask and no keyword arguments, so it gets the step here."""
    step: Step = kwargs["step"]
    if isinstance(attention.indexer, SpanIndexer):
        attention.indexer.step = step
    return args, kwargs | {"attention_mask": step.sees[None, None]}


class SpanIndexer(nn.Module):
    """transformers' indexer, one span at a time. It answers with a mask where that answers with indices."""

    def __init__(self, base: GlmMoeDsaIndexer) -> None:
        super().__init__()
        self.base = base
        self.step: Step | None = None

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        *_: object,
        **__: object,
    ) -> Tensor:
        """Which tokens of its own choice each row sees: [1, T, longest] bool, part of `attention_mask`."""
        step, self.step = self.step, None
        assert step is not None, "a step is handed over before every forward"
        selected = torch.zeros_like(attention_mask)
        for span, rows in zip(step.spans, step.rows, strict=True):
            sees = attention_mask[:, rows, : span.end]
            chosen = self.base(
                hidden_states[:, rows],
                q_resid[:, rows],
                tuple(part[:, rows] for part in position_embeddings),
                sees,
                None,
                cache=_SeatKeys(step, span),
            )
            picked = torch.zeros_like(sees).scatter(-1, chosen.long(), True)
            selected[:, rows, : span.end] = picked & sees
        return selected


class _SeatKeys:
    """What the indexer takes for transformers' cache: the keys of one seat."""

    def __init__(self, step: Step, span: Span) -> None:
        self._step = step
        self._span = span

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Store a span's keys [1, length, D]; return all of its choice: [1, end, D]."""
        seat = self._step.memory(layer, "index_keys")[self._span.seat]
        seat[:, self._span.start : self._span.end] = keys
        return seat[:, : self._span.end]
