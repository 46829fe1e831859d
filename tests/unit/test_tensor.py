"""DTensor: making one of shards, leaving for plain tensors, and what it says about itself."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from compare import check_shards
from meshes import data
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm import ranked

MESH = sw.simulate((2, 2), ("dp", "tp"))
LINE = sw.simulate((4,), ("tp",))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))


def uneven(dim: int, sizes: Sequence[int], *, grad: bool = False) -> tuple[Tensor, Tensor]:
    """Pieces of these sizes as the shards of a line of ranks, and what they are together."""
    pieces = [data(*(size if d == dim else 3 for d in range(2))).requires_grad_(grad) for size in sizes]
    return ranked([piece.view_as(piece) for piece in pieces]), torch.cat([p.detach() for p in pieces], dim)


@pytest.mark.parametrize("placements", PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (1, 7)])
def test_distribute_and_gather(shape: tuple[int, int], placements: tuple) -> None:
    x = data(*shape)
    d = sw.distribute_tensor(x, MESH, placements)
    check_shards(d)
    assert d.placements == placements and d.shape == x.shape and d.device_mesh is MESH
    torch.testing.assert_close(d.full_tensor(), x, atol=0, rtol=0)


def test_distributing_leaves_the_original_alone() -> None:
    x = data(4, 4)
    for placements in ([R, R], [S0, R]):
        d = sw.distribute_tensor(x, MESH, placements)
        d.zero_()
        assert x.abs().min() > 0


@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (0, 3, 0, 1), (4, 4, 4, 4), (5, 0, 0, 0)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_from_local_of_uneven_widths(dim: int, sizes: tuple[int, ...]) -> None:
    local, whole = uneven(dim % 2, sizes)
    d = DTensor.from_local(local, LINE, [Shard(dim)], run_check=True)
    assert d.shape == whole.shape and d.placements == (Shard(dim % 2),)
    assert torch.equal(d.full_tensor(), whole)
    check_shards(d * 2)


def test_arithmetic_and_gradient_of_uneven_widths() -> None:
    local, whole = uneven(1, (2, 3, 4, 5))
    d = DTensor.from_local(local, LINE, [S1]).requires_grad_()
    even = sw.distribute_tensor(whole, LINE, [S1])
    plain = whole.clone().requires_grad_()
    (d * even @ d.transpose(0, 1)).pow(2).sum().backward()
    (plain * whole @ plain.T).pow(2).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), plain.grad)
    check_shards(d.grad)
    assert d.grad._layout is d._layout


@pytest.mark.parametrize("sizes", [(2, 2, 1, 0), (2, 2, 2, 2)])
def test_from_local_with_a_given_shape(sizes: tuple[int, ...]) -> None:
    local, whole = uneven(0, sizes)
    d = DTensor.from_local(local, LINE, [S0], shape=whole.shape, stride=whole.stride())
    assert torch.equal(d.full_tensor(), whole)


def test_from_local_takes_one_plain_tensor_as_every_ranks_shard() -> None:
    x = data(2, 3)
    assert torch.equal(DTensor.from_local(x, LINE, [S0]).full_tensor(), x.repeat(4, 1))
    assert torch.equal(DTensor.from_local(x, LINE, [P]).full_tensor(), 4 * x)
    assert torch.equal(DTensor.from_local(x, LINE).full_tensor(), x)


def test_from_local_is_differentiable() -> None:
    pieces = [data(n, 3).requires_grad_() for n in (2, 3, 1, 4)]
    d = DTensor.from_local(ranked([p.view_as(p) for p in pieces]), LINE, [S0])
    d.pow(2).sum().backward()
    for piece in pieces:
        torch.testing.assert_close(piece.grad, 2 * piece.detach())


@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_to_local_and_back_is_neutral(placements: tuple) -> None:
    """Known wrong elsewhere: P → to_local → from_local(P)."""
    x, w = data(6, 4), data(6, 4)
    d = sw.distribute_tensor(x, MESH, placements).requires_grad_()
    back = DTensor.from_local(d.to_local(), MESH, placements)
    assert torch.equal(back.full_tensor(), d.full_tensor())
    (back * sw.distribute_tensor(w, MESH)).sum().backward()
    check_shards(d.grad)
    torch.testing.assert_close(d.grad.full_tensor(), w)


@pytest.mark.parametrize(
    ("placements", "grad_placements"),
    [((S0, R), (S0, R)), ((S0, R), (S0, P)), ((R, R), (P, R)), ((R, R), (P, P)), ((R, S1), (P, S1))],
    ids=str,
)
def test_to_local_with_grad_placements(placements: tuple, grad_placements: tuple) -> None:
    """As the gradient of the local tensor is said to lie, so it is read: pending terms are added up."""
    g = data(6, 4)
    d = sw.distribute_tensor(data(6, 4), MESH, placements).requires_grad_()
    gradient = sw.distribute_tensor(g, MESH, grad_placements)
    torch.autograd.backward(d.to_local(grad_placements=grad_placements), gradient.to_local())
    check_shards(d.grad)
    assert d.grad.placements == placements
    torch.testing.assert_close(d.grad.full_tensor(), g)


@pytest.mark.parametrize("placements", [(S0, R), (R, S1), (S0, S0), (P, S1)], ids=str)
def test_full_tensor_is_differentiable(placements: tuple) -> None:
    x, w = data(5, 4), data(5, 4)
    d = sw.distribute_tensor(x, MESH, placements).requires_grad_()
    (d.full_tensor() * w).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), w)


def test_full_tensor_with_grad_placements() -> None:
    """Every rank computes a term of the loss from the whole tensor: its gradient is the sum over the ranks."""
    x, w = data(4, 4), data(4, 4)
    d = sw.distribute_tensor(x, MESH, [S0, R]).requires_grad_()
    (d.full_tensor(grad_placements=[P, R]) * w).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), 2 * w)  # the simulator's one plain tensor stands for two terms


@pytest.mark.parametrize("dim", [-1, -2])
def test_negative_dims(dim: int) -> None:
    x = data(4, 6)
    d = sw.distribute_tensor(x, MESH, [Shard(dim), R])
    assert d.placements == (Shard(dim % 2), R)
    assert torch.equal(d.redistribute(placements=[R, Shard(dim)]).full_tensor(), x)


def test_submeshes() -> None:
    x, w = data(4, 6), data(6, 5)
    tp = MESH["tp"]
    d, v = sw.distribute_tensor(x, tp, [S1]).requires_grad_(), sw.distribute_tensor(w, tp, [S0])
    out = d @ v
    assert out.device_mesh is tp and tp.mesh_dim_names == ("tp",) and MESH["tp"] is tp
    torch.testing.assert_close(out.full_tensor(), x @ w)
    out.sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), w.sum(1).expand(4, 6))


def test_redistribute_with_dtypes() -> None:
    x = torch.randn(8, 4)
    d = sw.distribute_tensor(x, MESH, [S0, R]).requires_grad_()
    out = d.redistribute(placements=[R, R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    assert out.dtype == torch.bfloat16 and torch.equal(out.full_tensor(), x.bfloat16())
    out.float().sum().backward()
    assert d.grad.dtype == torch.float32 and torch.equal(d.grad.full_tensor(), torch.ones_like(x))
    assert torch.equal(d.redistribute(MESH, [S1, R], async_op=True).full_tensor(), x)


def test_the_dtype_of_the_backward_is_the_one_communicated() -> None:
    d = sw.distribute_tensor(torch.ones(8, 4), MESH, [P, R]).requires_grad_()
    g = sw.distribute_tensor(torch.full((8, 4), 1.001), MESH, [S0, R])
    d.redistribute(placements=[S0, R], backward_dtype=torch.bfloat16).backward(g)
    assert d.grad.dtype == torch.float32 and torch.equal(d.grad.full_tensor(), torch.ones(8, 4))


def test_a_pending_maximum_keeps_its_gradient_in_any_backward_dtype() -> None:
    local = ranked([torch.tensor([float(n), -float(n)]) for n in range(4)])
    d = DTensor.from_local(local, LINE, [Partial("max")]).requires_grad_()
    d.redistribute(placements=[R], backward_dtype=torch.float64).sum().backward()
    assert torch.equal(d.grad.full_tensor(), torch.ones(2))
    assert torch.equal(torch.stack([x.grad for x in d._peers])[:, 0], torch.tensor([0.0, 0.0, 1.0]))


def test_metadata_is_of_the_whole() -> None:
    d = sw.distribute_tensor(data(5, 3), MESH, [S0, S1])
    assert (d.shape, d.size(), d.size(-1), d.dim(), d.ndim) == ((5, 3), (5, 3), 3, 2, 2)
    assert (d.numel(), d.nelement(), len(d), d.stride(), d.stride(0)) == (15, 15, 5, (3, 1), 3)
    assert d.transpose(0, 1).stride() == (1, 3)
    assert (d.dtype, d.device, d.is_leaf, d.requires_grad) == (torch.float64, torch.device("cpu"), True, False)
    assert d.is_floating_point() and not d.is_complex() and d.element_size() == 8


def test_repr() -> None:
    d = sw.distribute_tensor(torch.arange(4.0), MESH, [S0, R])
    text = "DTensor(shard at dp=0: tensor([0., 1.]), shape=[4], {dp: S(0), tp: R})"
    assert repr(d) == str(d) == f"{d}" == text
    assert f"{d.sum():.2f}" == "6.00"


def test_a_dtensor_is_not_made_by_its_class() -> None:
    with pytest.raises(TypeError, match=r"distribute_tensor, DTensor\.from_local or a shardwise factory"):
        DTensor(torch.ones(2))


# What comes in, and what is refused


def test_what_was_computed_is_not_cut_off() -> None:
    weight = data(4).requires_grad_()
    with pytest.raises(RuntimeError, match="takes leaves of the graph"):
        sw.distribute_tensor(weight * 2, LINE, [S0])
    whole = DTensor.from_local(weight * 2, LINE, [R])
    whole.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 2))


@pytest.mark.parametrize("rank", [-1, 2, 5])
def test_a_source_that_is_no_rank(rank: int) -> None:
    with pytest.raises(sw.errors.MeshError, match=rf"src_data_rank={rank} is not on every axis of Mesh\(dp=2, tp=2\)"):
        sw.distribute_tensor(data(4), MESH, [S0, R], src_data_rank=rank)


def test_strides_that_are_said() -> None:
    local = data(3, 2).t()
    made = DTensor.from_local(local, LINE, [S0], shape=(8, 3), stride=(1, 8))
    assert made.stride() == (1, 8)
    with pytest.raises(sw.errors.ShardShapeError, match=r"stride=\[3, 1\] does not fit the shards: .* \[1, 8\]"):
        DTensor.from_local(local, LINE, [S0], shape=(8, 3), stride=(3, 1))


def test_gradients_come_back_as_asked() -> None:
    """Each rank holds the same; of the gradient, one asks for the whole everywhere, another for terms of a sum."""
    weight = data(3)
    for placement, total in ((R, 4 * 3.0), (P, 3.0)):
        leaves = [weight.clone().requires_grad_() for _ in range(4)]
        made = DTensor.from_local(ranked([x.view_as(x) for x in leaves]), LINE, [R], grad_placements=[placement])
        (made * 3).sum().backward()
        torch.testing.assert_close(sum(x.grad for x in leaves), torch.full_like(weight, total))  # type: ignore[misc]
    with pytest.raises(sw.errors.PlacementError, match="have other shapes than shards of"):
        DTensor.from_local(data(4), LINE, [R], grad_placements=[S0])


def test_the_mesh_of_a_with_block() -> None:
    with MESH, LINE:
        assert sw.distribute_tensor(data(4), placements=[S0]).device_mesh is LINE
        assert sw.zeros(4).device_mesh is LINE
        assert DTensor.from_local(data(4)).device_mesh is LINE
    with MESH:
        module = sw.distribute_module(torch.nn.Linear(2, 2))
    assert module.weight.device_mesh is MESH  # type: ignore[union-attr]
    with pytest.raises(sw.errors.MeshError, match="no mesh was given"):
        sw.distribute_tensor(data(4))


def test_a_size_that_is_not_there() -> None:
    for shape, dim in itertools.product([(), (4,), (4, 2)], [-3, 2, 5]):
        whole = torch.empty(shape)
        with pytest.raises(IndexError) as expected:
            whole.size(dim)
        with pytest.raises(IndexError) as found:
            sw.distribute_tensor(whole, LINE).size(dim)
        assert str(found.value) == str(expected.value)


def test_gradients_of_other_kinds_and_shapes() -> None:
    x = sw.distribute_tensor(data(4), LINE, [S0]).requires_grad_()
    with pytest.raises(TypeError, match="grad must be a DTensor, not a int"):
        x.grad = 3  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"grad has shape \[5\], the tensor it belongs to \[4\]"):
        x.grad = sw.zeros(5, device_mesh=LINE)


@pytest.mark.parametrize("parameter", [False, True])
def test_copies_keep_what_torchs_keep(parameter: bool) -> None:
    found = []
    for x in (data(4), sw.distribute_tensor(data(4), LINE, [S0])):
        x = torch.nn.Parameter(x) if parameter else x.requires_grad_()
        x.note = ["of mine"]  # type: ignore[attr-defined]
        x.sum().backward()
        copy, again = deepcopy(x), pickle.loads(pickle.dumps(x))
        found.append([(getattr(y, "note", None), y.grad is None, type(y) is type(x)) for y in (copy, again)])
        assert copy.__dict__.get("note") is not x.note  # type: ignore[attr-defined]
    assert found[0] == found[1]


def test_what_it_says_of_its_history() -> None:
    x = sw.distribute_tensor(torch.ones(4), LINE, [S0])
    assert repr(x).endswith("shape=[4], {tp: S(0)})")
    assert repr(x.requires_grad_()).endswith("shape=[4], {tp: S(0)}, requires_grad=True)")
    assert repr(x.exp()).endswith("shape=[4], {tp: S(0)}, grad_fn=<ExpBackward0>)")


def test_subclasses_are_refused_in_words() -> None:
    with pytest.raises(TypeError, match="DTensor is not to be subclassed"):
        type("Mine", (DTensor,), {"__module__": "mine"})


@pytest.mark.parametrize("make", [sw.simulate, sw.recording])
@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0), sw.Partial()])
def test_a_conversion_that_changes_nothing_is_the_tensor_itself(make: Callable, placement: sw.Placement) -> None:
    """As in torch; so a pending sum that is reduced for one of them is whole for the other."""
    mesh = make((2,), ("tp",))
    x = sw.distribute_tensor(torch.ones(4, 4, device=mesh.device_type), mesh, [sw.Replicate()])
    for computed in (x.redistribute(placements=[placement]), x.requires_grad_().redistribute(placements=[placement])):
        for same in (computed.to(torch.float32), computed.float(), computed.to(x.device), computed.type_as(x)):
            assert same is computed
        assert computed.to(torch.float32, copy=True) is not computed
        assert computed.double() is not computed
