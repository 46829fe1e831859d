"""Entries where torch reads a tensor in C++ and asks nobody: each sees the whole tensor, or is refused in words."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.dispatch.entries import WATCHED, rebind
from shardwise.errors import MixedTensorError

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
    "tensor": lambda d: torch.tensor(d),
    "tensor of another dtype": lambda d: torch.tensor(d, dtype=torch.int32),
    "tensor of a pending number": lambda d: torch.tensor(d.sum()),
    "tensor of numbers": lambda d: torch.tensor([d.sum(), d.max(), 1.0]),
    "as_tensor": lambda d: torch.as_tensor(d),
    "as_tensor of another dtype": lambda d: torch.as_tensor(d, dtype=torch.float64),
    "asarray": lambda d: torch.asarray(d, dtype=torch.float64, copy=True),
    "new_tensor": lambda d: torch.ones(1).new_tensor(d),
    "new_tensor by name": lambda d: torch.ones(1).new_tensor(data=d, dtype=torch.int64),
    "full": lambda d: torch.full((2,), d.sum()),
    "full_like": lambda d: torch.full_like(PLAIN, d.sum()),
    "new_full": lambda d: PLAIN.new_full((2,), d.sum()),
    "scalar_tensor": lambda d: torch.scalar_tensor(d.sum()),
    "arange": lambda d: torch.arange(d.sum()),
    "eye": lambda d: torch.eye(over_six(d)),
    "zeros": lambda d: torch.zeros(over_six(d), 2),
    "linspace": lambda d: torch.linspace(0, d.sum(), 3),
    "randint": lambda d: drawn(lambda: torch.randint(0, d.sum().long(), (20,))),
    "randperm": lambda d: drawn(lambda: torch.randperm(d.sum().long())),
    "manual_seed": lambda d: (torch.manual_seed(d.sum().long()), torch.rand(3))[1],
    # numbers given to ops of plain tensors
    "alpha": lambda d: torch.add(PLAIN, PLAIN, alpha=d.sum()),
    "value": lambda d: torch.addcmul(PLAIN, PLAIN, PLAIN, value=d.sum()),
    "slope": lambda d: nn.functional.leaky_relu(-PLAIN, d.sum()),
    "pad": lambda d: nn.functional.pad(PLAIN, (1, 1), value=d.sum()),
    "foreach alpha": lambda d: torch._foreach_add([PLAIN], [PLAIN], alpha=d.sum())[0],
    "roll": lambda d: PLAIN.roll(over_six(d), 0),
    "dim": lambda d: PLAIN.sum(over_six(d)),
    "slice": lambda d: PLAIN[: over_six(d)],
    "topk": lambda d: torch.arange(9.0).topk(over_six(d))[0],
    "bincount": lambda d: torch.bincount(torch.tensor([0, 1]), minlength=d.sum().long()),
    "uniform_": lambda d: drawn(lambda: torch.zeros(3).uniform_(0.0, d.sum())),
    # functions compiled by TorchScript
    "scripted": lambda d: scripted(d),
    "scripted again": lambda d: scripted(scripted(d) * 2),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "Tensor": lambda d: torch.Tensor(d),
    "new": lambda d: PLAIN.new(d),
    "data": lambda d: setattr(torch.zeros(()), "data", d.sum()),
    "set_": lambda d: torch.zeros(0).set_(d),
    "as_subclass": lambda d: d.as_subclass(Tensor),
    "as_subclass of a class": lambda d: Tensor.as_subclass(d, Plain),
    "_make_subclass": lambda d: Tensor._make_subclass(Plain, d),
    "a subclass": lambda d: Plain(d),
    "index": lambda d: PLAIN[over_six(d)],
    "mask": lambda d: WHOLE[d > 2],
    "assigned index": lambda d: PLAIN.clone().__setitem__(over_six(d), 1.0),
    "assigned": lambda d: PLAIN.clone().__setitem__((0, 0), d.sum()),
    "sparse": lambda d: torch.sparse_coo_tensor(torch.arange(4)[None], d[:, 0], (4,)),
    "sparse csr": lambda d: torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), d[0, :1], (1, 1)),
    "nested": lambda d: torch.nested.nested_tensor([d]),
    "as_nested_tensor": lambda d: torch.nested.as_nested_tensor([d]),
    "all_reduce": lambda d: dist.all_reduce(d),
    "all_gather": lambda d: dist.all_gather([torch.empty(2)], d),
    "scatter": lambda d: dist.scatter(torch.empty(2), [d, d]),
    "broadcast_coalesced": lambda d: dist._broadcast_coalesced(None, [d], 1, 0),
}


@pytest.mark.parametrize("name", RIGHT)
def test_sees_the_whole_tensor(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against some of these
        mine, theirs = RIGHT[name](sharded()), RIGHT[name](WHOLE)
    plain = mine.full_tensor() if isinstance(mine, sw.DTensor) else mine
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(plain, theirs, rtol=0, atol=0)
    else:
        assert numpy.array_equal(plain, theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    d = sharded()
    with warnings.catch_warnings(), pytest.raises(MixedTensorError):
        warnings.simplefilter("ignore", UserWarning)
        REFUSED[name](d)
    assert torch.equal(d.full_tensor(), WHOLE)


def test_the_words_of_refusals() -> None:
    d = sharded()
    with pytest.raises(MixedTensorError, match=r"plain\.new\(x\) would take this rank's shard .* use x\.clone\(\)"):
        torch.Tensor(d)
    with pytest.raises(MixedTensorError, match=r"plain\.data = x would take .* use x itself in place of"):
        torch.zeros(()).data = d.sum()
    with pytest.raises(MixedTensorError, match=r"set_ would take this rank's shard of a DTensor for the whole"):
        torch.zeros(0).set_(d)
    with pytest.raises(
        MixedTensorError, match=r"^as_subclass would take .* use x itself, x\.full_tensor\(\), or x\.to_l"
    ):
        d.as_subclass(Tensor)
    with pytest.raises(MixedTensorError, match=r"sparse_coo_tensor .* sparse and nested tensors have no shards"):
        torch.sparse_coo_tensor(torch.arange(4)[None], d[:, 0], (4,))
    with pytest.raises(MixedTensorError, match=r"torch\.distributed knows nothing of layouts.*DistributedDataParallel"):
        dist.all_reduce(d)


def test_a_copy_is_made_as_torch_makes_it() -> None:
    d = sharded().requires_grad_()
    with pytest.warns(UserWarning, match="copy construct"):
        made = torch.tensor(d, requires_grad=True)
    assert isinstance(made, sw.DTensor) and made.is_leaf and made.requires_grad
    assert made.placements == d.placements
    assert torch.as_tensor(d, dtype=torch.float64).grad_fn is not None
    assert torch.as_tensor(d) is d
    assert not torch.asarray(d, requires_grad=False).requires_grad
    assert torch.asarray(sharded(), requires_grad=True).requires_grad
    with pytest.raises(ValueError, match="can't alias"):
        torch.asarray(d.detach(), dtype=torch.float64, copy=False)


def test_data_of_a_dtensor_takes_a_dtensor() -> None:
    d = sharded()
    d.data = sharded() * 2
    assert torch.equal(d.full_tensor(), WHOLE * 2)


def test_ops_that_are_counted_stay_the_same() -> None:
    """A mode sees the ops it would see without us."""
    sharded()
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Names():
        assert torch.ones(()).item() == 1.0
    assert seen == ["ones.default", "_local_scalar_dense.default"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint64, torch.bfloat16, torch.complex64])
def test_plain_numbers_are_read_as_ever(dtype: torch.dtype) -> None:
    sharded()
    x = torch.ones((), dtype=dtype)
    assert x.item() == 1 and type(x.item()) is type(x.tolist())
    assert torch.full((1,), x).dtype == torch.full((1,), x.tolist()).dtype
    with pytest.raises(RuntimeError, match="a Tensor with 2 elements cannot be converted to Scalar"):
        torch.ones(2, dtype=dtype).item()


def test_numbers_that_torch_wraps_itself() -> None:
    """They reach a kernel in Python as numbers."""
    sharded()
    x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    (torch.fft.fft(x) * (1 - 2j)).abs().sum().backward()
    assert x.grad is not None
    assert torch.where(torch.tensor([True, False]), 2, 3.5).tolist() == [2.0, 3.5]


def test_torch_finds_its_functions_in_its_tables() -> None:
    for function in (torch.tensor, torch.as_tensor, torch.asarray):
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
        assert function.__doc__ and function.__name__ in repr(function)
    with torch.device("meta"):
        assert torch.tensor(1.0).is_meta and torch.as_tensor([1.0]).is_meta and torch.asarray(1.0).is_meta
    traced = torch.fx.symbolic_trace(lambda x: x + torch.tensor([1.0, 2.0]))
    assert torch.equal(traced(torch.zeros(2)), torch.tensor([1.0, 2.0]))


def test_plain_programs_compile_as_ever() -> None:
    def program(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0]) + torch.as_tensor(2.0) + torch.asarray(1.0) + x.new_tensor([1.0, 0.0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.zeros(2)), torch.tensor([5.0, 5.0]))

        @torch.jit.script
        def script(x: Tensor) -> Tensor:
            return torch.tensor([1.0, 2.0]) * torch.as_tensor(3.0) * float(x.item())

    assert torch.equal(script(torch.tensor(2.0)), torch.tensor([6.0, 12.0]))


class Plain(Tensor):
    """A subclass as others write them."""

    @staticmethod
    def __new__(cls, data: Any, *args: Any) -> Any:
        return super().__new__(cls, data, *args)


def test_tensors_and_their_subclasses_are_made_as_ever() -> None:
    sharded()
    x = torch.ones(2, 3)
    assert torch.equal(torch.Tensor(x), x) and torch.Tensor([1, 2]).tolist() == [1.0, 2.0]
    assert torch.Tensor(2, 3).shape == (2, 3) and torch.Tensor().numel() == 0
    assert x.new([1.0]).tolist() == [1.0] and x.new(2, 2).shape == (2, 2)
    for made in (x.as_subclass(Plain), Plain(x), Plain([1.0, 2.0]), Tensor._make_subclass(Plain, x)):
        assert type(made) is Plain
        assert type(made + 1) is Plain and type(pickle.loads(pickle.dumps(made))) is Plain
    assert type(nn.Parameter(x.as_subclass(Plain))) is Plain
    with pytest.raises(TypeError, match="make a DTensor with"):
        sw.DTensor(x)


def test_only_where_dtensors_are_the_ops_are_watched() -> None:
    """A function that runs on shards sees them."""
    d = sharded()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.full((1,), d.sum()).item() == 2.0


# Names taken from torch before shardwise is there

EARLY = """
import sys, types
from torch import as_tensor, sparse_coo_tensor as sparse, tensor, zeros
from torch.nested import nested_tensor
from torch.utils.dlpack import to_dlpack

