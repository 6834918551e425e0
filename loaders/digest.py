"""The name of an adapter's bytes: sha256(canonical JSON of the config + b"\\n" + the safetensors file).

Canonical JSON has sorted keys, no spaces, non-ASCII as UTF-8 (`config.canonical_json`). So the same factors
with another alpha have another digest, and a sender can compute it without us.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import canonical_json

_CHUNK = 1 << 20


class AdapterDigest:
    """The digest of an adapter whose safetensors bytes arrive piece by piece."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError or TypeError when the config is not JSON (NaN, bytes, …)."""
        self._sha256 = hashlib.sha256(canonical_json(config) + b"\n")

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._sha256.update(data)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def digest_of(config: Mapping[str, Any], file: Path) -> str:
    """The digest of a config and a safetensors file on disk; raises OSError when it cannot be read."""
    digest = AdapterDigest(config)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
