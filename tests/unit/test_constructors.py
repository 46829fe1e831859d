"""`torch.FloatTensor` and its kin refuse DTensors, and for plain programs they are what they were."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_constructors
import pytest
import torch
from plain_constructors import ALL, ASKED

import shardwise as sw
from shardwise.dispatch import constructors
from shardwise.errors import MixedTensorError

WHOLE = torch.arange(8.0).view(4, 2)
ANSWERS = Path(plain_constructors.__file__)


def sharded() -> sw.DTensor:
    mesh = sw.simulate((2, 2), ("a", "b"))
    return sw.distribute_tensor(WHOLE, mesh, [sw.Shard(0), sw.Shard(1)])


@pytest.mark.parametrize("cls", [cls for cls in ALL if not cls.is_sparse], ids=str)
def test_a_dtensor_is_refused(cls: Any) -> None:
    d = sharded()
    name = rf"{cls.__module__}\.{cls.__name__}"
    said = rf"^{name}\(x\) would take this rank's shard of a DTensor for the whole; use x\.clone\(\), or x\.full_tensor"
    for make in (lambda: cls(d), lambda: cls(other=d), lambda: cls(data=d.sum()), lambda: cls(d, device="cpu")):
        with pytest.raises(MixedTensorError, match=said):
            make()


@pytest.mark.parametrize("cls", [cls for cls in ALL if cls.is_sparse], ids=str)
def test_sparse_tensors_have_no_shards(cls: Any) -> None:
    d = sharded()
    for args in ((torch.tensor([[0, 1]]), d[0]), (d.long(), torch.ones(2), torch.Size([2]))):
        with pytest.raises(MixedTensorError, match=r"Tensor\(x\) would take this rank's shard .* sparse and nested"):
            cls(*args)


READ: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda d: torch.FloatTensor([d.sum(), d.max(), 1.0]),
    "a tuple of numbers": lambda d: torch.DoubleTensor((d.sum(), d.max())),
    "rows of numbers": lambda d: torch.LongTensor([[d.long().sum(), 1], [2, d.long().max()]]),
    "sizes": lambda d: torch.IntTensor((d > 5).sum(), 3).zero_(),
    "a last size": lambda d: torch.IntTensor(3, (d > 5).sum()).zero_(),
    "sizes of Tensor": lambda d: torch.Tensor((d > 5).sum(), 3).zero_(),
    "sizes of new": lambda d: torch.ones(1).new(3, (d > 5).sum()).zero_(),
    "instances": lambda d: torch.tensor([isinstance(d, cls) for cls in ALL]),
}


@pytest.mark.parametrize("name", READ)
def test_numbers_are_read_out_of_the_whole(name: str) -> None:
    torch.testing.assert_close(READ[name](sharded()), READ[name](WHOLE), rtol=0, atol=0)


def test_tensors_in_lists_are_an_error_of_torch() -> None:
    for x in (WHOLE, sharded()):
        with pytest.raises(ValueError, match="only one element tensors can be converted to Python scalars"):
            torch.FloatTensor([x])


def test_a_function_that_runs_on_shards_sees_them() -> None:
    d = sharded()
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.FloatTensor(d).shape == (2, 1)


# Plain programs


@functools.cache
def answered(*before: str) -> dict[str, str]:
    """What a process of its own answers that imports some modules first."""
    script = f"import runpy, {', '.join(before)}; runpy.run_path({str(ANSWERS)!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert not run.stderr
    return json.loads(run.stdout)


@functools.cache
def answered_here() -> dict[str, str]:
    sharded()
    return plain_constructors.answers()


def same(mine: str, theirs: str) -> bool:
    """What this version of torch does not compile it may refuse in other words: it names the function it came to."""
    return mine == theirs or (mine.startswith("Unsupported: ") and theirs.startswith("Unsupported: "))


@pytest.mark.parametrize("name", ASKED)
def test_plain_programs_are_answered_as_by_torch_alone(name: str) -> None:
    assert same(answered_here()[name], answered("torch")[name])


@pytest.mark.parametrize("name", ASKED)
def test_so_are_those_that_compile_before_shardwise_is_there(name: str) -> None:
    assert same(answered("torch._dynamo", "shardwise")[name], answered("torch")[name])


def test_the_questions_are_answered() -> None:
    """The comparison above would hold for two errors, too: these are meant."""
    errors = {name for name, said in answered("torch").items() if "Error: " in said.split("\n")[0][:40]}
    assert errors == {
        *("a wrong device", "an object", "an unknown name", "no such attribute", "immutable", "immutable metaclass"),
        *("a tensor", "subclassing", "annotations"),  # of some classes
    }


def test_only_the_signature_says_that_somebody_looks() -> None:
    """Torch gives none; a call that any argument passes through has one."""
    assert list(inspect.signature(torch.FloatTensor).parameters) == ["args", "kwargs"]
    assert inspect.signature(torch.FloatTensor).bind(2, 3, device="cpu").args == (2, 3)


# How classes of C++ are changed


def test_a_type_is_not_touched_where_its_flags_do_not_lie_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    metaclass = type(torch.FloatTensor)
    call, flags = metaclass.__call__, metaclass.__flags__
    monkeypatch.setattr(constructors, "FLAGS_AT", constructors.FLAGS_AT - 8)
    with pytest.raises(NotImplementedError, match="do not lie where they lie in CPython"):
        constructors.watch_calls(metaclass, lambda cls, *args: None)
    assert metaclass.__call__ is call and metaclass.__flags__ == flags


def test_shardwise_says_what_it_cannot_watch() -> None:
    script = (
        "import ctypes, torch; ctypes.c_ulong = ctypes.c_uint8; import shardwise; print(torch.FloatTensor(2).shape)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "torch.Size([2])\n"
    assert "UserWarning: torch.FloatTensor(x) would take a shard of a DTensor for the whole, unseen: " in run.stderr


def test_classes_of_python_need_no_flag() -> None:
    class Meta(type):
        pass

    made = Meta("made", (), {})
    constructors.watch_calls(Meta, lambda cls, *args: (cls, args))
    assert made(1, 2) == (made, (1, 2))
