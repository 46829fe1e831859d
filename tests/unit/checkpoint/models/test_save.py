"""`save`: files that `safetensors` opens, written in parts, and what was there if that fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import From, load, save
from shardwise.checkpoint.files.checksums import CHECKSUMS
from shardwise.checkpoint.files.file_sets import find_files
from shardwise.checkpoint.files.folders import UNFINISHED
from shardwise.checkpoint.files.verifying import _share, claims_of, verify
from shardwise.checkpoint.models.save import num_bytes_of
from shardwise.checkpoint.writers import put_together
from shardwise.errors import CheckpointError, CheckpointFileError, DamagedFileError

MESH = sw.simulate((2, 3), ("dp", "tp"))
R, S = sw.Replicate(), sw.Shard
LAYOUTS = [(R, R), (S(0), R), (R, S(1)), (S(0), S(1)), (S(0), S(0)), (sw.Partial(), S(1)), (sw.Partial("max"), R)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 5)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.ones(0, 3))


def place(module: nn.Module, *placements: sw.Placement) -> Any:
    def lay(name: str, part: nn.Module, mesh: Any) -> None:
        for key, x in list(part._parameters.items()):
            if x is not None and x.dim() > 1:
                part._parameters[key] = nn.Parameter(sw.distribute_tensor(x.detach(), mesh, list(placements)))

    return sw.distribute_module(module, MESH, lay)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.full_tensor() if isinstance(x, sw.DTensor) else x for name, x in module.state_dict().items()}


def check_file(path: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if UNFINISHED in path.name]


def test_whoever_may_read_a_new_file_may_read_a_saved_one(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(place(Net(), R, S(0)), tmp_path / "net.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "net.safetensors").stat().st_mode) == 0o640


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_safetensors_opens_what_is_saved(placements: Any, tmp_path: Path) -> None:
    net = place(Net(), *placements)
    save(net, tmp_path / "net.safetensors")
    check_file(tmp_path / "net.safetensors", values(net))
    save(net, tmp_path / "folder" / "inside")
    assert os.listdir(tmp_path / "folder" / "inside") == ["model.safetensors"]
    check_file(tmp_path / "folder" / "inside" / "model.safetensors", values(net))
    save(net, tmp_path)
    check_file(tmp_path / "model.safetensors", values(net))
    assert not left_over(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    net = place(Net(), S(0), S(1))
    save(net, tmp_path, max_shard_size=300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(os.listdir(tmp_path)) == [*names, "model.safetensors.index.json"]
    assert index["metadata"] == {"total_size": sum(x.numel() * x.element_size() for x in values(net).values())}
    assert index["weight_map"].keys() == values(net).keys()
    found = {name: x for file in names for name, x in load_file(tmp_path / file).items()}
    assert all(torch.equal(found[name], x) for name, x in values(net).items())
    other = place(Net(), S(1), R)
    load(other, tmp_path, verify=True)
    assert all(torch.equal(values(other)[name], x) for name, x in values(net).items())


def test_the_same_model_is_the_same_files(tmp_path: Path) -> None:
    net = place(Net(), S(0), S(1))
    for folder in "ab":
        save(net, tmp_path / folder, max_shard_size=300)
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(("before", "after"), [(60, 300), (300, "1MB"), ("1MB", 300), ("1MB", "1MB")])
def test_earlier_files_are_replaced_and_others_left_alone(before: Any, after: Any, tmp_path: Path) -> None:
    for name in ("config.json", "model.bin", "adapter.safetensors"):
        (tmp_path / name).write_text("kept")
    first, second = place(Net(), S(0), R), place(Net(), R, S(1))
    save(first, tmp_path, max_shard_size=before)
    save(second, tmp_path, max_shard_size=after)
    assert all((tmp_path / name).read_text() == "kept" for name in ("config.json", "model.bin", "adapter.safetensors"))
    third = place(Net(), S(1), R)
    load(third, tmp_path, verify=True)
    assert all(torch.equal(values(third)[name], x) for name, x in values(second).items())
    ours = [name for name in os.listdir(tmp_path) if name.startswith("model") and name != "model.bin"]
    assert len(ours) == (1 if after == "1MB" else 3) and not left_over(tmp_path)


def test_each_tensor_once_under_its_first_name_or_another(tmp_path: Path) -> None:
    net = nn.ModuleDict({"tokens": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    net["head"].weight = net["tokens"].weight
    place(net, S(0), S(1))
    save(net, tmp_path / "x.safetensors")
    check_file(tmp_path / "x.safetensors", {"tokens.weight": values(net)["tokens.weight"]})
    save(net, tmp_path / "y.safetensors", keys={"**": "model.**"})
    check_file(tmp_path / "y.safetensors", {"model.tokens.weight": values(net)["tokens.weight"]})


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    net = place(Net(), S(0), R)

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    wide = nn.Linear(2, 2, dtype=torch.complex128)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    for words, module, options in (
        ("'weight' is complex128, which safetensors files do not have; convert it", wide, {}),
        ("'weight' is on the meta device, so there is nothing to save", empty, {}),
        ("'__metadata__' can be no key of a safetensors file", net, {"keys": {"count": "__metadata__"}}),
        (r"'\\ud800' can be no key of a safetensors file", net, {"keys": {"count": "\ud800"}}),
        ("'_extra_state' of Extra is a dict, and safetensors files hold tensors only; .*save_step", Extra(2, 2), {}),
        ("two tensors of Net would be saved under the key 'x'", net, {"keys": lambda name: "x"}),
        ("'count' is saved under one key, as it is: not as From", net, {"keys": {"count": From("a", "b", make=max)}}),
    ):
        with pytest.raises(CheckpointError, match=words):
            save(module, tmp_path / "x", **options)
    for size in ("5 boxes", 0, -1, None, 2.5, True):
        with pytest.raises(ValueError, match="is no number of bytes: write"):
            save(net, tmp_path / "x", max_shard_size=size)
    assert not os.listdir(tmp_path)


def test_sizes() -> None:
    said = {"5GB": 5 * 10**9, "500 mb": 5 * 10**8, "1.5KiB": 1536, "7B": 7, 12: 12}
    assert {size: num_bytes_of(size) for size in said} == said


FAULTS: list[tuple[str, int]] = [
    ("pwrite", 0),
    ("pwrite", 9),
    ("fsync", 1),
    ("replace", 1),
    ("replace", 2),
    ("ftruncate", 0),
]


def failing(name: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a function of the operating system fail after so many."""
    original, calls = getattr(os, name), iter(range(after))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(("name", "after"), FAULTS)
