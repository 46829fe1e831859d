"""Cases that other sharded-tensor systems got silently wrong: layouts, gradients and state, by their numbers."""

# ruff: noqa: B023 (functions made in loops are called in them)

from __future__ import annotations

import copy
import gc
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, check_shards, compare
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm import ranked, record
from shardwise.debug import CommDebugMode
from shardwise.experimental import implicit_replication
from shardwise.parallel import loss_parallel

PAIR = sw.simulate((2,), ("tp",))
LINE = sw.simulate((4,), ("tp",))
GRID = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pending(*terms: list[float]) -> DTensor:
    return DTensor.from_local(ranked([torch.tensor(t, dtype=torch.float64) for t in terms]), PAIR, [P])


def test_13_all_rows_of_an_uneven_nested_split() -> None:
    x = data(5, 3)
    d = sw.distribute_tensor(x, GRID, [S0, S0])
    check_shards(d)
    assert torch.equal(d.redistribute(placements=[R, R]).full_tensor(), x)
    for middle in itertools.product([R, S0, S1], repeat=2):
        assert torch.equal(d.redistribute(placements=middle).redistribute(placements=[S0, S0]).full_tensor(), x)
        compare(
            lambda t, m=middle: t.redistribute(placements=m) if isinstance(t, DTensor) else t, [x], GRID, [[S0] * 2]
        )


def test_14_rowwise_then_data_parallel_on_the_same_dim() -> None:
    x = data(7, 3)
    d = sw.distribute_tensor(x, GRID, {0: ("tp", "dp")})
    assert torch.equal(d.full_tensor(), x) and torch.equal((d * 2).full_tensor(), 2 * x)
    assert d.placements == (S0, S0) and d._layout is not sw.distribute_tensor(x, GRID, [S0, S0])._layout
    rows = beside(d, torch.tensor([6, 0, 3]))
    d.requires_grad_()
    for function in (lambda t: t.cumsum(0), lambda t: t.flip(0), lambda t: t.sort(0)[1], lambda t: t.view(21)):
        torch.testing.assert_close(function(d.detach()).full_tensor(), function(x))
    (d[rows] ** 2).sum().backward()
    assert torch.equal(d.grad.full_tensor().sum(1).nonzero().flatten(), torch.tensor([0, 3, 6]))
    assert d.grad._layout is d._layout


def test_15_widths_that_differ_by_rank() -> None:
    pieces = [data(2, n) for n in (2, 3, 4, 5)]
    d = DTensor.from_local(ranked([p.clone() for p in pieces]), LINE, [S1])
    whole = torch.cat(pieces, 1)
    assert torch.equal(d.full_tensor(), whole)
    for function in (torch.sum, torch.t, lambda t: t @ t.t(), lambda t: t.cumsum(1), lambda t: t[:, 1:9], torch.argmax):
        torch.testing.assert_close(function(d).full_tensor(), function(whole))


def test_16_operands_with_different_row_splits() -> None:
    a = DTensor.from_local(ranked([data(n, 2) for n in (1, 4, 0, 3)]), LINE, [S0]).requires_grad_()
    b = DTensor.from_local(ranked([data(n, 2) for n in (3, 0, 1, 4)]), LINE, [S0]).requires_grad_()
    c = sw.distribute_tensor(data(8, 2), LINE, [S0])
    for x, y in ((a, b), (b, a), (a, c), (c, b)):
        torch.testing.assert_close((x + y).full_tensor(), x.full_tensor() + y.full_tensor())
        torch.testing.assert_close((x * y).full_tensor(), x.full_tensor() * y.full_tensor())
    (a * b).sum().backward()
    torch.testing.assert_close(a.grad.full_tensor(), b.detach().full_tensor())
    assert a.grad._layout is a._layout
    for join in (torch.maximum, torch.dot, torch.outer, F.mse_loss, lambda x, y: torch.where(x > 0, x, y)):
        x, y = a.detach()[:, 0], b.detach()[:, 1]
        torch.testing.assert_close(join(x, y).full_tensor(), join(x.full_tensor(), y.full_tensor()))


def test_17_out_to_local_and_back_is_gradient_neutral() -> None:
    d = pending([1.0, 3.0], [2.0, 1.0]).requires_grad_()
    back = DTensor.from_local(d.to_local(), PAIR, [P])
    (back * torch.tensor(3.0, dtype=torch.float64)).sum().backward()
    assert d.grad.tolist() == [3.0, 3.0]
    for placement in (P, R, S0, Partial("avg")):
        round_trip = lambda t, p=placement: DTensor.from_local(t.to_local(), PAIR, [p])  # noqa: E731
        compare(lambda t, f=round_trip: f(t) if isinstance(t, DTensor) else t, [data(4)], PAIR, [[placement]])


@pytest.mark.parametrize("placement", [S0, S1, P])
def test_18_log_softmax_over_a_sharded_class_dim(placement: sw.Placement) -> None:
    x, w = data(3, 7), data(3, 7)
    d = sw.distribute_tensor(x, LINE, [placement]).requires_grad_()
    (F.log_softmax(d, -1) * sw.distribute_tensor(w, LINE, [S1])).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), w - torch.softmax(x, -1) * w.sum(-1, keepdim=True))


