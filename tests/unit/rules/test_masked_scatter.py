"""masked_scatter: a sharded source is looked up, or fetched as far as it is needed, and not gathered."""

import itertools
import math
import warnings

import pytest
import torch
from compare import compare
from forcing import forced_ways
from sweep import mesh_of, normal, place, sweep, sweep_in_place

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch.call import clear_cache
from shardwise.rules import PENDING, masked

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()


def scatter(x, mask, source):
    return x.masked_scatter(mask, source)


def some(*shape):
    """A mask that is true in about half of its places."""
    return normal(*shape) > 0


def expanded(*shape):
    """The same for all of the last dim, which cannot be seen before one looks."""
    return some(*shape[:-1], 1).expand(shape).contiguous()


CASES = {
    "elements": (normal(5, 3), some(5, 3), normal(4, 5)),
    "columns of one": (normal(2, 1), some(2, 1), normal(2, 1)),
    "no columns": (normal(6, 0), some(6, 1), normal(0, 0)),
    "1-d": (normal(11), some(11), normal(11)),
    "1-d from rows": (normal(11), some(11), normal(4, 3)),
    "rows": (normal(3, 4, 2), some(3, 4, 1), normal(9, 2)),
    "rows that do not show": (normal(3, 4, 2), expanded(3, 4, 2), normal(9, 2)),
    "not quite rows": (normal(3, 4, 2), some(3, 4, 2), normal(9, 2)),
    "rows of another width": (normal(3, 4, 2), some(3, 4, 1), normal(5, 4)),
    "deep rows": (normal(2, 3, 2, 3), some(2, 3, 1, 1), normal(2, 4, 2, 3)),
    "deep rows that do not show": (normal(2, 5, 2, 3), some(2, 5, 1, 1).repeat(1, 1, 2, 3), normal(7, 2, 3)),
    "a batch of one": (normal(1, 7, 2), some(1, 7, 1), normal(1, 7, 2)),
    "a mask for all of a batch": (normal(3, 4, 2), some(4, 2), normal(12, 2)),
    "rows for all of a batch": (normal(3, 5, 2), some(5, 1), normal(10, 2)),
    "all": (normal(5, 3), torch.ones(1, 1, dtype=torch.bool), normal(7, 3)),
    "nothing": (normal(5, 3), torch.zeros(5, 3, dtype=torch.bool), normal(4, 3)),
    "nothing from nothing": (normal(5, 3), torch.zeros(5, 1, dtype=torch.bool), normal(0, 3)),
    "into nothing": (normal(0, 3), some(0, 1), normal(4, 3)),
    "a number": (normal(5, 3), torch.eye(5, 3, dtype=torch.bool) & (torch.arange(5) == 3)[:, None], normal()),
    "a target that is stretched": (normal(3), some(4, 3), normal(5, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_everywhere(name):
    sweep(scatter, *CASES[name])


@pytest.mark.parametrize("name", ["elements", "rows that do not show", "not quite rows", "rows of another width"])
def test_one_fetch_of_many_runs(monkeypatch, name):
    monkeypatch.setattr(masked, "MOST_FETCHES", 1)
    sweep(scatter, *CASES[name])


@pytest.mark.parametrize("name", ["elements", "rows", "rows that do not show"])
def test_in_place(name):
    accepted = sweep_in_place(lambda x, m, s: x.masked_scatter_(m, s), *CASES[name])
    assert {(R,), (S(0),), (S(1),), (P,)} <= {placements[0] for placements in accepted}


@pytest.mark.parametrize("name", ["elements", "rows that do not show"])
def test_second_derivatives(name):
    def gradients(x, mask, source):
        return torch.autograd.grad((scatter(x, mask, source) ** 3).sum(), [x, source], create_graph=True)

    x, mask, source = CASES[name]
    for where in itertools.product([S(0), S(1)], [R, S(0), S(1)], [S(0), S(1)]):
        compare(gradients, [x, mask, source], mesh_of((4,)), [[p] for p in where])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes(dtype):
    x, mask, source = CASES["rows that do not show"]
    inputs = [(x * 3).to(dtype), mask, (source * 3).to(dtype)]
    for where in ((S(0), S(0), S(0)), (S(1), R, S(0)), (S(2), S(2), S(1))):
        compare(scatter, inputs, mesh_of((4,)), [[p] for p in where], backward=False)


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_of_any_size(dim):
    """Pieces that a call before it has left."""
    x, mask, source = normal(5, 6, 2), expanded(5, 6, 2), normal(26, 2)

    def scatter_parts(x, mask, source):
        return scatter(x.narrow(dim, 1, 4), mask.narrow(dim, 1, 4), source[3:])

    for where in itertools.product([S(dim)], [S(dim), R], [S(0), S(1)]):
        compare(scatter_parts, [x, mask, source], mesh_of((3,)), [[p] for p in where])


# Every way, forced


@pytest.fixture
def force(monkeypatch):
    yield from forced_ways(monkeypatch, lambda call: call.name == "masked_scatter")


@pytest.mark.parametrize("name", ["rows", "rows that do not show", "not quite rows", "deep rows that do not show"])
def test_every_way(force, name):
    ways, seen = force
    inputs = CASES[name]
    ways.update({0: 0, 1: 0})
    clear_cache()
    scatter(*(place(x, R, R, mesh=(2, 2)) for x in inputs))
    numbers = [i for i, way in enumerate(seen) if PENDING not in way.ins]
    cut = [tuple(isinstance(p, int) for p in seen[i].ins) for i in numbers]
    assert {(True, True, True), (True, False, True), (True, True, False), (True, False, False)} <= set(cut)
    for mesh in ((4,), (3, 2)):
        for chosen in itertools.product(numbers, repeat=len(mesh)):
            if len(mesh) == 2 and name.startswith("deep") and chosen[0] > chosen[1]:
                continue
            ways.update(enumerate(chosen))
            clear_cache()
            try:
                compare(scatter, inputs, mesh_of(mesh), [[R] * len(mesh)] * 3)
            except sw.errors.InPlaceError:  # no other way is left
                assert len(set(chosen)) == 2, "only two ways that cut the same dim of a tensor do not combine"


# What moves: pictures' features into the embeddings of a text, batch × sequence × hidden

TEXT, PICTURES, NUM_FEATURES = (4, 32, 8), torch.arange(32)[None] % 8 < torch.tensor([3, 0, 5, 2])[:, None], 50
ONE_AXIS = {
    "batch": (S(0), S(0), S(0)),
    "batch, whole mask": (S(0), R, S(0)),
    "sequence": (S(1), S(1), S(0)),
    "sequence, whole mask": (S(1), R, S(0)),
    "hidden": (S(2), S(2), S(1)),
    "hidden, whole mask": (S(2), R, S(1)),
    "a pending target": (P, R, S(0)),
    "all pending": (P, R, P),
    "whole features": (S(1), S(1), R),
}
TWO_AXES = {
    "batch and sequence": ((S(0), S(1)), (S(0), S(1)), (S(0), R)),
    "batch and hidden": ((S(0), S(2)), (S(0), S(2)), (S(0), S(1))),
    "batch and hidden, whole mask": ((S(0), S(2)), (S(0), R), (S(0), S(1))),
    "sequence and hidden": ((S(1), S(2)), (S(1), R), (S(0), S(1))),
    "sequence, twice": ((S(1), S(1)), (S(1), S(1)), (S(0), S(0))),
}
LAYOUTS = {
    **{name: ((4,), [[p] for p in where]) for name, where in ONE_AXIS.items()},
    **{name: ((2, 2), [list(ps) for ps in where]) for name, where in TWO_AXES.items()},
}


def bytes_of(x):
    """Of the largest shard, which is the first."""
    return math.prod(x._layout.held_shapes[0]) * x.element_size()


@pytest.mark.parametrize("shows", [True, False], ids=["rows", "expanded"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_gathered(name, shows):
    shape, where = LAYOUTS[name]
    x, features, mask = normal(*TEXT), normal(NUM_FEATURES, TEXT[-1]), PICTURES[..., None]
    mask = mask if shows else mask.expand(TEXT).contiguous()
    if shows:  # there is nothing to cut in its last dim
        where = [where[0], [R if p == S(2) else p for p in where[1]], where[2]]
    placed = [place(t, *ps, mesh=shape) for t, ps in zip((x, mask, features), where, strict=True)]
    for t in (placed[0], placed[2]):
        t.requires_grad_()
    with sw.strict(), CommDebugMode() as forward:
        out = scatter(*placed)
    assert out.placements == placed[0].placements
    assert torch.equal(out.full_tensor(), x.masked_scatter(mask, features))
    assert {c.kind for c in forward.comms} <= {"all_reduce", "all_to_all"}
    counted = [c.bytes for c in forward.comms if c.kind == "all_reduce"]
    assert sum(counted) <= 8 * (x[..., 0].numel() + 16), "numbers of places, not more"
    sent = [c.bytes for c in forward.comms if c.kind == "all_to_all"]
    assert sum(sent) <= bytes_of(placed[2]), "a feature is sent to one rank"
    weight = sw.distribute_tensor(normal(*TEXT), out.device_mesh, [R if p == P else p for p in out.placements])
    with CommDebugMode() as backward:
        out.backward(weight)
    assert {c.kind for c in backward.comms} <= {"all_reduce", "all_to_all"}
    reduced = [c.bytes for c in backward.comms if c.kind == "all_reduce"]
    whole = [axis for axis, p in enumerate(placed[2].placements) if p == R]
    assert len(reduced) <= len(whole), "the gradient of whole features is a sum"
    assert sum(c.bytes for c in backward.comms if c.kind == "all_to_all") <= bytes_of(out)


def test_a_mask_that_changes_along_hidden_gathers():
    x, mask, features = normal(*TEXT), some(*TEXT), normal(99, TEXT[-1])
    with CommDebugMode() as comm:
        out = scatter(place(x, S(2)), place(mask, S(2)), place(features, S(1)))
    assert comm.get_comm_counts()["all_gather"] == 1
    assert torch.equal(out.full_tensor(), x.masked_scatter(mask, features))


def test_features_are_not_gathered_for_a_whole_target():
    x, mask, features = place(normal(*TEXT), R), place(PICTURES[..., None], R), place(normal(NUM_FEATURES, 8), S(0))
    with CommDebugMode() as comm:
        scatter(x, mask, features)
    assert "all_gather" not in comm.get_comm_counts()


def test_own_features_stay():
    """Features that lie where their places are do not move."""
    placed = [place(t, S(0)) for t in (normal(8, 4, 2), torch.ones(8, 4, 1, dtype=torch.bool), normal(32, 2))]
    with CommDebugMode() as comm:
        scatter(*placed)
    assert comm.get_comm_counts() == {"all_reduce": 1}


# Errors


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("name", ["elements", "rows", "rows that do not show", "not quite rows"])
def test_too_short(name, in_place):
    x, mask, source = CASES[name]
    mask, source = mask | mask.roll(1, 0), source[:1]
    write = (lambda x, m, s: x.masked_scatter_(m, s)) if in_place else scatter
    with pytest.raises(RuntimeError) as expected:
        write(x.clone(), mask, source)
    each = [[R, *map(S, range(t.ndim))] for t in (x, mask, source)]
    for where in itertools.product(*each):
        placed = [place(t, p, mesh=(4,)) for t, p in zip((x, mask, source), where, strict=True)]
        with warnings.catch_warnings(), pytest.raises(RuntimeError) as raised:
            warnings.simplefilter("ignore", sw.errors.FallbackWarning)
            write(*placed)
        assert str(raised.value) == str(expected.value), where
        if where[0] != R:  # elsewhere torch itself runs, and has written some when it finds out
            assert torch.equal(placed[0].full_tensor(), x)


def test_nothing_travels_before_an_error():
    placed = [place(t, S(0)) for t in (normal(50, 3), torch.ones(50, 1, dtype=torch.bool), normal(40, 3))]
    with CommDebugMode() as comm, pytest.raises(RuntimeError, match="source < number of ones in mask"):
        scatter(*placed)
    assert [(c.kind, c.bytes) for c in comm.comms] == [("all_reduce", 16)]


def test_planned_for_many_ranks():
    mesh = sw.recording((64, 8), ("dp", "tp"))
    kinds = ((64, 512, 256), torch.float64), ((64, 512, 256), torch.bool), ((9000, 256), torch.float64)
    where = [S(0), S(2)], [S(0), R], [S(0), S(1)]
    meta = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
    placed = [sw.distribute_tensor(t, mesh, ps) for t, ps in zip(meta, where, strict=True)]
    with CommDebugMode() as comm:
        out = scatter(*placed)
    assert out.placements == (S(0), S(2)) and out.to_local().shape == (1, 512, 32)
    assert set(comm.get_comm_counts()) == {"all_reduce", "all_to_all"}
