"""PEFT's `target_parameters` layout: one pair for all experts of a bank's 3-D parameter.

A is expert-major, [E·r, in]; B is expert-fastest, [out, r·E]: W_e gains s · B.view(out, r, E)[:, :, e] ·
A.view(E, r, in)[e]. PEFT up to 0.19.0 took a parameter [E, out, in] for [E, in, out], so there A and B have
swapped roles: the stored A is Bᵀ of the canonical pair, expert by expert, and the stored B is Aᵀ.
Source: peft/tuners/lora/layer.py, ParamWrapper, releases 0.18.1, 0.19.0, 0.19.1, 0.20.0 and 0.21.2.
"""

from dataclasses import dataclass
from typing import Literal

from .inventory import Module

Parameter = Literal["gate_up_proj", "down_proj"]


@dataclass(frozen=True)
class BankShape:
    """One way to store the pair of one parameter."""

    parameter: Parameter
    swapped: bool  # as PEFT up to 0.19.0
    rank: int
    experts: int
    in_features: int
    out_features: int

    def shape(self, side: Literal["A", "B"]) -> tuple[int, int]:
        """Of the stored A or B."""
        n_in, n_out = self.in_features, self.out_features
        if self.swapped:
            n_in, n_out = n_out, n_in
        folded = self.experts * self.rank
        return (folded, n_in) if side == "A" else (n_out, folded)

    def fits(self, side: Literal["A", "B"], shape: tuple[int, ...]) -> bool:
        return self.shape(side) == shape


def bank_shapes(gate_up: Module, down: Module, gate_up_rank: int, down_rank: int) -> list[BankShape]:
    """All four: sizes tell the two parameters apart, and the two conventions unless a parameter is square."""
    assert gate_up.experts is not None
    parameters: list[tuple[Parameter, Module, int]] = [
        ("gate_up_proj", gate_up, gate_up_rank),
        ("down_proj", down, down_rank),
    ]
    return [
        BankShape(parameter, swapped, rank, gate_up.experts, module.in_features, module.out_features)
        for parameter, module, rank in parameters
        for swapped in (False, True)
    ]
