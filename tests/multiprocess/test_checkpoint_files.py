"""What only processes can show of files: who reads and writes how much, and that what goes wrong on one rank goes wrong
on all, so that they go on together."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from launch import Case
from shardwise import checkpoint
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.writers import parts_of
from shardwise.errors import CheckpointError, CheckpointFileError, CheckpointWarning, DamagedFileError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

R, S = sw.Replicate(), sw.Shard
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.ones(3))


def plain(width: int = 64, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(width)


@functools.cache
def grid() -> DeviceMesh:
    """Made once: threads of each of Gloo's groups never rest."""
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def place(net: nn.Module, mesh: Any, *placements: sw.Placement) -> Any:
    def lay(name: str, part: nn.Module, mesh: Any) -> None:
        for key, x in list(part._parameters.items()):
            if x is not None and x.dim() > 1:
                part._parameters[key] = nn.Parameter(sw.distribute_tensor(x.detach(), mesh, list(placements)))

    return sw.distribute_module(net, mesh, lay)


def styles(net: nn.Module, mesh: Any) -> Any:
    """Beside plain parameters, which every rank has."""
    return parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fully(net: nn.Module, mesh: Any) -> Any:
    return fully_shard(styles(net, mesh), mesh=mesh["dp"])


WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "rows": lambda net, mesh: place(net, mesh, S(0), S(0)),
    "columns": lambda net, mesh: place(net, mesh, R, S(1)),
    "both": lambda net, mesh: place(net, mesh, S(1), S(0)),
    "replicated": lambda net, mesh: place(net, mesh, R, R),
    "styles": styles,
    "fully sharded": fully,
    "plain": lambda net, mesh: net,
    "simulated": lambda net, mesh: place(net, sw.simulate((3,), ("x",)), S(0)),  # each process plays all ranks
}


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """The same for all ranks."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    yield Path(folder[0])
    dist.barrier()
    if rank == 0:
        subprocess.run(["rm", "-r", folder[0]], check=True)


def check_equal(found: nn.Module, expected: nn.Module) -> None:
    state = found.state_dict()
    for name, x in expected.state_dict().items():
        value = state[name]
        assert torch.equal(value.full_tensor() if isinstance(value, sw.DTensor) else value, x), name


def num_local_bytes(net: nn.Module) -> int:
    shards = [x.to_local() if isinstance(x, sw.DTensor) else x for x in net.state_dict().values()]
    return sum(x.numel() * x.element_size() for x in shards)


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# Who reads and writes how much


def reading(rank: int, size: int, way: str) -> None:
    expected, net = plain(seed=1), WAYS[way](plain(), grid())
    with shared_folder(rank) as folder:
        if rank == 0:
            save_file(expected.state_dict(), folder / "x.safetensors")
        dist.barrier()
        loaded = checkpoint.load(net, folder)
        check_equal(net, expected)
        assert loaded.num_bytes <= 1.05 * num_local_bytes(net)


def writing(rank: int, size: int, way: str) -> None:
    """Every element once, by all ranks alike."""
    mesh, expected = grid(), plain(seed=1)
    net = WAYS[way](plain(seed=1), mesh)
    parts, _ = parts_of({name: x.detach() for name, x in net.state_dict().items()}, Ranks())
    shares = everywhere(sum(part.data.numel() * part.data.element_size() for part in parts))
    assert sum(shares) == sum(x.numel() * x.element_size() for x in expected.state_dict().values())
    whole = way in ("plain", "replicated", "simulated")  # of two matrices, not to be cut, two ranks write one each
    assert max(shares) <= (0.52 if whole else 0.3) * sum(shares)
    with shared_folder(rank) as folder:
        checkpoint.save(net, folder / "one.safetensors")
        checkpoint.save(net, folder / "set", max_shard_size="40KB")
        assert all(torch.equal(x, expected.state_dict()[k]) for k, x in load_file(folder / "one.safetensors").items())
        other = WAYS["rows"](plain(), mesh)
        checkpoint.load(other, folder / "set", verify=True)
        check_equal(other, expected)


# Steps


def resumed(rank: int, size: int, way: str) -> None:
    """On the same ranks, with other layouts, and by two of them."""
    mesh, expected = grid(), plain(seed=1)
    net = WAYS[way](plain(seed=1), mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.optim.AdamW(expected.parameters()).step()
    reference = torch.optim.AdamW(expected.parameters())
    for param in expected.parameters():
        param.grad = torch.ones_like(param)
    reference.step()
    with shared_folder(rank) as folder:
        checkpoint.save_step(folder, step=1, model=net, optimizer=optimizer, data={"rank": rank}).wait()
        for other in random.Random(way).sample(sorted(WAYS), 2):
            net = WAYS[other](plain(), mesh)
            optimizer, data = torch.optim.AdamW(net.parameters()), {}
            assert checkpoint.load_latest(folder, model=net, optimizer=optimizer, data=data) == 1
            check_equal(net, expected)
            check_state(optimizer, reference)
            assert data == {"rank": rank}
        pair, line = dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
        if rank < 2:
            net = place(plain(), line, S(0))
            optimizer = torch.optim.AdamW(net.parameters())
            checkpoint.load_latest(folder, model=net, optimizer=optimizer, process_group=pair)
            check_equal(net, expected)
            check_state(optimizer, reference)
            with pytest.raises(
                CheckpointError, match="'data' was not the same on the 4 ranks that saved it, and there"
            ):
                checkpoint.load_latest(folder, model=net, data={}, process_group=pair)
            checkpoint.save_step(folder / "pair", step=2, model=net, process_group=pair).wait()
            assert checkpoint.load_latest(folder / "pair", model=net, process_group=pair) == 2
        else:
            with pytest.raises(
                CheckpointError, match=f"rank {rank} is not in the process group that it saves or loads with"
            ):
                checkpoint.load_latest(folder, model=net, process_group=pair)


def check_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    pairs = zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True)
    for p, q in pairs:
        for name, value in expected.state[q].items():
            kept = found.state[p][name]
            assert torch.equal(kept.full_tensor() if isinstance(kept, sw.DTensor) else kept, value), name


def ranks_with_other_tensors(rank: int, size: int) -> None:
    """As stages of a pipeline have; some have what others have too."""
    halves = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))
    stage = halves.get_local_rank("stage")

    def made(seed: int) -> nn.Module:
        net = nn.Module()
        torch.manual_seed(seed)
        whole = {"first": torch.randn(6, 4), "second": torch.randn(6, 4), "shared": torch.randn(4, 4)}
        for name in (("first", "second")[stage], "shared"):
            net.register_parameter(name, nn.Parameter(sw.distribute_tensor(whole[name], halves["tp"], [S(0)])))
        return net

    net = made(1)
    with shared_folder(rank) as folder:
        checkpoint.save(net, folder / "x.safetensors")
        assert [*load_file(folder / "x.safetensors")] == ["first", "shared", "second"]
        other = made(2)
        checkpoint.load(other, folder, verify=True)
        for name, x in net.named_parameters():
            assert torch.equal(dict(other.named_parameters())[name].full_tensor(), x.full_tensor())
        checkpoint.save_step(folder, step=1, model=net, background=False)
        index = json.loads((folder / "step-00000001" / "index.json").read_text())
        assert len(index["tensors"]["model.shared"]["boxes"]) == 2
        checkpoint.load_latest(folder, model=made(3))


def wrapped_for_data_parallelism(rank: int, size: int) -> None:
    """The names are those of what is wrapped, and each rank writes a part."""
    net = DistributedDataParallel(plain(seed=1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.module.up(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    with shared_folder(rank) as folder:
        checkpoint.save_step(folder, step=1, model=net, optimizer=optimizer).wait()
        assert len(list((folder / "step-00000001").glob("rank-*.safetensors"))) == size
        other = plain()
        found = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
        checkpoint.load_latest(folder, model=other, optimizer=found)
        check_equal(other, net.module)
        check_state(found, optimizer)


# What goes wrong on one rank


def one_rank_cannot(rank: int, size: int) -> None:
    """All raise, nothing is changed, nothing is left, and the next save and load go well."""
    mesh, expected = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), plain(seed=1)
    net = place(plain(seed=1), mesh, S(0))
    with shared_folder(rank) as folder:
        checkpoint.save_step(folder / "steps", step=1, model=net, background=False)
        checkpoint.save(net, folder / "model")
        original = os.pwrite
        if rank == 1:
            os.pwrite = _full
        try:
            for save in (
                lambda: checkpoint.save_step(folder / "steps", step=2, model=net).wait(),
                lambda: checkpoint.save_step(folder / "steps", step=2, model=net, background=False),
                lambda: checkpoint.save(net, folder / "model"),
            ):
                with pytest.raises(CheckpointFileError, match="No space left on device") as error:
                    save()
                assert error.value.errno == errno.ENOSPC
        finally:
            os.pwrite = original
        dist.barrier()  # the first rank removes what is left
        assert sorted(os.listdir(folder / "steps")) == ["step-00000001"]
        assert os.listdir(folder / "model") == ["model.safetensors"]
        other = place(plain(), mesh, S(0))
        for load in (
            lambda: checkpoint.load(other, folder / ("model" if rank else "nowhere")),
            lambda: checkpoint.load_latest(
                folder / "steps", model=other if rank else expected, note={} if rank else other
            ),
            lambda: checkpoint.load(other, folder / "model", keys={"up.weight": None} if rank else {"nobody": "x"}),
        ):
            with pytest.raises(CheckpointError if rank else (CheckpointError, ValueError)):
                load()
        check_equal(other, plain())
        checkpoint.save_step(folder / "steps", step=2, model=net, keep=1).wait()
        checkpoint.load(other, folder / "model", verify=True)
        check_equal(other, expected)
        other = place(plain(), mesh, S(0))
        assert checkpoint.load_latest(folder / "steps", model=other) == 2
        check_equal(other, expected)
        assert os.listdir(folder / "steps") == ["step-00000002"]


def ranks_that_do_not_do_the_same(rank: int, size: int) -> None:
    """All raise, and none waits for the others."""
    net = place(plain(seed=1), sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), S(0))
    save, step, load = checkpoint.save, checkpoint.save_step, checkpoint.load_latest
    with shared_folder(rank) as folder:
        run, own = folder / "run", folder / f"of {rank}"
        step(run, step=0, model=net, background=False)
        words = "do not do the same: rank 0 is .*, and rank 1 is "
        for call in (
            lambda: step(run, step=1 + rank, model=net),
            lambda: step(own, step=1, model=net),
            lambda: save(net, own),
            lambda: load(own, model=net),
            lambda: save(net, run) if rank else load(run, model=net),
        ):
            with pytest.raises(CheckpointError, match=words):
                call()
        other = net if rank else nn.Linear(3, 3)
        for call in (lambda: save(other, folder / "x"), lambda: step(run, step=1, model=other).wait()):
            with pytest.raises(
                CheckpointError, match=r"do not have all of '(model\.)?(up|down).weight': call it on all"
            ):
                call()
        dist.barrier()  # the first rank removes what is left
        assert sorted(os.listdir(folder)) == ["run"] and sorted(os.listdir(run)) == ["step-00000000"]


def a_rank_with_more_than_the_others(rank: int, size: int) -> None:
    """What they hold together they save together."""
    expected, mesh = plain(seed=1), sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    net, own = place(plain(seed=1), mesh, S(0)), torch.arange(20_000.0)  # a tensor to be saved, and not as JSON
    more: dict[str, Any] = {"own": {"x": own}} if rank == 1 else {}
    with shared_folder(rank) as folder:
        checkpoint.save_step(folder, step=1, model=net, **more).wait()
        other = place(plain(), mesh, S(0))
        found: dict[str, Any] = {"own": {}} if rank == 1 else {}
        assert checkpoint.load_latest(folder, model=other, **found) == 1
        check_equal(other, expected)
        assert rank != 1 or torch.equal(found["own"]["x"], own)


def ranks_with_other_options(rank: int, size: int) -> None:
    """None waits for another."""
    net = place(plain(seed=1), sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), S(0))
    other = place(plain(), net.up.weight.device_mesh, S(0))
    with shared_folder(rank) as folder:
        checkpoint.save_step(folder / "run", step=1, model=net, background=rank == 0).wait()
        with pytest.raises(
            CheckpointError, match=r"do not do the same: rank 0 is .* with keep=1, and rank 1 is .*keep=2"
        ):
            checkpoint.save_step(folder / "run", step=2, model=net, keep=1 + rank)
        checkpoint.save(net, folder / "model", max_shard_size=20_000 + rank)
        for strict, verify in ((True, rank == 0), (rank == 0, True), (rank == 1, False)):
            checkpoint.load(other, folder / "model", strict=strict, verify=verify)
        assert checkpoint.load_latest(folder / "run", model=other, verify=rank == 0, random=rank == 1) == 1
        check_equal(other, plain(seed=1))


def whatever_device_tensors_are_made_on(rank: int, size: int) -> None:
    net = place(plain(seed=1), sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), S(0))
    with shared_folder(rank) as folder:
        with torch.device("meta"):
            checkpoint.save_step(folder / "run", step=1, model=net).wait()
            checkpoint.save(net, folder / "model")
        other = place(plain(), net.up.weight.device_mesh, S(1))
        with torch.device("meta"):
            assert checkpoint.load_latest(folder / "run", model=other) == 1
            checkpoint.load(other, folder / "model", verify=True)
        check_equal(other, plain(seed=1))


def ranks_with_other_numbers_under_one_name(rank: int, size: int) -> None:
    """Of a plain tensor one would be kept, so they are refused; under a name of its own each rank's is kept."""
    order = torch.randperm(20_000, generator=torch.Generator().manual_seed(rank))
    shared, own = torch.arange(20_000), {f"order of {rank}": order, "epoch": 3}
    with shared_folder(rank) as folder:
        with pytest.raises(
            CheckpointError, match=r"'data\.order' is not the same on all ranks, and one of them would be"
        ):
            checkpoint.save_step(folder, step=1, data={"order": order, "shared": shared})
        assert not os.listdir(folder)
        checkpoint.save_step(folder, step=1, own=own, data={"shared": shared}).wait()
        found: dict[str, Any] = {}
        checkpoint.load_latest(folder, own=found, data={})
        assert found.keys() == own.keys() and torch.equal(found[f"order of {rank}"], order)


