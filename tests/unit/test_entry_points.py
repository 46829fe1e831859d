"""Where torch reads a tensor in C++: what asks us sees the whole tensor or is refused in words, and what asks nobody is
what README's Limits say it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import MixedTensorError, ShardMemoryError

WHOLE = torch.arange(8.0).view(4, 2)
PLAIN = torch.arange(12.0).view(4, 3)


def sharded() -> sw.DTensor:
    mesh = sw.simulate((2, 2), ("a", "b"))
    return sw.distribute_tensor(WHOLE, mesh, [sw.Shard(0), sw.Shard(1)])


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x.sum() + x


def over_six(x: Any) -> Any:
    """How many numbers are greater than six: one, on one rank."""
    return (x > 6).sum()


def drawn(draw: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(0)
    return draw()


RIGHT: dict[str, Callable[[Any], Any]] = {
    # values that leave for Python
    "full_tensor": lambda d: d.full_tensor() if isinstance(d, sw.DTensor) else d,
    "tolist": lambda d: d.tolist(),
    "numpy": lambda d: d.numpy(),
    "numpy.asarray": lambda d: numpy.asarray(d),
    "numpy of numbers": lambda d: numpy.array([d.sum(), d.max()]),
    "item": lambda d: d.sum().item(),
    "float": lambda d: float(d.sum()),
    "int": lambda d: int(d.sum()),
    "format": lambda d: float(f"{d.sum():.1f}"),
    "percent": lambda d: float("%.1f" % d.sum()),  # noqa: UP031
    "list": lambda d: [float(x) for x in d.sum(1)],
    "in": lambda d: 7.0 in d,
    "dlpack": lambda d: torch.from_dlpack(d, copy=True),
    # constructors
    "tensor of numbers": lambda d: torch.tensor([d.sum(), d.max(), 1.0]),
    "tensor of rows of numbers": lambda d: torch.tensor([[d.sum(), 1], [2, d.max()]]),
    "as_tensor": lambda d: torch.as_tensor(d),
    "zeros": lambda d: torch.zeros(over_six(d), 2),
    "linspace": lambda d: torch.linspace(0, d.sum(), 3),
    "randint": lambda d: drawn(lambda: torch.randint(0, d.sum().long(), (20,))),
    "randperm": lambda d: drawn(lambda: torch.randperm(d.sum().long())),
    "manual_seed": lambda d: (torch.manual_seed(d.sum().long()), torch.rand(3))[1],
    # numbers given to ops of plain tensors
    "pad": lambda d: nn.functional.pad(PLAIN, (1, 1), value=d.sum()),
    "slice": lambda d: PLAIN[: over_six(d)],
    "bincount": lambda d: torch.bincount(torch.tensor([0, 1]), minlength=d.sum().long()),
    "uniform_": lambda d: drawn(lambda: torch.zeros(3).uniform_(0.0, d.sum())),
    # the way around what asks nobody
    "full of an item": lambda d: torch.full((2,), d.sum().item()),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "set_ to a plain tensor": lambda d: d.set_(torch.zeros(1)),
    "as_subclass": lambda d: d.as_subclass(Tensor),
    "index": lambda d: PLAIN[over_six(d)],
    "mask": lambda d: WHOLE[d > 2],
    "assigned index": lambda d: PLAIN.clone().__setitem__(over_six(d), 1.0),
    "assigned": lambda d: PLAIN.clone().__setitem__((0, 0), d.sum()),
    "all_reduce": lambda d: dist.all_reduce(d),
    "all_gather": lambda d: dist.all_gather([torch.empty(2)], d),
    "checked": lambda d: dist.distributed_c10d._ensure_all_tensors_same_dtype(torch.empty(2), [d]),
    "DistributedDataParallel": lambda d: dist._verify_params_across_processes(None, [d], None),
}

SEES_THE_SHARD: dict[str, Callable[[Any], Any]] = {
    # numbers that C++ reads out of a sum that is pending
    "full": lambda d: torch.full((2,), d.sum()),
    "new_full": lambda d: PLAIN.new_full((2,), d.sum()),
    "scalar_tensor": lambda d: torch.scalar_tensor(d.sum()),
    "arange": lambda d: torch.arange(d.sum()),
    "alpha": lambda d: torch.add(PLAIN, PLAIN, alpha=d.sum()),
    "slope": lambda d: nn.functional.leaky_relu(-PLAIN, d.sum()),
    "roll": lambda d: PLAIN.roll(over_six(d), 0),
    "dim": lambda d: PLAIN.sum(over_six(d)),
    # constructors that copy a tensor, or put another in its place
    "tensor": lambda d: torch.tensor(d),
    "asarray": lambda d: torch.asarray(d, dtype=torch.float64),
    "new_tensor": lambda d: torch.ones(1).new_tensor(d),
    "Tensor": lambda d: torch.Tensor(d),
    "FloatTensor": lambda d: torch.FloatTensor(d),
    "data": lambda d: put_in_place(torch.zeros(()), d),
    "set_": lambda d: torch.zeros(0).set_(d),
    # TorchScript
    "scripted": lambda d: scripted(d),
}


def put_in_place(x: Tensor, d: Any) -> Tensor:
    x.data = d
    return x


def same(mine: Any, theirs: Any) -> bool:
    plain = mine.full_tensor() if isinstance(mine, sw.DTensor) else mine
    return plain.shape == theirs.shape and torch.equal(plain, theirs)


@pytest.mark.parametrize("name", RIGHT)
def test_sees_the_whole_tensor(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against some of these
        mine, theirs = RIGHT[name](sharded()), RIGHT[name](WHOLE)
    assert same(mine, theirs) if isinstance(theirs, Tensor) else numpy.array_equal(mine, theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    d = sharded()
    with pytest.raises(MixedTensorError):
        REFUSED[name](d)
    assert torch.equal(d.full_tensor(), WHOLE)


@pytest.mark.parametrize("name", SEES_THE_SHARD)
def test_what_readmes_limits_name_asks_nobody(name: str) -> None:
    """Should this fail with a version of torch, that one asks, and the limit is gone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not same(SEES_THE_SHARD[name](sharded()), SEES_THE_SHARD[name](WHOLE))


