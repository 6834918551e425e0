"""Engines run the model: one Protocol, `torch` embedded, a scripted fake for tests."""

from .protocol import Call, Chunk, Engine, Lane

__all__ = ["Call", "Chunk", "Engine", "Lane"]