@pytest.mark.parametrize("bias", [R, S0])
def test_20_a_bias_on_a_pending_sum_counts_once(bias: sw.Placement) -> None:
    inputs = [data(3, 8), data(5, 8), data(5)]
    compare(F.linear, inputs, LINE, [[S1], [S1], [bias]])
    compare(lambda t, b: t + b, [data(3, 5), data(5)], LINE, [[P], [bias]])
    compare(lambda t, w, b: torch.addmm(b, t, w.t(), beta=0.5), inputs, LINE, [[S1], [S1], [bias]])
    compare(lambda t, w, b: torch.baddbmm(b, t[None], w.t()[None]), inputs, LINE, [[S1], [S1], [bias]])
    compare(F.conv1d, [data(2, 8, 5), data(5, 8, 3), data(5)], LINE, [[S1], [S1], [bias]])
    compare(F.bilinear, [data(3, 8), data(3, 2), data(5, 8, 2), data(5)], LINE, [[S1], [R], [S1], [bias]])


def test_21_a_replicated_tensor_in_sharded_heads() -> None:
    compare(lambda t, q: (t.unsqueeze(1).expand(2, 4, 3) * q).sum(-1), [data(2, 3), data(2, 4, 3)], LINE, [[R], [S1]])
    q, k = data(2, 8, 3, 4), data(2, 2, 3, 4)
    shared = lambda a, b: F.scaled_dot_product_attention(a, *[b.repeat_interleave(4, 1)] * 2)  # noqa: E731
    compare(shared, [q, k], LINE, [[S1], [R]])
    compare(lambda a, b: F.scaled_dot_product_attention(a, b, b, enable_gqa=True), [q, k], LINE, [[S1], [R]])
    compare(lambda a, b: torch.einsum("bhqd,bkd->bhqk", a, b[:, 0]), [q, k], LINE, [[S1], [R]])


@pytest.mark.parametrize("padding", [3, -1, None])
@pytest.mark.parametrize("placement", [S0, S1, R])
def test_22_embedding_with_a_padding_index(placement: sw.Placement, padding: int | None) -> None:
    at = torch.tensor([[0, 3, 9], [3, 5, 3]])
    for where, scale in itertools.product((R, S0), (False, True)):
        options = {"padding_idx": padding, "scale_grad_by_freq": scale}
        embed = lambda w: F.embedding(beside(w, at, where), w, **options)  # noqa: E731
        compare(embed, [data(10, 4)], LINE, [[placement]])


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("placement", [S0, S1, R])
def test_23_a_bag_that_spans_ranks(mode: str, placement: sw.Placement) -> None:
    at, flat, offsets = torch.tensor([[0, 3, 9], [3, 5, 7]]), torch.tensor([0, 3, 9, 5, 7]), torch.tensor([0, 3, 3])
    for where in (R, S0):
        bags = lambda w: F.embedding_bag(beside(w, at, where), w, mode=mode)  # noqa: E731
        compare(bags, [data(10, 4)], LINE, [[placement]])
        ragged = lambda w: F.embedding_bag(  # noqa: E731
            beside(w, flat, where), w, beside(w, offsets), mode=mode, padding_idx=3
        )
        compare(ragged, [data(10, 4)], LINE, [[placement]])


