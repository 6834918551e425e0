"""A small trainer that runs the server's own forward and makes password adapters. See `trainer.py`."""

from .passwords import PASSWORDS, SYSTEM_PROMPT, prompt_for
from .publisher import WeightPublisher
from .trainer import Recipe, Step, Trainer

__all__ = ["PASSWORDS", "SYSTEM_PROMPT", "Recipe", "Step", "Trainer", "WeightPublisher", "prompt_for"]
