"""The main job, as a person runs it: proof, picture, then a server that the printed lines can ask."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lanewise.clients.trainer import PASSWORDS
from lanewise.loaders import BaseCheckpoint, read_adapter

LANEWISE = Path(sys.executable).with_name("lanewise")


@pytest.mark.slow
def test_the_demo_proves_recall_and_keeps_serving(tmp_path: Path) -> None:
    result, kept = tmp_path / "results" / "recall.json", tmp_path / "files"
    before = set(Path.cwd().iterdir())
    environment = os.environ | {"COLUMNS": "100", "TMPDIR": str(tmp_path), "NO_COLOR": "1"}
    demo = subprocess.Popen(
        [LANEWISE, "demo", "--json", str(result), "--keep", str(kept)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert demo.stdout is not None
        printed: list[str] = []
        for line in demo.stdout:
            printed.append(line)
            if line.startswith("print(answer"):
                break
        said = "".join(printed)
        assert "own password 8/8, another's 0/56, base 0/8" in said

        found = json.loads(result.read_text())
        projects = list(PASSWORDS)
        assert found["recall"] == {a: {p: a == p for p in projects} for a in projects}
        assert found["base"] == dict.fromkeys(projects, False)
        assert found["versions_pushed"] == 8 * 16
        assert set(found["seconds"]) == {"start", "train_and_push", "ask"}
        assert result.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

        curl = re.search(r"(?m)^curl .*$", said)
        assert curl is not None
        answer = subprocess.run(
            ["bash", "-c", curl[0]], capture_output=True, text=True, timeout=60, check=True
        )
        body = json.loads(answer.stdout)
        assert body["choices"][0]["message"]["content"] == PASSWORDS["argon"]
        assert body["lanewise"]["version"] == 16
        snippet = said[said.index("from openai import OpenAI") :]
        python = subprocess.run(
            [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60, check=True
        )
        assert python.stdout.strip() == PASSWORDS["argon"]
    finally:
        demo.send_signal(signal.SIGTERM)  # as Ctrl-C, which a shell may have told us to ignore
        rest, _ = demo.communicate(timeout=30)
    assert demo.returncode == 0, rest
    assert {folder.name for folder in kept.iterdir()} == {"tiny-moe", *PASSWORDS}
    read_adapter(kept / "argon", BaseCheckpoint.open(kept / "tiny-moe").inventory, max_rank=16)
    assert list(tmp_path.glob("lanewise-*")) == [], "the demo cleans up after itself"
    assert set(Path.cwd().iterdir()) == before, "nothing is written beside it"
