"""Programs on disk: what is loaded does, bit for bit, what was saved, or says why it cannot."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import WIDTH, Made, Net, assert_same, batch, net_on, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import CaptureError, CaptureWarning, IndexRangeError, SavedProgramError
from shardwise.graph.save.values import Reader, Writer
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def mesh_2x2() -> Any:
    return sw.simulate((2, 2), ("dp", "tp"))


def saved_and_loaded(make: Callable[[], Made], folder: Path, calls: int = 3, programs: int = 1) -> Any:
    """Two equal models: one whose program is captured and saved, and one that it is loaded for."""
    changed, step, arguments = make()
    others, again, same = make()
    compiled = sw.compile(step, backend="fx")
    for call in range(calls):
        torch.manual_seed(call)
        compiled(*arguments(call))
        torch.manual_seed(call)
        again(*same(call))
    compiled.save(folder)
    loaded = sw.graph.load(folder, again, backend="fx")
    for call in range(calls, calls + 3):
        torch.manual_seed(call)
        wanted = compiled(*arguments(call))
        torch.manual_seed(call)
        assert_same(loaded(*same(call)), wanted, f"call {call}, result")
        assert_same(state_of(others), state_of(changed), f"call {call}, state")
    assert (len(compiled.runs), len(loaded.runs)) == (programs, 1)
    return loaded


def mean_square(net: nn.Module, x: Any) -> Tensor:
    return net(x).square().mean()


def under_autocast(net: nn.Module, x: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x).float().square().mean()


def recomputed(net: nn.Module, x: Any) -> Tensor:
    found: Tensor = checkpoint(net, x, use_reentrant=False)
    return found.square().mean()


def stepped(optimizer: Any = torch.optim.AdamW, loss: Callable[..., Tensor] = mean_square, **options: Any) -> Made:
    """A step that reaches its module and its optimizer by its closure."""
    mesh = mesh_2x2()
    net = net_on(mesh, dropout=0.1)
    made = optimizer(net.parameters(), lr=0.1, **options)

    def step(x: Any) -> Tensor:
        made.zero_grad()
        found = loss(net, x)
        found.backward()
        made.step()
        return found

    return (net, made), step, lambda call: (batch(mesh, call),)


def given_all() -> Made:
    """A step that is given what it changes, and gives a structure."""
    mesh = mesh_2x2()
    net = net_on(mesh, dropout=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], scale: float) -> Any:
        optimizer.zero_grad()
        y = net(batch["x"])
        loss = (y * batch["weights"]).square().mean() * torch.tensor([scale, 2.0]).sum()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "more": [y, (batch["x"], None, scale)]}

    weights = sw.distribute_tensor(torch.linspace(0.1, 1.0, WIDTH), mesh)
    return (net, optimizer), step, lambda call: (net, optimizer, {"x": batch(mesh, call), "weights": weights}, 0.5)


def fully_sharded() -> Made:
    mesh = sw.simulate((4,), ("dp",))
    torch.manual_seed(0)
    net = nn.Sequential(Net(0.1), Net(0.1))
    for part in (*net, net):
        sw.fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=True)

    def step(x: Any) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss

    return (net, optimizer), step, lambda call: (batch(mesh, call),)


def looked_up() -> Made:
    """Rows of a table by numbers, which are checked."""
    mesh = mesh_2x2()
    torch.manual_seed(0)
    table = nn.Parameter(sw.distribute_tensor(torch.randn(20, WIDTH), mesh, [sw.Replicate(), sw.Shard(0)]))
    optimizer = torch.optim.AdamW([table], lr=0.1)

    def step(numbers: Any) -> Tensor:
        optimizer.zero_grad()
        rows = nn.functional.embedding(numbers, table)
        loss = nn.functional.cross_entropy(nn.functional.linear(rows, table), numbers)
        loss.backward()
        optimizer.step()
        return loss

    def numbers(first: int) -> Any:
        return sw.distribute_tensor(torch.arange(first, first + 8), mesh, [sw.Shard(0), sw.Replicate()])

    return (table, optimizer), step, lambda call: (numbers(call),)


def by_a_plan() -> Made:
    """On one axis of a larger mesh; plain tensors in, plain tensors out."""
    mesh = mesh_2x2()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return (net, optimizer), step, lambda call: (torch.full((4, WIDTH), call + 1.0),)


MADE: dict[str, Callable[[], Made]] = {
    "step": stepped,
    "arguments": given_all,
    "fully sharded": fully_sharded,
    "by a plan": by_a_plan,
    "of all ranks together": partial(stepped, fused=True),
    "recomputed": partial(stepped, loss=recomputed),
    "autocast": partial(stepped, loss=under_autocast, foreach=True),
}


@pytest.mark.parametrize("name", MADE)
def test_a_loaded_program_does_what_the_saved_one_does(name: str, tmp_path: Path) -> None:
    saved_and_loaded(MADE[name], tmp_path)


def test_what_passes_have_made_is_saved(tmp_path: Path) -> None:
    loaded = saved_and_loaded(stepped, tmp_path)
    (program,) = loaded.programs
    assert {"bucket", "overlap"} <= {report.name for report in program.reports}
    assert "\npasses    " in str(loaded) and "bucket: " in str(loaded) and " start all_reduce" in str(loaded)


def test_a_loaded_program_checks_what_the_saved_one_does(tmp_path: Path) -> None:
    loaded = saved_and_loaded(looked_up, tmp_path)
    numbers = sw.distribute_tensor(torch.arange(30, 38), mesh_2x2(), [sw.Shard(0), sw.Replicate()])
    with pytest.raises(IndexRangeError, match="index 30 is out of bounds: it must be from 0 to 19"):
        loaded(numbers)


def test_of_several_programs_the_one_that_serves_the_call_is_bound(tmp_path: Path) -> None:
    rectified = partial(stepped, torch.optim.RAdam)
    loaded = saved_and_loaded(rectified, tmp_path, calls=7, programs=2)
    assert loaded.runs[0][1].program.expected


def test_gradients_flow_through_a_loaded_program(tmp_path: Path) -> None:
    nets = [net_on(mesh_2x2(), dropout=0.1) for _ in range(2)]
    x = batch(mesh_2x2(), 0).requires_grad_()
    sw.compile(nets[0], backend="fx")
    torch.manual_seed(1)
    nets[0](x).square().mean().backward()
    sw.graph.programs_of(nets[0]).save(tmp_path)
    wanted, x.grad = x.grad, None
    sw.graph.load(tmp_path, nets[1], backend="fx")
    torch.manual_seed(1)
    nets[1](x).square().mean().backward()
    assert_same(x.grad, wanted, "gradient of the input")
    assert_same(state_of(nets[1]), state_of(nets[0]), "gradients")


def test_learning_rates_are_those_of_the_optimizer_that_is_there(tmp_path: Path) -> None:
    changed, step, arguments = stepped()
    compiled = sw.compile(step, backend="fx")
    for call in range(2):
        compiled(*arguments(call))
    compiled.save(tmp_path)
    before = [x.clone() for x in changed[0].parameters()]
    changed[1].param_groups[0].update(lr=0.0)
    sw.graph.load(tmp_path, step, backend="fx")(batch(mesh_2x2(), 2))
    assert_same(list(changed[0].parameters()), before, "parameters")


PROGRAM = """
import sys, torch, shardwise as sw
from captured import batch, net_on
mesh = sw.simulate((2, 2), ("dp", "tp"))
net = net_on(mesh, dropout=0.1)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
def step(x):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
step(batch(mesh, 0))
if sys.argv[1] == "save":
    run = sw.compile(step, backend="fx")
    run(batch(mesh, 1))
    run.save(sys.argv[2])
