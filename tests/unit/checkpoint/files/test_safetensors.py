"""The format, against the library that defines it; and every way in which a file can contradict itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from shardwise.checkpoint.files.safetensors import (
    DTYPES,
    LONGEST_HEADER,
    Written,
    in_file_order,
    make_header,
    read_header,
)
from shardwise.errors import CheckpointError, CheckpointFileError, DamagedFileError

TENSORS = {f"a {code}": torch.arange(6).view(2, 3).to(dtype) for code, dtype in DTYPES.items() if code != "F8_E8M0"}
TENSORS |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "naïve": torch.ones(1)}


def raw(x: torch.Tensor) -> bytes:
    return bytes(x.reshape(-1).view(torch.uint8).tolist())


def test_headers_of_the_library_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file(TENSORS, file, {"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"} and header.size == file.stat().st_size
    content = file.read_bytes()
    for key, x in TENSORS.items():
        stored = header.tensors[key]
        assert (stored.dtype, stored.shape) == (x.dtype, tuple(x.shape))
        assert content[stored.begin : stored.begin + stored.num_bytes] == raw(x)


def test_the_library_understands_headers_of_ours(tmp_path: Path) -> None:
    file, codes = tmp_path / "x.safetensors", {dtype: code for code, dtype in DTYPES.items()}
    order = in_file_order([Written(key, codes[x.dtype], tuple(x.shape)) for key, x in TENSORS.items()])
    data = b"".join(raw(TENSORS[one.key]) for one in order)
    file.write_bytes(make_header(order, {"format": "pt"}) + data)
    found = safetensors.torch.load_file(file)
    assert found.keys() == TENSORS.keys()
    for key, x in TENSORS.items():
        assert found[key].shape == x.shape and raw(found[key]) == raw(x)
    assert {key: one.shape for key, one in read_header(file).tensors.items()} == {
        k: x.shape for k, x in TENSORS.items()
    }


def test_wide_elements_come_first_so_that_all_are_aligned() -> None:
    order = in_file_order([Written("a", "U8", (3,)), Written("b", "F64", (1,)), Written("c", "BF16", (1,))])
    assert [one.key for one in order] == ["b", "c", "a"]
    assert len(make_header(order, {"anything": "1"})) % 8 == 0


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int = 0, end: int = 8, **changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end], **changed}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "a safetensors file has at least 8 bytes, this one 0"),
    "half a length": (b"\x10\0\0", "at least 8 bytes, this one 3"),
    "an endless header": ((2**63).to_bytes(8, "little") + b"{}", "at byte 0: the header is said to have 9223372036"),
    "a long header": (
        file_of(b"{}", length=LONGEST_HEADER + 1),
        "at byte 0: the header is said to have 100000001 bytes",
    ),
    "a header cut off": (
        file_of({"w": entry()}, bytes(8))[:20],
        "at byte 0: .* it was cut off, or is no safetensors file",
    ),
    "no JSON": (file_of(b"{'w': 1}"), "at byte 8: this is not valid JSON: Expecting property name"),
    "no text": (file_of(b'{"\xff": 1}'), "at byte 8: this is not valid JSON: 'utf-8' codec can't decode"),
    "no object": (file_of([1]), "at byte 8: expected a JSON object, found a list"),
    "deep": (file_of(b'{"w":' + b"[" * 100_000), "at byte 8: this is not valid JSON"),
    "twice": (file_of(b'{"w": {}, "w": {}}'), "at byte 8: this is not valid JSON: 'w' comes twice"),
    "NaN": (file_of(b'{"w": NaN}'), "this is not valid JSON: NaN is no JSON"),
    "a long number": (file_of(b'{"w": ' + b"9" * 5000 + b"}"), "this is not valid JSON"),
    "odd metadata": (
        file_of({"__metadata__": {"a": 1}}),
        "key '__metadata__': __metadata__ is not a mapping from text",
    ),
    "an odd entry": (file_of({"w": 3}), "key 'w': an entry of the header has a dtype, a shape and data_offsets"),
    "one thing more": (file_of({"w": {**entry(), "x": 1}}, bytes(8)), "and nothing else"),
    "an unknown dtype": (file_of({"w": entry(dtype="F31")}, bytes(8)), "key 'w': unknown dtype 'F31'"),
    "an odd dtype": (file_of({"w": entry(dtype=["F32"])}, bytes(8)), "unknown dtype"),
    "a negative size": (file_of({"w": entry(shape=[-2])}, bytes(8)), r"shape \[-2\] and data_offsets \[0, 8\] are not"),
    "a size that is true": (file_of({"w": entry(shape=[2, True])}, bytes(8)), "are not sizes"),
    "offsets the wrong way": (file_of({"w": entry(8, 0)}, bytes(8)), "are not sizes"),
    "three offsets": (file_of({"w": {**entry(), "data_offsets": [0, 4, 8]}}, bytes(8)), "are not sizes"),
    "another size": (
        file_of({"w": entry(0, 7)}, bytes(7)),
        r"at byte \d+, key 'w': F32 of shape \[2\] takes 8 bytes, not 7",
    ),
    "a huge shape": (
        file_of({"w": entry(shape=[2**62, 2**62])}, bytes(8)),
        r"key 'w': no tensor has the shape \[4611686018427387904, 4611686018427387904\]",
    ),
    "a huge shape without elements": (
        file_of({"w": entry(0, 0, shape=[0, 2**62, 2**62])}),
        r"key 'w': no tensor has the shape \[0, 4611686018427387904, 4611686018427387904\]",
    ),
    "dims without end": (
        file_of({"w": entry(shape=[1] * 100_000 + [2])}, bytes(8)),
        "at byte 8, key 'w': no tensor has the shape of 100001 dims",
    ),
    "cut off": (
        file_of({"w": entry()}, bytes(5)),
        r"at byte \d+, key 'w': the file ends at byte \d+, .* it was cut off",
    ),
    "too long": (
        file_of({"w": entry()}, bytes(9)),
        r"at byte \d+: the file goes on to byte \d+ with bytes that are nobody",
    ),
    "a gap": (
        file_of({"v": entry(), "w": entry(9, 17)}, bytes(17)),
        r"key 'w': the tensor leaves bytes that are nobody's",
    ),
    "overlapping": (
        file_of({"v": entry(), "w": entry(4, 12)}, bytes(12)),
        "key 'w': the tensor begins before the one in",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_contradicts_itself(name: str, tmp_path: Path) -> None:
    content, words = DAMAGED[name]
    (file := tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(DamagedFileError, match=words) as error:
        read_header(file)
    assert str(error.value).startswith(str(file)) and isinstance(error.value, CheckpointError)
    assert error.value.path == file


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda path: None, CheckpointFileError, r"\[Errno 2\] cannot read .*x: No such file or directory"),
        (os.mkdir, DamagedFileError, "x: this is not a file"),
        (os.mkfifo, DamagedFileError, "x: this is not a file"),
        (lambda path: os.symlink("/dev/zero", path), DamagedFileError, "x: this is not a file"),
    ],
    ids=["nothing", "a folder", "a pipe", "a device"],
)
def test_what_is_no_file(make: Callable[[Path], None], kind: type[Exception], words: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(kind, match=words):
        read_header(tmp_path / "x")


def test_dtypes_without_elements_of_their_own_may_be_in_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "x").write_bytes(file_of({"w": entry(0, 2, dtype="F4", shape=[4])}, bytes(2)))
    assert read_header(file).tensors["w"].dtype is None
