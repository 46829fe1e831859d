"""What was communicated can be seen: line, function, argument, layouts and reason of every collective; its bytes."""

from __future__ import annotations

import gc
import inspect
import json
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from custom_ops import positives
from sweep import normal
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.cause import watchers
from shardwise.comm.record import listeners
from shardwise.debug import Comm, CommDebugMode, table, visualize_sharding
from shardwise.errors import FallbackWarning
from shardwise.redistribute import move_cache as shared


@pytest.fixture(params=["simulated", "process group", "recording"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Four ranks on one axis, on every port."""
    if request.param != "process group":
        yield (sw.simulate if request.param == "simulated" else sw.recording)((4,), ("tp",))
        return
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def place(x: Tensor, mesh: Any, *placements: Any) -> Tensor:
    return sw.distribute_tensor(x.detach(), mesh, placements or [Replicate()])


def here() -> int:
    """The number of the line that asks."""
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def said(comm: Comm) -> tuple[Any, ...]:
    return comm.kind, comm.backward, comm.line, comm.function, comm.argument, comm.why


def ends(comm: Comm) -> tuple[str, str]:
    return str(comm.source), str(comm.target)


# Causes


def test_a_pending_sum_that_is_reduced(mesh: Any) -> None:
    x = sw.DTensor.from_local(normal(6, 16), mesh, [sw.Partial()]) if not is_meta(mesh) else pending(mesh)
    with CommDebugMode() as comm:
        y = x.relu(); line = here()  # fmt: skip  # noqa: E702
    assert y.placements == (Replicate(),)
    assert [said(c) for c in comm.comms] == [
        ("all_reduce", False, line, "Tensor.relu", "argument 0 (self)", "pending sum reduced")
    ]
    assert ends(comm.comms[0]) == ("[6,16] P(sum)@tp", "[6,16] R")
    assert comm.comms[0].file == __file__


def test_a_pending_sum_that_meets_a_whole_tensor(mesh: Any) -> None:
    h, x, w = place(normal(6, 8), mesh), place(normal(6, 16), mesh, Shard(1)), place(normal(8, 16), mesh, Shard(1))
    with CommDebugMode() as comm:
        torch.add(h, F.linear(x, w))
    (found,) = comm.comms
    assert (found.kind, found.function, found.why) == ("all_reduce", "torch.add", "pending sum reduced")
    assert found.argument in ("its result", "argument 1 (other)")  # whichever is reduced
    assert ends(found) == ("[6,8] P(sum)@tp", "[6,8] R")


def test_the_gradient_of_a_gather_that_was_asked_for(mesh: Any) -> None:
    x, w = place(normal(8, 16), mesh, Shard(0)).requires_grad_(), place(normal(32, 16), mesh, Shard(0))
    with CommDebugMode() as comm:
        y = x.redistribute(placements=[Replicate()]); line = here()  # fmt: skip  # noqa: E702
        F.linear(y, w).to_local().sum().backward()
    back = [c for c in comm.comms if c.backward]
    assert [said(c) for c in back] == [
        ("reduce_scatter", True, line, "DTensor.redistribute", "", "gradient: asked for")
    ]
    assert ends(back[0]) == ("[8,16] P(sum)@tp", "[8,16] S(0)@tp")


def is_meta(mesh: Any) -> bool:
    return mesh.device_type == "meta"


def pending(mesh: Any) -> Tensor:
    return sw.DTensor.from_local(torch.empty(6, 16, device="meta"), mesh, [sw.Partial()])


def test_a_gradient_is_caused_by_the_forward_line(mesh: Any) -> None:
    h = place(normal(6, 16), mesh).requires_grad_()
    w = place(normal(32, 16), mesh, Shard(0))
    with CommDebugMode() as comm:
        y = F.linear(h, w); line = here()  # fmt: skip  # noqa: E702
        y.sum().backward()
    back = [c for c in comm.comms if c.argument]
    assert [said(c) for c in back] == [
        (
            *("all_reduce", True, line, "F.linear", "argument 0 (input)"),
            "gradient of a replicated tensor used on shards",
        )
    ]
    assert ends(back[0]) == ("[6,16] P(sum)@tp", "[6,16] R")


def test_what_is_asked_for_and_its_gradient(mesh: Any) -> None:
    x = place(normal(8, 4), mesh, Shard(0)).requires_grad_()
    with CommDebugMode() as comm:
        y = x.redistribute(placements=[Shard(1)]); line = here()  # fmt: skip  # noqa: E702
        y.to_local().sum().backward()
    assert [said(c) for c in comm.comms] == [
        ("all_to_all", False, line, "DTensor.redistribute", "", "asked for"),
        ("all_to_all", True, line, "DTensor.redistribute", "", "gradient: asked for"),
    ]
    assert [ends(c) for c in comm.comms] == [
        ("[8,4] S(0)@tp", "[8,4] S(1)@tp"),
        ("[8,4] S(1)@tp", "[8,4] S(0)@tp"),
    ]


def test_operands_in_conflict(mesh: Any) -> None:
    x, y = place(normal(8, 8), mesh, Shard(0)), place(normal(8, 8), mesh, Shard(1))
    with CommDebugMode() as comm:
        torch.maximum(x, other=y); line = here()  # fmt: skip  # noqa: E702
    assert comm.comms
    for c in comm.comms:
        assert said(c)[1:4] == (False, line, "torch.maximum") and c.why == "operands in conflict"
        assert c.argument in ("argument 0 (input)", "argument other")
        assert c.source in (x._layout, y._layout)


def test_programs_inside_of_functions(mesh: Any) -> None:
    x = place(normal(6, 8), mesh, Shard(1)).requires_grad_()
    with CommDebugMode() as comm:
        y = torch.softmax(x, 1); line = here()  # fmt: skip  # noqa: E702
        y.square().to_local().sum().backward()
    assert {said(c) for c in comm.comms if not c.backward} == {
        ("all_reduce", False, line, "torch.softmax", "", "inside the function")
    }
    assert {said(c) for c in comm.comms if c.backward} == {
        ("all_reduce", True, line, "torch.softmax", "", "gradient: inside the function")
    }
    assert all(c.source is None for c in comm.comms)


def test_a_layout_that_one_operand_cannot_have(mesh: Any) -> None:
    x = place(normal(4, 8, 8), mesh, Shard(2))
    with CommDebugMode() as comm:
        torch.linalg.det(x)
    assert {(c.function, c.argument, c.why) for c in comm.comms} == {
        ("torch.linalg.det", "argument 0 (A)", "needed in another layout")
    }


def test_calls_without_a_rule(mesh: Any) -> None:
    x = place(normal(8, 8), mesh, Shard(0))
    with CommDebugMode() as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        torch.linalg.eigvals(x); line = here()  # fmt: skip  # noqa: E702
    assert {(c.line, c.function, c.why) for c in comm.comms} == {(line, "torch.linalg.eigvals", "no rule")}
    assert comm.comms[0].argument == "argument 0 (input)"


def test_calls_that_cannot_be_planned() -> None:
    x = place(normal(5, 3), sw.simulate((4,), ("tp",)), Shard(1))
    with CommDebugMode() as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        positives(x)
    assert [(c.kind, c.argument, c.why) for c in comm.comms] == [("all_gather", "argument 0 (x)", "no rule")]


def test_values_that_leave_for_python() -> None:
    x = place(normal(8), sw.simulate((4,), ("tp",)), Shard(0)).sum()
    with CommDebugMode() as comm:
        x.item(); line = here()  # fmt: skip  # noqa: E702
    assert [said(c) for c in comm.comms] == [("all_reduce", False, line, "Tensor.item", "", "pending sum reduced")]


def test_moves_between_the_ops_of_a_function(mesh: Any) -> None:
    """Moves of values that the user never sees name the op they are for."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.multi_head_attention_forward(
            *(x, x, x, 8, 2, w, None, None, None, False, 0.0, w[:8], None), need_weights=False
        )[0]

    x, w = place(normal(6, 4, 8), mesh, Shard(2)), place(normal(24, 8), mesh, Shard(1))
    with CommDebugMode() as comm:
        function(x, w)
    inner = [c for c in comm.comms if c.argument.startswith("aten.")]
    assert {c.function for c in comm.comms} <= {"F.multi_head_attention_forward", "Tensor.__getitem__"}
    assert all(c.source is not None and c.why != "inside the function" for c in inner)


def test_lists_name_their_elements(mesh: Any) -> None:
    xs = [place(normal(4, 8), mesh, Shard(0)) for _ in range(2)]
    ys = [place(normal(4, 8), mesh, Shard(0)), place(normal(4, 8), mesh, Shard(1))]
    with CommDebugMode() as comm:
        torch._foreach_add(xs, ys)
    assert [(c.function, c.argument, c.why) for c in comm.comms] == [
        ("torch._foreach_add", "argument 1 (other)[1]", "operands in conflict")
    ]


def test_shared_moves_name_the_first_use(mesh: Any) -> None:
    h = place(normal(6, 16), mesh).requires_grad_()
    weights = [place(normal(32, 16), mesh, Shard(0)) for _ in range(3)]
    with CommDebugMode() as comm:
        q, k, v = (F.linear(h, w) for w in weights); line = here()  # fmt: skip  # noqa: E702
        (q.to_local() + k.to_local() + v.to_local()).sum().backward()
    assert [(c.kind, c.line, c.function) for c in comm.comms] == [("all_reduce", line, "F.linear")]


def test_a_backward_pass_on_another_thread(mesh: Any) -> None:
    """As on accelerators."""
    h, w = place(normal(6, 16), mesh).requires_grad_(), place(normal(32, 16), mesh, Shard(0))
    with CommDebugMode() as comm:
        y = F.linear(h, w).to_local().sum(); line = here()  # fmt: skip  # noqa: E702
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert [(c.backward, c.line, c.function) for c in comm.comms] == [(True, line, "F.linear")]


def test_gradients_of_a_forward_pass_that_nobody_saw(mesh: Any) -> None:
    h, w = place(normal(6, 16), mesh).requires_grad_(), place(normal(32, 16), mesh, Shard(0))
    y = F.linear(h, w).to_local().sum()
    with CommDebugMode() as comm:
        y.backward()
    (found,) = comm.comms
    assert (found.backward, found.file, found.line, found.function) == (True, "", 0, "")
    assert found.why == "gradient of a move made while nobody listened"


def test_second_derivatives_know_the_first_line() -> None:
    mesh = sw.simulate((4,), ("tp",))
    h, w = place(normal(6, 16), mesh).requires_grad_(), place(normal(32, 16), mesh, Shard(0))
    with CommDebugMode() as comm:
        y = F.linear(h, w).square().sum(); line = here()  # fmt: skip  # noqa: E702
        (grad,) = torch.autograd.grad(y, h, create_graph=True)
        first = comm.get_total_counts()
        grad.square().sum().backward()
    again = [c for c in comm.comms[first:] if c.function == "F.linear"]
    assert again and all(c.backward and c.line == line for c in again)
    assert all(c.file for c in comm.comms)


def test_operators_in_python_name_their_arguments(mesh: Any) -> None:
    x = pending(mesh) if is_meta(mesh) else sw.DTensor.from_local(normal(6, 16), mesh, [sw.Partial()])
    with CommDebugMode() as comm:
        _ = x**3
    assert [(c.function, c.argument) for c in comm.comms] == [("Tensor.__pow__", "argument 0 (self)")]


def test_second_derivatives_of_exchanges_know_the_first_line() -> None:
    x = place(normal(2, 3, 16), sw.simulate((4,), ("tp",)), Shard(2)).requires_grad_()
    with CommDebugMode() as comm:
        y = F.conv1d(x, place(normal(3, 3, 3), x._layout.mesh), padding=1); line = here()  # fmt: skip  # noqa: E702
        (grad,) = torch.autograd.grad(y.square().to_local().sum(), x, create_graph=True)
        first = comm.get_total_counts()
        grad.square().to_local().sum().backward()
    again = comm.comms[first:]
    assert any(c.kind == "all_to_all" for c in again)
    assert {(c.line, c.function) for c in again} == {(line, "F.conv1d")}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes_is_the_forward_line(reentrant: bool) -> None:
    mesh = sw.simulate((4,), ("tp",))
    x = place(normal(6, 16), mesh).requires_grad_()
    w = place(normal(16, 16), mesh, Shard(1))

    def block(x: Tensor) -> Tensor:
        return F.linear(x.redistribute(placements=[Shard(1)]), w).relu()

    with CommDebugMode() as comm:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    relus = [c for c in comm.comms if c.function == "Tensor.relu"]
    assert [(c.backward, c.why) for c in relus] == [(False, "pending sum reduced"), (True, "pending sum reduced")]
    assert all(c.file == __file__ for c in comm.comms)


def test_gradients_that_come_back_otherwise() -> None:
    mesh = sw.simulate((4,), ("tp",))
    x = place(normal(8, 4), mesh).requires_grad_()
    with CommDebugMode() as comm:
        y = x.to_local(grad_placements=[sw.Partial()]); line = here()  # fmt: skip  # noqa: E702
        y.sum().backward()
    assert [said(c) for c in comm.comms] == [("all_reduce", True, line, "DTensor.to_local", "", "gradient: asked for")]


def test_nobody_pays_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("looked at while nobody watches")

    for name in ("users_line", "cause", "_observed", "_mark"):
        monkeypatch.setattr(f"shardwise.comm.cause.{name}", never)
    monkeypatch.setattr("shardwise.dispatch.call.watched", never)
    mesh = sw.simulate((4,), ("tp",))
    h, w = place(normal(6, 16), mesh).requires_grad_(), place(normal(32, 16), mesh, Shard(0))
    (F.linear(h, w).relu() @ w).sum().backward()
    h.detach().redistribute(placements=[Shard(1)]).softmax(1).full_tensor()


def test_nothing_is_left_behind_by_an_exception() -> None:
    mesh = sw.simulate((4,), ("tp",))
    x = place(normal(8, 8), mesh, Shard(0))
    other = place(normal(3, 3), mesh)
    with pytest.raises(RuntimeError), CommDebugMode() as comm:
        x @ other
    assert not watchers and not listeners
    x.full_tensor()
    assert not comm.comms
    with comm:
        x.full_tensor()
    assert comm.comms[0].function == "DTensor.full_tensor"


def test_what_was_seen_is_freed(mesh: Any) -> None:
    h, w = place(normal(6, 16), mesh).requires_grad_(), place(normal(32, 16), mesh, Shard(0))
    with CommDebugMode() as comm:
        y = F.linear(h, w).relu().softmax(1)
        node, copy = y.grad_fn, h.redistribute(placements=[Shard(1)])
    kept = [weakref.ref(x) for x in (h, w, y, copy)]
    del h, w, y, copy, node
    shared.windows.clear()  # moves of leaves are shared until the next backward pass
    gc.collect()
    assert comm.comms and not any(ref() is not None for ref in kept)


# Numbers


def test_counts_by_our_names_and_by_torch_s_ops() -> None:
    mesh = sw.simulate((4,), ("tp",))
    x = place(normal(8, 8), mesh, Shard(0))
    with CommDebugMode() as comm:
        x.full_tensor()
        x.full_tensor()
        x.redistribute(placements=[Shard(1)])
    counts, ops = comm.get_comm_counts(), torch.ops.c10d_functional
    assert counts == {"all_gather": 2, "all_to_all": 1} == counts
    assert counts == {ops.all_gather_into_tensor: 2, ops.all_to_all_single: 1} and counts == comm.comm_counts
    assert counts != {"all_gather": 2} and counts != {"all_gather": 2, "all_to_all": 2}
    assert counts[ops.all_gather_into_tensor] == counts[ops.all_gather_into_tensor.default] == counts["all_gather"] == 2
    assert counts[torch.ops._c10d_functional.all_to_all_single] == 1
    assert counts[ops.all_reduce] == counts["all_reduce"] == counts[torch.ops.c10d.allreduce_] == 0
    assert ops.all_to_all_single in counts and ops.all_reduce not in counts and "all_reduce" not in counts
    assert counts.get(ops.all_to_all_single) == 1 and counts.get("all_reduce") is None
    assert dict(counts) == {"all_gather": 2, "all_to_all": 1} and comm.get_total_counts() == 3
    with pytest.raises(KeyError, match="no collective is called 'allreduce'; they are all_reduce, all_gather"):
        counts["allreduce"]


def test_bytes_by_the_ring_model(mesh: Any) -> None:
    whole = 16 * 8 * 8
    x = place(normal(16, 8), mesh, Shard(0))
    with CommDebugMode() as comm:
        x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Shard(1)])
        summed = sw.DTensor.from_local(x.to_local().new_ones(16, 8), mesh, [sw.Partial()])
        summed.redistribute(placements=[Replicate()])
        summed.redistribute(placements=[Shard(0)])
    assert [(c.kind, c.bytes, c.wire_bytes) for c in comm.comms] == [
        ("all_gather", whole // 4, whole * 3 // 4),
        ("all_to_all", whole // 4, whole * 3 // 16),
        ("all_reduce", whole, whole * 3 // 2),
        ("reduce_scatter", whole, whole * 3 // 4),
    ]
    assert comm.get_total_bytes() == sum(comm.get_comm_bytes().values()) == 3 * whole * (4 + 1 + 8 + 4) // 16
    assert comm.get_comm_bytes()[torch.ops.c10d_functional.all_reduce] == whole * 3 // 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.act = nn.Sequential(nn.ReLU(), nn.LayerNorm(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


def test_parameters_of_the_modules_that_ran() -> None:
    mesh, net = sw.simulate((4,), ("tp",)), Net().double()
    net.up.weight = nn.Parameter(place(net.up.weight, mesh, Shard(0)))
    sw.distribute_module(net, mesh)
    with CommDebugMode() as comm:
        net(place(normal(4, 8), mesh))
        net(place(normal(4, 8), mesh))
    assert comm.get_sharding_info() == {
        "Net.up.weight": (Shard(0),),
        "Net.act.1.weight": (Replicate(),),
        "Net.act.1.bias": (Replicate(),),
    }
    info = comm.get_parameter_info()
    assert {path: set(names) for path, names in info.items()} == {"Net.up": {"weight"}, "Net.act.1": {"weight", "bias"}}
    net(place(normal(4, 8), mesh))
    with comm:
        pass
    assert comm.get_sharding_info() == {} and comm.get_parameter_info() == {}


# Tables


def program() -> CommDebugMode:
    mesh = sw.simulate((4,), ("tp",))
    h, w = place(normal(64, 64), mesh).requires_grad_(), place(normal(64, 64), mesh, Shard(0))
    with CommDebugMode() as comm:
        for _ in range(2):
            F.linear(h, w).full_tensor().sum().backward()
    return comm


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("installed", [True, False], ids=["rich", "plain"])
def test_the_table_says_everything_at_every_width(
    width: int, installed: bool, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    if not installed:
        monkeypatch.setitem(sys.modules, "rich", None)
    comm = program()
    comm.print_table(width=width)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    line = next(c.line for c in comm.comms)
    for words in (
        *(f"test_debug.py:{line}", "F.linear", "DTensor.full_tensor", "argument 0 (input)", "asked for"),
        *("all_gather tp=4, forward", "all_reduce tp=4, backward", "[64,64] S(1)@tp", "→ R", "Totals by line"),
        *("49.2 kB", "98.3 kB", "147.5 kB", "all_gather 2, all_reduce 2"),
    ):
        assert words in text, words
    assert ("┃" in text) == installed and "\x1b" not in text


def test_the_table_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    layout = sw.Layout.of(mesh, (8, 4), [Shard(0), sw.Partial()])
    comms = [
        Comm("all_reduce", ("tp",), 2, 64, False, "net.py", 7, "F.linear", "argument 0 (input)", layout,
             sw.Layout.of(mesh, (8, 4), [Shard(0), Replicate()]), "pending sum reduced"),
        Comm("all_reduce", ("dp", "tp"), 4, 16, True, why="gradient of a move made while nobody listened"),
    ]  # fmt: skip
    found = table.draw(table.tables(comms, 200), 200)
    assert found.splitlines() == [
        "Collectives",
        "line          call                          collective                    from → to"
        "                          why                                            ×  sent",
        "net.py:7      F.linear, argument 0 (input)  all_reduce tp=2, forward      [8,4] S(0)@dp P(sum)@tp"
        " → S(0)@dp  pending sum reduced                            1  64 B",
        "line unknown                                all_reduce dp×tp=4, backward"
        "                                     gradient of a move made while nobody listened  1  24 B",
        "",
        "Totals by line",
        "line          collectives   ×  sent",
        "net.py:7      all_reduce 1  1  64 B",
        "line unknown  all_reduce 1  1  24 B",
        "all           all_reduce 2  2  88 B",
    ]


def test_files_and_totals(tmp_path: Path) -> None:
    comm = program()
    comm.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"))
    assert "gradient of a replicated tensor used on shards" in (tmp_path / "log.txt").read_text()
    totals = comm.generate_comm_debug_tracing_table(noise_level=0)
    assert "Totals by line" in totals and "asked for" not in totals
    assert "asked for" in str(comm) and repr(comm) == "CommDebugMode(get_total_counts()=4)"
    comm.generate_json_dump(str(tmp_path / "log.json"))
    first = json.loads((tmp_path / "log.json").read_text())[0]
    assert (first["kind"], first["wire_bytes"], first["source"]) == ("all_gather", 24576, "[64,64] S(1)@tp")


def test_an_empty_table() -> None:
    with CommDebugMode() as comm:
        pass
    assert "none" in comm.generate_comm_debug_tracing_table()


# Where a tensor lies


def shown(capsys: pytest.CaptureFixture[str], x: Tensor, **options: Any) -> list[str]:
    visualize_sharding(x, **options)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line]


def test_where_two_dims_lie(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.simulate((2, 2, 2), ("pp", "dp", "tp"))
    x = sw.distribute_tensor(torch.ones(5, 8), mesh, {0: ("tp", "dp")})
    assert shown(capsys, x, header="weight") == [
        "weight",
        "[5,8] S(0)@tp,dp; the same along pp",
        "dim 0 ↓ 1 →  0:8",
        "0:2          dp=0 tp=0",
        "2:3          dp=1 tp=0",
        "3:4          dp=0 tp=1",
        "4:5          dp=1 tp=1",
    ]
    pending = sw.DTensor.from_local(torch.ones(2, 3, 4), mesh, [sw.Partial("max"), Replicate(), Shard(2)])
    assert shown(capsys, pending) == [
        "[2,3,8] S(2)@tp P(max)@pp; the same along dp; pending: max along pp",
        "dim 0 ↓ 2 →  0:4   4:8",
        "0:2          tp=0  tp=1",
    ]


def test_where_one_dim_lies_or_three(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.simulate((2, 2, 2), ("pp", "dp", "tp"))
    line = shown(capsys, sw.distribute_tensor(torch.ones(3), mesh, {0: "tp"}))
    assert line == ["[3] S(0)@tp; the same along pp and dp", "dim 0  where", "0:2    tp=0", "2:3    tp=1"]
    assert shown(capsys, sw.distribute_tensor(torch.ones(()), mesh))[1:] == ["where", "everywhere"]
    cube = shown(capsys, sw.distribute_tensor(torch.ones(2, 2, 4), mesh, {0: "pp", 1: "dp", 2: "tp"}))
    assert len(cube) == 10 and cube[-1] == "1:2    1:2    2:4    pp=1 dp=1 tp=1"


def test_of_many_parts_some_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.recording((64, 16), ("dp", "tp"))
    x = sw.distribute_tensor(torch.empty(1000, 160, device="meta"), mesh, [Shard(0), Shard(1)])
    lines = shown(capsys, x)
    assert len(lines) == 14 and lines[1].split()[-2:] == ["…", "150:160"] and lines[-1].split()[0] == "1000:1000"
    assert any("━" in line for line in shown(capsys, x, use_rich=True))
