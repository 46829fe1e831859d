"""`save_step` and `load_latest`: what is saved, what is kept, what is passed over, and what cannot be loaded."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import From, background, load, load_latest, load_step, save_step, wait
from shardwise.checkpoint.files.folders import UNFINISHED
from shardwise.checkpoint.files.verifying import verify
from shardwise.checkpoint.files.writing import Writer
from shardwise.checkpoint.steps import resume
from shardwise.checkpoint.steps.folders import steps_in
from shardwise.checkpoint.steps.index import read_index
from shardwise.errors import CheckpointError, CheckpointFileError, CheckpointWarning, DamagedFileError

load_module = sys.modules[load.__module__]
MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S = sw.Replicate(), sw.Shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.second.weight = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("count", torch.tensor(7))


def net(*placements: sw.Placement) -> Any:
    def lay(name: str, part: nn.Module, mesh: Any) -> None:
        for key, x in list(part._parameters.items()):
            if x is not None:
                part._parameters[key] = nn.Parameter(sw.distribute_tensor(x.detach(), mesh, list(placements)))

    return sw.distribute_module(Net(), MESH, lay) if placements else Net()


def values(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (x.full_tensor() if isinstance(x, sw.DTensor) else x).clone() for name, x in module.state_dict().items()
    }


def check_equal(module: nn.Module, expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(x, expected[name]) for name, x in values(module).items())


def save(folder: Path, step: int, module: nn.Module, **options: Any) -> dict[str, Tensor]:
    """What was saved."""
    save_step(folder, step=step, model=module, **options).wait()
    return values(module)


def flip(path: Path, at: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 8
    path.write_bytes(content)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_nothing_is_there_yet(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "nowhere", model=net()) is None
    (tmp_path / "step-12.tmp").mkdir()
    (tmp_path / "step-12").write_text("")
    assert load_latest(tmp_path, model=net()) is None


@pytest.mark.parametrize("there", [(S(0), S(0)), (S(0), R), (R, S(-1)), (), (sw.Partial(), S(0))], ids=str)
@pytest.mark.parametrize("here", [(S(0), S(0)), (S(-1), R), ()], ids=str)
def test_any_layout_is_loaded_into_any_other(there: Any, here: Any, tmp_path: Path) -> None:
    expected = save(tmp_path, 5, net(*there))
    found = net(*here)
    assert load_latest(tmp_path, model=found) == 5
    check_equal(found, expected)


def test_the_files_are_plain(tmp_path: Path) -> None:
    """An index that people can read, and safetensors."""
    module = net(S(0), R)
    expected = save(tmp_path, 5, module, note={"text": "hello"})
    folder = tmp_path / "step-00000005"
    assert names_in(folder) == ["index.json", "rank-00000.safetensors"]
    index = json.loads((folder / "index.json").read_text())
    assert (index["format"], index["version"], index["step"], index["ranks"]) == ("shardwise step", 1, 5, 1)
    assert index["state"]["note"]["all"] == {"kind": "dict", "state": {"text": "hello"}}
    assert index["tensors"]["model.first.weight"]["layout"] == {
        "text": "[6,4] S(0)@dp",
        "mesh": {"dp": 2, "tp": 2},
        "splits": [["dp"], []],
        "sizes": [None, None],
    }
    assert [box[:2] for box in index["tensors"]["model.first.weight"]["boxes"]] == [[[0, 0], [3, 4]], [[3, 0], [3, 4]]]
    assert '\n "model.first.weight": {"dtype": "float32", "shape": [6, 4], ' in (folder / "index.json").read_text()
    parts = load_file(folder / "rank-00000.safetensors")
    assert torch.equal(
        torch.cat([parts["model.first.weight[0:3,0:4]"], parts["model.first.weight[3:6,0:4]"]]),
        expected["first.weight"],
    )


def test_old_steps_go_and_the_ones_asked_for_stay(tmp_path: Path) -> None:
    module = net(S(0), R)
    for step in (1, 2, 3):
        save(tmp_path, step, module)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    save(tmp_path, 4, module, keep=2)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]
    save(tmp_path, 2, module, keep=1)  # steps after it are somebody else's business
    assert names_in(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    save(tmp_path, 10**9, module, keep=1)
    assert names_in(tmp_path) == ["step-1000000000"]


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    first, second = net(S(0), R), net(R, S(0))
    save(tmp_path, 3, first)
    expected = save(tmp_path, 3, second)
    assert names_in(tmp_path) == ["step-00000003.2"]
    assert load_latest(tmp_path, model=first) == 3
    check_equal(first, expected)
    (tmp_path / "step-00000003.10").mkdir()
    assert [folder.save for folder in steps_in(tmp_path)] == [2, 10]


def test_a_damaged_step_is_passed_over_and_said(tmp_path: Path) -> None:
    module, found = net(S(0), R), net(R, S(0))
    save(tmp_path, 1, module)
    with torch.no_grad():
        module.first.weight.add_(1)
    expected = save(tmp_path, 2, module)
    for step in (3, 4, 5, 6):
        with torch.no_grad():
            module.first.weight.add_(1)
        save(tmp_path, step, module)
    flip(tmp_path / "step-00000003" / "rank-00000.safetensors")
    flip(tmp_path / "step-00000004" / "index.json", at=200)
    os.truncate(tmp_path / "step-00000005" / "rank-00000.safetensors", 1000)
    (tmp_path / "step-00000006" / "index.json").unlink()
    with pytest.warns(CheckpointWarning) as said:
        assert load_latest(tmp_path, model=found) == 2
    check_equal(found, expected)
    words = [re.sub(r"/.*/(?=step)", "", str(one.message)) for one in said]
    begin = "step 2 was loaded, because a later one is damaged: "
    assert all(one.startswith(begin) for one in words)
    words = [one.removeprefix(begin) for one in words]
    assert words[0] == "[Errno 2] cannot read step-00000006/index.json: No such file or directory"
    assert re.fullmatch(
        r"step-00000005/rank-00000\.safetensors: the file has 1000 bytes, and was written with \d+", words[1]
    )
    assert words[2].startswith("step-00000004/index.json")
    assert re.fullmatch(
        r"step-00000003/rank-00000.safetensors, at byte \d+, key 'model\..*': the data have changed since they were "
        r"written: their checksum is [0-9a-f]{8}, and was [0-9a-f]{8}",
        words[3],
    )


def test_if_every_step_is_damaged_that_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    module = net(S(0), R)
    expected = save(tmp_path, 1, module)
    save(tmp_path, 2, module)
    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}" / "rank-00000.safetensors")
    other = net(S(0), R)
    before = values(other)
    with pytest.raises(DamagedFileError, match=r"^no step in .* is whole\. .*step-00000002.*\. .*step-00000001"):
        load_latest(tmp_path, model=other)
    check_equal(other, before)
    with pytest.raises(DamagedFileError, match=r"step-00000001.* the data have changed"):
        load_step(tmp_path / "step-00000001", model=other)
    check_equal(other, before)
    assert load_latest(tmp_path, model=other, verify=False) == 2  # at one's own risk
    assert sum(not torch.equal(x, expected[name]) for name, x in values(other).items()) == 1


def test_a_program_may_go_elsewhere_while_a_step_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    started = background.started

    def later(save: Any, **options: Any) -> Any:
        os.chdir(elsewhere)
        return started(save, **options)

    monkeypatch.setattr(background, "started", later)
    assert checkpoint.save_step("run", step=1, note={}).wait() == tmp_path / "run" / "step-00000001"
    assert not list(elsewhere.iterdir())


def test_on_whatever_device_a_program_makes_tensors(tmp_path: Path) -> None:
    """Bytes on their way to and from files are in the host's memory."""
    module, other = net(S(0), R), net(R, S(0))
    data = {"few": torch.arange(3.0), "many": torch.arange(20_000.0)}
    twice = {"first.weight": From("first.weight", make=lambda w: torch.cat([w, torch.zeros(0, w.shape[1])]) * 2)}
    with torch.device("meta"):
        for in_background in (False, True):
            save_step(tmp_path / "run", step=1, background=in_background, model=module, data=data).wait()
        found: dict[str, Any] = {}
        load_latest(tmp_path / "run", model=other, data=found)
        checkpoint.save(module, tmp_path / "model")
        load(other, tmp_path / "model", verify=True)
        check_equal(other, values(module))
        load(other, tmp_path / "model", keys=twice)
    assert all(torch.equal(found[name], x) for name, x in data.items())
    assert torch.equal(values(other)["first.weight"], values(module)["first.weight"] * 2)