taken = types.ModuleType("taken")
exec("from torch import *; from torch import asarray as convert; ones = 3", taken.__dict__)
sys.modules["taken"] = taken
before = dict(vars(taken)), dict(globals())

import torch, shardwise as sw
from shardwise.dispatch.entries import WATCHED

assert tensor is torch.tensor and as_tensor is torch.as_tensor and sparse is torch.sparse_coo_tensor
assert nested_tensor is torch.nested.nested_tensor and to_dlpack is torch.utils.dlpack.to_dlpack
assert taken.tensor is torch.tensor and taken.convert is torch.asarray

changed = {name for name, x in before[0].items() if vars(taken)[name] is not x}
watched = {name for name, x in before[0].items() if x in [watched.original for watched in WATCHED]}
assert changed == {*watched, "compile"}, changed
changed = {name for name, x in before[1].items() if name in globals() and globals()[name] is not x}
assert changed == {"tensor", "as_tensor", "sparse", "nested_tensor", "to_dlpack"}, changed
assert list(vars(taken)) == list(before[0])

d = sw.distribute_tensor(torch.arange(8.0).view(4, 2), sw.simulate((2,), ("a",)), [sw.Shard(0)])
for make in (as_tensor, taken.convert):
    assert make(d, dtype=torch.float64).shape == (4, 2)
