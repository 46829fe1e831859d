"""Random numbers: exact where a tensor is initialised, parallel where a function draws for itself."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from compare import check_shards
from features import traces
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm import ranked

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
WRITABLE = list(itertools.product([R, S0, S1], repeat=2))
over_layouts = pytest.mark.parametrize("placements", WRITABLE, ids=str)

FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda t: t.normal_(1.0, 3.0),
    "uniform_": lambda t: t.uniform_(-1.0, 2.0),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(2.0),
    "random_": lambda t: t.random_(3, 9),
}
INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "init.normal_": nn.init.normal_,
    "init.uniform_": lambda t: nn.init.uniform_(t, -2, b=3.0),
    "init.constant_": lambda t: nn.init.constant_(t, 0.5),
    "init.zeros_": nn.init.zeros_,
    "init.ones_": nn.init.ones_,
    "init.kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.trunc_normal_": nn.init.trunc_normal_,
}


def next_draw() -> float:
    return torch.rand(1).item()


def check_exact(fill: Callable[[Tensor], Tensor], expected: Tensor, d: DTensor) -> None:
    torch.manual_seed(3)
    expected = fill(expected)
    after = next_draw()
    torch.manual_seed(3)
    found = fill(d)
    assert next_draw() == after, "the generator must advance as on one device"
    check_shards(found)
    assert torch.equal(found.detach().full_tensor(), expected)


@over_layouts
@pytest.mark.parametrize("name", [*FILLS, *INITS])
def test_initialisation_is_exact(name: str, placements: tuple) -> None:
    fill = {**FILLS, **INITS}[name]
    for shape in ((6, 4), (5, 7), (1, 3)):
        p = sw.zeros(shape, device_mesh=MESH, placements=placements)
        check_exact(fill, torch.zeros(shape), nn.Parameter(p) if name in INITS else p)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")  # a decomposition of the whole
@over_layouts
def test_orthogonal_initialisation_is_exact(placements: tuple) -> None:
    check_exact(nn.init.orthogonal_, torch.zeros(6, 4), sw.zeros(6, 4, device_mesh=MESH, placements=placements))


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
def test_orthogonal_initialisation_of_one_sharded_row() -> None:
    check_exact(nn.init.orthogonal_, torch.zeros(1, 3), sw.zeros(1, 3, device_mesh=MESH, placements=[S0, R]))


@pytest.mark.parametrize("name", ["cauchy_", "log_normal_", "geometric_"])
@pytest.mark.parametrize("placement", [R, S0])
def test_rarer_distributions(name: str, placement: sw.Placement) -> None:
    args = (0.3,) if name == "geometric_" else ()
    d = sw.zeros(6, 4, device_mesh=MESH, placements=[placement, R])
    check_exact(lambda t: getattr(t, name)(*args), torch.zeros(6, 4), d)


@pytest.mark.parametrize("placements", [*WRITABLE, (P, S0), (P, P)], ids=str)
def test_like_factories_are_exact(placements: tuple) -> None:
    x = torch.zeros(5, 7)
    for make in (
        torch.rand_like,
        torch.randn_like,
        lambda t: torch.randint_like(t, 10),
        lambda t: torch.randint_like(t, 3, 10),
        lambda t: torch.randn_like(t, dtype=torch.float64),
    ):
        torch.manual_seed(3)
        expected = make(x)
        torch.manual_seed(3)
        found = make(sw.distribute_tensor(x, MESH, placements))
        check_shards(found)
        assert found.dtype == expected.dtype and torch.equal(found.full_tensor(), expected)


def test_uneven_shards_are_exact() -> None:
    line = sw.simulate((4,), ("tp",))
    d = DTensor.from_local(ranked([torch.zeros(3, n) for n in (2, 3, 4, 5)]), line, [S1])
    check_exact(lambda t: t.normal_(), torch.zeros(3, 14), d)


def test_other_numbers_are_not_part_of_a_stale_plan() -> None:
    d = sw.zeros(64, device_mesh=MESH, placements=[S0, R])
    for low in (0.0, 5.0, -7.0):
        d.uniform_(low, low + 1)
        assert low <= d.min().item() and d.max().item() <= low + 1


@pytest.mark.parametrize("call", [lambda t, g: t.normal_(generator=g), lambda t, g: torch.bernoulli(t, generator=g)])
def test_a_generator_of_the_users(call: Callable) -> None:
    generator = torch.Generator().manual_seed(5)
    state = torch.get_rng_state()
    draws = []
    for placements in ([S0, R], [R, R]):
        d = call(sw.full((6, 4), 0.5, device_mesh=MESH, placements=placements), generator)
        check_shards(d)
        draws.append(generator.get_state())
    assert not torch.equal(draws[0], draws[1]), "the user's generator advances"
    assert torch.equal(state, torch.get_rng_state()), "and the default one does not"
    check_exact(
        lambda t: t.normal_(generator=torch.Generator().manual_seed(7)),
        torch.zeros(4, 3),
        sw.zeros(4, 3, device_mesh=MESH),
    )


@pytest.mark.parametrize("placements", [*WRITABLE, (P, S0)], ids=str)
def test_dropout_differs_between_shards_and_agrees_between_replicas(placements: tuple) -> None:
    torch.manual_seed(3)
    d = sw.ones(64, 64, device_mesh=MESH, placements=placements, requires_grad=True)
    out = F.dropout(d, 0.25)
    after = next_draw()
    check_shards(out)
    mask = out.detach().full_tensor()
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.2 < (mask == 0).double().mean() < 0.3
    halves = [mask[:32], mask[32:], mask[:, :32].T, mask[:, 32:].T]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(halves, 2)), "two shards drew alike"
    out.sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), mask, msg="the backward pass must use the same mask")
    torch.manual_seed(3)
    F.dropout(sw.ones(2, 2, device_mesh=MESH, placements=[S1, R]), 0.25)
    assert next_draw() == after, "every dropout advances the generator alike, whatever its layout"


def test_dropout_draws_anew_each_time_and_repeats_by_seed() -> None:
    d = sw.ones(64, device_mesh=MESH, placements=[S0, R])
    torch.manual_seed(1)
    first, second = F.dropout(d).full_tensor(), F.dropout(d).full_tensor()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(F.dropout(d).full_tensor(), first)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": torch.bernoulli,
    "multinomial": lambda d: torch.multinomial(d, 3),
    "multinomial with replacement": lambda d: torch.multinomial(d, 9, replacement=True),
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax, hard": lambda d: F.gumbel_softmax(d, hard=True),
    "rrelu": lambda d: F.rrelu(d - 0.5, training=True),
    "alpha_dropout": lambda d: F.alpha_dropout(d, 0.5, training=True),
    "native_dropout": lambda d: torch.native_dropout(d, 0.5, True)[0],
    "dropout1d": lambda d: F.dropout1d(d, 0.5),
    "normal of a mean": lambda d: torch.normal(d, 2.0),
    "normal of a deviation": lambda d: torch.normal(1.0, d),
    "normal of both": lambda d: torch.normal(d, d + 1),
    "poisson": torch.poisson,
    "gamma": torch._standard_gamma,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_replicas_agree_whatever_draws(draw: Callable) -> None:
    """Also where shards are uneven or empty: the same seed gives the same again, and the generator goes on alike."""
    if not traces(draw, torch.full((6, 5), 0.4)):
        warnings.simplefilter("ignore", sw.errors.FallbackWarning)
    line = sw.simulate((4,), ("tp",))
    after = set()
    for mesh, placements in [*((MESH, p) for p in WRITABLE), (MESH, (P, S0)), (line, [S0]), (line, [S1])]:
        d = sw.full((6, 5), 0.4, device_mesh=mesh, placements=placements, requires_grad=True)
        draws = []
        for _ in range(2):
            torch.manual_seed(3)
            out = draw(d)
            after.add(next_draw())
            check_shards(out)
            draws.append(out.detach().full_tensor())
        assert torch.equal(*draws)
        if out.requires_grad:
            out.sum().backward()
            check_shards(d.grad)
    assert len(after) == 1


def drawn(mask: Tensor) -> Tensor:
    """Masks drawn for features, one number each, if all elements of a feature agree."""
    flat = mask.flatten(2)
    assert (flat == flat[..., :1]).all(), "one feature, two masks"
    return flat[..., 0]


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "dropout", [F.dropout2d, lambda x, p: F.feature_alpha_dropout(x, p, training=True)], ids=["plain", "alpha"]
)
def test_a_feature_is_dropped_as_a_whole(dropout: Callable, dim: int) -> None:
    """Whichever dim is sharded, all shards of one feature have one mask, and features differ."""
    x = sw.ones(3, 32, 5, 4, device_mesh=MESH, placements=[R, Shard(dim)], requires_grad=True)
    out = dropout(x, 0.5)
    check_shards(out)
    features = drawn(out.detach().full_tensor())
    assert len(features.unique()) == 2
    out.sum().backward()
    assert torch.equal(drawn(x.grad.full_tensor()) == 0, features == features.min())


@pytest.mark.parametrize("dim", range(4))
def test_attention_drops_a_key_for_all_columns(dim: int) -> None:
    """Uniform attention to values that are alike in all columns stays alike, whatever is sharded."""
    query = sw.zeros(2, 4, 6, 4, device_mesh=MESH, placements=[R, Shard(dim) if dim < 3 else R])
    column = torch.randn(2, 4, 6, 1).expand(2, 4, 6, 4).contiguous()
    value = sw.distribute_tensor(column, MESH, [R, Shard(dim)])
    torch.manual_seed(3)
    out = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    after = next_draw()
    check_shards(out)
    whole = out.full_tensor()
    torch.testing.assert_close(whole, whole[..., :1].expand_as(whole))
    undropped = F.scaled_dot_product_attention(query, query, value).full_tensor()
    assert not torch.allclose(whole, undropped)
    torch.manual_seed(3)
    F.dropout(query)
    assert next_draw() == after


def test_forked_generators_come_back() -> None:
    d = sw.ones(64, device_mesh=MESH, placements=[S0, R])
    torch.manual_seed(1)
    with torch.random.fork_rng():
        inside = F.dropout(d).full_tensor()
    assert torch.equal(F.dropout(d).full_tensor(), inside)


def test_filling_a_pending_sum() -> None:
    d = sw.ones(4, device_mesh=MESH, placements=[P, R])
    torch.manual_seed(1)
    d.normal_()
    torch.manual_seed(1)
    assert torch.equal(d.full_tensor(), torch.ones(4).normal_()) and d.placements == (P, R)
