"""Files as they come: whole, cut, forged."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loader.errors import CheckpointError
from loader.safetensors import MAX_HEADER_BYTES, open_safetensors
from tests.loader.files import LLAMA, raw_file, read_tensors, tensor_file


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def problems_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)
    return caught.value.problems


def test_reads_what_another_program_wrote() -> None:
    path = LLAMA / "model.safetensors"
    file = open_safetensors(path)
    expected = read_tensors(path)
    assert file.entries.keys() == expected.keys()
    for name, array in expected.items():
        found = file.tensor(name)
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes()


def test_views_are_read_only_and_share_the_map(tmp_path: Path) -> None:
    file = open_safetensors(tensor_file(tmp_path / "m.safetensors", {"w": np.arange(8, dtype=np.float32)}))
    view = file.tensor("w")
    assert not view.flags.writeable and not view.flags.owndata
    assert np.shares_memory(view, file.tensor("w"))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_misaligned_data_is_copied_not_misread(tmp_path: Path) -> None:
    header = json.dumps({"w": entry("F32", [2], 0, 8)})
    header += " " * ((-len(header) + 1) % 4)
    values = np.array([1.5, -2.0], np.float32)
    view = open_safetensors(raw_file(tmp_path / "m.safetensors", header, values.tobytes())).tensor("w")
    assert view.flags.aligned and not view.flags.writeable
    assert view.tolist() == [1.5, -2.0]


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {
        "s": np.array(3, np.float32),
        "e": np.zeros((0, 4), np.float16),
        "w": np.ones(2, np.float32),
    }
    file = open_safetensors(tensor_file(tmp_path / "m.safetensors", tensors))
    assert file.tensor("s").shape == () and file.tensor("s") == 3
    assert file.tensor("e").shape == (0, 4)
    assert file.tensor("w").tolist() == [1, 1]


def test_l27_bfloat16_is_bit_exact(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    path = raw_file(tmp_path / "m.safetensors", {"w": entry("BF16", [1 << 16], 0, 1 << 17)}, bits.tobytes())
    view = open_safetensors(path).tensor("w")
    assert np.array_equal(view.view(np.uint16), bits)
    # a bfloat16 is the upper half of a float32
    assert np.array_equal(view.astype(np.float32), (bits.astype(np.uint32) << 16).view(np.float32), equal_nan=True)
    assert view.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["FOO", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", None, 7])
def test_l27_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: object) -> None:
    header = {"model.w": entry("F32", [2], 0, 8) | {"dtype": dtype}}
    (problem,) = problems_of(raw_file(tmp_path / "m.safetensors", header, bytes(8)))
    assert problem.startswith("model.w: dtype") and repr(dtype) in problem


def test_l01_duplicate_name(tmp_path: Path) -> None:
    one, two = json.dumps(entry("F32", [2], 0, 8)), json.dumps(entry("F32", [2], 8, 16))
    path = raw_file(tmp_path / "m.safetensors", f'{{"w": {one}, "w": {two}}}', bytes(16))
    assert any("w: listed more than once" in p for p in problems_of(path))


@pytest.mark.parametrize(
    ("shape", "offsets", "data", "message"),
    [
        ([1000, 1000], [0, 4], 4, "needs 4000000 bytes"),
        ([1], [4, 0], 4, "needs 4 bytes"),
        ([1 << 62, 4], [0, 4], 4, "needs"),
        ([0, 1 << 80], [0, 0], 0, "a shape has at most 8 sizes, and without those of 0 their product is at most"),
        ([0, *[1] * 64], [0, 0], 0, "a shape has at most 8 sizes"),
        ([1], [-4, 0], 4, "not a pair of offsets"),
        ([1], [0], 4, "not a pair of offsets"),
        ([1], [0.0, 4.0], 4, "not a pair of offsets"),
        ([True], [0, 4], 4, "not a list of sizes"),
        ([-1, -1], [0, 4], 4, "not a list of sizes"),
        ("4", [0, 4], 4, "not a list of sizes"),
    ],
)
def test_l03_ranges(tmp_path: Path, shape: object, offsets: object, data: int, message: str) -> None:
    header = {"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
    (problem,) = problems_of(raw_file(tmp_path / "m.safetensors", header, bytes(data)))
    assert problem.startswith("w: ") and message in problem


@pytest.mark.parametrize(
    ("first", "second", "data", "message"),
    [
        ((0, 8), (4, 12), 12, "b: begins at 4, inside"),
        ((0, 8), (12, 20), 20, "b: begins at 12, leaving a hole after 8"),
        ((4, 12), (12, 20), 20, "a: begins at 4, leaving a hole after 0"),
        ((0, 8), (8, 16), 20, "4 bytes after the last tensor"),
    ],
)
def test_data_section_is_covered_exactly(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int], data: int, message: str
) -> None:
    header = {"b": entry("F32", [2], *second), "a": entry("F32", [2], *first)}
    assert any(message in p for p in problems_of(raw_file(tmp_path / "m.safetensors", header, bytes(data))))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"1234567", "truncated: 7 bytes"),
        (LFS_POINTER, "git-LFS pointer"),
        (struct.pack("<Q", 1000) + b"{}", "truncated: the header should have 1000 bytes, the file has 2"),
        (struct.pack("<Q", 1 << 63) + b"{}", "exceeds the limit"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not JSON"),
        (struct.pack("<Q", 7) + b'{"w":1}', "w: expected an object, found 1"),
    ],
)
def test_l04_broken_files_are_explained(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    (problem,) = problems_of(path)
    assert message in problem


def test_l04_file_cut_in_its_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((LLAMA / "model.safetensors").read_bytes()[:-10])
    size = len((LLAMA / "model.safetensors").read_bytes())
    (header,) = struct.unpack("<Q", (LLAMA / "model.safetensors").read_bytes()[:8])
    data = size - 8 - header
    assert problems_of(path) == (
        f"truncated: the file holds {data - 10} of the {data} bytes of its tensors; fetch it again",
    )


def test_l05_header_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = json.dumps({"w": entry("F32", [1], 0, 4)}).ljust(MAX_HEADER_BYTES)
    raw_file(path, header, struct.pack("<f", 2.5))
    assert open_safetensors(path).tensor("w").tolist() == [2.5]
    with path.open("r+b") as file:  # sparse: nothing but the length is read
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)
    (problem,) = problems_of(path)
    assert "100000001" in problem and "100000000" in problem
    path.unlink()


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_paths_that_are_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.safetensors"
    if kind == "folder":
        path.mkdir()
    assert "cannot be read" in problems_of(path)[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_ends_in_a_checkpoint_error_or_a_consistent_file(tmp_path: Path, data: st.DataObject) -> None:
    path = tensor_file(tmp_path / "m.safetensors", {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)})
    blob = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    del blob[data.draw(st.integers(len(blob) - 8, len(blob))) :]
    path.write_bytes(blob)
    try:
        file = open_safetensors(path)
    except CheckpointError:
        return
    assert sum(len(file.tensor(name).tobytes()) for name in file.entries) == len(blob) - file.data_offset
