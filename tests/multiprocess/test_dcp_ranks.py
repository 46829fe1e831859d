"""torch.distributed.checkpoint on real ranks: beside torch's own DTensor, from mesh to mesh, and its state dicts."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

import shardwise as sw
from launch import Case
from shardwise import Replicate, Shard
from shardwise.checkpoint.pieces import flaw
from shardwise.layout import Layout
from shardwise.tensor import wrap

R, S = Replicate(), Shard
Options = dcp_state.StateDictOptions


@contextmanager
def shared_folder() -> Any:
    """One that all ranks have, and that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


@functools.cache
def meshes() -> tuple[Any, Any]:
    """Made once: Gloo has threads for each group that never rest, so that hundreds of groups slow all ranks down."""
    grid = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return grid, sw.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


def check(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found.keys() == right.keys()
    for name, x in right.items():
        assert torch.equal(whole(found[name]), whole(x)), name


def ragged(x: Tensor, mesh: Any, sizes: tuple[int, ...]) -> sw.DTensor:
    """Rows in pieces of these sizes."""
    ours = sw.distribute_tensor(x, mesh)._layout.mesh
    layout = Layout(ours, x.shape, ((0,), ()), sizes=(sizes, None))
    (start, _), (size, _) = layout.box(ours.held[0])
    return wrap(x[start : start + size].clone(), layout)


# Beside torch's DTensor


def what_torch_saved_loads_and_the_other_way_round(rank: int, size: int) -> None:
    grid, line = meshes()
    x, y, z = torch.randn(7, 5), torch.randn(2, 3), torch.tensor(3.0)

    def lie_theirs(x: Tensor, y: Tensor, z: Tensor) -> dict[str, Any]:
        place, shard = theirs.distribute_tensor, theirs.Shard
        return {
            "blocks": place(x, grid, [shard(0), shard(1)]),
            "nested": place(x, grid, [shard(0), shard(0)]),
            "rows": place(x, line, [shard(0)]),
            "few": place(y, line, [shard(0)]),
            "replicated": place(x, grid, [theirs.Replicate(), theirs.Replicate()]),
            "number": place(z, grid, [theirs.Replicate(), theirs.Replicate()]),
            "plain": x,
        }

    def lie_ours(x: Tensor, y: Tensor, z: Tensor) -> dict[str, Any]:
        return {
            "blocks": sw.distribute_tensor(x, line, [S(1)]),
            "nested": sw.distribute_tensor(x, grid, {0: ("tp", "dp")}),
            "rows": ragged(x, line, (0, 5, 0, 2)),
            "few": sw.distribute_tensor(y, grid, [S(1), S(0)]),
            "replicated": sw.distribute_tensor(x, grid, {1: ("tp", "dp")}),
            "number": sw.distribute_tensor(z, line),
            "plain": sw.distribute_tensor(x, grid, [R, S(0)]),
        }

    nothing = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(z)
    right = lie_ours(x, y, z)
    for source, target in ((lie_theirs, lie_ours), (lie_ours, lie_theirs), (lie_ours, lie_ours)):
        with shared_folder() as folder:
            dcp.save(source(x, y, z), checkpoint_id=folder)
            found = target(*nothing)
            dcp.load(found, checkpoint_id=folder)
            check(found, right)


def fully_sharded_models_of_both_kinds(rank: int, size: int) -> None:
    """torch's strided shards (tensor parallel, then fully sharded on the same dim) are nested ones here."""
    grid, line = meshes()

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))

    def of_torch(net: nn.Module) -> nn.Module:
        parallelize_module(net, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return torch.distributed.fsdp.fully_shard(net, mesh=grid["dp"])

    def of_ours(net: nn.Module) -> nn.Module:
        plan = {"0": sw.parallel.ColwiseParallel(), "2": sw.parallel.RowwiseParallel()}
        sw.parallel.parallelize_module(net, grid["tp"], plan)
        return sw.fully_shard(net, mesh=grid["dp"])

    kinds: list[Callable[[nn.Module], nn.Module]] = [of_torch, of_ours, lambda net: sw.fully_shard(net, mesh=line)]
    for source in kinds:
        for target in kinds:
            if {source, target} == {of_torch}:
                continue
            with shared_folder() as folder:
                first, second = source(make(0)), target(make(1))
                optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1 + i) for i, net in enumerate((first, second))]
                for net, optimizer in zip((first, second), optimizers, strict=True):
                    train(net, optimizer, float(net is first))
                state, steps = dcp_state.get_state_dict(first, optimizers[0])
                dcp.save({"model": state, "optimizer": steps}, checkpoint_id=folder)
                right = {name: whole(x) for name, x in state.items()}
                right_steps = flat(steps)
                state, steps = dcp_state.get_state_dict(second, optimizers[1])
                read = {"model": state, "optimizer": steps}
                dcp.load(read, checkpoint_id=folder)
                dcp_state.set_state_dict(
                    second, optimizers[1], model_state_dict=read["model"], optim_state_dict=read["optimizer"]
                )
                check(dict(second.named_parameters()), right)
                check(flat(dcp_state.get_optimizer_state_dict(second, optimizers[1])), right_steps)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        net(torch.full((4, 6), value)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name} {key}": whole(x) for name, kept in state["state"].items() for key, x in kept.items()}