try:
    nested_tensor([d])
except sw.errors.MixedTensorError:
    print("refused")
"""


def test_names_that_were_taken_before_are_watched() -> None:
    run = subprocess.run([sys.executable, "-W", "error", "-c", EARLY], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("refused\n", "")


def test_modules_are_read_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is asked for an attribute: many load what they name only then."""

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    class Odd:
        __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    theirs, ours, lazy, own = object(), object(), Lazy("lazy"), ModuleType("torch.own")
    lazy.one, lazy.other, lazy.two, own.one = theirs, object(), theirs, theirs  # type: ignore[attr-defined]
    for name, module in {"lazy": lazy, "odd": Odd(), "none": None, "torch.own": own}.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    rebind([(theirs, ours)])
    assert object.__getattribute__(lazy, "one") is ours and object.__getattribute__(lazy, "two") is ours
    assert object.__getattribute__(lazy, "other") not in (theirs, ours)
    assert own.one is theirs


def test_nothing_outside_of_torch_keeps_an_original() -> None:
    originals = {id(watched.original) for watched in WATCHED}
    kept = [
        f"{name}.{key}"
        for name, module in tuple(sys.modules.items())
        if type(module) is ModuleType and name.partition(".")[0] != "torch"
        for key, x in tuple(vars(module).items())
        if id(x) in originals
    ]
    assert kept == []
