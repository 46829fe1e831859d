"""masked_scatter: a sharded source is looked up, or fetched as far as it is needed, and not gathered."""

import itertools
import warnings

import pytest
import torch
from compare import compare
from forcing import forced_ways
from sweep import mesh_of, normal, place, sweep, sweep_in_place

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch.call import clear_cache
from shardwise.rules import PENDING

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
    assert set(cut) == {(False, False, False), (True, False, False)}
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


# What moves: pictures' features into the embeddings of a text, batch x sequence x hidden

TEXT, PICTURES, NUM_FEATURES = (4, 32, 8), torch.arange(32)[None] % 8 < torch.tensor([3, 0, 5, 2])[:, None], 50


@pytest.mark.parametrize("where", [S(0), S(1), S(2)])
def test_the_target_stays_and_mask_and_source_are_gathered(where):
    x, features, mask = normal(*TEXT), normal(NUM_FEATURES, TEXT[-1]), PICTURES[..., None]
    target = place(x, where, mesh=(4,))
    placed = place(mask, S(0), mesh=(4,)), place(features, S(0), mesh=(4,))
    with sw.strict(), CommDebugMode() as comm:
        out = scatter(target, *placed)
    assert out.placements == target.placements and comm.get_comm_counts() == {"all_gather": 2}
    assert torch.equal(out.full_tensor(), x.masked_scatter(mask, features))


def test_nothing_moves_where_mask_and_source_are_whole():
    target, mask, features = place(normal(*TEXT), S(1)), place(PICTURES[..., None], R), place(normal(50, 8), R)
    with sw.strict(), CommDebugMode() as comm:
        scatter(target, mask, features)
    assert not comm.get_comm_counts()


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
