"""How fast adapters are described and read, and what memory that takes.

`python benchmarks/loaders.py` writes `results/loaders.json`. The adapters have GLM-5.2's shapes at rank 64:
one of all 78 layers (16.4 GB) as a sparse file, whose header alone is real, and one of six layers (0.7 GB)
that is real. Every memory figure is of a process of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from results import Row, write_rows

from lanewise.loaders import Adapter, Inventory, read_adapter, write_adapter

RANK, ROUNDS = 64, 7
GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "max_position_embeddings": 1_048_576,
}
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def main() -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:
        rows = [*inspecting(Path(name)), *reading(Path(name))]
    write_rows(
        "loaders",
        rows,
        command="python benchmarks/loaders.py",
        meaning=(
            "Adapters of GLM-5.2's shapes at rank 64. `lanewise inspect` is timed from process start to end. "
            "Times: speed of reading every factor over that of reading the file in one call, taken in turns; "
            "for memory, the peak while loading over the adapter's size."
        ),
    )
    for row in rows:
        print(
            f"{row.case}, {row.measure}: {row.value:.4g} {row.unit}"
            + (f" ({row.ratio:.2f}×)" if row.ratio else "")
        )


def inspecting(folder: Path) -> Iterator[Row]:
    base = folder / "glm.json"
    base.write_text(json.dumps(GLM))
    for layout in ("shared_outer", "per_expert_2d"):
        adapter = folder / layout
        nbytes, tensors = write_sparse(adapter, layout)
        case = f"inspect {nbytes / 1e9:.1f} GB, {layout}, {tensors:,} tensors"
        runs = [inspect_once(adapter, base) for _ in range(ROUNDS)]
        yield Row(case, "process start to end", statistics.median(s for s, _ in runs), "s", ROUNDS)
        yield Row(case, "peak memory", statistics.median(peak for _, peak in runs) / 1e6, "MB", ROUNDS)


def reading(folder: Path) -> Iterator[Row]:
    small = GLM | {"num_hidden_layers": 6}
    (folder / "small.json").write_text(json.dumps(small))
    file = write_real(folder / "real", Inventory.from_config(small))
    adapter = read_adapter(file.parent, Inventory.from_config(small), max_rank=RANK)
    case = f"read {adapter.nbytes / 1e9:.2f} GB"
    for cached in (True, False):
        plain, ours = in_turns(file, [lambda: len(file.read_bytes()), lambda: read_all(adapter)], cached)
        speed, baseline = adapter.nbytes / ours / 1e9, adapter.nbytes / plain / 1e9
        where = "file in memory" if cached else "file not in memory"
        yield Row(
            case, f"all factors, {where}", speed, "GB/s", ROUNDS, "one read", baseline, speed / baseline
        )
    started = time.perf_counter()
    read_adapter(file.parent, Inventory.from_config(small), max_rank=RANK)
    seconds = time.perf_counter() - started
    yield Row(case, "check every value and take the digest", adapter.nbytes / seconds / 1e9, "GB/s", 1)
    command = [sys.executable, __file__, "load", str(file.parent), str(folder / "small.json")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    yield Row(
        case,
        "peak memory of loading",
        peak / 1e9,
        "GB",
        1,
        "the adapter",
        adapter.nbytes / 1e9,
        peak / adapter.nbytes,
    )


def shapes(inventory: Inventory, layout: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, module in inventory.modules.items():
        pair = {"A": (RANK, module.in_features), "B": (module.out_features, RANK)}
        for side, shape in pair.items():
            if module.experts is None:
                yield f"base_model.model.{name}.lora_{side}.weight", shape
            elif layout == "per_expert_2d":
                bank, _, last = name.rpartition(".")
                for expert in range(module.experts):
                    yield f"base_model.model.{bank}.{expert}.{PARTS[last]}.lora_{side}.weight", shape
            else:
                experts = 1 if module.outer("A" if side == "A" else "B") else module.experts
                yield f"base_model.model.{name}.lora_{side}.weight", (experts, *shape)


def write_sparse(folder: Path, layout: str) -> tuple[int, int]:
    """A folder with a true header over a hole; gives the bytes and the number of its tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes(Inventory.from_config(GLM), layout):
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end, len(header)


# A process counts the memory of the one that started it, up to the moment it becomes another program: so the
# command is started by a small process, not by this one.
_WATCH = """
import os, subprocess, sys, time
started = time.perf_counter()
_, status, usage = os.wait4(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, 0)
print(time.perf_counter() - started, usage.ru_maxrss * 1024, status)
"""


def inspect_once(adapter: Path, base: Path) -> tuple[float, int]:
    """Seconds and peak bytes of one `lanewise inspect`."""
    command = [str(Path(sys.executable).with_name("lanewise")), "inspect", str(adapter), "--base", str(base)]
    watched = subprocess.run(
        [sys.executable, "-c", _WATCH, *command], check=True, capture_output=True, text=True
    )
    seconds, peak, status = watched.stdout.split()
    assert status == "0", "the adapter has no problems"
    return float(seconds), int(peak)


def write_real(folder: Path, inventory: Inventory) -> Path:
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=random).bfloat16()
        for name, shape in shapes(inventory, "shared_outer")
    }
    write_adapter(folder, tensors, CONFIG)
    return folder / "adapter_model.safetensors"


def read_all(adapter: Adapter) -> int:
    """As an engine's pool does before it copies: every factor in memory at once."""
    return len(list(adapter.pairs()))


def in_turns(file: Path, actions: list[Callable[[], int]], cached: bool) -> list[float]:
    """Median seconds of each action; unless `cached`, the file is dropped from the page cache before each."""
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(ROUNDS):
        for action, taken in zip(actions, seconds, strict=True):
            if not cached:
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            action()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


def load(folder: Path, base: Path) -> int:
    """How many bytes this process grows by, at most, while an adapter is checked and read for an engine."""
    inventory = Inventory.from_config(json.loads(base.read_text()))
    torch.isfinite(torch.stack(torch.aminmax(torch.ones(8).bfloat16())))  # loads what torch loads late
    before = memory("VmRSS")
    read_all(read_adapter(folder, inventory, max_rank=RANK))
    return memory("VmHWM") - before


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        print(load(Path(sys.argv[2]), Path(sys.argv[3])))
    else:
        main()
