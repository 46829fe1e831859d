"""Files that disks, networks and people have changed: an error of ours, or what was saved; never a crash or other
numbers, and the model is as it was. A thousand for each reader. (Of dcp and torch.save: test_catalogue.py.)"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import load, load_step, save, save_step
from shardwise.errors import CheckpointError, DamagedFileError

MESH = sw.simulate((2,), ("tp",))
Load = Callable[[nn.Module], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(sw.distribute_tensor(torch.randn(6, 5), MESH, [sw.Shard(0)]))
        self.halves = nn.Parameter(sw.distribute_tensor(torch.randn(4, 3).bfloat16(), MESH, [sw.Shard(1)]))
        self.register_buffer("count", torch.tensor([3, 4], dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False, True]))


def values(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (x.full_tensor() if isinstance(x, sw.DTensor) else x).clone() for name, x in module.state_dict().items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, b[name]) for name, x in a.items())


def changed(content: bytes, chance: random.Random, until: int | None = None) -> bytes:
    """With some bits flipped, bytes that are others, the end cut off, something more, a block that is lost, or two that
    have changed places; only before a byte, if one is given."""
    found, end = bytearray(content), until or len(content)
    match chance.choice(("bits", "bits", "byte", "cut", "cut", "more", "zeros", "swapped")):
        case "bits":
            for _ in range(chance.randint(1, 3)):
                found[chance.randrange(end)] ^= 1 << chance.randrange(8)
        case "byte":
            found[chance.randrange(end)] = chance.randrange(256)
        case "cut":
            del found[chance.randrange(len(found)) :]
        case "more":
            found += chance.randbytes(chance.randint(1, 40))
        case "zeros":
            at, count = chance.randrange(end), chance.randint(1, 64)
            found[at : min(at + count, end)] = bytes(min(at + count, end) - at)
        case "swapped":
            a, b = sorted(chance.sample(range(end), 2))
            count = min(b - a, end - b, chance.randint(1, 32))
            found[a : a + count], found[b : b + count] = found[b : b + count], found[a : a + count]
    return bytes(found)


def check(files: list[Path], damage: Callable[[Path, bytes], bytes], read: Load, count: int) -> dict[str, int]:
    """What came of it: how often it was right, and how often an error."""
    chance, found, saved = random.Random(0), {"right": 0, "refused": 0}, Net()
    read(saved)
    right, net = values(saved), Net()
    before = values(net)
    for _ in range(count):
        path = chance.choice(files)
        content = path.read_bytes()
        path.write_bytes(damaged := damage(path, content))
        try:
            read(net)
        except CheckpointError as error:
            found["refused"] += 1
            assert str(error) and same(values(net), before), "the model has changed"
            assert not isinstance(error, DamagedFileError) or str(path.parent) in str(error)
        else:
            found["right"] += 1
            assert same(values(net), right), f"other numbers: {path} {content} {damaged}"
            net.load_state_dict(
                {name: sw.distribute_tensor(x, MESH) if x.ndim == 2 else x for name, x in before.items()}
            )
        finally:
            path.write_bytes(content)
    return found


def test_steps(tmp_path: Path) -> None:
    chance = random.Random(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    folder = save_step(tmp_path, step=1, model=net, optimizer=optimizer, background=False).wait()
    found = check(
        list(folder.iterdir()), lambda path, x: changed(x, chance), lambda net: load_step(folder, model=net), 1000
    )
    assert found["refused"] > 750


@pytest.mark.parametrize("size", ["1GB", 100])
def test_safetensors_with_checksums(size: Any, tmp_path: Path) -> None:
    chance = random.Random(2)
    save(Net(), tmp_path, max_shard_size=size)
    found = check(
        list(tmp_path.iterdir()), lambda path, x: changed(x, chance), lambda net: load(net, tmp_path, verify=True), 1000
    )
    assert found["refused"] > 750


def test_headers_of_safetensors(tmp_path: Path) -> None:
    """Of data without checksums nobody can know; but what is said of them must be so."""
    chance, file = random.Random(3), tmp_path / "x.safetensors"
    save(Net(), file)
    length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    found = check([file], lambda path, x: changed(x, chance, until=length), lambda net: load(net, file), 1000)
    assert found["refused"] > 330


@pytest.mark.parametrize("seed", range(2))
def test_files_of_nothing_but_noise(seed: int, tmp_path: Path) -> None:
    chance, net = random.Random(seed), Net()
    before = values(net)
    for length in (0, 1, 7, 8, 9, 100, 5000):
        for begin in (b"", (50).to_bytes(8, "little"), b'{"', b"\x02\0\0\0\0\0\0\0{}"):
            (tmp_path / "x.safetensors").write_bytes(begin + chance.randbytes(length))
            with pytest.raises(CheckpointError):
                load(net, tmp_path)
    assert same(values(net), before)
