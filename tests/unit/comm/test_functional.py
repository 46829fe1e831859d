"""Programs of one rank that a tracer sees as aten ops on shards with collectives in between."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from saved import fake_mesh
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.checkpoint import checkpoint
from traced import PROGRAMS, R, S, collectives, leaf, on_two_axes, shards, traced

import shardwise as sw
from shardwise.comm.functional import traceable
from shardwise.debug import CommDebugMode
from shardwise.errors import MeshError

RANK, RANKS = 1, 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(RANKS, names=("tp",), rank=RANK) as made:
        yield made


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_has_the_collectives_of_the_schedule_and_nothing_of_ours(name: str, mesh: DeviceMesh) -> None:
    program, expected = PROGRAMS[name]
    graph = make_fx(traced(program, mesh))(*shards(name, RANK, RANKS))
    assert collectives(graph) == expected
    assert not [constant for constant in graph.buffers() if constant.dim()]  # no shard was taken for one
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert {op.namespace for op in called if hasattr(op, "namespace")} <= {"aten", "_c10d_functional"}
    for node in graph.graph.nodes:  # each collective is waited for
        if "c10d" in str(node.target) and "wait" not in str(node.target):
            assert [str(user.target) for user in node.users] == ["_c10d_functional.wait_tensor.default"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_communicates_what_the_program_does(name: str, mesh: DeviceMesh) -> None:
    program, expected = PROGRAMS[name]
    with CommDebugMode() as eager:
        program(mesh)(*shards(name, RANK, RANKS))
    with CommDebugMode() as as_traced:
        traced(program, mesh)(*shards(name, RANK, RANKS))
    assert [c.kind for c in as_traced.comms] == [c.kind for c in eager.comms]
    assert len(eager.comms) == sum(expected.values())


def test_groups_over_several_axes_are_made_while_tracing() -> None:
    with fake_mesh(2, 2, 2, names=("pp", "dp", "tp"), rank=RANK) as mesh:
        graph = make_fx(traced(on_two_axes, mesh["dp", "tp"]))(torch.ones(2, 3))
    assert collectives(graph) == {"all_reduce": 1}
    assert not list(graph.buffers())


def test_a_module_is_traced_with_its_parameters_as_arguments(mesh: DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    places = {"0.weight": S(0), "0.bias": S(0), "2.weight": S(1), "2.bias": R}
    local = {
        name: sw.distribute_tensor(p.detach(), mesh, [places[name]]).to_local() for name, p in module.named_parameters()
    }

    def forward(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        with traceable(mesh) as own:
            laid_out = {name: sw.DTensor.from_local(p, own, [places[name]]) for name, p in parameters.items()}
            return functional_call(module, laid_out, (sw.DTensor.from_local(x, own, [R]),)).full_tensor()

    x = torch.ones(3, 4)
    graph = make_fx(forward)(local, x)
    assert collectives(graph) == {"all_reduce": 1}
    assert torch.equal(graph(local, x), forward(local, x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_knows_the_sizes_of_shards(name: str, mesh: DeviceMesh) -> None:
    """Also of what was written to in place, which is a DTensor when its node is made."""
    program, _ = PROGRAMS[name]
    arguments = shards(name, RANK, RANKS)
    graph = make_fx(traced(program, mesh))(*arguments)
    known = {node: node.meta["val"] for node in graph.graph.nodes if "val" in node.meta}
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        FakeTensorProp(graph, fake).propagate(*arguments)
    for node, before in known.items():
        if isinstance(before, Tensor):
            assert before.shape == node.meta["val"].shape, node.format_node()


def test_dropout_says_that_it_reads_a_seed(mesh: DeviceMesh) -> None:
    def drop(x: Tensor) -> Tensor:
        with traceable(mesh) as own:
            return F.dropout(sw.DTensor.from_local(x, own, [S(0)])).to_local()

    with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
        make_fx(drop)(torch.ones(2, 2))


def test_a_checkpointed_part_is_recomputed_in_the_graph(mesh: DeviceMesh) -> None:
    def step(x: Tensor, up: Tensor, down: Tensor) -> Sequence[Tensor]:
        with traceable(mesh) as own:
            leaves = [leaf(t, own, p) for t, p in ((x, R), (up, S(0)), (down, S(1)))]
            part = checkpoint(lambda x, up, down: F.linear(F.linear(x, up).sin(), down), *leaves, use_reentrant=False)
            part.square().sum().backward()
            return [x.grad.to_local() for x in leaves]

    arguments = torch.randn(3, 4), torch.randn(5, 4), torch.randn(4, 5)
    graph = make_fx(step)(*arguments)
    assert sum(node.target is torch.ops.aten.sin.default for node in graph.graph.nodes) == 2
    assert not list(graph.buffers())
    for found, expected in zip(graph(*arguments), step(*arguments), strict=True):
        assert torch.equal(found, expected)


def test_a_mesh_is_made_once_and_has_its_own_tensors(mesh: DeviceMesh) -> None:
    with traceable(mesh) as own:
        x = sw.DTensor.from_local(torch.ones(2), placements=[S(0)])  # on the mesh of the block
    with traceable(mesh) as again:
        assert again is own
    assert x.device_mesh is own
    assert torch.equal(pickle.loads(pickle.dumps(x)).to_local(), x.to_local())
    with pytest.raises(MeshError, match="mixes tensors"):
        x + sw.DTensor.from_local(torch.ones(2), mesh, [S(0)])


def test_a_simulated_mesh_has_no_program_of_one_rank() -> None:
    with pytest.raises(MeshError, match="only the program of a real rank can be traced"), traceable(sw.simulate((2,))):
        pass
