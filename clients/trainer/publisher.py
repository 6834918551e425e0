"""Push a trainer's factors to a running server. Only the factors move; the base never does."""

from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..client import Client, Version


class WeightPublisher:
    """Pushes versions of one adapter, one after another.

        publisher = WeightPublisher(Client(url), "argon", trainer.config)
        version = publisher.publish(trainer.factors())

    Each push is whole and checked by digest: the server takes all of it or nothing.
    """

    def __init__(self, client: Client, adapter: str, config: Mapping[str, Any]) -> None:
        self.adapter = adapter
        self.client = client
        self._config = dict(config)

    def publish(self, factors: Mapping[str, Tensor], *, activate: bool = True) -> Version:
        """Make these factors the adapter's next version. Raises ServerRefused or ConnectionFailed."""
        body = save({name: factor.contiguous() for name, factor in factors.items()})
        return self.client.push(self.adapter, body, self._config, activate=activate)
