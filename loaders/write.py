"""Writes an adapter folder that is there whole or not at all, also after a power cut."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

from .adapter import CONFIG, WEIGHTS


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write factors under their PEFT names, with their config, as a new folder.

    Everything is written and synced beside `folder`, then renamed. Raises OSError when `folder` exists with
    files in it: a version is never overwritten.
    """
    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / CONFIG).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
        for path in (staging / WEIGHTS, staging / CONFIG, staging):
            _sync(path)
        staging.chmod(0o755)
        staging.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already when the rename succeeded


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