def _full(*args: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def one_rank_finds_damage(rank: int, size: int) -> None:
    """Each looks at a part of the data; what one finds all know of."""
    mesh, expected = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), plain(seed=1)
    net = place(plain(seed=1), mesh, S(0))
    with shared_folder(rank) as folder:
        checkpoint.save_step(folder, step=1, model=net, background=False)
        checkpoint.save_step(folder, step=2, model=place(plain(seed=5), mesh, S(0)), background=False)
        checkpoint.save(net, folder / "model")
        if rank == 0:
            for path in (folder / "step-00000002" / "rank-00001.safetensors", folder / "model" / "model.safetensors"):
                content = bytearray(path.read_bytes())
                content[-9] ^= 64
                path.write_bytes(content)
        dist.barrier()
        other = place(plain(), mesh, S(0))
        with pytest.raises(CheckpointError, match="the data have changed since they were written"):
            checkpoint.load(other, folder / "model", verify=True)
        with pytest.raises(DamagedFileError, match="the data have changed since they were written"):
            checkpoint.load_step(folder / "step-00000002", model=other)
        check_equal(other, plain())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert checkpoint.load_latest(folder, model=other) == 1
        assert [type(one.message) for one in said] == [CheckpointWarning]
        check_equal(other, expected)


def experts_of_transformers(rank: int, size: int) -> None:
    """One tensor in memory, many in files: no rank has any but its own, and nothing is communicated for them."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, vocab_size=32, num_hidden_layers=2, num_local_experts=5)

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return transformers.MixtralForCausalLM(config)

    def sharded(model: Any) -> Any:
        mesh = grid()
        parallelize_module(model, mesh["tp"], model._tp_plan)
        fully_shard(model.model, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    model = sharded(make(0))
    with shared_folder(rank) as folder:
        with sw.debug.CommDebugMode() as comms:
            checkpoint.save_pretrained(model, folder, max_shard_size="12KB")
        assert not comms.comms
        dist.barrier()
        check_equal(transformers.MixtralForCausalLM.from_pretrained(folder), make(0))
        other = sharded(make(1))
        checkpoint.load_pretrained(other, folder, verify=True)
        check_equal(other, make(0))


def ranks_find_different_files(rank: int, size: int) -> None:
    net = place(plain(), sw.init_device_mesh("cpu", (size,)), S(0))
    with tempfile.TemporaryDirectory() as folder:
        state = plain().state_dict()
        save_file(state | ({"more": torch.ones(1)} if rank else {}), Path(folder, "x.safetensors"))
        with pytest.raises(CheckpointError, match="ranks find different files at "):
            checkpoint.load(net, folder)
    check_equal(net, plain())


def ranks_in_different_numbers_of_groups(rank: int, size: int) -> None:
    """torch has the members of a group that only they make look for one another under names that these numbers are
    part of."""
    others = [dist.new_group(ranks) for ranks in ([0], [0], [0, 1], [1, 2])]  # rank 0 is in three, rank 1 in two
    pair = dist.new_group([0, 1])
    three = sw.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with shared_folder(rank) as folder:
        for again in range(2):
            if rank < 2:
                net = plain(seed=again)
                checkpoint.save_step(folder, step=again, model=net, process_group=pair).wait()
                found = plain(seed=9)
                assert checkpoint.load_latest(folder, model=found, process_group=pair) == again
                check_equal(found, net)
            if again == 0:
                x = sw.DTensor.from_local(torch.ones(2), three, [R, sw.Partial(), sw.Partial()])
                assert x.full_tensor().tolist() == [2.0, 2.0]  # over two axes at once
    assert others


def groups_are_destroyed_while_a_step_is_saved(rank: int, size: int) -> None:
    """The step is complete first."""
    script = f"""