def test_names_that_meet(tmp_path: Path) -> None:
    """A tensor may be called as a part of another is, and two alike when the names that lead to them are joined."""
    module, line = nn.Module(), sw.simulate((2,), ("x",))
    module.register_parameter("w", nn.Parameter(sw.distribute_tensor(torch.arange(6.0), line, [S(0)])))
    module.register_buffer("w[0:3]", torch.full((3,), 7.0))
    many = torch.arange(20_000.0)
    save_step(tmp_path, step=1, background=False, module=module, **{"a": {"b.c": many}, "a.b": {"c": -many}})
    found: dict[str, Any] = {"a": {}, "a.b": {}}
    other = nn.Module()
    other.w = nn.Parameter(torch.zeros(6))
    other.register_buffer("w[0:3]", torch.zeros(3))
    load_latest(tmp_path, module=other, **found)
    assert other.w.tolist() == [*range(6)] and other.get_buffer("w[0:3]").tolist() == [7.0] * 3
    assert torch.equal(found["a"]["b.c"], many) and torch.equal(found["a.b"]["c"], -many)


def test_one_step_by_its_folder(tmp_path: Path) -> None:
    module, found = net(S(0), R), net()
    expected = save(tmp_path, 1, module)
    with torch.no_grad():
        module.first.weight.add_(1)
    save(tmp_path, 2, module)
    assert load_step(tmp_path / "step-00000001", model=found) == 1
    check_equal(found, expected)
    with pytest.raises(DamagedFileError, match="No such file or directory"):
        load_step(tmp_path / "step-00000009", model=found)