@pytest.mark.parametrize("size", [300, "1MB"])
def test_a_save_that_fails(name: str, after: int, size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is there."""
    first, second = place(Net(), S(0), S(1)), place(Net(), S(0), S(1))
    save(first, tmp_path, max_shard_size=size)
    before = sorted(os.listdir(tmp_path))
    with monkeypatch.context() as patched:
        failing(name, after, patched)
        if name == "replace" and size == "1MB":
            save(second, tmp_path, max_shard_size=size)  # one file, one rename
            return
        with pytest.raises(CheckpointFileError, match="No space left on device") as error:
            save(second, tmp_path, max_shard_size=size)
        assert error.value.errno == errno.ENOSPC
    third = place(Net(), R, R)
    load(third, tmp_path, verify=True)
    assert all(torch.equal(values(third)[name], x) for name, x in values(first).items())
    assert not left_over(tmp_path) and sorted(os.listdir(tmp_path)) == before
    save(second, tmp_path, max_shard_size=size)
    load(third, tmp_path, verify=True)
    assert all(torch.equal(values(third)[name], x) for name, x in values(second).items())


@pytest.mark.parametrize(("before", "after"), [(60, 300), (300, 300), (300, "1MB"), ("1MB", 300), ("1MB", "1MB")])
def test_at_any_moment_there_is_a_model(
    before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed between two calls into the operating system leaves the one or the other, and the next save
    leaves nothing else."""
    first, second, third = place(Net(), S(0), S(1)), place(Net(), S(0), S(1)), place(Net(), R, R)
    seen: list[bool] = []

    def look() -> None:
        load(third, tmp_path / "net", verify=True)
        found = [all(torch.equal(values(third)[k], x) for k, x in values(one).items()) for one in (first, second)]
        assert any(found)
        seen.append(found[1])
        shutil.copytree(tmp_path / "net", tmp_path / f"killed {len(seen)}")

    save(first, tmp_path / "net", max_shard_size=before)
    with monkeypatch.context() as patched:
        for name in ("replace", "unlink", "rename"):
            patched.setattr(os, name, looking(getattr(os, name), look))
        save(second, tmp_path / "net", max_shard_size=after)
    look()
    assert seen == sorted(seen) and not seen[0] and seen[-1]
    right = sorted(os.listdir(tmp_path / "net"))
    for number in range(1, len(seen) + 1):
        save(second, tmp_path / f"killed {number}", max_shard_size=after)
        left = os.listdir(tmp_path / f"killed {number}")
        assert len(left) == len(right) and not left_over(tmp_path / f"killed {number}")
        load(third, tmp_path / f"killed {number}", verify=True)


def looking(call: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        look()
        return call(*args, **kwargs)

    return called


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    net = place(Net(), S(0), S(1))
    for folder, name in ((tmp_path / "there", "model"), (tmp_path, "new"), (tmp_path, "one.safetensors")):
        (folder / f"{UNFINISHED}{name}-01234567" / "x").mkdir(parents=True)
    (other := tmp_path / f"{UNFINISHED}new-one-01234567").mkdir()  # of somebody who saves in the same folder
    for path in ("there", "new", "one.safetensors"):
        save(net, tmp_path / path)
    assert left_over(tmp_path) == [other.name]


# Checksums


def test_data_are_verified_before_anything_is_loaded(tmp_path: Path) -> None:
    net = place(Net(), S(0), S(1))
    save(net, tmp_path / "x.safetensors")
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    content[-7] ^= 1
    (tmp_path / "x.safetensors").write_bytes(content)
    other = place(Net(), S(1), R)
    before = values(other)
    with pytest.raises(
        DamagedFileError, match=r"x\.safetensors, at byte \d+, key '.*': the data have changed since they"
    ) as error:
        load(other, tmp_path / "x.safetensors", verify=True)
    assert error.value.key in before and error.value.offset <= len(content) - 7
    assert all(torch.equal(values(other)[name], x) for name, x in before.items())


def test_files_of_others_cannot_be_verified(tmp_path: Path) -> None:
    save_file(values(Net()), tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointError, match=r"carries no checksums to be verified by: only files that shardwise\.checkpoint"
    ):
        load(Net(), tmp_path / "x.safetensors", verify=True)


def test_ranks_share_what_is_to_be_verified(tmp_path: Path) -> None:
    """Each part is some rank's, and all have about as much."""
    save(place(Net(), S(0), S(1)), tmp_path, max_shard_size=300)
    claims = claims_of(find_files(tmp_path))
    shares = [_share(claims, number, 3) for number in range(3)]
    assert sorted(map(repr, claims)) == sorted(repr(claim) for share in shares for claim in share)
    sizes = [sum(claim.region.num_bytes for claim in share) for share in shares]
    assert max(sizes) - min(sizes) <= max(claim.region.num_bytes for claim in claims)
    assert [verify(claims, number=number, count=3) for number in range(3)] == sizes


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("{", "key '__metadata__': the checksums cannot be read"),
        ('{"w": 3}', "the checksums cannot be read"),
        ('{"w": [[[0], [Infinity], "00000000"]]}', "the checksums cannot be read: .* are no box"),
        ('{"w": [[[0.5], [4], "00000000"]]}', "the checksums cannot be read: .* are no box"),
        ('{"w": [[[0], [3], "00000000"]]}', "key 'w': its checksums are not of all its data"),
        ('{"w": [[[0, 0], [4], "00000000"]]}', "key 'w': its checksums are not of all its data"),
        ('{"w": [[[0], [9], "00000000"]]}', "key 'w': its checksums are not of all its data"),
        ("{}", "key 'w': its checksums are not of all its data"),
        ('{"w": [[[0], [4], "00000000"]]}', "key 'w': the data have changed since they were written"),
    ],
)
def test_checksums_that_are_none(said: str, words: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "x.safetensors", {CHECKSUMS: said})
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(4))
    with pytest.raises(DamagedFileError, match=words):
        load(net, tmp_path, verify=True)
    assert not net.w.any()


