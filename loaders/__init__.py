"""Reads bases and adapters from disk, and refuses what it does not understand by name."""

from .adapter import Adapter, read_adapter, read_adapter_file
from .base import BaseCheckpoint
from .config import AdapterConfig, parse_json_object
from .convert import Conversion, convert
from .digest import AdapterDigest, digest_of
from .errors import Finding, InvalidAdapter, LoaderError, UnsafeFile, UnsupportedBase
from .inspection import Inspection, inspect_adapter, own_inventory
from .inventory import Inventory, Layout, Module
from .write import write_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterDigest",
    "BaseCheckpoint",
    "Conversion",
    "Finding",
    "Inspection",
    "InvalidAdapter",
    "Inventory",
    "Layout",
    "LoaderError",
    "Module",
    "UnsafeFile",
    "UnsupportedBase",
    "convert",
    "digest_of",
    "inspect_adapter",
    "own_inventory",
    "parse_json_object",
    "read_adapter",
    "read_adapter_file",
    "write_adapter",
]
