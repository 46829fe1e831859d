"""Meshes: named axes, submeshes, coordinates, identity."""

import copy
import pickle

import pytest
import torch

import shardwise as sw
from shardwise.comm import as_mesh
from shardwise.errors import MeshError


@pytest.fixture
def mesh() -> sw.Mesh:
    return sw.simulate((2, 3), ("dp", "tp"))


def test_facts(mesh: sw.Mesh) -> None:
    assert (mesh.ndim, mesh.shape, mesh.names, mesh.mesh_dim_names) == (2, (2, 3), ("dp", "tp"), ("dp", "tp"))
    assert (mesh.size(), mesh.size(0), mesh.size(-1)) == (6, 2, 3)
    assert repr(mesh) == "Mesh(dp=2, tp=3)"
    assert mesh.held == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert mesh.get_coordinate() == [0, 0]
    assert mesh.get_local_rank("tp") == mesh.get_local_rank(1) == mesh["tp"].get_local_rank() == 0
    assert mesh.device_type == "cpu"
    assert mesh.origin is mesh


def test_names_are_made_up_where_none_are_given() -> None:
    assert sw.simulate((2, 2)).names == ("axis0", "axis1")
    assert sw.simulate((2,), "tp").names == ("tp",)


def test_axis_by_name_and_index(mesh: sw.Mesh) -> None:
    assert [mesh.axis(name) for name in ("dp", "tp", 0, -1)] == [0, 1, 0, 1]


def test_submesh_coordinates_are_those_of_its_axes(mesh: sw.Mesh) -> None:
    tp = mesh["tp"]
    assert (tp.names, tp.shape, tp.root_axes) == (("tp",), (3,), (1,))
    assert tp.held == ((0,), (1,), (2,), (0,), (1,), (2,))


def test_one_object_per_set_of_axes() -> None:
    mesh = sw.simulate((2, 2, 2), ("a", "b", "c"))
    assert mesh["a", "b", "c"] is mesh
    assert mesh["b"] is mesh[("b",)] is mesh[["b"]]
    assert mesh["a", "b"]["b"] is mesh["b", "c"]["b"] is mesh["b"]
    assert mesh["b"]["b"] is mesh["b"]
    assert mesh["a"] is not mesh["b"]
    assert sw.simulate([2, 2, 2], ["a", "b", "c"]) is mesh
    assert sw.simulate((2, 2, 2), ("a", "b", "d")) is not mesh


@pytest.mark.parametrize("make", [sw.simulate, sw.recording])
@pytest.mark.parametrize("keep", [("a", "b", "c"), ("b",), ("a", "c")])
def test_pickle_and_deepcopy_keep_identity(make, keep) -> None:
    mesh = make((2, 1, 2), ("a", "b", "c"))[keep]
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert copy.deepcopy(mesh) is mesh
    assert copy.copy(mesh) is mesh


def test_a_submesh_of_a_submesh_survives_pickle() -> None:
    mesh = sw.simulate((2, 2, 2), ("a", "b", "c"))
    assert pickle.loads(pickle.dumps(mesh["a", "b"]["b"])) is mesh["b"]


def test_tensors_on_a_submesh_reached_in_two_ways_meet() -> None:
    mesh = sw.simulate((2, 2, 2), ("a", "b", "c"))
    x = torch.arange(4.0)
    left = sw.distribute_tensor(x, mesh["a", "b"]["b"], [sw.Shard(0)])
    right = sw.distribute_tensor(x, mesh["b"], [sw.Shard(0)])
    assert torch.equal((left + right).full_tensor(), 2 * x)


@pytest.mark.parametrize("make", [sw.simulate, sw.recording])
@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (2.0,), 4, "ab"])
def test_bad_shape(make, shape) -> None:
    with pytest.raises(MeshError) as error:
        make(shape)
    assert str(error.value) == f"a mesh needs at least one axis, each of at least one rank; got the shape {shape}"


@pytest.mark.parametrize("names", [("dp",), ("dp", "dp"), ("dp", "tp", "pp"), "tp"])
def test_bad_names(names) -> None:
    with pytest.raises(MeshError) as error:
        sw.simulate((2, 2), names)
    shown = (names,) if isinstance(names, str) else names
    assert str(error.value) == f"a mesh of shape (2, 2) needs 2 distinct axis names; got {shown}"


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda m: m["pp"], "unknown mesh axis 'pp': Mesh(dp=2, tp=3) has the axes 'dp', 'tp'"),
        (lambda m: m.axis("pp"), "unknown mesh axis 'pp': Mesh(dp=2, tp=3) has the axes 'dp', 'tp'"),
        (lambda m: m.axis(2), "mesh axis 2 does not exist: Mesh(dp=2, tp=3) has 2"),
        (lambda m: m.axis(-3), "mesh axis -3 does not exist: Mesh(dp=2, tp=3) has 2"),
        (
            lambda m: m["tp", "dp"],
            "a submesh keeps at least one axis, and their order: asked for ('tp', 'dp'), "
            "Mesh(dp=2, tp=3) has ('dp', 'tp')",
        ),
        (
            lambda m: m[()],
            "a submesh keeps at least one axis, and their order: asked for (), Mesh(dp=2, tp=3) has ('dp', 'tp')",
        ),
        (lambda m: m.get_local_rank(), "get_local_rank needs an axis on a mesh of 2 axes: one of ('dp', 'tp')"),
        (
            lambda m: as_mesh([0, 1]),
            "expected a mesh from shardwise.simulate or a torch DeviceMesh, got list",
        ),
    ],
)
def test_errors(mesh: sw.Mesh, use, text) -> None:
    with pytest.raises(MeshError) as error:
        use(mesh)
    assert str(error.value) == text


def test_not_iterable(mesh: sw.Mesh) -> None:
    with pytest.raises(TypeError, match=r"a Mesh is not iterable; its axes are mesh\.names"):
        list(mesh)
