"""Indices out of range and shapes that do not fit: errors of torch's types, whatever the layouts, nothing written."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch.call import clear_cache

R, S = sw.Replicate(), sw.Shard

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce.* is in beta"),
    pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning"),  # what is not judged here
]


def bad(index, *shape):
    return torch.tensor([0, 1, 3, index]).reshape(-1, *[1] * (len(shape) - 1)).expand(4, *shape[1:]).clone()


CALLS = {
    "gather": (lambda x, i: x.gather(0, i), (4, 3)),
    "index_select": (lambda x, i: x.index_select(0, i), (4,)),
    "index_select 1-d": (lambda x, i: x[:, 0].index_select(0, i), (4,)),
    "take": (lambda x, i: x.take(i * 3 + 2), (4,)),
    "index": (lambda x, i: x[i], (4,)),
    "index later": (lambda x, i: x.t()[:, i], (4,)),
    "index second": (lambda x, i: x[i * 0, i - 2], (4,)),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (4, 3)),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x[:4]), (4, 3)),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i, x[:4], "mean"), (4, 3)),
    "scatter_": (lambda x, i: x.scatter_(0, i, 1.0), (4, 3)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:4]), (4,)),
    "index_add 1-d": (lambda x, i: x[:, 0].index_add(0, i, x[:4, 0]), (4,)),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:4]), (4,)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), (4,)),
    "index_fill_": (lambda x, i: x.index_fill_(0, i, 1.0), (4,)),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, x[:4], "amax"), (4,)),
    "index_put": (lambda x, i: x.index_put((i,), x[0]), (4,)),
    "index_put_": (lambda x, i: x.index_put_((i, i * 0), x[0, 0].clone(), accumulate=True), (4,)),
    "put": (lambda x, i: x.put(i * 3, x[:4, 0]), (4,)),
}


@pytest.mark.parametrize("index", [7, -8], ids=["above", "below"])
@pytest.mark.parametrize("name", CALLS)
def test_out_of_range(name, index):
    function, shape = CALLS[name]
    x, i = normal(5, 3), bad(index, *shape)
    with pytest.raises((IndexError, RuntimeError)) as expected:
        function(x.clone(), i)
    for ranks in (2, 4):
        for where in itertools.product([R, S(0), S(1)], [R, *map(S, range(i.dim()))]):
            d, j = place(x, where[0], mesh=(ranks,)), place(i, where[1], mesh=(ranks,))
            with pytest.raises((IndexError, RuntimeError)) as raised:
                function(d, j)
            assert issubclass(raised.type, expected.type), where
            assert raised.type is expected.type or "is out of bounds: it must be from" in str(raised.value), where
            if where[0] == S(0):  # elsewhere torch itself runs, and has written some when it meets the bad one
                assert torch.equal(d.full_tensor(), x)


def test_negative_where_torch_takes_none():
    x, i = place(normal(5, 3), S(0)), place(torch.tensor([[-1, 0, 1]]), R)
    with pytest.raises(RuntimeError, match="index -1 is out of bounds: it must be from 0 to 4"):
        x.gather(0, i)
    with pytest.raises(RuntimeError, match="index -1 is out of bounds: it must be from 0 to 4"):
        x.scatter(0, i, 1.0)


def test_nothing_travels_before_an_error():
    x = place(normal(50, 3), S(0))
    for index, allowed in ((place(bad(70), R), set()), (place(bad(70), S(0)), {"all_gather", "all_reduce"})):
        with CommDebugMode() as comm, pytest.raises(IndexError):
            x[index]
        assert set(comm.get_comm_counts()) <= allowed


def test_ranks_without_anything_to_read_refuse_too():
    """A rank whose shard is empty in another dim does not look at the indices."""
    x, i = sw.distribute_tensor(normal(5, 2), mesh_of((4,)), [S(1)]), place(bad(7), R, mesh=(4,))
    for function in (lambda: x[i], lambda: x.index_add(0, i, x[:4]), lambda: x.index_put((i,), x[0])):
        with CommDebugMode() as comm, pytest.raises((IndexError, RuntimeError), match="index 7 is out of bounds"):
            function()
        assert comm.get_total_counts() == 0


MISMATCHES = {
    "index_put": lambda x, s: x.index_put((like(x, [0, 1, 2]),), s),
    "index_put mask": lambda x, s: x.index_put((like(x, [True] * 4),), s[0, 0]),
    "index_add": lambda x, s: x.index_add(0, like(x, [0, 1, 2]), s),
    "index_copy": lambda x, s: x.index_copy(0, like(x, [0, 1, 2]), s),
    "put": lambda x, s: x.put(like(x, [0, 1, 2]), s),
    "masked_scatter": lambda x, s: x.masked_scatter(x > -100, s),
    "select_scatter": lambda x, s: x.select_scatter(s, 0, 1),
    "slice_scatter": lambda x, s: x.slice_scatter(s, 0, 1),
    "diagonal_scatter": lambda x, s: x.diagonal_scatter(s[0]),
    "gather": lambda x, s: x.gather(0, like(x, [[0, 1, 2, 0]])),
}


def like(x, values):
    index = torch.tensor(values)
    return sw.distribute_tensor(index, x.device_mesh, [R]) if isinstance(x, sw.DTensor) else index


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatched_shapes(name):
    x, s = normal(5, 3), normal(2, 2)
    with pytest.raises((IndexError, RuntimeError)) as expected:
        MISMATCHES[name](x, s)
    for where in itertools.product([R, S(0), S(1)], repeat=2):
        with pytest.raises(expected.type):
            MISMATCHES[name](place(x, where[0]), place(s, where[1]))


def test_indices_that_do_not_broadcast():
    x = place(normal(5, 3), S(0))
    with pytest.raises(IndexError, match="shape mismatch: indexing tensors could not be broadcast together"):
        x[like(x, [0, 1]), like(x, [0, 1, 2])]


def too_many_classes(placement):
    with pytest.raises(RuntimeError, match=r"Class values must be smaller|index 7 is out of bounds"):
        F.one_hot(place(bad(7), placement), 5)


def test_one_hot_of_more_classes():
    clear_cache()
    try:
        sweep(lambda i: F.one_hot(i, 5), bad(2, 4, 3))
        too_many_classes(R)
        too_many_classes(S(0))
    finally:
        clear_cache()


def test_one_hot_is_checked():
    too_many_classes(S(0))
