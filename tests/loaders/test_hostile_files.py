"""Files made to break a reader: each gives a typed error, quickly and without a large allocation."""

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from lanewise.loaders import Adapter, InvalidAdapter, Inventory, UnsafeFile, read_adapter_file

NAME = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["k_proj"]}

Read = Callable[[bytes], Adapter]


def valid() -> bytes:
    """A small whole adapter: one pair of rank 2."""
    a, b = torch.arange(512.0).view(2, 2, 128)
    return save({NAME.format("A"): a.contiguous(), NAME.format("B"): b.reshape(128, 2)})


def build(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory, inventory: Inventory) -> Read:
    file = tmp_path_factory.mktemp("hostile") / "push.safetensors"

    def from_bytes(data: bytes) -> Adapter:
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        return read_adapter_file(file, CONFIG, inventory, max_rank=64)

    return from_bytes


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: 0 bytes"),
    "header length cut": (b"\0" * 7, "truncated: 7 bytes"),
    "header of 2^63 bytes": (build({}, length=2**63), f"a header of {2**63} bytes"),
    "header past the end": (build({}, length=50_000), "truncated in its header"),
    "header of no bytes": (build(b""), "not a JSON object"),
    "not an object": (build([]), "not a JSON object"),
    "cut JSON": (build(b'{"a":'), "not valid JSON"),
    "not UTF-8": (build(b'{"\xff":1}'), "not valid JSON"),
    "deep nesting": (build(b'{"a":' * 100_000), "not valid JSON"),
    "a number of 5,000 digits": (build(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "duplicate keys": (build(b'{"a":{},"a":{}}'), "duplicate key 'a'"),
    "duplicate fields": (build(b'{"a":{"dtype":"F32","dtype":"F16"}}'), "duplicate key 'dtype'"),
    "metadata of numbers": (build({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata of a list": (build({"__metadata__": []}), "__metadata__"),
    "entry not an object": (build({"a": 3}), "'a' described by a int"),
    "field missing": (build({"a": {"dtype": "F32", "shape": [2]}}), "missing fields"),
    "field unknown": (build({"a": entry() | {"x": 1}}, b"\0" * 8), "unknown or missing"),
    "dtype unknown": (build({"a": entry(dtype="F7")}, b"\0" * 8), "'a' with an unknown dtype"),
    "dtype a number": (build({"a": entry(dtype=7)}, b"\0" * 8), "'a' with an unknown dtype"),
    "shape negative": (build({"a": entry(shape=[-2])}, b"\0" * 8), "malformed shape"),
    "shape of floats": (build({"a": entry(shape=[2.0])}, b"\0" * 8), "malformed shape"),
    "shape of booleans": (build({"a": entry(shape=[True, 2])}, b"\0" * 8), "malformed shape"),
    "shape not a list": (build({"a": entry(shape=2)}, b"\0" * 8), "malformed shape"),
    "shape of 9 sizes": (build({"a": entry(shape=[1] * 9)}, b"\0" * 4), "malformed shape"),
    "shape of 2^40": (build({"a": entry(shape=[2**40, 2**40])}, b"\0" * 8), "'a' with 8 bytes"),
    "shape of 2^70": (build({"a": entry(shape=[2**70])}, b"\0" * 8), "malformed shape"),
    "offsets reversed": (build({"a": entry(offsets=[8, 0])}, b"\0" * 8), "'a' with -8 bytes"),
    "offsets of one": (build({"a": entry(offsets=[8])}, b"\0" * 8), "malformed data_offsets"),
    "offsets past the end": (build({"a": entry(shape=[2**40], offsets=[0, 2**42])}), "truncated"),
    "offsets too long": (build({"a": entry(offsets=[0, 12])}, b"\0" * 12), "'a' with 12 bytes"),
    "a gap": (build({"a": entry(offsets=[4, 12])}, b"\0" * 12), "leaves a gap"),
    "an overlap": (build({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12), "overlaps"),
    "the same bytes twice": (build({"a": entry(), "b": entry()}, b"\0" * 8), "overlaps"),
    "bytes at the end": (valid() + b"\0", "nothing after them"),
    "no name": (build({"a\n": entry()}, b"\0" * 8), "printable"),
    "a name of half a surrogate": (build({"\ud800": entry()}, b"\0" * 8), "printable"),
    "a name of 10,000 letters": (build({"a" * 10_000: entry()}, b"\0" * 8), "a tensor named"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_file_is_refused_with_its_reason(read: Read, case: str) -> None:
    data, reason = HOSTILE[case]
    with pytest.raises(UnsafeFile) as caught:
        read(data)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def test_too_many_tensors_are_refused(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanewise.loaders.tensor_file.MAX_TENSORS", 1)
    with pytest.raises(UnsafeFile, match="found 2 tensors; expected at most 1"):
        read(valid())


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a":[' + b"0," * 5_000_000 + b"0]}", "a header of"),
        (json.dumps({"__metadata__": {str(i): "x" for i in range(400_000)}}).encode(), "a header of"),
        (
            json.dumps({f"t{i}": {} for i in range(2000)}).encode(),
            "found 2000 tensors; expected at most 1024",
        ),
    ],
    ids=["flat list", "metadata", "tensors"],
)
def test_a_small_base_takes_no_header_of_a_large_one(read: Read, header: bytes, reason: str) -> None:
    started = time.monotonic()
    with pytest.raises(UnsafeFile, match=reason):
        read(build(header))
    assert time.monotonic() - started < 1


def test_the_valid_file_is_accepted(read: Read) -> None:
    adapter = read(valid())
    assert adapter.layout == "linear"
    padded = build(HEADER[8:].rstrip() + b"   ", valid()[len(HEADER) :])
    assert same(read(padded), adapter)


@pytest.mark.parametrize("length", range(0, len(valid()), 97))
def test_a_truncated_file_says_how_long_it_is_and_should_be(read: Read, length: int) -> None:
    with pytest.raises(UnsafeFile, match="truncated") as caught:
        read(valid()[:length])
    assert f"{length} bytes" in str(caught.value)
    header_end = 8 + struct.unpack("<Q", valid()[:8])[0]
    if length >= header_end:
        assert f"{len(valid())} bytes" in str(caught.value)


def test_a_sparse_file_with_a_giant_header_costs_neither_time_nor_memory(
    tmp_path: Path, inventory: Inventory
) -> None:
    file = tmp_path / "giant.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 2**40))
        stream.truncate(2**41)
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(UnsafeFile, match="header of"):
        read_adapter_file(file, CONFIG, inventory, max_rank=64)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert time.perf_counter() - started < 1


def test_a_giant_tensor_that_does_not_fit_the_base_is_never_read(
    tmp_path: Path, inventory: Inventory
) -> None:
    file = tmp_path / "giant.safetensors"
    size = 2**41
    with file.open("wb") as stream:
        stream.write(build({NAME.format("A"): entry(shape=[size // 4], offsets=[0, size])}))
        stream.truncate(stream.tell() + size)
    started = time.perf_counter()
    with pytest.raises(InvalidAdapter, match=r"lora_A"):
        read_adapter_file(file, CONFIG, inventory, max_rank=64)
    assert time.perf_counter() - started < 1


def same(one: Adapter, other: Adapter) -> bool:
    """Equal meaning: the same modules with factors equal in value."""
    pairs = zip(one.pairs(), other.pairs(), strict=True)
    return all(
        m1 == m2 and torch.equal(a1, a2) and torch.equal(b1, b2) and s1 == s2
        for (m1, a1, b1, s1), (m2, a2, b2, s2) in pairs
    )


HEADER = valid()[: 8 + struct.unpack("<Q", valid()[:8])[0]]
EDIT = st.tuples(st.integers(0, len(HEADER) - 1), st.integers(0, 255))
FUZZ = settings(
    max_examples=200, deadline=10_000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(edits=st.lists(EDIT, min_size=1, max_size=4))
def test_any_bytes_changed_in_the_header(read: Read, edits: list[tuple[int, int]]) -> None:
    """Refused with a typed error, or still the same adapter; no other exception, no hang."""
    data = bytearray(valid())
    for position, value in edits:
        data[position] = value
    try:
        adapter = read(bytes(data))
    except (UnsafeFile, InvalidAdapter):
        return
    assert same(adapter, read(valid()))


@FUZZ
@given(
    position=st.integers(0, len(HEADER)),
    removed=st.integers(0, 12),
    inserted=st.binary(max_size=12),
    mend_length=st.booleans(),
)
def test_any_bytes_cut_from_or_put_into_the_header(
    read: Read, position: int, removed: int, inserted: bytes, mend_length: bool
) -> None:
    header = HEADER[:position] + inserted + HEADER[position + removed :]
    if mend_length and len(header) >= 8:
        header = struct.pack("<Q", len(header) - 8) + header[8:]
    try:
        adapter = read(header + valid()[len(HEADER) :])
    except (UnsafeFile, InvalidAdapter):
        return
    assert same(adapter, read(valid()))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@FUZZ
@given(
    name=st.sampled_from([NAME.format("A"), "__metadata__", "x"]),
    value=JSON | st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON}),
)
def test_any_json_as_an_entry(read: Read, name: str, value: object) -> None:
    end = len(HEADER)
    header: dict[str, object] = json.loads(HEADER[8:])
    try:
        adapter = read(build(header | {name: value}, valid()[end:]))
    except (UnsafeFile, InvalidAdapter):
        return
    assert same(adapter, read(valid()))


@FUZZ
@given(field=st.sampled_from([*CONFIG, "use_dora", "_sglang_lora_format", "note"]), value=JSON)
def test_any_json_as_a_config_field(
    tmp_path_factory: pytest.TempPathFactory, inventory: Inventory, field: str, value: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "config_fuzz.safetensors"
    if not file.exists():
        file.write_bytes(valid())
    try:
        adapter = read_adapter_file(file, CONFIG | {field: value}, inventory, max_rank=64)
    except InvalidAdapter:
        return
    assert adapter.rank == 2
    assert len(adapter.digest) == 64
