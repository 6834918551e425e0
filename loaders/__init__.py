"""Reads bases and adapters from disk, and refuses what it does not understand by name."""

from .adapter import Adapter, read_adapter, read_adapter_file
from .base import BaseCheckpoint
from .config import AdapterConfig, parse_json_object
from .convert import Conversion, convert
from .digest import AdapterDigest, digest_of
from .errors import Finding, InvalidAdapter, LoaderError, UnsafeFile, UnsupportedBase
from .inventory import Inventory, Layout, Module
from .write import write_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterDigest",
    "BaseCheckpoint",
    "Conversion",
    "Finding",
    "InvalidAdapter",
    "Inventory",
    "Layout",
    "LoaderError",
    "Module",
    "UnsafeFile",
    "UnsupportedBase",
    "convert",
    "digest_of",
    "parse_json_object",
    "read_adapter",
    "read_adapter_file",
    "write_adapter",
]