UNSEEN = {"Tensor", "FloatTensor", "set_", "scripted"}


@pytest.mark.parametrize("name", SEES_THE_SHARD)
def test_a_watch_finds_what_asks_nobody(name: str) -> None:
    with warnings.catch_warnings(), sw.debug.watch_reads():
        warnings.simplefilter("ignore")
        if name in UNSEEN:  # should this fail with a version of torch, that one shows them to modes
            SEES_THE_SHARD[name](sharded())
        else:
            with pytest.raises(ShardMemoryError, match="has read this rank's shard for the whole tensor"):
                SEES_THE_SHARD[name](sharded())


@pytest.mark.parametrize("name", RIGHT)
def test_a_watch_lets_pass_what_is_right(name: str) -> None:
    with warnings.catch_warnings(), sw.debug.watch_reads():
        warnings.simplefilter("ignore")
        RIGHT[name](sharded())


def test_a_watch_lets_pass_programs_and_whole_tensors() -> None:
    mesh = sw.simulate((2,), ("tp",))
    module = sw.distribute_module(nn.Linear(4, 4), mesh)
    x = sw.distribute_tensor(torch.ones(2, 4), mesh, [sw.Shard(0)])
    with sw.debug.watch_reads():
        optimizer = torch.optim.AdamW(module.parameters())
        loss = nn.functional.mse_loss(module(x), x)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        whole = loss.detach().redistribute(placements=[sw.Replicate()])
        assert torch.equal(torch.full((1,), whole), loss.full_tensor().view(1))  # every rank has it
        assert "DTensor" in repr(x)


def test_torch_loses_the_weight_of_an_l1_loss() -> None:
    """Of any subclass of Tensor. Should this fail, torch passes it on, and the limit is gone."""
    d, weight = sharded(), torch.rand(4, 2)
    on_mesh = sw.distribute_tensor(weight, d.device_mesh)
    loss = nn.functional.l1_loss(d, d + 1, weight=on_mesh, reduction="none")
    assert torch.equal(loss.full_tensor(), torch.ones(4, 2))


def test_the_words_of_refusals() -> None:
    d = sharded()
    with pytest.raises(
        MixedTensorError, match=r"^as_subclass would take .* use x itself, x\.full_tensor\(\), or x\.to_l"
    ):
        d.as_subclass(Tensor)
    with pytest.raises(MixedTensorError, match=r"^set_ of a DTensor takes another DTensor"):
        d.set_(torch.zeros(1))
    with pytest.raises(MixedTensorError, match=r"torch\.distributed knows nothing of layouts.*DistributedDataParallel"):
        dist.all_reduce(d)


def test_data_of_a_dtensor_takes_a_dtensor() -> None:
    for put in (lambda d, other: setattr(d, "data", other), lambda d, other: d.set_(other)):
        d = sharded()
        put(d, sharded() * 2)
        assert torch.equal(d.full_tensor(), WHOLE * 2)


def test_a_function_that_runs_on_shards_sees_them() -> None:
    d = sharded()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.full((1,), d.sum()).item() == 2.0
