"""Put the active LoRA path into a transformers model: its modules keep their weights and gain a factor pool.

`attach` replaces each adaptable linear and each bank of experts by a module that calls `lora_linear` or
`lora_experts`. All of them read one `LanePool`: S slots, each holding one adapter version's factors.

    pool = attach(model, slots=8, max_rank=16)
    pool.write(3, [("model.layers.0.self_attn.q_proj", a, b, 1.0), ...])
    with pool.using(slots):      # one slot per row of the flattened batch, −1: base
        model(input_ids)
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from .lora import BASE_SLOT, ExpertFactors, ExpertWeights, LinearFactors, lora_experts, lora_linear

ExpertLayout = Literal["shared_outer", "stacked"]

HEAD = "lm_head"

ADAPTABLE_LINEARS = frozenset(
    [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # multi-head latent attention
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),  # gated delta-net
        *("in_proj_qkvz", "in_proj_ba"),  # the same, merged
        *("gate_proj", "up_proj", "down_proj"),  # dense MLPs and shared experts
        HEAD,
    ]
)


@dataclass(frozen=True)
class _Pair:
    """One factor pair's place in the pool, as views: a [S, …, r, in], b [S, …, out, r], scale [S]."""

    a: Tensor
    b: Tensor
    scale: Tensor