import os, sys, tempfile, torch, torch.distributed as dist
import shardwise as sw
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", {size}), rank={rank}, world_size={size})
mesh = sw.init_device_mesh("cpu", ({size},))
net = torch.nn.Linear(300, 300)
net.weight = torch.nn.Parameter(sw.distribute_tensor(net.weight.detach(), mesh, [sw.Shard(0)]))
sw.checkpoint.save_step(sys.argv[1] + "/steps", step=1, model=net)
dist.destroy_process_group()
print(os.listdir(sys.argv[1] + "/steps"))
"""
    with shared_folder(rank) as folder:
        command = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert done.returncode == 0 and done.stdout == "['step-00000001']\n" and not done.stderr, done


CASES = [
    *(Case(f"reading, {way}", 4, reading, (way,)) for way in WAYS if way != "simulated"),
    *(Case(f"{body.__name__}, {way}", 4, body, (way,)) for body in (writing, resumed) for way in WAYS),
    Case("ranks with other tensors", 4, ranks_with_other_tensors),
    *([Case("experts of transformers", 4, experts_of_transformers)] if find_spec("transformers") else []),
    Case("ranks in different numbers of groups", 4, ranks_in_different_numbers_of_groups),
    *(
        Case(body.__name__, 2, body)
        for body in (
            *(one_rank_cannot, one_rank_finds_damage, ranks_find_different_files, wrapped_for_data_parallelism),
            *(groups_are_destroyed_while_a_step_is_saved, ranks_that_do_not_do_the_same),
            *(a_rank_with_more_than_the_others, ranks_with_other_numbers_under_one_name),
            *(whatever_device_tensors_are_made_on, ranks_with_other_options),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_processes(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_faults() -> None:
    """A few of the two hundred of `make faults`; another seed."""
    program = Path(__file__).parents[2] / "benchmarks" / "checkpoint_faults.py"
    command = [sys.executable, str(program), "--runs", "12", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 12 |" in done.stdout
