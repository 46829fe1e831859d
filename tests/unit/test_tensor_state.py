"""DTensors as the state of modules: parameters, conversion, state dicts, copies, pickles, files."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from pathlib import Path

import pytest
import torch
from compare import check_shards
from meshes import data
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm import ranked

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))


def linear(placements: tuple = (S0, S1)) -> tuple[nn.Linear, nn.Linear]:
    """A plain layer, and its equal with a sharded weight."""
    plain = nn.Linear(4, 6, dtype=torch.float64)
    sharded = copy.deepcopy(plain)
    sharded.weight = nn.Parameter(sw.distribute_tensor(sharded.weight, MESH, placements))
    return plain, sw.distribute_module(sharded, MESH)


@pytest.mark.parametrize("placements", PAIRS, ids=str)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_is_the_tensor(placements: tuple, requires_grad: bool) -> None:
    d = sw.distribute_tensor(data(6, 4), MESH, placements)
    p = nn.Parameter(d, requires_grad=requires_grad)
    assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)
    assert p.placements == placements and p.requires_grad is requires_grad and p.is_leaf
    with torch.no_grad():
        p.zero_()
    assert not d.full_tensor().any(), "a parameter shares its tensor's storage"


@pytest.mark.parametrize("convert", ["half", "float", "bfloat16", "cpu", "to", "to_empty"])
def test_module_conversion(convert: str) -> None:
    plain, layer = linear()
    weight = layer.weight
    match convert:
        case "to":
            layer.to(dtype=torch.float32, device="cpu")
            plain.to(torch.float32)
        case "to_empty":
            layer.to_empty(device="cpu")
            assert layer.weight.shape == (6, 4)
            return
        case _:
            getattr(layer, convert)()
            getattr(plain, convert)()
    assert layer.weight is weight and isinstance(layer.weight, nn.Parameter)
    check_shards(layer.weight)
    assert layer.weight.dtype == plain.weight.dtype and layer.weight.placements == (S0, S1)
    assert all(peer.dtype == plain.weight.dtype for peer in layer.weight._peers)
    assert torch.equal(layer.weight.full_tensor(), plain.weight)


def test_apply_and_requires_grad() -> None:
    _, layer = linear()
    seen = []
    layer.apply(lambda m: seen.append(m.weight))
    assert seen == [layer.weight]
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad and not any(x.requires_grad for x in layer.weight._peers)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_goes_into_other_placements(assign: bool) -> None:
    plain, layer = linear((S0, S1))
    _, other = linear((S1, R))
    assert other.load_state_dict(layer.state_dict(), assign=assign).missing_keys == []
    assert torch.equal(other.weight.full_tensor(), plain.weight)
    assert other.weight.placements == ((S0, S1) if assign else (S1, R))
    assert isinstance(other.weight, nn.Parameter)


@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_deepcopy(placements: tuple, parameter: bool) -> None:
    """As in torch, a parameter's copy has no gradient; another leaf's has a copy of it."""
    x = data(6, 4)
    p = sw.distribute_tensor(x, MESH, placements).requires_grad_()
    p = nn.Parameter(p) if parameter else p
    (p * p).sum().backward()
    twin, again = copy.deepcopy([p, p])
    assert twin is again and isinstance(twin, nn.Parameter) is parameter and twin.placements == placements
    check_shards(twin)
    if parameter:
        assert twin.grad is None
    else:
        assert torch.equal(twin.grad.full_tensor(), p.grad.full_tensor())
    with torch.no_grad():
        twin.zero_()
        if not parameter:
            twin.grad.zero_()
    torch.testing.assert_close(p.full_tensor(), x, atol=0, rtol=0)
    assert p.grad.full_tensor().any()


def test_deepcopy_is_for_leaves() -> None:
    d = sw.distribute_tensor(data(4, 4), MESH, [S0, R]).requires_grad_()
    with pytest.raises(RuntimeError, match=r"leaves of the graph can be deep-copied; detach\(\) it first"):
        copy.deepcopy(d * 2)


def tensors_to_keep() -> dict[str, DTensor]:
    kept = {str(p): sw.distribute_tensor(data(5, 3), MESH, p) for p in PAIRS}
    kept["norm"] = DTensor.from_local(data(3), MESH, [Partial("norm", 2.0), R])
    kept["uneven"] = DTensor.from_local(ranked([data(n, 2) for n in (3, 1, 4, 1)]), MESH, {0: ("tp", "dp")})
    kept["submesh"] = sw.distribute_tensor(data(4, 4), MESH["tp"], [S1])
    kept["parameter"] = nn.Parameter(sw.distribute_tensor(data(4, 4), MESH, [S0, S1]))
    return kept


@pytest.mark.parametrize("how", ["pickle", "torch.save", "weights_only"])
def test_files(how: str) -> None:
    kept = tensors_to_keep()
    where = (S0, S1, R, Partial(), Partial("norm", 3.0))  # placements are kept as they are, too
    if how == "pickle":
        back, placements = pickle.loads(pickle.dumps((kept, where)))
    else:
        file = io.BytesIO()
        torch.save((kept, where), file)
        file.seek(0)
        back, placements = torch.load(file, weights_only=how == "weights_only")
    assert placements == where
    for name, x in kept.items():
        y = back[name]
        assert y._layout is x._layout, name
        assert type(y) is DTensor and isinstance(y, nn.Parameter) == isinstance(x, nn.Parameter), name
        assert y.requires_grad == x.requires_grad
        check_shards(y)
        assert torch.equal(y.detach().full_tensor(), x.detach().full_tensor()), name


def test_a_saved_state_dict_loads() -> None:
    plain, layer = linear()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    _, other = linear()
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.weight.full_tensor(), plain.weight)


def test_data_can_be_read_and_set() -> None:
    x, y = data(4, 4), data(4, 4)
    p = nn.Parameter(sw.distribute_tensor(x, MESH, [S0, R]))
    p.data.mul_(2)
    assert torch.equal(p.full_tensor(), 2 * x)
    p.data = sw.distribute_tensor(y, MESH, [R, S1])
    check_shards(p)
    assert p.placements == (R, S1) and torch.equal(p.full_tensor(), y) and p.requires_grad
    with pytest.raises(sw.errors.MixedTensorError, match="data of a DTensor must be set to a DTensor"):
        p.data = y


def test_data_of_another_layout_keep_the_gradient_if_it_fits() -> None:
    p = nn.Parameter(sw.distribute_tensor(data(4, 6), MESH, [S0, R]))
    (p * 2).sum().backward()
    p.data = sw.distribute_tensor(data(4, 6), MESH, [R, S1])
    assert p.grad is not None and p.grad.placements == (R, S1)
    assert torch.equal(p.grad.full_tensor(), torch.full((4, 6), 2.0, dtype=torch.float64))
    p.data = sw.distribute_tensor(data(2, 3), MESH, [R, S1])
    assert p.grad is None


def test_a_gradient_can_be_set_and_takes_its_tensors_layout() -> None:
    g = data(4, 4)
    p = nn.Parameter(sw.distribute_tensor(data(4, 4), MESH, [S0, R]))
    p.grad = sw.distribute_tensor(g, MESH, [R, S1])
    check_shards(p.grad)
    assert p.grad.placements == (S0, R) and torch.equal(p.grad.full_tensor(), g) and p.grad is p.grad
    with pytest.raises(sw.errors.MixedTensorError, match="grad must be a DTensor like the tensor it belongs to"):
        p.grad = g
    with pytest.raises(sw.errors.ShardShapeError, match=r"grad has shape \[2, 4\], the tensor it belongs to \[4, 4\]"):
        p.grad = sw.zeros(2, 4, device_mesh=MESH, dtype=torch.float64)
    assert torch.equal(p.grad.full_tensor(), g), "a refused gradient changes nothing"
    del p.grad
    assert p.grad is None and all(x.grad is None for x in p._peers)


def test_a_parameter_saved_inside_no_sync_is_loaded_with_weights_only() -> None:
    weight = nn.Parameter(sw.distribute_tensor(data(4, 4), MESH, [R, R]))
    x = sw.distribute_tensor(data(8, 4), MESH, [S0, R])
    with sw.parallel.no_sync():
        (x @ weight).sum().backward()
        file = io.BytesIO()
        torch.save({"weight": weight}, file)
    weight.grad = None
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert loaded.placements == weight.placements and torch.equal(loaded.full_tensor(), weight.full_tensor())


def test_all_that_is_kept_on_a_tensor_is_declared() -> None:
    """Whatever is put into a tensor's dict under a name of ours is not the user's, and neither copied nor saved."""
    named = re.compile(r'__dict__(?:\[|\.get\(|\.pop\(|\.setdefault\()"(_[a-z_]+)"')
    # Of moves, functions, lists of shards, optimizers and modules.
    elsewhere = {"_function", "_on_dtensors", "_all", "_init_group", "_compares_calls"}
    source = Path(sw.__file__).parent
    found = {name for file in source.rglob("*.py") for name in named.findall(file.read_text())}
    assert {name for name in found if not name.startswith("__")} - elsewhere <= set(DTensor.__annotations__)