class LanePool:
    """The factors of S lanes, and which of them the running forward uses. Not for concurrent threads.

    Made by `attach`. Slots that were never written hold zeros, so they act as the base.
    """

    def __init__(self, slots: int, max_rank: int) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self._pairs: dict[str, _Pair] = {}
        self._tensors: dict[str, list[Tensor]] = {}  # what `trainable` hands out, by module
        self._written: list[set[str]] = [set() for _ in range(slots)]
        self._active: Tensor | None = None
        self._active_head: Tensor | None = None
        self._active_modules: frozenset[str] = frozenset()

    @property
    def modules(self) -> list[str]:
        """What can be adapted: the base's linears, and w1, w2, w3 of each expert bank."""
        return list(self._pairs)

    def shapes(self, module: str) -> tuple[torch.Size, torch.Size]:
        """Shapes of the A and B of a module in one slot, at max_rank."""
        place = self._pairs[module]
        return place.a.shape[1:], place.b.shape[1:]

    @property
    def nbytes(self) -> int:
        """Memory of all slots together."""
        unique = {id(t): t for tensors in self._tensors.values() for t in tensors}
        return sum(t.nbytes for t in unique.values())

    @torch.no_grad()
    def write(self, slot: int, pairs: Iterable[tuple[str, Tensor, Tensor, float]]) -> None:
        """Fill a slot with (module, A, B, scale); modules left out act as the base.

        Shapes: linears A [r, in], B [out, r]; experts A [1 or E, r, in], B [1 or E, out, r]; r ≤ max_rank.
        Nothing is written unless everything fits. Raises ValueError naming the module that does not.
        """
        pairs = list(pairs)
        for module, a, b, _ in pairs:
            self._check(module, a, b)
        scales: dict[int, float] = {}
        for module, _, _, scale in pairs:
            if scales.setdefault(id(self._pairs[module].scale), scale) != scale:
                raise ValueError(f"{module}: scale {scale}; w1, w2 and w3 of one bank must share their scale")
        self.clear(slot)
        for module, a, b, scale in pairs:
            place, rank = self._pairs[module], a.shape[-2]
            place.a[slot][..., :rank, :].copy_(a)
            place.b[slot][..., :rank].copy_(b)
            place.scale[slot] = scale
            self._written[slot].add(module)

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Make a slot act as the base."""
        for module in self._written[slot]:
            place = self._pairs[module]
            for part in (place.a, place.b, place.scale):
                part[slot].zero_()
        self._written[slot].clear()

    @torch.no_grad()
    def read(self, slot: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Copies of what a slot holds, padded to max_rank: module → (A, B), shaped as `write` takes them."""
        return {
            module: (place.a[slot].clone(), place.b[slot].clone())
            for module, place in self._pairs.items()
            if module in self._written[slot]
        }

    def trainable(self, slot: int = 0) -> list[Tensor]:
        """The pool tensors behind the modules written to a slot, as leaves that collect gradients.

        They hold all slots, so train in a pool of one. `read` gives the trained factors back.
        """
        unique = {id(t): t for module in self._written[slot] for t in self._tensors[module]}
        return [t.requires_grad_() for t in unique.values()]

    @contextmanager
    def using(self, slots: Tensor, head_rows: Tensor | None = None) -> Generator[None]:
        """While open, row t of the flattened batch uses slots[t]; −1 is a base row. slots: [T] int.

        `head_rows` [R] int says which rows lm_head sees (transformers' `logits_to_keep`); None: all.
        Modules that no slot in use adapts skip the LoRA branch.
        """
        assert self._active is None, "a forward is already running"
        present = [slot for slot in slots.unique().tolist() if slot != BASE_SLOT]
        assert all(0 <= slot < self.slots for slot in present), f"slots {present} in a pool of {self.slots}"
        self._active = slots
        self._active_head = slots if head_rows is None else slots[head_rows]
        self._active_modules = frozenset(m for slot in present for m in self._written[slot])
        try:
            yield
        finally:
            self._active = self._active_head = None
            self._active_modules = frozenset()

    def active_for(self, modules: tuple[str, ...]) -> Tensor | None:
        """The slots of the rows that reach these modules, if one of them adapts one of the modules."""
        if self._active_modules.isdisjoint(modules):
            return None
        return self._active_head if HEAD in modules else self._active

    def add_linear(self, module: str, factors: LinearFactors) -> None:
        self._pairs[module] = _Pair(factors.a, factors.b, factors.scale)
        self._tensors[module] = [factors.a, factors.b]

    def add_experts(self, names: tuple[str, str, str], factors: ExpertFactors) -> None:
        """`names` are those of w1, w2 and w3."""
        w1, w2, w3 = names
        rank, inner = factors.rank, factors.a2.shape[3]
        a13, b13, scale = factors.a13, factors.b13, factors.scale
        self._pairs[w1] = _Pair(a13[:, :, :rank], b13[:, :, :inner], scale)
        self._pairs[w2] = _Pair(factors.a2, factors.b2, scale)
        self._pairs[w3] = _Pair(a13[:, :, rank:], b13[:, :, inner:], scale)
        self._tensors |= {w1: [a13, b13], w2: [factors.a2, factors.b2], w3: [a13, b13]}

    def _check(self, module: str, a: Tensor, b: Tensor) -> None:
        if module not in self._pairs:
            raise ValueError(f"{module}: not a module of this base that can be adapted")
        place = self._pairs[module]
        rank = a.shape[-2] if a.ndim == place.a.ndim - 1 else 0
        if rank > self.max_rank:
            raise ValueError(f"{module}: rank {rank} is over this server's limit of {self.max_rank}")
        for side, factor, room in (
            ("lora_A", a, place.a[0, ..., :rank, :]),
            ("lora_B", b, place.b[0, ..., :rank]),
        ):
            fits = rank > 0 and factor.ndim == room.ndim and factor.shape[-2:] == room.shape[-2:]
            if fits and factor.shape[:-2] in (room.shape[:-2], (1,)):
                continue
            if fits and room.shape[0] == 1:
                raise ValueError(
                    f"{module}: {side} has one factor per expert {list(factor.shape)} and this server "
                    "keeps it shared; start the server with --expert-layout stacked"
                )
            expected = (
                [*room.shape[:-2], "r", room.shape[-1]] if side == "lora_A" else [*room.shape[:-1], "r"]
            )
            shown = ", ".join(str(size) for size in expected)
            raise ValueError(f"{module}: {side} is {list(factor.shape)}, expected [{shown}]")