else:
    run = sw.graph.load(sys.argv[2], step, backend="fx")
    step(batch(mesh, 1))
run(batch(mesh, 2))
print([(name, x.full_tensor().tolist()) for name, x in net.named_parameters()])
"""


def in_a_process(*given: str, seed: int) -> str:
    """What the program prints, in a process whose sets and dicts hash otherwise."""
    path = ":".join(path for path in sys.path if path)
    command = [sys.executable, "-c", f"import torch; torch.manual_seed(0)\n{PROGRAM}", *given]
    env = {"PYTHONPATH": path, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    return run.stdout


@pytest.mark.slow
def test_another_process_loads_it(tmp_path: Path) -> None:
    saved = in_a_process("save", str(tmp_path), seed=1)
    assert in_a_process("load", str(tmp_path), seed=2) == saved


# What does not fit


class Scaled(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(sw.distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [sw.Shard(0)]))
        self.register_buffer("offset", torch.zeros(()))
        self.scale, self.activation = 2.0, torch.relu

    def forward(self, x: Any) -> Any:
        y = self.activation(nn.functional.linear(x, self.weight)) * self.scale
        return y if self.offset is None else y + self.offset


def rows(mesh: Any, number: int = 4) -> Any:
    return sw.distribute_tensor(torch.ones(number, WIDTH), mesh, [sw.Replicate()])


def total(net: nn.Module, x: Any) -> Tensor:
    return net(x).sum()


def mean(net: nn.Module, x: Any) -> Tensor:
    return net(x).mean()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mesh = sw.simulate((2,), ("tp",))
    compiled = sw.compile(total, backend="fx")
    with torch.no_grad():
        compiled(Scaled(mesh), rows(mesh))
    compiled.save(tmp_path)
    return tmp_path


def refusal(folder: Path, function: Any = total, mesh: Any = None, x: Any = None, **changed: Any) -> str:
    """What is said of a call that the saved program does not serve."""
    mesh = mesh or sw.simulate((2,), ("tp",))
    net = Scaled(mesh)
    for name, value in changed.items():
        setattr(net, name, value)
    with torch.no_grad(), pytest.raises(SavedProgramError) as caught:
        sw.graph.load(folder, function, backend="fx")(net, rows(mesh) if x is None else x)
    return str(caught.value).replace(str(folder), "DIR")


def parameter(x: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(sw.distribute_tensor(x, sw.simulate((2,), ("tp",)), [sw.Shard(dim)]))


ON = "on (tp=2: 2 ranks in one process), cpu, strides"
WEIGHT = f"net.weight was DTensor f32[8,8] S(0)@tp {ON} [8, 1], with a gradient, and is DTensor"
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "layout": (
        {"weight": parameter(torch.ones(8, 8), 1)},
        f"{WEIGHT} f32[8,8] S(1)@tp {ON} [4, 1], with a gradient now",
    ),
    "dtype": (
        {"weight": parameter(torch.ones(8, 8).double())},
        f"{WEIGHT} f64[8,8] S(0)@tp {ON} [8, 1], with a gradient now",
    ),
    "shape": ({"weight": parameter(torch.ones(6, 8))}, f"{WEIGHT} f32[6,8] S(0)@tp {ON} [8, 1], with a gradient now"),
    "batch": (
        {"x": rows(sw.simulate((2,), ("tp",)), 5)},
        f"x was DTensor f32[4,8] R {ON} [8, 1], and is DTensor f32[5,8]",
    ),
    "value": ({"scale": 3.0}, "net.scale was 2.0, and is 3.0 now"),
    "function": (
        {"activation": torch.tanh},
        "net.activation was torch._VariableFunctionsClass.relu, and is torch._VariableFunctionsClass.tanh now",
    ),
    "training": ({"training": False}, "net.training was True, and is False now"),
    "code": (
        {"function": mean},
        "the code of the function, or of one that it calls, is another one than that which was",
    ),
    "mesh": (
        {"mesh": sw.simulate((4,), ("tp",))},
        "[8, 1], with a gradient, and is DTensor f32[8,8] S(0)@tp on (tp=4: 4",
    ),
    "axes": (
        {"mesh": sw.simulate((2,), ("dp",))},
        "[8, 1], with a gradient, and is DTensor f32[8,8] S(0)@dp on (dp=2: 2",
    ),
    "missing": ({"offset": None}, "net.offset is missing: nothing is called so here"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_of_what_differs_it_is_said_what(name: str, folder: Path) -> None:
    changed, words = DIFFERENT[name]
    found = refusal(folder, **changed)
    function = changed.get("function", total)
    assert found.startswith(f"no program in DIR serves this call of {function.__qualname__}: ")
    assert words in found


def test_modes_are_part_of_a_program(folder: Path) -> None:
    mesh = sw.simulate((2,), ("tp",))
    with pytest.raises(SavedProgramError, match="grad mode was False, and is True now"):
        sw.graph.load(folder, total, backend="fx")(Scaled(mesh), rows(mesh))


def test_the_state_of_an_optimizer_must_be_there(tmp_path: Path) -> None:
    _, step, arguments = stepped()
    compiled = sw.compile(step, backend="fx")
    for call in range(2):
        compiled(*arguments(call))
    compiled.save(tmp_path)
    _, again, same = stepped(torch.optim.SGD)
    loaded = sw.graph.load(tmp_path, again, backend="fx")
    loaded(*same(0))  # the first step of an optimizer runs as it is
    said = r"made.exp_avg\[net.down.bias\] is missing: load the optimizer's state, or take a step, before the program"
    with pytest.raises(SavedProgramError, match=said):
        loaded(*same(1))


def test_what_is_not_strict_captures_instead(folder: Path) -> None:
    mesh = sw.simulate((2,), ("tp",))
    net = Scaled(mesh)
    net.scale = 3.0
    loaded = sw.graph.load(folder, total, backend="fx", strict=False)
    with (
        torch.no_grad(),
        pytest.warns(CaptureWarning, match=r"net.scale was 2.0, and is 3.0 now. It is captured instead"),
    ):
        found = loaded(net, rows(mesh))
    assert found.full_tensor() == 3.0 * 4 * WIDTH * WIDTH
    assert len(loaded.runs) == 1


# What cannot be saved

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda x: Pair(x + 1, x),
            "the program returns a Pair, which cannot be saved: return tensors in tuples, lists",
        ),
        (lambda x: [lambda: 0, x * 2], "the program returns a function, which cannot be saved"),
    ],
)
def test_what_cannot_be_saved_says_so(function: Any, said: str, tmp_path: Path) -> None:
    compiled = sw.compile(function, backend="fx")
    compiled(torch.ones(2))
    with pytest.raises(SavedProgramError, match=said):
        compiled.save(tmp_path)
    assert not any(tmp_path.iterdir())


def test_what_was_not_captured_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="nothing was captured of total yet: call it, or capture"):
        sw.compile(total, backend="fx").save(tmp_path)


# Files


def test_files_are_json_and_safetensors(tmp_path: Path) -> None:
    compiled = sw.compile(lambda x: x * torch.tensor([1.0, 2.0]), backend="fx")
    compiled(torch.ones(2))
    compiled.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.json", "rank-00000.safetensors"]
    assert json.loads((tmp_path / "rank-00000.json").read_text())["content"]["format"] == "shardwise program"
    safetensors = pytest.importorskip("safetensors.torch")
    (kept,) = safetensors.load_file(tmp_path / "rank-00000.safetensors").values()
    assert kept.tolist() == [1.0, 2.0]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def changed_inside(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def of_another_kind(file: Path) -> None:
    file.write_text('{"some": ["other", "file"]}')


def not_json(file: Path) -> None:
    file.write_bytes(b"\x80\x04\x95pickle\xff")


def nested(file: Path) -> None:
    file.write_text("[" * 100_000)


@pytest.mark.parametrize("damage", [cut, changed_inside, of_another_kind, not_json, nested])
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_damaged_files(damage: Callable[[Path], None], suffix: str, folder: Path) -> None:
    file = folder / f"rank-00000.{suffix}"
    if suffix == "safetensors":
        file.write_bytes(file.read_bytes() + b" " * 64)
    damage(file)
    with pytest.raises(SavedProgramError, match=r"rank-00000.json is not as it was written: it, or the file beside it"):
        sw.graph.load(folder, total, backend="fx")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((), "rank-00000.json is missing: there are no saved programs in "),
        (("rank-00001.json",), "rank-00000.json is missing: .* has rank-00001.json"),
        (("rank-00000.json",), "rank-00000.safetensors is missing"),
    ],
)
def test_missing_files(kept: tuple[str, ...], said: str, folder: Path) -> None:
    (folder / "rank-00000.json").rename(folder / "rank-00001.json" if not kept else folder / kept[0])
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    with pytest.raises(SavedProgramError, match=said):
        sw.graph.load(folder, total, backend="fx")


def test_what_is_no_folder(folder: Path) -> None:
    with pytest.raises(SavedProgramError, match=r"rank-00000.json cannot be read: Not a directory"):
        sw.graph.load(folder / "rank-00000.json", total, backend="fx")


def test_a_loaded_program_is_saved_as_it_was(tmp_path: Path) -> None:
    loaded = saved_and_loaded(stepped, tmp_path / "first")
    loaded.save(tmp_path / "second")
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file says, and its digest with it, as somebody would who means to."""
    file = folder / "rank-00000.json"
    content = json.loads(file.read_text())["content"]
    change(content)
    text = json.dumps(content, separators=(",", ":"))
    file.write_text(f'{{"digest": "{hashlib.sha256(text.encode()).hexdigest()}", "content": {text}}}')


