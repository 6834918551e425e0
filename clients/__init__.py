"""Clients of a lanewise server. They need httpx and openai, not torch."""

from .client import Adapter, AsyncClient, Client, Version, digest_of
from .errors import ClientError, ConnectionFailed, ServerRefused

__all__ = [
    "Adapter",
    "AsyncClient",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "ServerRefused",
    "Version",
    "digest_of",
]
