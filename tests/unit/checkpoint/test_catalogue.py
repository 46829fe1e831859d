"""Checkpoints of every format read as one thing, converted to every other, and compared."""

from __future__ import annotations

import errno
import math
import os
import pickle
import random
import resource
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats import FORMATS, model, save_all
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardwise as sw
from checkpoint_loading import MB, at_the_peak
from shardwise.checkpoint import catalogue, torch_files
from shardwise.checkpoint.catalogue import Catalogue, found_in, items, open_checkpoint
from shardwise.checkpoint.compare import Tolerance, differences
from shardwise.checkpoint.convert import convert, part_of, rows_of
from shardwise.checkpoint.dcp_files import read_dcp
from shardwise.checkpoint.pieces import flaw, whole, within
from shardwise.checkpoint.torch_files import key_of, leaves, nested
from shardwise.errors import CheckpointError, CheckpointFileError, DamagedFileError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("formats")
    torch.manual_seed(0)
    return folder, save_all(folder)


def key_in(found: Catalogue, name: str) -> str:
    return name if name in found.items else f"model.{name}"


TIED = "2.bias"
"""Files of safetensors have a tied tensor once, under the other name."""


def right_items(found: Catalogue, right: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors by the keys that they have in a checkpoint."""
    keys = {name: name if name in found.items else f"model.{name}" for name in right}
    assert {name for name, key in keys.items() if key not in found.items} <= {TIED}
    return {key: right[name] for name, key in keys.items() if key in found.items}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name: str, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, right = saved
    monkeypatch.setattr(items, "AT_ONCE", 20)  # so that boxes are cut
    with open_checkpoint(folder / name) as found:
        for key, x in right_items(found, right).items():
            item = found.items[key]
            assert item.torch_dtype == x.dtype and item.shape == x.shape and item.num_bytes == x.numel() * 4
            assert flaw(item.shape, item.boxes) is None and flaw(item.shape, list(item.parts())) is None
            for box in item.parts():
                assert torch.equal(item.read(box), x[within(box, whole(x.shape))])
            assert torch.equal(torch.cat([part.reshape(-1) for part in rows_of(item)]), x.reshape(-1))
        assert found.checks and not found.unproven
        for check in found.checks:
            check.run()


def test_what_is_said_of_each(saved: Any) -> None:
    folder, _ = saved
    told = {}
    for path, found in found_in(folder):
        assert isinstance(found, Catalogue)
        with found:
            told[path.name] = found.kind, found.about.partition(" at ")[0]
    for name in ("torch.save", "shards"):
        with open_checkpoint(folder / name) as found:
            told[name] = found.kind, found.about
    assert told == {
        "step": ("step", "step 7, saved by 1 rank"),
        "safetensors": ("safetensors", "1 file"),
        "a set": ("safetensors", "3 files"),
        "dcp": ("dcp", "1 file"),
        "torch.save": ("torch.save", "1 file"),
        "shards": ("torch.save", "1 file"),
    }
    with open_checkpoint(folder / "step" / "step-00000007" / "index.json") as found:
        assert found.items["model.0.weight"].layout == "S(0)@tp,dp" and found.items["model.0.bias"].layout == "R"
        assert {key_of(keys): read() for keys, read in found.others.items()}["progress.rate"] == 0.5
        assert found.items["optimizer.state.model.0.weight.exp_avg"].keys == (
            *("optimizer", "state", "model.0.weight", "exp_avg"),
        )
    with open_checkpoint(folder / "dcp" / ".metadata") as found:
        assert found.items["model.0.weight"].layout == "5 boxes"  # one rank has no rows
        assert found.others["epoch",]() == 3


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch.save"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_converted_to_every_other(
    name: str, to: Any, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    monkeypatch.setattr(items, "AT_ONCE", 40)
    target, written = tmp_path / "made", []
    with open_checkpoint(folder / name) as source:
        left = convert(source, target, to, max_shard_size=500, done=written.append)
        assert left == (list(source.others) if to == "safetensors" else [])
        assert sum(written) == source.num_bytes
        assert [entry.name for entry in tmp_path.iterdir()] == ["made"]
        with open_checkpoint(target) as found:
            assert found.kind == to
            for check in found.checks:
                check.run()
            assert found.items.keys() == source.items.keys()
            for key, item in source.items.items():
                assert found.items[key].dtype == item.dtype
                assert torch.equal(part_of(found.items[key], whole(item.shape)), part_of(item, whole(item.shape)))
            if to != "safetensors":
                assert {keys: read() for keys, read in found.others.items()} == {
                    keys: read() for keys, read in source.others.items()
                }


def test_converted_files_are_read_by_those_whose_they_are(saved: Any, tmp_path: Path) -> None:
    folder, right = saved
    with open_checkpoint(folder / "step") as step:
        convert(step.under("model."), tmp_path / "model.safetensors", "safetensors")
        convert(step, tmp_path / "all.pt", "torch.save")
        convert(step, tmp_path / "dcp", "dcp")
    assert all(torch.equal(x, right[name]) for name, x in load_file(tmp_path / "model.safetensors").items())
    for mapped in (False, True):
        read = torch.load(tmp_path / "all.pt", weights_only=True, mmap=mapped)
        assert all(torch.equal(x, right[name]) for name, x in read["model"].items())
        assert read["model"].keys() == right.keys() and read["progress"] == {"epoch": 3, "rate": 0.5}
        assert all(x.data_ptr() % 64 == 0 for x in read["model"].values())
    net = model()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    state = {"model": net.state_dict(), "progress": {"rate": 0}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state["progress"]["rate"] == 0.5
    assert all(torch.equal(x.full_tensor(), right[name]) for name, x in state["model"].items())


DTYPES = [
    *(torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.bool, torch.uint8, torch.int64, torch.uint16, torch.uint32, torch.uint64),
]


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    chance = random.Random(0)
    state = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (3,), (2, 3), (2, 0)]:
            raw = torch.tensor(list(chance.randbytes(math.prod(shape) * dtype.itemsize)), dtype=torch.uint8)
            x = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)
            state[f"{dtype} {shape}".replace("torch.", "")] = x
    state["transposed"] = torch.randn(3, 4).T
    state["conjugated"] = torch.randn(3, 4, dtype=torch.complex64).conj()
    torch.save(state, tmp_path / "0.pt")
    for at, to in enumerate(["dcp", "safetensors", "torch.save", "dcp", "torch.save"]):
        with open_checkpoint(tmp_path / (f"{at}.pt" if not at else str(at))) as source:
            convert(source, tmp_path / str(at + 1), to)  # type: ignore[arg-type]
    found = torch.load(tmp_path / "5", weights_only=True)
    for key, x in state.items():
        assert found[key].dtype == x.dtype and found[key].shape == x.shape
        shown = x.resolve_conj().reshape(-1)
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), shown.view(torch.uint8)), key


def test_tensors_among_the_other_values_of_a_step(tmp_path: Path) -> None:
    """Small ones are part of its JSON. The file that is made of it is read without running code, like any other."""
    data = {"x": torch.randn(2, 3), "flags": torch.tensor([True, False]), 1: torch.ones(()), "1": "text"}
    folder = sw.checkpoint.save_step(tmp_path, step=1, background=False, data=data).wait()
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "x.pt", "torch.save")
    found = torch.load(tmp_path / "x.pt", weights_only=True)["data"]
    assert found.keys() == data.keys() and found["1"] == "text"
    assert all(torch.equal(found[key], x) for key, x in data.items() if isinstance(x, Tensor))
    with open_checkpoint(tmp_path / "x.pt") as read:
        assert {"data.x", "data.flags", "data.1"} == {*read.items}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "'a.x' is a sparse_coo tensor, and only dense ones"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "'a.x' is a quantized tensor"),
        (lambda: torch.ones(2, device="meta"), "'a.x' is a tensor of the meta device: it was saved without data"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about quantized tensors
def test_tensors_that_no_checkpoint_holds(make: Any, words: str, tmp_path: Path) -> None:
    torch.save({"a": {"x": make()}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "x.pt")


def test_what_cannot_be_converted(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved
    (tmp_path / "there").mkdir()
    with open_checkpoint(folder / "dcp") as source:
        with pytest.raises(CheckpointError, match="there is there already: name another place, or remove it first"):
            convert(source, tmp_path / "there", "dcp")
        with pytest.raises(CheckpointError, match=r"no key of .* begins with 'nets\.': the first one is 'model\.0\."):
            source.under("nets.")
    torch.save({"x": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "wide.pt")
    wide = open_checkpoint(tmp_path / "wide.pt")
    with wide, pytest.raises(CheckpointError, match="'x' is complex128, which safetensors files do not have"):
        convert(wide, tmp_path / "narrow", "safetensors")
    torch.save({"a": {"b": 1}, "a.b": torch.zeros(1)}, tmp_path / "names.pt")
    alike = open_checkpoint(tmp_path / "names.pt")
    with alike, pytest.raises(CheckpointError, match="two values have the same key, once the keys that lead to them"):
        convert(alike, tmp_path / "names", "dcp")
    torch.save({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, tmp_path / "names.pt")
    with pytest.raises(CheckpointError, match=r"has two tensors that are called 'a\.b'"):
        open_checkpoint(tmp_path / "names.pt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["names.pt", "there", "wide.pt"]


def test_a_conversion_that_fails_leaves_nothing(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved

    def fail(num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    for to in ("safetensors", "dcp", "torch.save"):
        with open_checkpoint(folder / "step") as source, pytest.raises(Exception, match="No space left"):
            convert(source, tmp_path / "made", to, done=fail)  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch.save"])
def test_a_disk_that_is_full(to: Any, tmp_path: Path) -> None:
    """Or what stands for it: the largest file that the operating system allows."""
    save_file({"x": torch.randn(50_000)}, tmp_path / "x.safetensors")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_checkpoint(tmp_path / "x.safetensors") as source:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(CheckpointFileError, match=r"cannot write .*made.*: File too large") as error:
                convert(source, tmp_path / "made", to)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG and os.listdir(tmp_path) == ["x.safetensors"]


# Files that are not what they should be


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda path: None, CheckpointFileError, r"cannot read .*it: No such file or directory"),
        (lambda path: path.mkdir(), CheckpointFileError, r"no checkpoint is in .*it"),
        *(
            (
                make,
                DamagedFileError,
                r"it, at byte 0: this is no zip archive, which is what torch\.save has written since",
            )
            for make in (
                lambda path: path.write_bytes(b"hello"),
                lambda path: path.write_bytes(b""),
                lambda path: torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False),
            )
        ),
        (
            lambda path: path.write_bytes(b"PK\3\4 and"),
            DamagedFileError,
            "it, at byte 0: torch.save wrote no such thing",
        ),
        (lambda path: torch.save({"a": Custom()}, path), CheckpointError, "it holds more than tensors, numbers, text"),
        (
            lambda path: (path.mkdir(), (path / "__0.metadata").write_bytes(b"")),
            CheckpointError,
            r"it was saved without collectives, and has no \.metadata that speaks for all ranks",
        ),
    ],
)
def test_what_is_no_checkpoint(make: Any, error: type, words: str, tmp_path: Path) -> None:
    make(tmp_path / "it")
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path / "it")


class Custom:
    """What only its own code could make again."""


class _Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("exit 3",)


def test_metadata_name_nothing_but_records(saved: Any, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Hostile()))
    with pytest.raises(DamagedFileError, match=r"posix\.system is no part of a checkpoint's metadata"):
        open_checkpoint(tmp_path)
    torch.save(_Hostile(), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"that would run code which the file names, posix\.system$"):
        open_checkpoint(tmp_path / "x.pt")


def pickled(*opcodes: bytes) -> bytes:
    return b"\x80\x04" + b"".join(opcodes) + b"."


MANY = b"]q\0" + b"".join(b"0h%ch%c\x86q%c" % (at, at, at + 1) for at in range(60))
"""A list in a pair of two, of which a pair is made, and so on: 2**60 lists, in a few bytes."""

BOMBS = {
    "remembers a billion objects": pickled(b"Nr\0\0\0\x0f"),
    "is text of many lists": pickled(b"ctorch.serialization\n_get_layout\n", MANY, b"\x85R"),
    "is no keys": pickled(
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(",
        b"X\x0c\0\0\0storage_data}X\x13\0\0\0state_dict_metadata}X\x0c\0\0\0planner_data}X\1\0\0\0k",
        MANY,
        b"sub",
    ),
    "changes a class": pickled(b"cpathlib\nPurePosixPath\nN}X\4\0\0\0nameK\1s\x86b"),
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak of memory")
@pytest.mark.parametrize("name", BOMBS)
def test_metadata_that_would_take_all_memory_or_change_the_program(name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(BOMBS[name])
    before = vars(PurePosixPath).copy()

    def opened() -> None:
        with pytest.raises(DamagedFileError, match="these are no metadata of a checkpoint"):
            open_checkpoint(tmp_path)

    _, peak, _ = at_the_peak(opened)
    assert peak < 64 * MB and vars(PurePosixPath) == before


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for entry in source.iterdir():
        (target / entry.name).write_bytes(entry.read_bytes())
    return target


def problems(path: Path) -> list[CheckpointError]:
    found = []
    with open_checkpoint(path) as opened:
        for check in opened.checks:
            try:
                check.run()
            except CheckpointError as error:
                found.append(error)
    return found


def test_damage_is_named_with_its_key_and_offset(saved: Any, tmp_path: Path) -> None:
    folder = copied(saved[0] / "dcp", tmp_path / "dcp")
    tensor = read_dcp(folder).tensors["model.0.weight"]
    box, place = next(iter(tensor.boxes.items()))
    data = bytearray((folder / place.file).read_bytes())
    value = struct.pack("<f", float(saved[1]["0.weight"][box[0]]))
    data[data.index(value, place.offset)] ^= 1
    (folder / place.file).write_bytes(data)
    [error] = problems(folder)
    assert isinstance(error, DamagedFileError)
    assert (error.key, error.offset, error.path) == ("model.0.weight", place.offset, folder / place.file)
    assert "the data have changed since they were written: archive/data/0 has another checksum" in str(error)

    (folder / place.file).write_bytes(data[:-100])
    with pytest.raises(DamagedFileError, match=r"the file ends at byte \d+, before byte \d+ where its data do"):
        open_checkpoint(folder)


def test_damage_in_a_file_of_torch_save_is_named_with_its_key_and_offset(tmp_path: Path) -> None:
    x, y = torch.arange(5.0), torch.arange(7.0) + 100
    torch.save(
        {"later": [y, torch.zeros(0)], "first": {"x": x, "tied": x[2:]}, "none": torch.zeros(0, 3)}, tmp_path / "x.pt"
    )
    data = (tmp_path / "x.pt").read_bytes()
    for value, key in ((3.0, "first.x"), (104.0, "later.0")):
        at = data.index(struct.pack("<ff", value, value + 1))
        (tmp_path / "x.pt").write_bytes(data[:at] + b"\x01" + data[at + 1 :])
        [error] = problems(tmp_path / "x.pt")
        assert isinstance(error, DamagedFileError) and error.key == key
        assert error.offset is not None and 0 < error.offset < at
        assert data[error.offset : error.offset + 4] == b"PK\x03\x04"


def test_boxes_that_are_not_the_whole_are_found(tmp_path: Path) -> None:
    """Ranks that each save by themselves, as if they were alone, do not save all."""
    mesh = sw.simulate((4,), ("tp",))
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)])
    items = x.__create_write_items__("x", x)  # type: ignore[attr-defined]

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            self.plan = dcp.SavePlan([items[0], items[2]], planner_data={"x": ("x",)})
            return self.plan

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"x": x}, checkpoint_id=tmp_path / "part", planner=Planner())
    [error] = problems(tmp_path / "part")
    assert str(error) == f"{tmp_path}/part/.metadata, key 'x': of the tensor [8], [2:4] was not saved"


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "torch.save"])
def test_files_damaged_at_random(name: str, saved: Any, tmp_path: Path) -> None:
    """Each is refused, or whole after all, and its values right."""
    folder, right = saved
    chance = random.Random(name)
    path = folder / "torch.save" if name == "torch.save" else copied(folder / "dcp", tmp_path / "dcp") / name
    target = tmp_path / "torch.save" if name == "torch.save" else path
    original, refused = path.read_bytes(), 0
    for _ in range(200 if name == "__0_0.distcp" else 1000):
        data = bytearray(original)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            for _ in range(chance.randint(1, 3)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        target.write_bytes(data)
        where = target if name == "torch.save" else tmp_path / "dcp"
        try:
            if problems(where):
                refused += 1
                continue
        except CheckpointError:
            refused += 1
            continue
        with open_checkpoint(where) as found:
            for key, x in right.items():
                item = found.items.get(f"model.{key}")
                if item is not None and item.shape == x.shape and item.torch_dtype == x.dtype:
                    assert name == ".metadata" or torch.equal(part_of(item, whole(item.shape)), x)
    assert refused > 10


# Comparing


def save_pair(folder: Path, first: dict[str, Tensor], second: dict[str, Tensor]) -> tuple[Catalogue, Catalogue]:
    save_file(first, folder / "a.safetensors")
    torch.save(second, folder / "b.pt")
    return open_checkpoint(folder / "a.safetensors"), open_checkpoint(folder / "b.pt")


def test_checkpoints_of_all_formats_are_the_same(saved: Any) -> None:
    folder, _ = saved
    with open_checkpoint(folder / "safetensors") as first:
        for name in FORMATS:
            with open_checkpoint(folder / name) as second:
                nets = second.under("model.") if any(key.startswith("model.") for key in second.items) else second
                found = list(differences(first, nets))
                assert [one.key for one in found] in ([], [TIED]) and all("only in" in one.what for one in found)


def test_what_differs_and_by_how_much(tmp_path: Path) -> None:
    nan = float("nan")
    first = {
        "same": torch.tensor([1.0, nan, float("inf")]),
        "values": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "shape": torch.zeros(2, 3),
        "dtype": torch.tensor([1.0, 2.5]),
        "gone": torch.zeros(2, dtype=torch.int8),
        "lost": torch.tensor([1.0, 2.0]),
        "numbers": torch.tensor([2**60, 5]),
        "small": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "unsigned": torch.tensor([2**64 - 1, 2**63 + 5, 7], dtype=torch.uint64),
    }
    second = {
        "same": torch.tensor([1.0, nan, float("inf")]),
        "values": torch.tensor([[1.0, 2.5], [3.0, 3.0]]),
        "shape": torch.zeros(3, 2),
        "dtype": torch.tensor([1.0, 2.5]).half(),
        "new": torch.zeros(()),
        "lost": torch.tensor([1.0, nan]),
        "numbers": torch.tensor([2**60 + 1, 5]),
        "small": torch.tensor([1.0, 416.0]).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, True]),
        "unsigned": torch.tensor([0, 2**63 + 6, 7], dtype=torch.uint64),
    }
    one, two = save_pair(tmp_path, first, second)
    told = {(d.key, d.what): (d.first, d.second) for d in differences(one, two)}
    assert told == {
        ("values", "values"): ("2 of 4 elements, by at most 1 (relative 0.333)", ""),
        ("shape", "shape"): ("float32 [2, 3]", "float32 [3, 2]"),
        ("dtype", "dtype"): ("float32", "float16"),
        ("gone", "only in the first"): ("int8 [2]", ""),
        ("lost", "values"): ("1 of 2 elements, some infinite or NaN on one side", ""),
        ("numbers", "values"): ("1 of 2 elements, by at most 1 (relative 8.67e-19)", ""),
        ("small", "values"): ("1 of 2 elements, by at most 32 (relative 0.0769)", ""),
        ("flags", "values"): ("1 of 2 elements, by at most 1 (relative 1)", ""),
        ("unsigned", "values"): ("2 of 3 elements, by at most 1.84e+19 (relative inf)", ""),
        ("new", "only in the second"): ("", "float32 []"),
    }
    near = differences(one, two, tolerance=Tolerance(relative=0.1, absolute=0.5))
    loose = {d.key for d in near if d.what == "values"}
    assert loose == {"values", "lost", "flags", "unsigned"}
    assert not [d for d in differences(one, two, values=False) if d.what == "values"]


def test_nested_values_and_their_keys() -> None:
    value = {"a": {"b": 1, 2: [3, 4]}, "c": [torch.zeros(1), {"d": None}], "e": []}
    found = dict(leaves(value))
    assert [key_of(keys) for keys in found] == ["a.b", "a.2", "c.0", "c.1.d", "e"]
    assert nested(found) == value
    assert torch_files.key_of(()) == "value" and nested({(): 5}) == 5
    assert catalogue.Item.__abstractmethods__ == {"read"}
