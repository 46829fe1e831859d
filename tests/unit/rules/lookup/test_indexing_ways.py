"""Every way to run an indexing op on shards, forced: alone on one axis, and in pairs on two.

A way that no call in the other tests takes is right here or nowhere.
"""

import itertools

import pytest
from compare import compare
from forcing import forced_ways
from indexing_cases import INDEX_WRITES, MASKS, PARTS, PUTS, READS, ROWS, SCATTERS, SEARCHES, SHAPES, TWO, WIDE
from sweep import mesh_of, normal

import shardwise as sw
from shardwise.dispatch.call import clear_cache
from shardwise.rules import PENDING

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce.* is in beta"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]


@pytest.fixture
def force(monkeypatch):
    yield from forced_ways(monkeypatch, lambda call: call.name in NAMES)


NAMES = {
    *("gather", "index_select", "index", "bucketize", "searchsorted", "scatter", "scatter_add"),
    *("scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce", "index_put"),
    *("masked_scatter", "select_scatter", "slice_scatter", "diagonal_scatter"),
}

CALLS = {
    **{f"read {name}": case for name, case in READS.items() if name.split()[0] != "take"},
    **{f"two {name}": case for name, case in TWO.items()},
    **{f"search {name}": case for name, case in SEARCHES.items()},
    **{f"scatter {name}": (write, normal(5, 3), WIDE, normal(4, 3)) for name, write in SCATTERS.items()},
    **{f"scatter {name}": case for name, case in SHAPES.items()},
    **{name: (write, normal(5, 3), ROWS, normal(6, 3)) for name, write in INDEX_WRITES.items()},
    **{f"put {name}": case for name, case in PUTS.items() if "put" not in name},
    **{
        f"add {name}": (lambda *a, f=f: f(*a, accumulate=True), *rest)
        for name, (f, *rest) in PUTS.items()
        if "put" not in name
    },
    **{f"mask {name}": case for name, case in MASKS.items() if name != "fill"},
    **{f"part {name}": case for name, case in PARTS.items()},
    "fill": (lambda x, i: x.index_fill(0, i, 2.0), normal(5, 3), ROWS - 5),
    "fill with a tensor": (lambda x, i, v: x.index_fill(1, i, v), normal(3, 5), ROWS, normal(2)[0]),
    "scatter number": (lambda x, i: x.scatter(1, i, 2.0), normal(6, 5), WIDE),
}

WITHOUT_GRADIENT = {"scatter longer source"}  # in torch, too


def num_ways(force, function, inputs):
    """How many ways there are, found out by a call."""
    ways, seen = force
    ways.update({0: 0, 1: 0})
    clear_cache()
    placed = [sw.distribute_tensor(x, mesh_of((2, 2)), [sw.Replicate()] * 2) for x in inputs]
    function(*placed)
    return [i for i, way in enumerate(seen) if PENDING not in way.ins]


@pytest.mark.parametrize("name", CALLS)
def test_every_way(force, name):
    function, *inputs = CALLS[name]
    numbers = num_ways(force, function, inputs)
    ways, _ = force
    for mesh in ((4,), (2, 2)):
        for chosen in itertools.product(numbers, repeat=len(mesh)):
            ways.update(enumerate(chosen))
            clear_cache()
            where = [[sw.Replicate()] * len(mesh)] * len(inputs)
            try:
                compare(function, inputs, mesh_of(mesh), where, backward=name not in WITHOUT_GRADIENT)
            except sw.errors.InPlaceError:  # no other way is left
                assert len(set(chosen)) == 2, "only two ways that cut the same dim of a tensor do not combine"
