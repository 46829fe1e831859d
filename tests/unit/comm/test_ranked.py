"""`Ranked`: code written for one rank runs for all of them."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm import PerRank, Ranked, per_rank, ranked, shards_of
from shardwise.errors import MixedTensorError, ReplicaError


def make(*values: list[float]) -> Ranked:
    return ranked([torch.tensor(value, dtype=torch.float64) for value in values])


def lists(x: Tensor) -> list:
    with torch._C.DisableTorchFunctionSubclass():
        return [shard.tolist() for shard in shards_of(x)]


def test_functions_map_over_the_ranks() -> None:
    x = make([1, 2], [3, 4, 5])
    assert lists(x * 2 + 1) == [[3, 5], [7, 9, 11]]
    assert lists(torch.cat([x, x[:1]])) == [[1, 2, 1], [3, 4, 5, 3]]
    assert lists(torch.add(input=x, other=x)) == [[2, 4], [6, 8, 10]]
    assert isinstance(x + 1, Ranked)


def test_plain_arguments_are_the_same_on_every_rank() -> None:
    assert lists(make([1, 2], [3, 4]) * torch.tensor([10, 100])) == [[10, 200], [30, 400]]
    assert lists(torch.tensor([10, 100]) * make([1, 2], [3, 4])) == [[10, 200], [30, 400]]


def test_results_of_several_tensors() -> None:
    values, indices = make([1, 2], [4, 3]).max(0)
    assert (lists(values), lists(indices)) == ([2, 4], [1, 0])
    assert [lists(part) for part in make([1, 2], [3, 4]).split(1)] == [[[1], [3]], [[2], [4]]]
    assert make([1, 2], [4, 3]).sort().values.shape == (2,)


def test_python_values_agree_or_are_per_rank() -> None:
    x = make([1, 2], [3, 4, 5])
    assert x.dim() == 1
    assert x.dtype == torch.float64
    assert isinstance(x.shape, PerRank)
    assert x.shape.values == ((2,), (3,))
    assert repr(x.numel()) == "PerRank(2, 3)"
    assert make([1, 2], [1, 2]).tolist() == [1, 2]
    assert [len(array) for array in x.numpy().values] == [2, 3]


def test_per_rank() -> None:
    assert per_rank([3, 3]) == 3
    assert per_rank([3, 4]).values == (3, 4)
    assert per_rank([float("nan"), float("nan")]) != 0
    assert not isinstance(per_rank([float("nan"), float("nan")]), PerRank)
    assert isinstance(per_rank([float("nan"), 1.0]), PerRank)
    assert isinstance(per_rank([1.0, float("nan")]), PerRank)


@pytest.mark.parametrize("read", [Tensor.item, bool, float, int, complex])
def test_values_a_program_branches_on_must_agree(read) -> None:
    assert read(make(2.0, 2.0)) == read(2.0 if read is not Tensor.item else torch.tensor(2.0))
    with pytest.raises(ReplicaError) as error:
        read(make(0.0, 2.0))
    shown = [read(torch.tensor(value, dtype=torch.float64)) for value in (0.0, 2.0)]
    assert str(error.value) == f"ranks disagree about a value the program branches on: {shown}"


@pytest.mark.parametrize("values", [(1.0, float("nan")), (float("nan"), 1.0)])
def test_nan_agrees_with_nan_only(values) -> None:
    with pytest.raises(ReplicaError):
        make(*values).item()
    assert make(float("nan"), float("nan")).isnan().item() is True
    assert make(float("nan"), float("nan")).item() != 0


def test_in_place_functions_return_their_argument() -> None:
    x = make([1, 2], [3, 4])
    assert x.add_(1) is x
    assert lists(x) == [[2, 3], [4, 5]]
    x[0] = 9
    assert lists(x) == [[9, 3], [9, 5]]


def test_a_function_that_returns_its_argument_on_some_ranks_only() -> None:
    wide = torch.arange(6.0).view(2, 3)
    x = ranked([torch.zeros(2, 2), wide[:, :2]])  # contiguous on rank 0, not on rank 1
    packed = x.contiguous()
    assert all(shard.is_contiguous() for shard in shards_of(packed))
    assert lists(packed.view(-1)) == [[0, 0, 0, 0], [0, 1, 3, 4]]
    assert lists(x) == [[[0, 0], [0, 0]], [[0, 1], [3, 4]]]


def test_gradients() -> None:
    x = make([1, 2], [3, 4, 5]).requires_grad_()
    (x * x).sum().backward()
    assert lists(x.grad) == [[2, 4], [6, 8, 10]]
    (x * x).sum().backward()
    assert lists(x.grad) == [[4, 8], [12, 16, 20]]
    (found,) = torch.autograd.grad((x**3).sum(), x)
    assert lists(found) == [[3, 12], [27, 48, 75]]
    x.grad = None
    torch.autograd.backward([x.sum(), (2 * x).sum()])
    assert lists(x.grad) == [[3, 3], [3, 3, 3]]
    y = make([1, 1], [1, 1, 1]).requires_grad_()
    (x * y).backward(gradient=make([1, 0], [0, 0, 1]), inputs=[y])
    assert lists(y.grad) == [[1, 0], [0, 0, 5]]
    assert lists(x.grad) == [[3, 3], [3, 3, 3]]


def test_backward_runs_once_through_a_collective_shared_by_all_ranks() -> None:
    mesh = sw.simulate((2,), ("tp",))
    full = torch.arange(1.0, 5.0, dtype=torch.float64)
    x = sw.distribute_tensor(full, mesh, [sw.Shard(0)]).requires_grad_()
    # Each rank sees the whole of x² and takes its own multiple of it: the gradient is the sum of theirs.
    local = (x * x).redistribute(placements=[sw.Replicate()]).to_local(grad_placements=[sw.Partial()])
    (local * make(1.0, 10.0)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 11 * 2 * full)


def test_text_copies_and_pickles() -> None:
    x = make([1, 2], [3]).requires_grad_()
    assert repr(x) == "Ranked(tensor([1., 2.], dtype=torch.float64), tensor([3.], dtype=torch.float64))"
    x.sum().backward()
    for same in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(same) is Ranked
        assert lists(same) == [[1, 2], [3]]
        assert same.requires_grad
        same.detach().zero_()
        assert lists(x) == [[1, 2], [3]]
    assert lists(copy.deepcopy(x).grad) == [[1, 1], [1]]
    pair = [x, x]
    first, second = copy.deepcopy(pair)
    assert first is second
    with pytest.raises(RuntimeError, match="only leaves of the graph can be deep-copied"):
        copy.deepcopy(x * 2)


@pytest.mark.parametrize(
    "mix",
    [
        torch.add,
        lambda a, b: torch.add(b, a),
        lambda a, b: a + b,
        lambda a, b: b * a,
    ],
)
def test_a_local_tensor_does_not_mix_with_a_dtensor(mix) -> None:
    mesh = sw.simulate((2,), ("tp",))
    x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
    with pytest.raises(MixedTensorError):
        mix(x, x.to_local())