# What is saved


def test_everything_with_a_state(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.position, self.order = 0, torch.zeros(3)

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position, "order": self.order}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position, self.order = state["position"], state["order"]

    class Keeping(nn.Linear):
        kept: Any = None

        def get_extra_state(self) -> Any:
            return self.kept

        def set_extra_state(self, state: Any) -> None:
            self.kept = state

    loader, generator, progress, kept = (
        Loader(),
        torch.Generator().manual_seed(3),
        {"epoch": 1, "seen": {(1, 2)}},
        Keeping(2, 2),
    )
    loader.position, loader.order, kept.kept = 12, torch.rand(3), {"scale": 2.5}
    ema = {"weight": sw.distribute_tensor(torch.randn(4, 6), MESH, [S(0), S(1)]), "big": torch.randn(300, 100)}
    order, big, weight = loader.order.clone(), ema["big"].clone(), ema["weight"].full_tensor()
    save_step(tmp_path, step=0, kept=kept, loader=loader, generator=generator, progress=progress, ema=ema).wait()
    drawn = torch.rand(2, generator=generator)
    loader.position, loader.order, kept.kept = 0, torch.zeros(3), None
    progress.clear()
    progress["other"] = 1
    ema["weight"], ema["big"] = sw.distribute_tensor(torch.zeros(4, 6), MESH, [R, S(0)]), torch.zeros(300, 100)
    state = {"loader": loader, "generator": generator, "progress": progress, "ema": ema, "kept": kept}
    assert load_latest(tmp_path, **state) == 0
    assert loader.position == 12 and torch.equal(loader.order, order) and kept.kept == {"scale": 2.5}
    assert torch.equal(torch.rand(2, generator=generator), drawn)
    assert progress == {"epoch": 1, "seen": {(1, 2)}}
    assert torch.equal(ema["big"], big) and torch.equal(ema["weight"].full_tensor(), weight)
    assert ema["weight"].placements == (R, S(0))
    with pytest.raises(
        CheckpointError, match=r"'ema\.weight' was saved as a DTensor, and nothing shows where its shards belong"
    ):
        load_latest(tmp_path, ema={})