# What several ranks have written, put together


def facts(kin: int, boxes: list[Any], tensors: Any = (("w", "float32", (4, 2)),)) -> dict[str, Any]:
    return {"kin": kin, "tensors": tensors, "boxes": [("w", *box) for box in boxes]}


def boxes_of(said: list[dict[str, Any]]) -> list[Any]:
    return [place.box for place in put_together(said)[0].places]


TOP, BOTTOM, LEFT, RIGHT = ((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 0), (4, 1)), ((0, 1), (4, 1))


def test_the_same_boxes_are_kept_once() -> None:
    assert boxes_of([facts(0, [TOP]), facts(0, [BOTTOM]), facts(2, [TOP]), facts(2, [BOTTOM])]) == [TOP, BOTTOM]


def test_of_other_boxes_those_of_one_kind_of_ranks_are_kept() -> None:
    assert boxes_of([facts(0, [LEFT]), facts(1, [TOP]), facts(0, [RIGHT]), facts(1, [BOTTOM])]) == [LEFT, RIGHT]
    assert boxes_of([facts(0, [LEFT]), facts(1, [TOP]), facts(1, [BOTTOM])]) == [TOP, BOTTOM]


@pytest.mark.parametrize("boxes", [[[TOP], []], [[LEFT], [BOTTOM]], [[], []]])
def test_what_is_not_all_there(boxes: Any) -> None:
    with pytest.raises(
        CheckpointError, match="the ranks that save do not have all of 'w': call it on all ranks of its mesh"
    ):
        boxes_of([facts(0, some) for some in boxes])


def test_ranks_with_different_tensors_of_one_name() -> None:
    with pytest.raises(
        CheckpointError, match=r"ranks have different tensors under the name 'w': float32 \[4, 3\] and float32"
    ):
        boxes_of([facts(0, [TOP, BOTTOM]), facts(1, [], [("w", "float32", (4, 3))])])


def test_odd_names(tmp_path: Path) -> None:
    names = ("a/b", "with space", "", "é☃\u2028", "$", '"quoted\\', "two\nlines", "x" * 5000, "\0")
    net = nn.Module()
    for number, name in enumerate(names):
        net._buffers[name] = torch.full((2,), float(number))
    save(net, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: x.tolist() for name, x in found.items()} == {name: [i, i] for i, name in enumerate(names)}
    other = nn.Module()
    other._buffers.update({name: torch.zeros(2) for name in names})
    load(other, tmp_path, verify=True)
    assert all(torch.equal(x, found[name]) for name, x in other._buffers.items())
