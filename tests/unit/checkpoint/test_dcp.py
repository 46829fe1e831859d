"""torch.distributed.checkpoint on DTensors: what is saved in one layout loads into any other, bit for bit."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compare import check_shards
from layouts import laid_out, random_layout
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from twenty_layouts import SHAPE, distinct_layouts

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.checkpoint.pieces import flaw, pieces
from shardwise.debug import CommDebugMode
from shardwise.layout import Layout

GRID, LINE = sw.simulate((2, 3), ("dp", "tp")), sw.simulate((4,), ("tp",))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [
    *(torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int64, torch.uint16),
    *(torch.uint32, torch.uint64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def saved(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    dcp.save(state, checkpoint_id=folder)
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def bits(x: Any) -> tuple[Any, ...]:
    whole = x.detach().full_tensor() if isinstance(x, DTensor) else x
    return whole.dtype, whole.shape, bytes(whole.contiguous().view(-1).view(torch.uint8).tolist())


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, chance: random.Random) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(chance.randbytes(count)), dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)


def test_any_two_of_twenty_layouts_on_one_to_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpickled = cache(
        lambda content, load=torch.load: load(io.BytesIO(content))
    )  # torch's reader does so for each part
    monkeypatch.setattr(torch, "load", lambda file, **_: unpickled(file.read()))
    every = distinct_layouts()
    assert {layout.mesh.size() for layout in every.values()} == {1, 2, 3, 4, 8} and len(every) > 50
    values = {name: torch.arange(105.0).view(SHAPE) + 1000 * i for i, name in enumerate(every)}
    metadata = saved({name: laid_out(values[name], layout) for name, layout in every.items()}, tmp_path)
    for name, layout in every.items():
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in metadata[name].chunks]
        assert flaw(SHAPE, chunks) is None and len(chunks) == len(pieces(layout))
    for target in every.values():
        found = {name: laid_out(torch.full(SHAPE, torch.nan), target) for name in every}
        dcp.load(found, checkpoint_id=tmp_path)
        for name, x in found.items():
            check_shards(x)
            assert x.layout_on_mesh is target and torch.equal(x.full_tensor(), values[name])


@pytest.mark.parametrize("seed", range(6))
def test_every_dtype_and_shape_in_random_layouts(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    shapes = [(), (0,), (1,), (7,), (4, 6), (5, 0), (3, 1, 4)]
    values = {f"{dtype} {shape}": random_bits(shape, dtype, chance) for dtype in DTYPES for shape in shapes}
    meshes = [GRID, LINE, sw.simulate((1,)), GRID["tp"]]

    def lie(x: Tensor, fill: bool) -> DTensor:
        layout = random_layout(chance, chance.choice(meshes), x.shape)
        return laid_out(x if fill else torch.zeros_like(x), layout)

    saved({name: lie(x, True) for name, x in values.items()}, tmp_path)
    found = {name: lie(x, False) for name, x in values.items()}
    dcp.load(found, checkpoint_id=tmp_path)
    for name, x in values.items():
        assert bits(found[name]) == bits(x), (name, found[name].layout_on_mesh)
        check_shards(found[name].view(torch.uint8) if x.dtype.itemsize == 1 and x.dim() else found[name])


def test_nested_state_and_plain_tensors_on_either_side(tmp_path: Path) -> None:
    x, y = torch.randn(4, 6), torch.randn(5)
    place = lambda x: sw.distribute_tensor(x, GRID, [S0, R])  # noqa: E731
    saved({"a": {"list": [place(x), place(y)], "step": 3}, "plain": x}, tmp_path)
    found = {"a": {"list": [torch.zeros(4, 6), place(torch.zeros(5))], "step": 0}, "plain": place(torch.zeros(4, 6))}
    dcp.load(found, checkpoint_id=tmp_path)
    (first, second), plain = found["a"]["list"], found["plain"]
    assert torch.equal(first, x) and torch.equal(second.full_tensor(), y) and torch.equal(plain.full_tensor(), x)
    assert found["a"]["step"] == 3


def test_what_is_pending_is_reduced_when_it_is_saved(tmp_path: Path) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    for kind in ("sum", "max"):
        pending = laid_out(x, Layout(GRID, (4, 6), [(1,), ()], [Partial(kind), None]))
        found = {kind: torch.zeros(4, 6, dtype=torch.float64)}
        with CommDebugMode() as comm:
            saved({kind: pending}, tmp_path / kind)
        assert comm.get_comm_counts() == {"all_reduce": 1}
        assert pending.placements[0] == Partial(kind)
        dcp.load(found, checkpoint_id=tmp_path / kind)
        assert torch.equal(found[kind], x)


def test_nothing_else_is_communicated(tmp_path: Path) -> None:
    state = {"x": sw.distribute_tensor(torch.randn(4, 6), GRID, {0: ("tp", "dp")})}
    with CommDebugMode() as comm:
        saved(state, tmp_path)
        dcp.load(state, checkpoint_id=tmp_path)
    assert not comm.comms


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: laid_out(torch.zeros(4, 6), Layout(GRID, (4, 6), pending=[P, None])),
            r"a checkpoint cannot be loaded into a tensor that is \[4,6\] P\(sum\)@dp: no value is taken apart into "
            r"pending terms",
        ),
        (lambda: torch.zeros(5, 6), r"Size mismatch between saved torch.Size\(\[4, 6\]\) and current"),
    ],
)
def test_what_cannot_be_loaded_into_is_refused(make: Any, error: str, tmp_path: Path) -> None:
    saved({"x": sw.distribute_tensor(torch.ones(4, 6), GRID)}, tmp_path)
    with pytest.raises(CheckpointException, match=error):
        dcp.load({"x": make()}, checkpoint_id=tmp_path)


def test_a_copied_view_is_not_loaded_into(tmp_path: Path) -> None:
    """The write would be lost."""
    x = sw.distribute_tensor(torch.zeros(4, 6), GRID, [R, S1])
    flat = x.view(24)
    saved({"x": sw.distribute_tensor(torch.ones(24), GRID)}, tmp_path)
    with pytest.raises(CheckpointException, match="a view of a DTensor that had to be a copy"):
        dcp.load({"x": flat}, checkpoint_id=tmp_path)
    assert not x.any() and not flat.any()


def test_meta_tensors_have_nothing_to_save(tmp_path: Path) -> None:
    x = sw.distribute_tensor(torch.zeros(4, 6, device="meta"), GRID, [S0, R])
    with pytest.raises(CheckpointException, match=r"layer.weight is on the meta device and has nothing to save"):
        saved({"layer": {"weight": x}}, tmp_path)


def test_views_taken_before_see_what_is_loaded(tmp_path: Path) -> None:
    """Moves that were kept are forgotten, as after any write."""
    weight = nn.Parameter(sw.distribute_tensor(torch.zeros(4, 6), GRID, [S0, R]))
    x = sw.distribute_tensor(torch.ones(2, 6), GRID, [R, S0])
    assert not torch.nn.functional.linear(x, weight).any()
    part = weight.detach()[:2]
    saved({"w": torch.ones(4, 6)}, tmp_path)
    dcp.load({"w": weight}, checkpoint_id=tmp_path)
    assert (torch.nn.functional.linear(x, weight) == 6).all()
    assert (part == 1).all()


# In the background

STAGERS: dict[str, Any] = {
    "by its own stager": lambda folder: {"checkpoint_id": folder},
    "by the writer": lambda folder: {"storage_writer": dcp.FileSystemWriter(folder)},
    "in shared memory": lambda folder: {
        "checkpoint_id": folder,
        "async_stager": DefaultStager(StagingOptions(False, True, False, False)),
    },
    "in a thread": lambda folder: {
        "checkpoint_id": folder,
        "async_stager": DefaultStager(StagingOptions(False, False, True, False)),
    },
}


@pytest.mark.parametrize("how", STAGERS)
def test_what_is_saved_in_the_background_may_be_written_to(how: str, tmp_path: Path) -> None:
    values = {"x": torch.randn(7, 5), "uneven": torch.randn(1, 3), "number": torch.tensor(3.0), "plain": torch.randn(3)}
    state: dict[str, Any] = {
        "x": sw.distribute_tensor(values["x"], GRID, [S0, S1]),
        "uneven": sw.distribute_tensor(values["uneven"], GRID, [S0, S0]),
        "number": sw.distribute_tensor(values["number"], GRID),
        "plain": values["plain"].clone(),
    }
    layouts = {name: getattr(x, "layout_on_mesh", None) for name, x in state.items()}
    options = STAGERS[how](tmp_path)
    begun: Any = dcp.async_save({"state": state}, **options)
    if hasattr(begun, "staging_completion"):
        begun.staging_completion.result()
        begun = begun.upload_completion
    for x in state.values():
        x.zero_()
    begun.result()
    if "async_stager" in options:
        options["async_stager"].close()
    found = {"state": {name: torch.full(x.shape, torch.nan) for name, x in values.items()}}
    dcp.load(found, checkpoint_id=tmp_path)
    assert all(torch.equal(found["state"][name], x) for name, x in values.items())
    assert all(getattr(x, "layout_on_mesh", None) is layouts[name] for name, x in state.items())


# State dicts


def model() -> nn.Module:
    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, {0: ("tp", "dp")}))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    return sw.distribute_module(net, GRID, shard)


@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_model_state_dicts(full: bool, cpu_offload: bool) -> None:
    net, options = model(), dcp_state.StateDictOptions(full_state_dict=full, cpu_offload=cpu_offload)
    state = dcp_state.get_model_state_dict(net, options=options)
    for name, x in net.state_dict().items():
        assert type(state[name]) is (Tensor if full else DTensor)
        assert bits(state[name]) == bits(x)
    other = model()
    with torch.no_grad():
        for x in other.state_dict().values():
            x.zero_()
    dcp_state.set_model_state_dict(other, state, options=options)
    for name, x in other.state_dict().items():
        check_shards(x)
        assert bits(x) == bits(net.state_dict()[name]) and x.layout_on_mesh is net.state_dict()[name].layout_on_mesh


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.filterwarnings("ignore:Getting submodules only:FutureWarning")
def test_state_dicts_of_a_part(prefixes: bool) -> None:
    """Of submodules, with or without the names of what they are in: as of plain modules."""
    options = dcp_state.StateDictOptions(True, keep_submodule_prefixes=prefixes)
    plain = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    plain.load_state_dict(dcp_state.get_model_state_dict(model(), options=dcp_state.StateDictOptions(True)))
    found = []
    for net in (plain, model()):
        for part in net:
            found.append(dcp_state.get_model_state_dict(net, submodules={part}, options=options))
    for right, state in zip(found[:2], found[2:], strict=True):
        assert {name: bits(x) for name, x in right.items()} == {name: bits(x) for name, x in state.items()}
    assert ("1.bias" if prefixes else "bias") in found[3]


@pytest.mark.parametrize("full", [False, True])
def test_optimizer_state_dicts(full: bool) -> None:
    options = dcp_state.StateDictOptions(full_state_dict=full)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(sw.distribute_tensor(torch.randn(4, 5), GRID)).square().sum().backward()
    optimizer.step()
    state = dcp_state.get_optimizer_state_dict(net, optimizer, options=options)
    kinds = {type(x) for kept in state["state"].values() for name, x in kept.items() if name != "step"}
    assert kinds == {Tensor if full else DTensor}
    other = model()
    second = torch.optim.AdamW(other.parameters(), lr=0.5)
    dcp_state.set_optimizer_state_dict(other, second, state, options=options)
    assert second.param_groups[0]["lr"] == 0.1
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        for name, x in optimizer.state[p].items():
            found = second.state[q][name]
            assert bits(found) == bits(x) and getattr(found, "layout_on_mesh", q._layout) is q._layout
