"""What the torch engine says of a base or a device that it cannot serve with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanewise.loaders import UnsupportedBase
from lanewise.server.engines import Call
from lanewise.server.engines.torch_engine import TorchEngine
from lanewise.server.errors import EngineFailure, InvalidRequest

pytestmark = pytest.mark.anyio
MakeCall = Callable[..., Call]


@pytest.fixture
def base(base_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny base, to take things away from."""
    return shutil.copytree(base_folder, tmp_path / "base")


@pytest.fixture
def base_without_tokenizer(base: Path) -> Path:
    for file in base.glob("*token*"):
        file.unlink()
    return base


@pytest.fixture
def base_without_template(base: Path) -> Path:
    (base / "chat_template.jinja").unlink(missing_ok=True)
    file = base / "tokenizer_config.json"
    fields: dict[str, Any] = json.loads(file.read_text())
    fields.pop("chat_template", None)
    file.write_text(json.dumps(fields))
    return base


async def test_a_base_without_tokenizer_is_refused(base_without_tokenizer: Path) -> None:
    with pytest.raises(UnsupportedBase, match=r"no tokenizer; expected tokenizer\.json"):
        await TorchEngine(base_without_tokenizer).start()


async def test_a_base_without_chat_template_completes_but_does_not_chat(
    base_without_template: Path, chat: MakeCall, completion: MakeCall, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TorchEngine(base_without_template)
    await engine.start()
    try:
        assert "no chat template" in caplog.text
        with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
            await engine.complete(chat())
        assert (await engine.complete(completion()))["usage"]["completion_tokens"] == 12
    finally:
        await engine.stop(0)


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
async def test_a_device_that_is_not_there_is_named(base_folder: Path, device: str) -> None:
    with pytest.raises(EngineFailure, match=f"--device {device}"):
        await TorchEngine(base_folder, device=device).start()
