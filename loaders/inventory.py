"""The modules of a base that may be adapted, read from its `config.json` alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from .errors import UnsupportedBase

Kind = Literal["linear", "expert"]

# Dense decoders whose layers are q, k, v, o and a gated MLP, and nothing else that may be adapted.
_DENSE = ("llama", "qwen3")
_SUPPORTED = (*_DENSE, "qwen3_moe")
# What transformers' Qwen3Config takes when config.json has no head_dim; the other types derive it.
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True)
class Module:
    """One module that may be adapted. An expert bank is three of them: `….experts.w1`, `….w2`, `….w3`.

    `in_features` and `out_features` are of one expert; `experts` is None for a linear module. `region` is the
    part of the model it belongs to: attention, dense_mlp or routed_experts.
    """

    name: str
    kind: Kind
    in_features: int
    out_features: int
    experts: int | None
    region: str


@dataclass(frozen=True)
class Inventory:
    """What may be adapted in one base, by module name, in the order of its layers."""

    architecture: str
    hidden_size: int
    context_length: int
    modules: Mapping[str, Module]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Inventory":
        """Read a Hugging Face `config.json`. Raises UnsupportedBase naming the field.

        Module names are those of transformers' model class, with an expert bank's three projections as
        w1 (gate), w3 (up) and w2 (down).
        """
        architecture = config.get("model_type")
        if architecture not in _SUPPORTED:
            raise UnsupportedBase(
                f"config.json: model_type {architecture!r} is not supported; "
                f"expected one of {', '.join(_SUPPORTED)}"
            )
        modules = _Layers(config).modules()
        return cls(
            architecture=architecture,
            hidden_size=_positive(config, "hidden_size"),
            context_length=_positive(config, "max_position_embeddings"),
            modules={module.name: module for module in modules},
        )


class _Layers:
    """The decoder layers of one config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.hidden = _positive(config, "hidden_size")

    def modules(self) -> Iterator[Module]:
        for layer in range(_positive(self.config, "num_hidden_layers")):
            prefix = f"model.layers.{layer}"
            yield from self._attention(f"{prefix}.self_attn")
            if self._has_experts(layer):
                yield from self._experts(f"{prefix}.mlp.experts")
            else:
                yield from self._dense_mlp(f"{prefix}.mlp")

    def _attention(self, prefix: str) -> Iterator[Module]:
        heads = _positive(self.config, "num_attention_heads")
        kv_heads = _positive(self.config, "num_key_value_heads")
        width = self._head_dim(heads)
        for name, n_in, n_out in (
            ("q_proj", self.hidden, heads * width),
            ("k_proj", self.hidden, kv_heads * width),
            ("v_proj", self.hidden, kv_heads * width),
            ("o_proj", heads * width, self.hidden),
        ):
            yield Module(f"{prefix}.{name}", "linear", n_in, n_out, None, "attention")

    def _dense_mlp(self, prefix: str) -> Iterator[Module]:
        inner = _positive(self.config, "intermediate_size")
        for name, n_in, n_out in (
            ("gate_proj", self.hidden, inner),
            ("up_proj", self.hidden, inner),
            ("down_proj", inner, self.hidden),
        ):
            yield Module(f"{prefix}.{name}", "linear", n_in, n_out, None, "dense_mlp")

    def _experts(self, prefix: str) -> Iterator[Module]:
        inner = _positive(self.config, "moe_intermediate_size")
        experts = self._num_experts
        for name, n_in, n_out in (
            ("w1", self.hidden, inner),
            ("w2", inner, self.hidden),
            ("w3", self.hidden, inner),
        ):
            yield Module(f"{prefix}.{name}", "expert", n_in, n_out, experts, "routed_experts")

    def _has_experts(self, layer: int) -> bool:
        """transformers' Qwen3MoeDecoderLayer decides the same way."""
        if self.config["model_type"] in _DENSE or layer in self._mlp_only_layers:
            return False
        return (layer + 1) % _positive(self.config, "decoder_sparse_step", default=1) == 0

    def _head_dim(self, heads: int) -> int:
        derived = _QWEN3_HEAD_DIM if self.config["model_type"] == "qwen3" else self.hidden // heads
        return _positive(self.config, "head_dim", default=derived)

    @property
    def _num_experts(self) -> int:
        # transformers 5 writes the field under its common name; checkpoints on the hub have the old one.
        name = "num_local_experts" if "num_local_experts" in self.config else "num_experts"
        return _positive(self.config, name)

    @property
    def _mlp_only_layers(self) -> list[int]:
        value = self.config.get("mlp_only_layers") or []
        if isinstance(value, list):
            layers = cast(list[object], value)
            if all(type(layer) is int for layer in layers):
                return cast(list[int], layers)
        raise UnsupportedBase(f"config.json: mlp_only_layers is {value!r}; expected a list of layer numbers")


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if type(value) is not int or value <= 0:
        found = "missing" if value is None else repr(value)
        raise UnsupportedBase(f"config.json: {field} is {found}; expected a positive integer")
    return value