# What is written


def each_element_is_written_once_and_ranks_write_as_much(rank: int, size: int) -> None:
    grid, line = meshes()
    state = {f"norm {i}": sw.distribute_tensor(torch.randn(64, 64), grid, [R, R]) for i in range(12)}
    state |= {f"rows {i}": sw.distribute_tensor(torch.randn(64, 64), grid, [R, S(0)]) for i in range(12)}
    state |= {f"own {i}": sw.distribute_tensor(torch.randn(64, 64), line, [S(1)]) for i in range(3)}
    with shared_folder() as folder:
        dcp.save(state, checkpoint_id=folder)
        metadata = dcp.FileSystemReader(folder).read_metadata()
        for name, found in metadata.state_dict_metadata.items():
            assert flaw(found.size, [(tuple(c.offsets), tuple(c.sizes)) for c in found.chunks]) is None, name
        sizes = [file.stat().st_size for file in folder.glob("*.distcp")]
        assert len(sizes) == size and max(sizes) < 1.25 * min(sizes)


def plans_are_those_of_torchs_own(rank: int, size: int) -> None:
    """Item by item, to save and to load; what is written is the shards themselves, and no copy of them."""
    grid, line = meshes()
    lie = {
        "blocks": (grid, "0 1"),
        "nested": (grid, "0 0"),
        "rows": (line, "1"),
        "few": (grid, "R 0"),
        "all": (grid, "R R"),
    }
    values = {name: torch.randn(3 if name == "few" else 8, 12) for name in lie}

    def plans(kind: Any) -> tuple[Any, Any]:
        state = {}
        for name, (mesh, placements) in lie.items():
            where = [kind.Replicate() if word == "R" else kind.Shard(int(word)) for word in placements.split()]
            state[name] = kind.distribute_tensor(values[name], mesh, where)
        saving, loading = dcp.DefaultSavePlanner(), dcp.DefaultLoadPlanner()
        saving.set_up_planner(state, None, rank == 0)
        local = saving.create_local_plan()
        for item in local.items:
            assert saving.resolve_data(item).data_ptr() == state[item.index.fqn].to_local().data_ptr()
        _, metadata = saving.create_global_plan([local])
        loading.set_up_planner(state, metadata, rank == 0)
        return local.items, loading.create_local_plan().items

    assert plans(sw) == plans(theirs)


def other_planners_and_writers(rank: int, size: int) -> None:
    grid, line = meshes()
    right = torch.arange(60.0).view(10, 6)

    def state(x: Tensor) -> dict[str, Any]:
        return {"nested": sw.distribute_tensor(x, grid, {1: ("tp", "dp")}), "rows": ragged(x, line, (3, 0, 5, 2))}

    with shared_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that are read through torch's buffers
        for again in range(2):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state(right + again), checkpoint_id=folder / str(again), planner=planner)
            found = state(torch.zeros_like(right))
            dcp.load(found, checkpoint_id=folder / str(again))
            check(found, state(right + again))
        files = str(folder / "files")
        dcp.save(state(right), storage_writer=dcp.HuggingFaceStorageWriter(files, save_distributed=True))
        found = state(torch.zeros_like(right))
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(files))
        check(found, state(right))


