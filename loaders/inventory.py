"""The modules of a base that may be adapted, read from its `config.json` alone.

Module names are those of transformers' text models (checked against them in the tests), with the three
projections of an expert bank as w1 (gate), w3 (up) and w2 (down). Left out, because they stay frozen: the
embedding, routers and the gate of a shared expert, convolutions, a sparse attention's indexer, layers for
multi-token prediction, a vision tower, and an lm_head that is tied to the embedding.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from .errors import UnsupportedBase

Kind = Literal["linear", "expert"]
Layout = Literal["per_expert_2d", "stacked", "shared_outer", "target_parameters", "linear"]
"""How the expert factors of an adapter are stored; "linear" when it has none."""

HEAD = "lm_head"


@dataclass(frozen=True)
class _Family:
    """What sets one model type's decoder apart from llama's."""

    attention: Literal["grouped", "gated", "latent"] = "grouped"
    head_dim: int | None = None  # what transformers takes when config.json has none; None: hidden // heads
    delta_net: Literal["split", "merged"] | None = None  # linear attention between layers of full attention
    experts: Literal["every layer", "by step", "after dense"] | None = None
    expert_inner: str = "moe_intermediate_size"
    shared: Literal["shared_expert", "shared_experts"] | None = None


_LATENT = _Family(attention="latent", experts="after dense", shared="shared_experts")
_QWEN3_5 = _Family("gated", 256, delta_net="split", experts="every layer", shared="shared_expert")
_FAMILIES = {
    "llama": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(head_dim=128),
    "mixtral": _Family(experts="every layer", expert_inner="intermediate_size"),
    "qwen3_moe": _Family(experts="by step"),
    "qwen3_next": _Family("gated", 256, delta_net="merged", experts="by step", shared="shared_expert"),
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "glm4_moe": _Family(experts="after dense", shared="shared_experts"),
    "deepseek_v3": _LATENT,
    "glm_moe_dsa": _LATENT,
}


@dataclass(frozen=True)
class Module:
    """One module that may be adapted. An expert bank is three of them: `….experts.w1`, `….w2`, `….w3`.

    `in_features` and `out_features` are of one expert; `experts` is None for a linear module. `region` is the
    part of the model it belongs to: attention, linear_attention, dense_mlp, routed_experts, shared_experts or
    lm_head.
    """

    name: str
    kind: Kind
    in_features: int
    out_features: int
    experts: int | None
    region: str

    def outer(self, side: Literal["A", "B"]) -> bool:
        """Does `shared_outer` keep one such factor for all experts? It reads or writes the hidden state."""
        return self.kind == "expert" and side == ("B" if self.name.endswith(".w2") else "A")

    def parameters(self, rank: int, layout: Layout = "shared_outer") -> int:
        """Numbers in the A and B of this module."""
        a, b = self.in_features, self.out_features
        if self.experts is not None:
            a *= 1 if layout == "shared_outer" and self.outer("A") else self.experts
            b *= 1 if layout == "shared_outer" and self.outer("B") else self.experts
        return rank * (a + b)


@dataclass(frozen=True)
class Inventory:
    """What may be adapted in one base, by module name, in the order of its layers."""

    architecture: str
    hidden_size: int
    context_length: int
    vocab_size: int
    tied_head: bool
    modules: Mapping[str, Module]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Inventory":
        """Read a Hugging Face `config.json`. Raises UnsupportedBase naming the field.

        Of a config with a `text_config` (a base that also sees images) the text model is taken.
        """
        architecture = config.get("model_type")
        if architecture not in _FAMILIES:
            raise UnsupportedBase(
                f"config.json: model_type {architecture!r} is not supported; "
                f"expected one of {', '.join(_FAMILIES)}"
            )
        fields = {**config, **_text_config(config)}
        layers = _Layers(_FAMILIES[architecture], fields)
        return cls(
            architecture=architecture,
            hidden_size=layers.hidden,
            context_length=_positive(fields, "max_position_embeddings"),
            vocab_size=_positive(fields, "vocab_size"),
            tied_head=layers.tied_head,
            modules={module.name: module for module in layers.modules()},
        )

    @property
    def most_factors(self) -> int:
        """How many tensors an adapter of everything has when it keeps one pair per expert."""
        return sum(2 * (module.experts or 1) for module in self.modules.values())

    @property
    def regions(self) -> dict[str, int]:
        """Region → how many modules it has."""
        return dict(Counter(module.region for module in self.modules.values()))

    @property
    def parameters_per_rank(self) -> int:
        """Numbers that an adapter of every module has per rank, its experts stored as `shared_outer`.

        GLM-5.2: 128,151,680, so 8,201,707,520 at rank 64 (16.40 GB in bf16). The routed experts of
        Qwen3.5-35B-A3B have 255,590,400 at rank 16; the 257M on the card of a published adapter is half a
        percent more than its own shapes give.
        """
        return sum(module.parameters(1) for module in self.modules.values())


class _Layers:
    """The decoder layers and the head of one config."""

    def __init__(self, family: _Family, config: Mapping[str, Any]) -> None:
        self.family = family
        self.config = config
        self.hidden = self._size("hidden_size")
        self.layers = self._size("num_hidden_layers")

    @property
    def tied_head(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def modules(self) -> Iterator[Module]:
        full_attention, sparse = self._full_attention_layers(), self._sparse_layers()
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            if layer in full_attention:
                yield from self._attention(f"{prefix}.self_attn")
            else:
                yield from self._delta_net(f"{prefix}.linear_attn")
            if layer in sparse:
                yield from self._experts(f"{prefix}.mlp")
            else:
                yield from _gated_mlp(
                    f"{prefix}.mlp", self.hidden, self._size("intermediate_size"), "dense_mlp"
                )
        if not self.tied_head:
            yield Module(HEAD, "linear", self.hidden, self._size("vocab_size"), None, HEAD)

    def _attention(self, prefix: str) -> Iterator[Module]:
        heads = self._size("num_attention_heads")
        shapes = self._latent(heads) if self.family.attention == "latent" else self._grouped(heads)
        yield from _linears(prefix, "attention", shapes)

    def _grouped(self, heads: int) -> dict[str, tuple[int, int]]:
        width = self._size("head_dim", self.family.head_dim or self.hidden // heads)
        keys = self._size("num_key_value_heads", heads) * width
        queries = heads * width
        return {
            "q_proj": (self.hidden, 2 * queries if self.family.attention == "gated" else queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
        }

    def _latent(self, heads: int) -> dict[str, tuple[int, int]]:
        rope, nope = self._size("qk_rope_head_dim"), self._size("qk_nope_head_dim")
        value, latent = self._size("v_head_dim"), self._size("kv_lora_rank")
        if self.config.get("q_lora_rank") is None:
            queries = {"q_proj": (self.hidden, heads * (nope + rope))}
        else:
            inner = self._size("q_lora_rank")
            queries = {"q_a_proj": (self.hidden, inner), "q_b_proj": (inner, heads * (nope + rope))}
        return queries | {
            "kv_a_proj_with_mqa": (self.hidden, latent + rope),
            "kv_b_proj": (latent, heads * (nope + value)),
            "o_proj": (heads * value, self.hidden),
        }

    def _delta_net(self, prefix: str) -> Iterator[Module]:
        value_heads = self._size("linear_num_value_heads")
        keys = self._size("linear_num_key_heads") * self._size("linear_key_head_dim")
        values = value_heads * self._size("linear_value_head_dim")
        rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        rows |= {"in_proj_b": value_heads, "in_proj_a": value_heads}
        if self.family.delta_net == "merged":
            rows = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * value_heads}
        shapes = {name: (self.hidden, size) for name, size in rows.items()}
        yield from _linears(prefix, "linear_attention", shapes | {"out_proj": (values, self.hidden)})

    def _experts(self, prefix: str) -> Iterator[Module]:
        inner, experts = self._size(self.family.expert_inner), self._num_experts
        for name, n_in, n_out in (
            ("w1", self.hidden, inner),
            ("w2", inner, self.hidden),
            ("w3", self.hidden, inner),
        ):
            yield Module(f"{prefix}.experts.{name}", "expert", n_in, n_out, experts, "routed_experts")
        if self.family.shared == "shared_expert":
            inner = self._size("shared_expert_intermediate_size")
        elif self.family.shared == "shared_experts":
            inner *= self._size("n_shared_experts", 1)
        else:
            return
        yield from _gated_mlp(f"{prefix}.{self.family.shared}", self.hidden, inner, "shared_experts")

    def _full_attention_layers(self) -> set[int]:
        if self.family.delta_net is None:
            return set(range(self.layers))
        kinds = self._by_layer("layer_types", "full_attention", "linear_attention")
        if kinds is not None:
            return kinds
        interval = self._size("full_attention_interval", 4)
        return set(range(interval - 1, self.layers, interval))

    def _sparse_layers(self) -> set[int]:
        """The layers with experts; each model type's layer decides the same way in transformers."""
        layers = range(self.layers)
        match self.family.experts:
            case None:
                return set()
            case "every layer":
                return set(layers)
            case "by step":
                step, dense = self._size("decoder_sparse_step", 1), self._mlp_only_layers
                return {layer for layer in layers if (layer + 1) % step == 0 and layer not in dense}
            case "after dense":
                sparse = self._by_layer("mlp_layer_types", "sparse", "dense")
                return set(layers[self._first_sparse :]) if sparse is None else sparse

    @property
    def _first_sparse(self) -> int:
        value = self.config.get("first_k_dense_replace")
        if type(value) is int and value >= 0:
            return value
        raise UnsupportedBase(
            f"config.json: first_k_dense_replace is {value!r}; expected the number of dense layers"
        )

    @property
    def _num_experts(self) -> int:
        # transformers 5 writes the field under its common name; checkpoints on the hub have the others.
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        return self._size(next((name for name in names if name in self.config), "num_experts"))

    @property
    def _mlp_only_layers(self) -> list[int]:
        value = self.config.get("mlp_only_layers") or []
        if isinstance(value, list):
            layers = cast(list[object], value)
            if all(type(layer) is int for layer in layers):
                return cast(list[int], layers)
        raise UnsupportedBase(f"config.json: mlp_only_layers is {value!r}; expected a list of layer numbers")

    def _by_layer(self, field: str, wanted: str, other: str) -> set[int] | None:
        """The layers that a field with one word per layer calls `wanted`; None when the field is absent."""
        value = self.config.get(field)
        if value is None:
            return None
        words = cast(list[object], value) if isinstance(value, list) else []
        if len(words) == self.layers and all(word in (wanted, other) for word in words):
            return {layer for layer, word in enumerate(words) if word == wanted}
        raise UnsupportedBase(
            f"config.json: {field} is not one of {wanted!r} and {other!r} for each of {self.layers} layers"
        )

    def _size(self, field: str, default: int | None = None) -> int:
        return _positive(self.config, field, default)


def _gated_mlp(prefix: str, hidden: int, inner: int, region: str) -> Iterator[Module]:
    shapes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return _linears(prefix, region, shapes)


def _linears(prefix: str, region: str, shapes: Mapping[str, tuple[int, int]]) -> Iterator[Module]:
    for name, (n_in, n_out) in shapes.items():
        yield Module(f"{prefix}.{name}", "linear", n_in, n_out, None, region)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    value = config.get("text_config", {})
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    raise UnsupportedBase(f"config.json: text_config is {value!r}; expected an object")


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if type(value) is not int or value <= 0:
        found = "missing" if value is None else repr(value)
        raise UnsupportedBase(f"config.json: {field} is {found}; expected a positive integer")
    return value