def test_versions(folder: Path) -> None:
    rewritten(folder, lambda content: content["versions"].update(torch="2.1.0"))
    with pytest.raises(SavedProgramError, match=r"was saved with torch 2.1.0; this is torch .*: capture it again"):
        sw.graph.load(folder, total, backend="fx")
    rewritten(folder, lambda content: content.update(version=99))
    with pytest.raises(SavedProgramError, match="is of format 99; this version reads format 1"):
        sw.graph.load(folder, total, backend="fx")


def nodes(content: dict[str, Any]) -> list[Any]:
    found: list[Any] = content["programs"][0]["program"]["ranks"]["tuple"][0]["Part"]["nodes"]
    return found


def call_of(content: dict[str, Any]) -> list[Any]:
    node: list[Any] = next(node for node in nodes(content) if node[0] == "call_function")
    return node


EVIL = "x=__import__('os').abort()"
FOREIGN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "name": (lambda content: call_of(content).__setitem__(1, EVIL), "the file holds what is no program: a node"),
    "target": (lambda content: nodes(content)[0].__setitem__(2, EVIL), "the file holds what is no program: a node"),
    "option": (
        lambda content: call_of(content).__setitem__(4, [[EVIL, 1]]),
        "the file holds what is no program: a node",
    ),
    "kind of node": (
        lambda content: call_of(content).__setitem__(0, "call_module"),
        "the file holds what is no program",
    ),
    "op": (
        lambda content: call_of(content).__setitem__(2, {"op": "os.system.default"}),
        "calls os.system.default, which",
    ),
    "function": (
        lambda content: call_of(content).__setitem__(2, {"function": "os.system"}),
        "the file holds what is no program: KeyError: 'os.system'",
    ),
    "tag": (
        lambda content: call_of(content).__setitem__(2, {"pickle": ""}),
        "has a 'pickle', which this version does not",
    ),
    "dtype": (lambda content: call_of(content).__setitem__(3, [{"dtype": "load"}]), "torch.load is no dtype in this"),
    "collective": (
        lambda content: (
            content["programs"][0]["shared"].append(0)
            or call_of(content).__setitem__(2, {"Collective": ["__init__", None, None, None]})
        ),
        "the file holds what is no program: a collective '__init__'",
    ),
    "node": (lambda content: call_of(content).__setitem__(3, [{"node": 999}]), "is no program: IndexError"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_that_somebody_made_run_nothing(name: str, folder: Path) -> None:
    change, said = FOREIGN[name]
    rewritten(folder, change)
    assert said in refusal(folder)


VALUES = [
    *(None, True, 3, 2.5, float("inf"), "text", [1, [2]], (1, (2.0, "x")), {"a": 1, 2: (3,)}, {1: {}}),
    *(torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.strided, torch.channels_last, torch.device("cpu")),
    *(
        slice(1, None, 2),
        range(3),
        1 + 2j,
        frozenset({1, 2}),
        torch.ops.aten.add.Tensor,
        torch.ops.aten.mm.default,
        int,
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values(value: Any) -> None:
    def unknown(*given: Any) -> Any:
        raise AssertionError(given)

    writer = Writer(unknown)
    written = json.loads(json.dumps(writer.write(value), allow_nan=False))
    found = Reader(writer.shared, unknown).read(written)
    assert type(found) is type(value) and found == value