def a_tensor_of_some_ranks(rank: int, size: int) -> None:
    """Ranks that are not part of a mesh have nothing of its tensors."""
    _, line = meshes()
    pair = theirs.DeviceMesh("cpu", [1, 3])
    state: dict[str, Any] = {"all": sw.distribute_tensor(torch.arange(6.0), line, [S(0)])}
    found: dict[str, Any] = {"all": sw.distribute_tensor(torch.zeros(6), line)}
    if rank in (1, 3):
        state["some"] = sw.distribute_tensor(torch.arange(5.0), pair, [S(0)])
        found["some"] = sw.distribute_tensor(torch.zeros(5), pair)
    with shared_folder() as folder:
        dcp.save(state, checkpoint_id=folder)
        dcp.load(found, checkpoint_id=folder)
    assert all(torch.equal(x.to_local(), torch.arange(float(len(x)))) for x in found.values())


def what_is_pending_is_reduced_on_all_ranks(rank: int, size: int) -> None:
    _, line = meshes()
    pending = sw.DTensor.from_local(torch.full((3,), float(rank)), line, [sw.Partial()])
    with shared_folder() as folder:
        dcp.save({"x": pending}, checkpoint_id=folder)
        found = {"x": torch.zeros(3)}
        dcp.load(found, checkpoint_id=folder)
    assert found["x"].tolist() == [6.0] * 3 and pending.to_local().tolist() == [float(rank)] * 3


def what_does_not_fit_one_rank_raises_on_all(rank: int, size: int) -> None:
    _, line = meshes()
    with shared_folder() as folder:
        dcp.save({"x": sw.distribute_tensor(torch.ones(4), line)}, checkpoint_id=folder)
        found: dict[str, Any] = {"x": sw.distribute_tensor(torch.zeros(4), line, [S(0)])}
        if rank == 2:
            found["y"] = found["x"]
        with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: y"):
            dcp.load(found, checkpoint_id=folder)
        assert not found["x"].to_local().any()


def training_goes_on_while_it_is_saved(rank: int, size: int) -> None:
    grid, line = meshes()
    net = sw.fully_shard(nn.Linear(6, 5), mesh=line)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)

    def step() -> None:
        net(torch.full((2, 6), float(rank))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    group = dist.new_group()  # on Gloo, collectives of both would meet in one
    for how in ("checkpoint_id", "storage_writer"):
        with shared_folder() as folder:
            state = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(net, optimizer), strict=True))
            right = {name: whole(x).clone() for name, x in state["model"].items()}
            where: Any = folder if how == "checkpoint_id" else dcp.FileSystemWriter(folder)
            begun: Any = dcp.async_save(state, process_group=group, **{how: where})
            for _ in range(3):
                step()
            begun.result()
            found = {"model": {name: sw.distribute_tensor(torch.zeros_like(x), grid) for name, x in right.items()}}
            dcp.load(found, checkpoint_id=folder)
            check(found["model"], right)
            assert not torch.equal(whole(net.weight), right["weight"])


# State dicts


def build(mesh: Any, device: str = "cpu", seed: int = 0) -> nn.Module:
    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(sw.distribute_tensor(module.weight, mesh, {0: ("tp", "dp")}))

    torch.manual_seed(seed)
    with torch.device(device):
        net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 5, bias=False))
    if device != "meta":
        net[1].num_batches_tracked += seed
    net = net if mesh is None else sw.distribute_module(net, mesh, shard)
    net[2].weight.requires_grad_(False)
    return net


