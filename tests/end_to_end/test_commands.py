"""The `lanewise` commands that talk to a server, and every command and snippet of the README."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
LANEWISE = Path(sys.executable).with_name("lanewise")


def run(served: Any, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LANEWISE_URL": served.url, "COLUMNS": "200"}
    return subprocess.run(
        [LANEWISE, *arguments], input=stdin, capture_output=True, text=True, timeout=60, env=environment
    )


def test_adapters(served: Any, adapter_folders: dict[str, Path]) -> None:
    folder = str(adapter_folders["a0"])
    pushed = run(served, "adapters", "push", "command", folder)
    assert pushed.returncode == 0, pushed.stderr
    assert "command@1 is active" in pushed.stdout
    assert "command@2 is stored" in run(served, "adapters", "push", "command", folder, "--no-activate").stdout
    listed = run(served, "adapters", "list").stdout
    assert re.search(r"(?m)^command@1 +active +4 +shared_outer .* 2 *$", listed)
    assert "command@2" not in listed
    versions = run(served, "adapters", "list", "command").stdout
    assert re.search(r"(?m)^command@1 +active", versions)
    assert re.search(r"(?m)^command@2 +stored", versions)
    assert "command@2 is active" in run(served, "adapters", "activate", "command", "2").stdout
    assert "command@1 is active" in run(served, "adapters", "activate", "command@1").stdout
    assert run(served, "adapters", "activate", "command").returncode == 2
    assert "deleted command@2" in run(served, "adapters", "delete", "command@2").stdout
    assert "deleted command\n" in run(served, "adapters", "delete", "command").stdout
    gone = run(served, "adapters", "delete", "command")
    assert gone.returncode == 1
    assert "404" in gone.stderr
    assert "command" in gone.stderr
    assert "Traceback" not in gone.stderr


def test_chat(served: Any) -> None:
    once = run(served, "chat", "--model", "a0", "--max-tokens", "24", "Who are you?")
    assert once.returncode == 0, once.stderr
    assert once.stdout == served.said("a0") + "\n"
    assert "a0@1" in once.stderr
    talk = run(served, "chat", "--model", "a0", "--max-tokens", "24", stdin="Who are you?\n\nAnd you?\n")
    assert talk.returncode == 0, talk.stderr
    assert served.said("a0") in talk.stdout
    assert talk.stderr.count("a0@1") == 2


def test_errors_are_said_plainly(served: Any, tmp_path: Path) -> None:
    unknown = run(served, "chat", "--model", "nobody", "Hi")
    assert unknown.returncode == 1
    assert "nobody" in unknown.stderr
    empty = run(served, "adapters", "push", "argon", str(tmp_path))
    assert empty.returncode != 0
    assert "adapter_config.json" in empty.stderr
    away = run(served, "adapters", "list", "--url", "http://127.0.0.1:1")
    silent = run(served, "chat", "--url", "http://127.0.0.1:1", "Hi")
    for result in (away, silent):
        assert result.returncode == 1
        assert "127.0.0.1:1" in result.stderr
        assert "lanewise serve" in result.stderr
    assert not any("Traceback" in result.stderr for result in (unknown, empty, away, silent))
    goes_on = run(served, "chat", "--model", "nobody", stdin="Hi\nStill there?\n")
    assert goes_on.returncode == 0
    assert goes_on.stderr.count("nobody") == 2


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text()


def test_every_command_of_the_readme_works(
    serve: Any, base_folder: Path, adapter_folders: dict[str, Path], readme: str, tmp_path: Path
) -> None:
    commands = [
        command.partition("  #")[0].strip().replace("\\\n", " ")
        for command in re.findall(r"(?m)^    ((?:lanewise|curl) (?:[^\n]*\\\n)*[^\n]*)$", readme)
    ]
    starts, others = (
        [c for c in commands if "serve" in c.split()],
        [c for c in commands if "serve" not in c.split()],
    )
    # `serve` fixture runs it with the same options, on a free port.
    assert starts == ["lanewise serve --base files/tiny-moe --adapter argon=files/argon"]
    assert len(others) >= 6
    folder = adapter_folders["a0"]
    with serve(tmp_path / "data", {"argon": folder}) as served:
        for seed in (1, 2):
            served.client.push_folder("argon", adapter_folders[f"a{seed}"])  # so that versions 2 and 3 exist
        for command in others:
            line = (
                command.replace("http://127.0.0.1:8000", served.url)
                .replace("files/argon", str(folder))
                .replace("files/tiny-moe", str(base_folder))
            )
            environment = os.environ | {
                "LANEWISE_URL": served.url,
                "PATH": f"{LANEWISE.parent}:{os.environ['PATH']}",
            }
            done = subprocess.run(
                ["bash", "-c", line], input="", capture_output=True, text=True, timeout=60, env=environment
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            assert '"error"' not in done.stdout, f"{line}\n{done.stdout}"


def test_every_python_snippet_of_the_readme_works(
    serve: Any,
    adapter_folders: dict[str, Path],
    adapter_config: dict[str, Any],
    random_factors: Any,
    readme: str,
    tmp_path: Path,
) -> None:
    snippets = re.findall(r"(?s)```python\n(.*?)```", readme)
    assert len(snippets) == 2
    with serve(tmp_path / "data", {"argon": adapter_folders["a0"]}) as served:
        for snippet in snippets:
            # A random adapter does not know when to stop, so it is told.
            code = snippet.replace("http://127.0.0.1:8000", served.url)
            code = code.replace("temperature=0,", "temperature=0, max_tokens=8,")
            names: dict[str, Any] = {"factors": random_factors(3), "adapter_config": adapter_config}
            exec(code, names)
            if "publisher" in names:
                assert names["version"].model == "argon@2"
                names["publisher"].client.close()
            else:
                assert names["raw"].headers["x-lanewise-version"] == "1"
                names["client"].close()