def test_state_shaped_otherwise_than_its_parameter_lies_as_it_did(tmp_path: Path) -> None:
    """On a mesh with the same axes; sums over its shards are the same ones then. Replicated on another."""

    def made(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Module()
        module.w = nn.Parameter(sw.zeros(4, 6, device_mesh=mesh, placements=[S(0), S(1)]))
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    module, optimizer = made(MESH)
    rows = torch.randn(4, 1)
    optimizer.state[module.w] = {
        "rows": sw.distribute_tensor(rows, MESH, [S(0), R]),
        "whole": sw.distribute_tensor(rows + 1, MESH, [R, R]),
        "number": sw.distribute_tensor(torch.tensor(3.0), MESH, [R, R]),
        "plain": torch.ones(2),
    }
    save_step(tmp_path, step=1, model=module, optimizer=optimizer, background=False)
    for mesh, placements in ((MESH, (S(0), R)), (sw.simulate((4, 1), ("dp", "tp")), (R, R))):
        module, optimizer = made(mesh)
        load_latest(tmp_path, model=module, optimizer=optimizer)
        kept = optimizer.state[module.w]
        assert kept["rows"].placements == placements and torch.equal(kept["rows"].full_tensor(), rows)
        assert kept["whole"].placements == (R, R) and torch.equal(kept["whole"].full_tensor(), rows + 1)
        assert kept["number"].full_tensor().item() == 3 and type(kept["plain"]) is torch.Tensor
    plain = nn.Module()
    plain.w = nn.Parameter(torch.zeros(4, 6))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    load_latest(tmp_path, model=plain, optimizer=optimizer)
    assert torch.equal(optimizer.state[plain.w]["rows"], rows)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    torch.manual_seed(5)
    save(tmp_path, 1, net(S(0), R))
    expected = torch.rand(3)
    load_latest(tmp_path, model=net(S(0), R))
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(6)
    other, expected = net(S(0), R), torch.rand(3)
    torch.manual_seed(6)
    net(S(0), R)
    load_latest(tmp_path, model=other, random=False)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("placements", [(), (S(0), R), (S(0), S(0))])
def test_a_module_on_meta_gets_memory(placements: Any, tmp_path: Path) -> None:
    expected = save(tmp_path, 1, net(S(0), R))
    with torch.device("meta"):
        module = net(*placements)
    bias = module.first.bias
    load_latest(tmp_path, model=module)
    check_equal(module, expected)
    assert module.first.bias is not bias and type(module.first.bias) is type(bias)
    assert all(isinstance(x, nn.Parameter) and not x.is_meta for x in module.parameters())


def test_part_of_the_state_may_be_loaded(tmp_path: Path) -> None:
    module = net(S(0), R)
    expected = save(tmp_path, 1, module, optimizer=torch.optim.Adam(module.parameters()), note={"a": 1})
    found = net()
    assert load_latest(tmp_path, model=found) == 1
    check_equal(found, expected)


# What does not fit: found before anything is changed


def refused(folder: Path, words: str, **state: Any) -> None:
    modules = [module for module in state.values() if isinstance(module, nn.Module)]
    before = [values(module) for module in modules]
    with pytest.raises(CheckpointError, match=words):
        load_latest(folder, **state)
    for module, one in zip(modules, before, strict=True):
        check_equal(module, one)


def test_what_does_not_fit(tmp_path: Path) -> None:
    module = net(S(0), R)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    save(tmp_path, 1, module, optimizer=optimizer, note={"a": 1})
    other = net(S(0), R)
    refused(tmp_path, "has nothing under the name 'net'; it has 'model', 'optimizer', 'note'", model=other, net=other)
    refused(tmp_path, "^note is a Net, and was saved from a dict$", model=other, note=other)
    bigger = net(S(0), R)
    bigger.extra = nn.Linear(2, 2)
    refused(tmp_path, "^model is not what was saved: 2 names are new, 'extra.weight' for one$", model=bigger)
    refused(
        tmp_path,
        "^model is not what was saved: 2 names are new, 'weight' for one; 5 names are gone, '",
        model=nn.Linear(2, 2),
    )
    wider = net()
    wider.first.weight = nn.Parameter(torch.ones(7, 4))
    words = r"^'model\.first\.weight' was saved as float32 \[6, 4\], and is float32 \[7, 4\] now$"
    refused(tmp_path, words, model=wider)
    refused(tmp_path, r"^'model\..*' was saved as float32 .*, and is int32 .* now$", model=integers(net()))
    groups = torch.optim.SGD([{"params": list(other.first.parameters())}, {"params": list(other.second.parameters())}])
    words = (
        r"^optimizer is not what was saved: its parameter group 0 has other parameters, of which 'model\.second\.bias' "
        r"is only in the saved one$"
    )
    refused(tmp_path, words, model=other, optimizer=groups)
    refused(
        tmp_path, "one; give the module that they belong to as well$", optimizer=torch.optim.SGD(other.parameters())
    )
    with torch.device("meta"):
        empty = Net()
    words = "optimizer has parameters on the meta device, which loading replaces: make the optimizer when the model has"
    with pytest.raises(CheckpointError, match=words):
        load_latest(tmp_path, model=empty, optimizer=torch.optim.SGD(empty.parameters(), lr=0.1))
    assert empty.first.weight.is_meta


def integers(module: nn.Module) -> nn.Module:
    module.first.weight = nn.Parameter(torch.ones(6, 4, dtype=torch.int32), requires_grad=False)
    return module


def test_a_folder_that_is_mistaken_for_another_is_no_fresh_start(tmp_path: Path) -> None:
    module = net(S(0), R)
    save(tmp_path / "run", 1, module)
    step = tmp_path / "run" / "step-00000001"
    with pytest.raises(
        CheckpointError, match=r"step-00000001 is a step: load it with load_step, or the latest in .*run$"
    ):
        load_latest(step, model=module)
    with pytest.raises(CheckpointError, match="step-00000001 is a step of training: load it with load_step"):
        load(module, step)
    with pytest.raises(CheckpointError, match="run has steps of training: go on from the latest with load_latest"):
        load(module, tmp_path / "run")
    with pytest.raises(CheckpointError, match="run has steps of training: name one of them, or go on from the latest"):
        load_step(tmp_path / "run", model=module)


def test_a_disk_that_fails_after_all_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be done about it, but it is said."""
    module = net(S(0), R)
    save(tmp_path / "run", 1, module)
    checkpoint.save(module, tmp_path / "model")
    for do in (lambda: load_latest(tmp_path / "run", model=module), lambda: load(module, tmp_path / "model")):
        with monkeypatch.context() as patched:
            patched.setattr(load_module, "fill_tensor", failing)
            patched.setattr(resume, "fill_tensor", failing)
            with pytest.raises(CheckpointFileError, match="Input/output error") as error:
                do()
        assert error.value.__notes__ == [
            "All was well when it was checked. What was read until now is in Net, and the rest is not."
        ]


def failing(*args: Any) -> None:
    raise CheckpointFileError(errno.EIO, "Input/output error")


def test_what_has_no_data_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Net()
    with pytest.raises(CheckpointError, match=r"^'model\.count' is on the meta device, so there is nothing to save$"):
        save_step(tmp_path, step=1, model=nn.ModuleDict({"a": module})["a"])
    assert not os.listdir(tmp_path)


def test_arguments(tmp_path: Path) -> None:
    module = net()
    for options, words in (
        ({"step": -1, "model": module}, "step is the number of a step, counted from 0: not -1"),
        ({"step": True, "model": module}, "not True"),
        (
            {"step": 1, "keep": 0, "model": module},
            "keep is how many steps are kept, at least 1, or None for all: not 0",
        ),
        ({"step": 1}, "give what is to be saved or loaded by name: model=model, optimizer=optimizer"),
        (
            {"step": 1, "epoch": 3},
            r"epoch is a int, which has no state_dict .* put numbers, text and the like into a dict, epoch=\{",
        ),
        ({"step": 1, "random": module}, "random is an option of save_step or load_latest: give the state another name"),
    ):
        with pytest.raises(TypeError, match=words):
            save_step(tmp_path, **options)
    with pytest.raises(
        CheckpointError, match=r"^note\.f is a builtins\.builtin_function_or_method, which a checkpoint cannot hold"
    ):
        save_step(tmp_path, step=1, model=module, note={"f": len})
    assert not os.listdir(tmp_path)


# Saving while the program goes on


def test_what_is_saved_is_what_was_there_when_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second save waits for the first."""
    goes_on, original, written = threading.Event(), Writer.write_tensor, []

    def late(self: Any, *args: Any) -> int:
        assert goes_on.wait(60)
        written.append(threading.current_thread().name)
        return original(self, *args)

    monkeypatch.setattr(Writer, "write_tensor", late)
    module = net(S(0), R)
    optimizer, note = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), {"step": 1}
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = values(module)
    saving = save_step(tmp_path, step=1, model=module, optimizer=optimizer, note=note)
    assert not saving.is_done and not written
    optimizer.step()
    note["step"] = 2
    assert not any(folder.startswith("step") for folder in os.listdir(tmp_path)) if tmp_path.exists() else True
    goes_on.set()
    later = save_step(tmp_path, step=2, model=module, optimizer=optimizer, note=note)
    assert saving.is_done
    later.wait()
    assert {*written} == {"shardwise-save"} and saving.wait() == tmp_path / "step-00000001"
    found = {}
    load_step(saving.wait(), model=module, note=found)
    check_equal(module, expected)
    assert found == {"step": 1}