def stepped(net: nn.Module, mesh: Any = None) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    net(x if mesh is None else sw.distribute_tensor(x, mesh)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def state_dicts_whole_and_back(rank: int, size: int) -> None:
    grid, _ = meshes()
    net, plain = build(grid), build(None)
    full = dcp_state.get_model_state_dict(net, options=Options(full_state_dict=True))
    assert {type(x) for x in full.values()} == {Tensor}
    check(full, plain.state_dict())
    full = dcp_state.get_model_state_dict(net, options=Options(full_state_dict=True, cpu_offload=True))
    check(full, plain.state_dict() if rank == 0 else {})
    trained = dcp_state.get_model_state_dict(net, options=Options(ignore_frozen_params=True))
    assert "2.weight" not in trained and isinstance(trained["0.weight"], sw.DTensor)
    whole_again, broadcast = {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}
    for device, chosen in (
        *(("cpu", {}), ("cpu", whole_again), ("cpu", broadcast), ("cpu", {**broadcast, "cpu_offload": True})),
        *(("meta", whole_again), ("meta", broadcast)),
    ):
        other = build(grid, device, seed=1)
        given = {} if "broadcast_from_rank0" in chosen and rank else plain.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about a function that it calls itself
            assert dcp_state.set_model_state_dict(other, given, options=Options(**chosen)) == ([], [])
        check(other.state_dict(), plain.state_dict())
        assert other[0].weight.layout_on_mesh is net[0].weight.layout_on_mesh and not other[0].weight.is_meta


def state_of_torchs_own_dtensors(rank: int, size: int) -> None:
    """They are gathered, one at a time."""
    grid, line = meshes()
    state = build(None).state_dict()
    lying = {name: theirs.distribute_tensor(x, line, [theirs.Shard(0)]) if x.dim() else x for name, x in state.items()}
    for assign in (False, True):
        net = build(grid, seed=1)
        layouts = {name: x.layout_on_mesh for name, x in net.state_dict().items()}
        net.load_state_dict(lying, assign=assign)
        check(net.state_dict(), state)
        assert {name: x.layout_on_mesh for name, x in net.state_dict().items()} == layouts


def strictness(rank: int, size: int) -> None:
    grid, _ = meshes()
    net, state = build(grid), build(None, seed=1).state_dict()
    extra = {**state, "more": torch.zeros(2)}
    del extra["0.bias"]
    for options in (Options(full_state_dict=True), Options()):
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.bias"|Unexpected key'):
            dcp_state.set_model_state_dict(net, dict(extra), options=options)
    options = Options(strict=False)
    assert dcp_state.set_model_state_dict(net, dict(extra), options=options) == (["0.bias"], ["more"])
    assert torch.equal(whole(net[0].weight), state["0.weight"])


def optimizers_whole_and_back(rank: int, size: int) -> None:
    grid, _ = meshes()
    net, plain = build(grid), build(None)
    ours, right = stepped(net, grid), stepped(plain)
    full = dcp_state.get_optimizer_state_dict(net, ours, options=Options(full_state_dict=True))
    assert {type(x) for kept in full["state"].values() for x in kept.values()} == {Tensor}
    check(flat(full), flat(dcp_state.get_optimizer_state_dict(net, ours)))
    for options in (
        *(Options(full_state_dict=True), Options(full_state_dict=True, broadcast_from_rank0=True)),
        *(Options(flatten_optimizer_state_dict=True), Options()),
    ):
        other = build(grid)
        optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.5)
        given = dcp_state.get_optimizer_state_dict(
            plain, right, options=Options(flatten_optimizer_state_dict=options.flatten_optimizer_state_dict)
        )
        given = {} if options.broadcast_from_rank0 and rank else given
        dcp_state.set_optimizer_state_dict(other, optimizer, given, options=options)
        assert optimizer.param_groups[0]["lr"] == 0.1
        for p, q in zip(optimizer.param_groups[0]["params"], right.param_groups[0]["params"], strict=True):
            for name, x in right.state[q].items():
                found = optimizer.state[p][name]
                assert torch.equal(whole(found), x), name
                assert not x.dim() or found.layout_on_mesh is p.layout_on_mesh, name


