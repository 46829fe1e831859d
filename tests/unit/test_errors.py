"""Bad input: typed errors, their text word for word, and nothing left half done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, errors
from shardwise.comm import ranked

MESH = sw.simulate((2, 2), ("dp", "tp"))
LINE = sw.simulate((4,), ("tp",))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def ones(*placements: sw.Placement) -> DTensor:
    return sw.ones(4, 4, device_mesh=MESH, placements=placements)


def shards(*shapes: tuple[int, ...]) -> torch.Tensor:
    return ranked([torch.ones(shape) for shape in shapes])


CASES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: ones(Shard(2), R),
        errors.PlacementError,
        "S(2) names dim 2, but the tensor has 2 dims: [4, 4]",
    ),
    (
        lambda: ones(S0, R).redistribute(placements=[Shard(-3), R]),
        errors.PlacementError,
        "S(-3) names dim -3, but the tensor has 2 dims: [4, 4]",
    ),
    (
        lambda: ones(S0),
        errors.PlacementError,
        "Mesh(dp=2, tp=2) has 2 axes, so it takes 2 placements; got [S(0)]",
    ),
    (
        lambda: ones(S0, "tp"),
        errors.PlacementError,
        "expected Replicate(), Shard(dim) or Partial(op), got 'tp'",
    ),
    (
        lambda: ones(S0, R).redistribute(),
        errors.PlacementError,
        "redistribute needs the placements to go to",
    ),
    (
        lambda: Partial("mean"),
        errors.PlacementError,
        "Partial('mean'): the reduction must be one of sum, avg, max, min, product, norm",
    ),
    (
        lambda: MESH["pp"],
        errors.MeshError,
        "unknown mesh axis 'pp': Mesh(dp=2, tp=2) has the axes 'dp', 'tp'",
    ),
    (
        lambda: ones(S0, R) + sw.ones(4, 4, device_mesh=LINE, placements=[R]),
        errors.MeshError,
        "torch.Tensor.add(self: f32[4,4] S(0)@dp, other: f32[4,4] R) mixes tensors on Mesh(dp=2, tp=2) and on "
        "Mesh(tp=4); bring them to one mesh first (full_tensor() and distribute_tensor)",
    ),
    (
        lambda: F.linear(ones(S0, R), sw.ones(2, 4, device_mesh=MESH["tp"], placements=[S0])),
        errors.MeshError,
        "torch.nn.functional.linear(input: f32[4,4] S(0)@dp, weight: f32[2,4] S(0)@tp) mixes tensors on "
        "Mesh(dp=2, tp=2) and on Mesh(tp=2), which are parts of one mesh. Put the whole module on Mesh(dp=2, tp=2): "
        "distribute_module(model, mesh), also after parallelize_module, replicates parameters along the axes that they "
        "are not on yet, and module styles get use_local_output=False, since a plain tensor is a part along a style's "
        "own axis alone. (A single tensor gets there by full_tensor() and distribute_tensor)",
    ),
    (
        lambda: ones(S0, R).redistribute(LINE, [R]),
        errors.MeshError,
        "redistribute stays on the tensor's mesh Mesh(dp=2, tp=2); it cannot move to Mesh(tp=4)",
    ),
    (
        lambda: sw.distribute_tensor(ones(S0, R), LINE, [R]),
        errors.MeshError,
        "the tensor is already on Mesh(dp=2, tp=2), not on Mesh(tp=4); use full_tensor() first",
    ),
    (
        lambda: sw.zeros(2, device_mesh="cpu"),
        errors.MeshError,
        "expected a mesh from shardwise.simulate or a torch DeviceMesh, got str",
    ),
    (
        lambda: DTensor.from_local(shards((2, 3), (2, 3), (2, 4), (2, 3)), LINE, [S0], run_check=True),
        errors.ShardShapeError,
        "the shard at tp=2 has shape [2, 4], but [8,3] S(0)@tp wants [2, 3] there",
    ),
    (
        lambda: DTensor.from_local(shards((2, 3), (2, 3), (2, 3), (2, 3)), LINE, [S0], shape=(7, 3), stride=(3, 1)),
        errors.ShardShapeError,
        "the shard at tp=3 has shape [2, 3], but [7,3] S(0)@tp wants [1, 3] there",
    ),
    (
        lambda: DTensor.from_local(torch.ones(2, 3), LINE, [S0], shape=(8,)),
        errors.ShardShapeError,
        "shape=[8] has 1 dims, the shard has 2",
    ),
    (
        lambda: DTensor.from_local(
            ranked([torch.full((2,), float(n)) for n in range(4)]), MESH, [S0, R], run_check=True
        ),
        errors.ReplicaError,
        "from_local: [4] S(0)@dp says that the ranks along 'tp' hold the same values, but they differ; use Shard or "
        "Partial there, or make them equal first",
    ),
    (
        lambda: DTensor.from_local(ones(S0, R), MESH, [S0, R]),
        TypeError,
        "from_local takes a plain tensor; this already is a DTensor (redistribute changes its placements)",
    ),
    (
        lambda: ones(S0, R) + torch.ones(4),
        errors.MixedTensorError,
        "torch.Tensor.add(self: DTensor f32[4,4] S(0)@dp, other: plain f32[4]): argument 'other' is a plain "
        "torch.Tensor, and its layout on the mesh is unknown. Make it a DTensor with "
        "shardwise.distribute_tensor(tensor, mesh, placements), or, if every rank holds the same values, run the call "
        "inside shardwise.experimental.implicit_replication()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=[text[:40] for _, _, text in CASES])
def test_bad_input(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    before = sw.cache_info().size
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == text
    assert isinstance(error.value, errors.ShardwiseError) or kind is TypeError
    again = sw.cache_info().size
    with pytest.raises(kind):
        call()
    assert sw.cache_info().size == again, f"a refused call leaves no plan behind ({before})"


def test_replicas_that_differ_are_taken_at_their_word_without_a_check() -> None:
    d = DTensor.from_local(ranked([torch.full((2,), float(n)) for n in range(4)]), LINE, [R])
    assert d.tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested", "ignore:Sparse CSR tensor support", "ignore:.*on these shards"
)
def test_sparse_and_nested_tensors_have_no_shards() -> None:
    mesh = sw.simulate((2,), ("tp",))
    dense = sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    makers = {
        "sparse coo": lambda: sw.distribute_tensor(torch.eye(4).to_sparse(), mesh, [sw.Shard(0)]),
        "sparse csr": lambda: sw.DTensor.from_local(torch.eye(4).to_sparse_csr(), mesh, [sw.Shard(0)]),
        "nested": lambda: sw.distribute_tensor(nested, mesh),
    }
    for kind, make in [*makers.items(), ("sparse coo", dense.to_sparse)]:
        with pytest.raises(sw.errors.PlacementError) as error:
            make()
        assert str(error.value) == (
            f"a {kind} tensor cannot be a DTensor: only dense tensors have shards; convert it first (to_dense(), "
            f"to_padded_tensor()), or keep it a plain tensor"
        )