@pytest.mark.parametrize("how", ["wait", "the next save", "the next load", "the saving itself"])
def test_what_goes_wrong_is_raised_once_where_it_is_waited_for(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net(S(0), R)
    save(tmp_path, 1, module)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        saving = save_step(tmp_path, step=2, model=module)
        saving._thread.join()
    ways = {
        "wait": wait,
        "the next save": lambda: save_step(tmp_path, step=3, model=module),
        "the next load": lambda: load_latest(tmp_path, model=module),
        "the saving itself": saving.wait,
    }
    with pytest.raises(CheckpointFileError, match="No space left on device") as error:
        ways[how]()
    assert error.value.errno == errno.ENOSPC and saving.is_done
    wait()
    assert names_in(tmp_path) == ["step-00000001"]
    with pytest.raises(RuntimeError, match="this step was not saved, as was said before"):
        saving.wait()
    save(tmp_path, 3, module)


def full(*args: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_who_never_asks_is_told_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        save_step(tmp_path, step=2, model=module)._thread.join()
    background._say_what_failed()
    assert "No space left on device" in capsys.readouterr().err
    with pytest.raises(CheckpointFileError):
        wait()


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("name", "error"), [("pwrite", errno.ENOSPC), ("rename", errno.EIO), ("fsync", errno.EIO)])
def test_a_save_that_fails_leaves_what_was_there(
    name: str, error: int, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net(S(0), R)
    expected = save(tmp_path, 1, module)
    with torch.no_grad():
        module.first.weight.add_(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(os, name, fails)
        with pytest.raises(CheckpointFileError) as caught:
            save_step(tmp_path, step=2, model=module, background=background).wait()
    assert caught.value.errno == error and names_in(tmp_path) == ["step-00000001"]
    assert load_latest(tmp_path, model=module) == 1
    check_equal(module, expected)


def test_a_step_that_appears_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever kills the process may do so right then."""
    original, seen = os.rename, []

    def rename(old: Any, new: Any) -> None:
        if Path(new).name == "step-00000001":
            index = read_index(Path(old))
            index.check_files()
            seen.append(verify(index.claims()))
        original(old, new)

    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, 1, net(S(0), R))
    assert len(seen) == 1 and seen[0] > 200


def test_what_was_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / f"{UNFINISHED}step-00000007-0123abcd" / "x").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, 1, net())
    assert names_in(tmp_path) == ["notes.txt", "step-00000001"]


def test_an_old_step_that_was_moved_to_another_disk(tmp_path: Path) -> None:
    """The link in its place goes, and what it leads to stays."""
    module, run = net(), tmp_path / "run"
    folder = save_step(run, step=1, model=module, background=False).wait()
    (tmp_path / "archive").mkdir()
    os.symlink(folder.rename(tmp_path / "archive" / "first"), folder)
    assert load_latest(run, model=module) == 1
    for step in (2, 3):
        save_step(run, step=step, keep=1, model=module, background=False)
        assert os.listdir(run) == [f"step-{step:08}"]
    assert load_step(tmp_path / "archive" / "first", model=module) == 1


def test_an_old_step_that_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    save(tmp_path, 1, module)
    original = os.rename

    def rename(old: Any, new: Any) -> None:
        if Path(old).name == "step-00000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        original(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.warns(
        CheckpointWarning, match="step-00000002 is saved, but an older step is still there: .*Permission denied"
    ):
        save_step(tmp_path, step=2, model=module, keep=1, background=False)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]


# Indexes that are none


def test_an_index_of_a_later_format_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, net())
    monkeypatch.setattr("shardwise.checkpoint.steps.index.VERSION", 2)
    save(tmp_path, 2, net())
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"index\.json has version 2 of the format; this is version 1"):
        load_latest(tmp_path, model=net())


HOSTILE: dict[str, Any] = {
    "a file elsewhere": lambda said: said["files"].update({"../../secret": 1}),
    **{
        f"a file called {name!a}": lambda said, name=name: said["files"].update({name: 1})
        for name in ("..", "\0", "\ud800")
    },
    "a size that is none": lambda said: said["files"].update({"rank-00000.safetensors": "1"}),
    "boxes that overlap": lambda said: boxes(said).append(boxes(said)[0]),
    "boxes that are not all": lambda said: boxes(said).pop(),
    "a box of another dim": lambda said: boxes(said)[0].__setitem__(0, [0]),
    "a box outside": lambda said: boxes(said)[0].__setitem__(0, [100, 0]),
    "a negative offset": lambda said: boxes(said)[0].__setitem__(3, -8),
    "an offset after the end": lambda said: boxes(said)[0].__setitem__(3, 10**15),
    "an end after the end": lambda said: boxes(said)[0].__setitem__(3, said["files"]["rank-00000.safetensors"] - 1),
    "a file that is none of the step's": lambda said: boxes(said)[0].__setitem__(2, "x"),
    "a dtype": lambda said: said["tensors"]["model.first.weight"].update({"dtype": "load"}),
    "a huge shape": lambda said: said["tensors"]["model.first.weight"].update({"shape": [2**62, 2**62]}),
    "a huge shape without elements": lambda said: said["tensors"]["model.first.weight"].update(
        {"shape": [0, 2**62, 2**62], "boxes": [[[0, 0, 0], [0, 2**62, 2**62], "rank-00000.safetensors", 0, "00000000"]]}
    ),
    "nothing": lambda said: [said.pop(key) for key in list(said) if key not in ("format", "version")],
    "a checksum": lambda said: boxes(said)[0].__setitem__(4, "zz"),
}


def boxes(said: Any) -> Any:
    return said["tensors"]["model.first.weight"]["boxes"]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_index_that_somebody_has_written(name: str, tmp_path: Path) -> None:
    """With a checksum that is right."""
    from shardwise.checkpoint.steps.index import _checksum

    module = net(S(0), R)
    save(tmp_path, 1, module)
    path = tmp_path / "step-00000001" / "index.json"
    said = json.loads(path.read_text())
    HOSTILE[name](said)
    path.write_text(json.dumps({**said, "checksum": _checksum(said)}))
    before = values(module)
    with pytest.raises(DamagedFileError, match=r"index\.json|end after their file"):
        load_step(path.parent, model=module)
    check_equal(module, before)


def test_state_that_somebody_has_written(tmp_path: Path) -> None:
    from shardwise.checkpoint.steps.index import _checksum

    save(tmp_path, 1, net(), note={"a": 1})
    path = tmp_path / "step-00000001" / "index.json"
    for state in (
        *({"$": "system", "of": "x"}, {"$": "tensor", "of": "x"}, {"$": "dict", "of": 3}),
        *({"$": "numbers", "of": ["uint8", shape, ""]} for shape in ([2**60], [0, 2**62, 2**62], [-1], [0.5], "3")),
    ):
        said = json.loads(path.read_text())
        said["state"]["note"]["all"]["state"] = state
        path.write_text(json.dumps({**said, "checksum": _checksum(said)}))
        note = {"b": 2}
        with pytest.raises(CheckpointError, match=r"^note cannot be made of what .*step-00000001 has: "):
            load_latest(tmp_path, note=note)
        assert note == {"b": 2}


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(said: Any) -> None:
        for key in path[:-1]:
            said = said[key]
        said[path[-1]] = value

    return change


NUMPY = ("random", "numpy", "states", 0)
STRANGE: dict[str, Callable[[Any], None]] = {
    "state": put(3, "state"),
    "of a module": put([1], "state", "model"),
    "of an optimizer": put(None, "state", "optimizer"),
    "of a parameter": put(None, "state", "optimizer", "all", "state", "model.first.weight"),
    "a count of steps": put("x", "state", "optimizer", "all", "state", "model.first.weight", "step"),
    "the rest of an optimizer": put("x", "state", "optimizer", "all", "rest"),
    "of a scheduler": put("x", "state", "scheduler", "all", "state"),
    "of a generator": put(None, "state", "generator", "all", "state"),
    "random numbers": put({}, "random", "torch", "states", 0),
    "a position that is far away": put(10**8, *NUMPY, "state", "pos"),  # numpy would read memory there
    "a position before the first": put(-1, *NUMPY, "state", "pos"),
    "a position that is none": put("1", *NUMPY, "state", "pos"),
    "a file": put({}, "tensors", "model.first.weight", "boxes", 0, 2),
}


@pytest.mark.parametrize("name", STRANGE)
def test_anything_that_somebody_has_written_is_refused(name: str, tmp_path: Path) -> None:
    """With a checksum that is right. Neither the module nor random numbers are changed, and no memory is read amiss."""
    from shardwise.checkpoint.steps.index import _checksum

    def made() -> dict[str, Any]:
        module = net(S(0), R)
        optimizer = torch.optim.AdamW(module.parameters())
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"model": module, "optimizer": optimizer, "scheduler": scheduler, "generator": torch.Generator()}

    save_step(tmp_path, step=1, background=False, **made())
    path = tmp_path / "step-00000001" / "index.json"
    said = json.loads(path.read_text())
    STRANGE[name](said)
    path.write_text(json.dumps({**said, "checksum": _checksum(said)}))
    state = made()
    told = {name: str(state[name].state_dict()) for name in ("optimizer", "scheduler")}
    before = values(state["model"]), random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())
    with pytest.raises(CheckpointError, match="step-00000001"):
        load_step(path.parent, **state)
    check_equal(state["model"], before[0])
    assert told == {name: str(state[name].state_dict()) for name in told}
    assert before[1:] == (random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state()))