# All options at once: what comes back is what does of torch's own fully sharded module

KINDS: dict[str, Callable[..., nn.Module]] = {"torch's": torch.distributed.fsdp.fully_shard, "ours": sw.fully_shard}


def trained(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    _, line = meshes()
    net = KINDS[kind](build(None, seed=seed), mesh=line)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1 + seed)
    chance = torch.Generator().manual_seed(seed)
    distribute = theirs.distribute_tensor if kind == "torch's" else sw.distribute_tensor
    for param in optimizer.param_groups[0]["params"]:
        param.grad = distribute(torch.randn(param.shape, generator=chance), line, param.placements)
    optimizer.step()
    return net, optimizer


def every_option(names: str, **fixed: bool) -> Iterator[Options]:
    for chosen in product((False, True), repeat=len(names.split())):
        yield Options(**fixed, **dict(zip(names.split(), chosen, strict=True)))


def state_dicts_with_every_option(rank: int, size: int) -> None:
    both = {kind: trained(kind, 0) for kind in KINDS}
    for options in every_option("full_state_dict cpu_offload ignore_frozen_params flatten_optimizer_state_dict"):
        found = {kind: facts(dcp_state.get_state_dict(*one, options=options)) for kind, one in both.items()}
        assert found["ours"] == found["torch's"], options


def state_dicts_are_set_with_every_option(rank: int, size: int, full: bool, other_names: bool) -> None:
    sources = {kind: trained(kind, 0) for kind in KINDS}
    names = "cpu_offload flatten_optimizer_state_dict strict"
    if full and not other_names:  # else torch refuses it, or only the first rank finds that names do not fit
        names += " broadcast_from_rank0"
    for options in every_option(names, full_state_dict=full):
        given = Options(full, flatten_optimizer_state_dict=options.flatten_optimizer_state_dict)
        found = {}
        for kind in KINDS:
            model, steps = dcp_state.get_state_dict(*sources[kind], options=given)
            if other_names:
                model = {**model, "more": torch.zeros(2)}
                del model["0.bias"]
            elif options.broadcast_from_rank0 and rank:
                model, steps = tree_map_only(Tensor, torch.zeros_like, (model, steps))
            net, optimizer = trained(kind, 1)
            try:
                left = dcp_state.set_state_dict(
                    net, optimizer, model_state_dict=model, optim_state_dict=steps, options=options
                )
                found[kind] = list(left), facts(dcp_state.get_state_dict(net, optimizer))
            except (RuntimeError, KeyError) as error:  # torch cannot read all that it has flattened
                found[kind] = type(error), str(error).replace("FSDP", "")
        assert found["ours"] == found["torch's"], options
        if not other_names and not options.flatten_optimizer_state_dict:
            assert found["ours"][1] == facts(dcp_state.get_state_dict(*sources["ours"]))


def facts(value: Any) -> Any:
    """What is in nested dicts, tensors as what they are and what they hold."""
    if isinstance(value, dict):
        return {key: facts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [facts(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    return hasattr(value, "placements"), value.device, value.dtype, whole(value).tolist()


EVERY_OPTION = "state dicts are set with every option, {}, {}"
CASES = [
    *(
        Case(function.__name__.replace("_", " "), 4, function)
        for function in chain(
            (what_torch_saved_loads_and_the_other_way_round, fully_sharded_models_of_both_kinds),
            (each_element_is_written_once_and_ranks_write_as_much, a_tensor_of_some_ranks),
            (plans_are_those_of_torchs_own,),
            (what_is_pending_is_reduced_on_all_ranks, what_does_not_fit_one_rank_raises_on_all),
            (training_goes_on_while_it_is_saved, state_dicts_whole_and_back, strictness, optimizers_whole_and_back),
            (other_planners_and_writers, state_of_torchs_own_dtensors, state_dicts_with_every_option),
        )
    ),
    *(
        Case(EVERY_OPTION.format(*chosen), 4, state_dicts_are_set_with_every_option, chosen)
        for chosen in product((False, True), repeat=2)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_ranks(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