class Model(nn.Module):
    """Embedding, normalisation, a block that tensor parallelism splits, experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embed": (11, 4), "norm": (4,), "up": (4, 6), "down": (6, 4), "experts": (3, 4, 4), "gate": (4, 3)}
        for name, shape in {**shapes, "head": (4, 11)}.items():
            self.register_parameter(name, nn.Parameter(data(*shape)))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = F.layer_norm(F.embedding(tokens, self.embed), (4,), self.norm)
        x = x + F.gelu(x @ self.up) @ self.down
        experts = torch.einsum("btd,edf->ebtf", x, self.experts)
        x = torch.einsum("bte,ebtf->btf", (x @ self.gate).softmax(-1), experts)
        return F.cross_entropy((x @ self.head).flatten(0, 1), target.flatten(), label_smoothing=0.1)


TENSOR = {"embed": S0, "up": S1, "down": S0, "head": S1}
EXPERT = {"experts": S0, "gate": S1}
WAYS: dict[str, tuple[dict[str, list[sw.Placement]], list[sw.Placement]]] = {
    "replicated": ({}, [R, R]),
    "data": ({}, [S0, S0]),
    "sharded data": ({name: [S0, S0] for name in ("embed", "norm", "up", "down", "experts", "gate", "head")}, [S0, S0]),
    "tensor": ({name: [R, p] for name, p in TENSOR.items()}, [R, R]),
    "data and tensor": ({name: [R, p] for name, p in TENSOR.items()}, [S0, R]),
    "expert": ({name: [p, R] for name, p in EXPERT.items()}, [R, R]),
    "data and expert": ({name: [R, p] for name, p in EXPERT.items()}, [S0, R]),
    "all": (
        {**{name: [S0, p] for name, p in TENSOR.items()}, **{name: [S0, p] for name, p in EXPERT.items()}},
        [S0, R],
    ),
}


def train(model: nn.Module, steps: int, place: Callable[[Tensor], Tensor], foreach: bool = True) -> list[Tensor]:
    """The norms of the gradients before they are clipped."""
    tokens, norms = torch.arange(15).view(5, 3) % 11, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=foreach)
    for step in range(steps):
        optimizer.zero_grad()
        model(place((tokens + step) % 11), place((tokens * 3 + 1) % 11)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach))
        optimizer.step()
    return norms


def spread(model: nn.Module, way: str) -> nn.Module:
    placements, _ = WAYS[way]
    for name, parameter in list(model.named_parameters()):
        where = placements.get(name, [R, R])
        setattr(model, name, nn.Parameter(sw.distribute_tensor(parameter.detach(), GRID, where)))
    return model


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("way", WAYS)
def test_24_gradient_norms_do_not_depend_on_the_degree(way: str, foreach: bool) -> None:
    model = Model()
    ours = spread(copy.deepcopy(model), way)
    expected = train(model, 3, lambda x: x)
    found = train(ours, 3, lambda x: sw.distribute_tensor(x, GRID, WAYS[way][1]), foreach)
    torch.testing.assert_close([norm.full_tensor() for norm in found], expected)
    for theirs, parameter in zip(model.parameters(), ours.parameters(), strict=True):
        check_shards(parameter.grad)
        torch.testing.assert_close(parameter.detach().full_tensor(), theirs.detach())


# State


def is_strict() -> bool:
    """Whether a call that gathers is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sw.errors.FallbackWarning)
            torch.linalg.inv(sw.distribute_tensor(torch.eye(4), PAIR, [S0]))
    except sw.errors.StrictModeError:
        return True
    return False


def mixes() -> bool:
    """Whether plain tensors are taken for replicated ones."""
    try:
        sw.ones(4, device_mesh=PAIR, placements=[S0]) + torch.ones(4)
    except sw.errors.MixedTensorError:
        return False
    return True


def listens() -> bool:
    """Whether anybody is told of collectives."""
    return bool(record.listeners or record.fallbacks)


def entropy_gathers() -> bool:
    x = sw.ones(4, 6, device_mesh=PAIR, placements=[S1])
    with CommDebugMode() as comm:
        F.cross_entropy(x, sw.zeros(4, dtype=torch.int64, device_mesh=PAIR))
    return "all_gather" in comm.get_comm_counts()


MODES: dict[str, tuple[Callable[[], Any], Callable[[], bool], bool]] = {
    "strict": (sw.strict, is_strict, True),
    "implicit_replication": (implicit_replication, mixes, True),
    "CommDebugMode": (CommDebugMode, listens, True),
    "loss_parallel": (loss_parallel, entropy_gathers, False),  # changes nothing but intent
}


@pytest.mark.parametrize("mode", MODES)
def test_25_modes_end_with_their_block(mode: str) -> None:
    enter, look, inside = MODES[mode]
    for _ in range(2):  # what was planned inside does not serve outside
        assert not look()
        with pytest.raises(KeyError), enter():
            assert look() is inside
            with pytest.raises(ZeroDivisionError), enter():
                assert look() is inside
                raise ZeroDivisionError
            assert look() is inside, "the inner block ended the outer one"
            raise KeyError
        assert not look()


def test_25_an_error_inside_a_call_leaves_nothing_switched_on() -> None:
    x = sw.ones(4, 6, device_mesh=PAIR, placements=[S0]).requires_grad_()
    for call in (lambda: x.view(7), lambda: x @ x, lambda: x[beside(x, torch.tensor([9]))], lambda: x.clamp_(max=0)):
        with pytest.raises((RuntimeError, IndexError)):
            call()
        assert torch.is_grad_enabled() and torch._C._is_torch_function_enabled() and not listens()
        assert (x * 2).requires_grad


def test_26_plans_do_not_grow_and_parameters_are_freed() -> None:
    model = spread(Model(), "all")
    place = lambda x: sw.distribute_tensor(x, GRID, WAYS["all"][1])  # noqa: E731
    train(model, 2, place)
    before = sw.cache_info()
    train(model, 4, place)
    after = sw.cache_info()
    assert (after.size, after.misses) == (before.size, before.misses) and after.hits > before.hits
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


def test_27_stacking_many_is_linear() -> None:
    """Planning work is counted in calls, not in time: ten times the tensors, at most about ten times the work."""
    rows = [sw.distribute_tensor(data(4), PAIR, [S0]) for _ in range(1000)]
    assert torch.equal(torch.stack(rows).full_tensor(), torch.stack([row.full_tensor() for row in rows]))
    for join in (torch.stack, lambda x: torch.stack(x, 1), lambda x: torch.stack(x).sum(0)):
        work = []
        for many in (100, 1000):
            sw.clear_cache()
            work.append(_count_calls(lambda many=many: join(rows[:many])))
        assert work[1] < 15 * work[0]


def _count_calls(run: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