class AdaptedLinear(nn.Module):
    """A frozen linear with the LoRA branch beside it."""

    def __init__(self, module: str, base: nn.Linear, factors: LinearFactors, pool: LanePool) -> None:
        super().__init__()
        self.base = base
        self._names = (module,)
        self._factors = factors
        self._pool = pool

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        slots = self._pool.active_for(self._names)
        if slots is None:
            return y
        assert len(slots) == y.shape[:-1].numel(), (
            f"{self._names[0]}: {y.shape[:-1].numel()} rows and {len(slots)} slots; "
            "tell `using` the head's rows if not all reach it"
        )
        return lora_linear(y.flatten(0, -2), x.flatten(0, -2), self._factors, slots).view(y.shape)


class AdaptedExperts(nn.Module):
    """A frozen bank of experts, run by `lora_experts` with or without lanes."""

    def __init__(
        self,
        names: tuple[str, str, str],
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        factors: ExpertFactors,
        pool: LanePool,
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._names = names
        self._factors = factors
        self._pool = pool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        bank = ExpertWeights(self.gate_up_proj, self.down_proj)
        slots = self._pool.active_for(self._names)
        factors = None if slots is None else self._factors
        return lora_experts(hidden_states, top_k_index, top_k_weights, bank, factors, slots)


def attach(
    model: nn.Module, slots: int, max_rank: int, expert_layout: ExpertLayout = "shared_outer"
) -> LanePool:
    """Replace the adaptable modules of a transformers model, in place, and return their pool of S slots.

    Adaptable are the linears named in `ADAPTABLE_LINEARS` and every bank of gated experts (3-D `gate_up_proj`
    [E, 2I, H] and `down_proj` [E, H, I]); routers, a sparse attention's indexer and an lm_head tied to the
    embedding are not. Factors are kept in the weights' dtype. Raises ValueError for experts of another form.
    """
    pool = LanePool(slots, max_rank)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in ADAPTABLE_LINEARS:
            if id(module.weight) in embeddings:
                continue
            linear = _linear_factors(module, slots, max_rank)
            pool.add_linear(name, linear)
            model.set_submodule(name, AdaptedLinear(name, module, linear, pool))
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            gate_up, down = _gated_experts(name, module)
            names = (f"{name}.w1", f"{name}.w2", f"{name}.w3")
            bank = _expert_factors(gate_up, down, slots, max_rank, expert_layout)
            pool.add_experts(names, bank)
            model.set_submodule(name, AdaptedExperts(names, gate_up, down, bank, pool))
    return pool


def _linear_factors(linear: nn.Linear, slots: int, rank: int) -> LinearFactors:
    weight = linear.weight
    return LinearFactors(
        a=weight.new_zeros(slots, rank, linear.in_features),
        b=weight.new_zeros(slots, linear.out_features, rank),
        scale=weight.new_zeros(slots, dtype=torch.float32),
    )


def _expert_factors(
    gate_up: Tensor, down: Tensor, slots: int, rank: int, layout: ExpertLayout
) -> ExpertFactors:
    num_experts, hidden, inner = down.shape
    outer = 1 if layout == "shared_outer" else num_experts
    return ExpertFactors(
        a13=gate_up.new_zeros(slots, outer, 2 * rank, hidden),
        b13=gate_up.new_zeros(slots, num_experts, 2 * inner, rank),
        a2=down.new_zeros(slots, num_experts, rank, inner),
        b2=down.new_zeros(slots, outer, hidden, rank),
        scale=down.new_zeros(slots, dtype=torch.float32),
    )


def _gated_experts(name: str, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter) or down.ndim != 3:
        raise ValueError(f"{name}: expected 3-D gate_up_proj and down_proj")
    num_experts, hidden, inner = down.shape
    if tuple(gate_up.shape) != (num_experts, 2 * inner, hidden):
        raise ValueError(
            f"{name}: gate_up_proj is {list(gate_up.shape)}, expected [E, 2I, H] beside {list(down.shape)}"
        )
    if not isinstance(module.act_fn, nn.SiLU | SiLUActivation):
        raise ValueError(f"{name}: activation {module.act_fn}; only SiLU experts can be run")
    return gate_up, down
