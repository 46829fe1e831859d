"""What torch's library offers beside modules (distributions, initialisation, Fourier transforms, sampling, padding) on
sharded tensors and on plain ones: the same results."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributions as D
from compare import compare
from programs import To, check_program
from sweep import mesh_of, normal, place
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import shardwise as sw
from shardwise.experimental import implicit_replication

R, S = sw.Replicate(), sw.Shard
pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning"),
    pytest.mark.usefixtures("double_precision"),
]


def check(step: Callable[[To], list[Tensor]], *, mesh: tuple[int, ...] = (2, 3), meta: str = "the same") -> None:
    check_program(nn.Identity, lambda _, to: step(to), mesh=mesh, meta=meta)


@pytest.fixture
def replicating() -> Iterator[None]:
    """What torch's own code makes beside DTensors (noise, permutations, lengths, numbers as tensors) is plain, and the
    same on all ranks. Where it meets DTensors the program says so."""
    with implicit_replication():
        yield


# Distributions


def some(to: To, *shape: int) -> Tensor:
    return to(torch.randn(shape)).requires_grad_()


def chances(to: To, *shape: int) -> Tensor:
    return to(torch.rand(shape) * 0.6 + 0.2).requires_grad_()


DISTRIBUTIONS: dict[str, Callable[[To], D.Distribution]] = {
    "Normal": lambda to: D.Normal(some(to, 4, 3), chances(to, 3)),
    "Laplace": lambda to: D.Laplace(some(to, 4, 3), chances(to, 4, 3)),
    "Gumbel": lambda to: D.Gumbel(some(to, 4, 3), chances(to, 4, 3)),
    "Uniform": lambda to: D.Uniform(chances(to, 4, 3) - 9, chances(to, 4, 3) + 9),
    "Exponential": lambda to: D.Exponential(chances(to, 4, 3)),
    "StudentT": lambda to: D.StudentT(chances(to, 4, 3) + 2, some(to, 4, 3), chances(to, 4, 3)),
    "ContinuousBernoulli": lambda to: D.ContinuousBernoulli(chances(to, 4, 3)),
    "Kumaraswamy": lambda to: D.Kumaraswamy(chances(to, 4, 3) + 1, chances(to, 4, 3) + 1),
    "Relaxed": lambda to: D.RelaxedOneHotCategorical(to(torch.tensor(0.5)), logits=some(to, 4, 3)),
    "MultivariateNormal": lambda to: D.MultivariateNormal(some(to, 4, 3), to(torch.eye(3) * 2 + 0.1)),
    "LowRank": lambda to: D.LowRankMultivariateNormal(some(to, 4, 3), some(to, 4, 3, 2), chances(to, 4, 3)),
    "Transformed": lambda to: D.TransformedDistribution(
        D.Normal(some(to, 4, 3), chances(to, 4, 3)), [D.SigmoidTransform(), D.AffineTransform(1.0, 2.0)]
    ),
}


@pytest.mark.usefixtures("replicating")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_those_of_one_device(name: str) -> None:
    """What a distribution draws by itself is drawn alike on all ranks, and follows the gradient to its parameters."""

    def step(to: To) -> list[Tensor]:
        distribution = DISTRIBUTIONS[name](to)
        torch.manual_seed(7)
        if name == "StudentT":  # its gamma variates are drawn by shards
            return [distribution.log_prob(to(torch.randn(4, 3)))]
        drawn = distribution.rsample((2,))
        drawn.square().sum().backward()
        return [drawn, distribution.log_prob(drawn.detach())]

    check(step, meta="needs data")  # whether the parameters are valid


DISCRETE: dict[str, Callable[[To], D.Distribution]] = {
    "Bernoulli": lambda to: D.Bernoulli(chances(to, 4, 3)),
    "Categorical": lambda to: D.Categorical(logits=some(to, 4, 3)),
    "Multinomial": lambda to: D.Multinomial(6, logits=some(to, 4, 3)),
    "Binomial": lambda to: D.Binomial(5, chances(to, 4, 3)),
    "Geometric": lambda to: D.Geometric(chances(to, 4, 3)),
    "Poisson": lambda to: D.Poisson(chances(to, 4, 3)),
    "VonMises": lambda to: D.VonMises(some(to, 4, 3), chances(to, 4, 3)),
    "Gamma": lambda to: D.Gamma(chances(to, 4, 3), chances(to, 4, 3)),
}


@pytest.mark.usefixtures("replicating")
@pytest.mark.parametrize("name", DISCRETE)
def test_samples_lie_in_the_support(name: str) -> None:
    def on_mesh(x: Tensor, *where: Any) -> Tensor:
        return sw.distribute_tensor(x, mesh_of((2, 2)), [S(0), S(1)][: 2 if x.dim() > 1 else 0] or [R, R])

    plain, dist = DISCRETE[name](lambda x, *where: x), DISCRETE[name](on_mesh)
    for shape in ((), (2,)):
        drawn = dist.sample(shape)
        assert isinstance(drawn, sw.DTensor)
        assert drawn.shape == plain.sample(shape).shape
        assert plain.support.check(drawn.full_tensor()).all()


@pytest.mark.usefixtures("replicating")
def test_log_probabilities_entropies_and_divergences() -> None:
    def step(to: To) -> list[Tensor]:
        p, q = D.Normal(some(to, 4, 3), chances(to, 4, 3)), D.Normal(some(to, 4, 3), chances(to, 4, 3))
        act, policy = to(torch.tensor([0, 2, 1, 0])), D.Categorical(logits=some(to, 4, 3))
        found = [
            *(D.kl_divergence(p, q), p.cdf(p.mean), D.Independent(p, 1).log_prob(q.mean), p.entropy()),
            *(policy.log_prob(act), policy.entropy()),
            *(D.Binomial(5, chances(to, 4, 3)).entropy(), D.Bernoulli(chances(to, 4, 3)).variance),
            D.Dirichlet(chances(to, 4, 3)).entropy(),
        ]
        sum(x.sum() for x in found if x.requires_grad).backward()
        return found

    check(step, meta="needs data")


@pytest.mark.usefixtures("replicating")
def test_a_number_beside_a_tensor_of_parameters() -> None:
    check(lambda to: [D.Normal(to(torch.randn(4, 3)), 1.5).log_prob(to(torch.randn(4, 3)))], meta="needs data")


def test_noise_that_a_distribution_makes_is_not_taken_as_replicated_unasked() -> None:
    normal_of = D.Normal(place(normal(4, 2), S(0)), place(normal(4, 2).exp(), S(0)))
    with pytest.raises(sw.errors.MixedTensorError, match=r"implicit_replication\(\)"):
        normal_of.rsample()


# Initialisation, factories that write, and what tensors make


I = nn.init  # noqa: E741
INITIALISERS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "eye": (I.eye_, (5, 3)),
    "dirac": (lambda w: I.dirac_(w, 2), (6, 4, 3)),
    "orthogonal": (lambda w: I.orthogonal_(w, 2.0), (3, 2, 3)),
    "sparse": (lambda w: I.sparse_(w, 0.4), (7, 3)),
    "trunc_normal": (lambda w: I.trunc_normal_(w, a=-1.0, b=1.0), (5, 3)),
    "kaiming_normal": (lambda w: I.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"), (4, 3)),
    "xavier_uniform": (I.xavier_uniform_, (4, 3, 2)),
}


@pytest.mark.usefixtures("replicating")
@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisation_is_that_of_one_device(name: str) -> None:
    initialise, shape = INITIALISERS[name]

    def step(to: To) -> list[Tensor]:
        weight = nn.Parameter(to(torch.ones(shape)))
        assert initialise(weight).requires_grad
        return [weight, to(torch.rand(2))]  # and the generator is where it would be

    check(step, meta="less" if name in ("orthogonal", "trunc_normal") else "the same")


FACTORIES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "eye": (lambda out: torch.eye(5, 3, out=out), torch.float64),
    "full": (lambda out: torch.full((5, 3), 2.0, out=out), torch.float64),
    "rand": (lambda out: torch.rand(5, 3, out=out), torch.float32),
    "randint": (lambda out: torch.randint(0, 9, (5, 3), out=out), torch.int64),
    "normal": (lambda out: torch.normal(0.0, 1.0, (5, 3), out=out), torch.float64),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_write_where_they_are_told(name: str) -> None:
    make, dtype = FACTORIES[name]
    for where in ([S(0), S(1)], [S(0), S(0)], [R, S(1)], [sw.Partial(), S(0)]):
        plain, dist = torch.zeros(5, 3, dtype=dtype), place(torch.zeros(5, 3, dtype=dtype), *where, mesh=(2, 2))
        for out in (plain, dist):
            torch.manual_seed(3)
            assert make(out) is out
        assert torch.equal(dist.full_tensor(), plain)
    with pytest.raises(sw.errors.InPlaceError, match="are not resized"):
        make(place(torch.zeros(0, 3, 2, dtype=dtype), S(2)))


@pytest.mark.filterwarnings("error::shardwise.errors.FallbackWarning")
def test_new_tensors_of_sizes_and_of_data() -> None:
    x = place(normal(4, 6), S(1))
    for given in ((4, 6), (torch.Size([4, 6]),), (), ([4.0, 6.0],), ((4, 6),)):
        made, expected = x.new(*given), normal(4, 6).new(*given)
        assert made.shape == expected.shape and made.dtype == expected.dtype, given
        assert made.fill_(1.0).full_tensor().sum() == expected.numel()
    assert torch.equal(x.new_tensor([1, 2]).full_tensor(), normal(4, 6).new_tensor([1, 2]))
    assert x.new_tensor([1.0], requires_grad=True).requires_grad


def test_sharing_memory_is_done_to_every_shard() -> None:
    model = nn.ParameterList([place(normal(4, 6), S(0))])
    assert model.share_memory()[0].is_shared()
    assert torch.equal(model[0].detach().full_tensor(), normal(4, 6))


# Views by numbers in tensors


@pytest.mark.parametrize("where", [R, S(0), S(1)], ids=str)
@pytest.mark.parametrize("index", [torch.tensor(1), place(torch.tensor(1), R)], ids=["plain", "DTensor"])
def test_a_part_that_a_number_in_a_tensor_names_is_a_view(index: Tensor, where: sw.Placement) -> None:
    for cut in (lambda x, i: x.narrow(0, i, 2), lambda x, i: x.tensor_split(i + 1)[1]):
        plain, dist = normal(4, 3), place(normal(4, 3), where)
        cut(plain, 1 if isinstance(index, sw.DTensor) else index).fill_(9.0)
        cut(dist, index).fill_(9.0)
        assert torch.equal(dist.full_tensor(), plain)


def test_a_row_that_a_number_in_a_tensor_names_is_a_view() -> None:
    dist = place(torch.zeros(4, 3), S(0))
    dist[place(torch.tensor(1), R)].fill_(1.0)
    assert dist.sum().item() == 3


def test_a_view_by_strides_is_written_or_refused() -> None:
    dist = place(torch.zeros(4, 3), S(0))
    try:
        dist.as_strided((2, 2), (3, 1)).fill_(1.0)
    except sw.errors.InPlaceError:
        return
    assert dist.sum().item() == 4


# Complex numbers


def spectrum(to: To) -> list[Tensor]:
    x = to(torch.randn(4, 8, 6)).requires_grad_()
    waves = torch.fft.rfft2(x) * torch.exp(1j * to(torch.randn(8, 4)))
    back, shifted = torch.fft.irfft2(waves, s=(8, 6)), torch.fft.fftshift(torch.fft.fft(x, dim=1), dim=1)
    window = to(torch.hann_window(8))
    short = torch.stft(x.reshape(4, -1), 8, 4, window=window, return_complex=True)
    turned = torch.complex(x, x * 2).transpose(0, 1).conj().resolve_conj()
    found = [
        *(back, torch.view_as_real(shifted), torch.angle(shifted).sin(), torch.istft(short, 8, 4, window=window)),
        *(torch.view_as_real(turned), turned.real, turned.imag, torch.polar(x.abs(), x).imag),
    ]
    sum(part.square().sum() for part in found).backward()
    return [*found, x.grad]


@pytest.mark.parametrize("mesh", [(3,), (2, 3)], ids=str)
def test_a_pipeline_of_complex_numbers(mesh: tuple[int, ...]) -> None:
    check(spectrum, mesh=mesh, meta="needs data")


@pytest.mark.parametrize("where", [S(0), S(1), R], ids=str)
def test_gradients_of_pairs_of_numbers_on_empty_shards(where: sw.Placement) -> None:
    compare(lambda x: torch.view_as_real(torch.complex(x, x * 2)).sum(), [normal(4, 2)], mesh_of((3,)), [[where]])


def test_settled_conjugates_and_negatives() -> None:
    x = place(torch.complex(normal(4, 3), normal(4, 3)), S(0))
    assert x.conj().is_conj() and not x.conj().resolve_conj().is_conj()
    assert not x.conj().imag.resolve_neg().is_neg()
    assert x.resolve_conj() is x
    assert torch.equal(torch.view_as_real(x.mH.resolve_conj()).full_tensor()[..., 1], -normal(4, 3).T)


# Searching, sampling, padding


def beams(to: To) -> list[Tensor]:
    table = to(torch.randn(7, 7))
    scores, tokens = to(torch.randn(3, 7)).log_softmax(-1).topk(2, -1)
    found = tokens.unsqueeze(-1)
    for _ in range(3):
        total = scores.unsqueeze(-1) + table[found[:, :, -1]].log_softmax(-1)
        scores, best = total.view(3, -1).topk(2, -1)
        beam = torch.div(best, 7, rounding_mode="floor").unsqueeze(-1)
        found = torch.cat([found.gather(1, beam.expand(-1, -1, found.size(-1))), (best % 7).unsqueeze(-1)], -1)
    return [scores, found, found[list(range(3)), scores.argmax(-1)]]


def nucleus(to: To) -> list[Tensor]:
    logits = to(torch.randn(4, 9))
    ordered, order = logits.sort(descending=True, dim=-1)
    cut = ordered.softmax(-1).cumsum(-1) > 0.8
    cut[..., 1:] = cut[..., :-1].clone()
    cut[..., 0] = False
    kept = logits.masked_fill(cut.scatter(1, order, cut), float("-inf")).softmax(-1)
    assert (kept.gather(1, torch.multinomial(kept, 1)) > 0).all()
    return [kept, cut]


def padded(to: To) -> list[Tensor]:
    parts = [to(torch.randn(length, 3)).requires_grad_() for length in (4, 2, 3)]
    whole = rnn.pad_sequence(parts, batch_first=True, padding_value=-1.0)
    with implicit_replication():  # the order of the lengths is a plain tensor
        again, lengths = rnn.pad_packed_sequence(rnn.pack_sequence(parts, enforce_sorted=False))
        lines = rnn.unpad_sequence(whole, lengths, batch_first=True)
    (again.square().sum() + sum(line.sum() for line in lines)).backward()
    return [whole, again, *lines, *(part.grad for part in parts)]


def collated(to: To) -> list[Tensor]:
    x, y = to(torch.randn(6, 3)), to(torch.arange(6))
    batches = DataLoader(TensorDataset(x, y), batch_size=4)
    return [*default_collate(list(zip(x, y, strict=True))), *(part for batch in batches for part in batch)]


def masked(to: To) -> list[Tensor]:
    x = to(torch.randn(6, 5)).requires_grad_()
    mask, rest = x > 0, x.clone()
    rest[rest < -1] = 0
    rest[mask] = x[mask] * 3
    found = [
        x[mask],
        x[mask.any(1)],
        torch.where(mask, x, -x),
        x.masked_fill(mask, 2.0),
        rest,
        x[mask.nonzero().unbind(1)],
    ]
    sum(part.square().sum() for part in found).backward()
    return [*found, x.grad]


def in_parts(to: To) -> list[Tensor]:
    x = to(torch.randn(6, 4)).requires_grad_()
    y, rows = x * 1, x.new_zeros(6, 4)
    y[1:3] *= 2
    y[:, 0] += 1
    y.t()[2].mul_(3)
    y.view(-1)[5] = 7
    y.unsqueeze(0).transpose(1, 2).mul_(1.5)
    for row in range(6):
        rows[row] = x[row].tanh() + (rows[row - 1] if row else 0)
    (y.square().sum() + rows.sum()).backward()
    return [y, rows, x.grad]


PROGRAMS = [beams, nucleus, padded, collated, masked, in_parts]


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("step", PROGRAMS, ids=lambda f: f.__name__)
def test_programs_on_tensors(step: Callable[[To], list[Tensor]], mesh: tuple[int, ...]) -> None:
    check(step, mesh=mesh, meta=ON_META.get(step.__name__, "the same"))


ON_META = {"nucleus": "needs data", "masked": "needs data", "padded": "refused by torch"}


# Tensors as Python objects


def test_printing_copying_and_comparing() -> None:
    x = place(normal(4, 3), S(0)).requires_grad_()
    assert f"{x.sum():.3f}" == f"{normal(4, 3).sum():.3f}"
    print(x, [x], repr(x * 2), file=io.StringIO())
    for other in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        torch.testing.assert_close(other, x)
        assert other.requires_grad and other.is_leaf
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(x, x + 1)


def test_threads_compute_side_by_side() -> None:
    mesh, given = mesh_of((2, 2)), [normal(4, 3) * (i + 1) for i in range(4)]
    leaves = [sw.distribute_tensor(x, mesh, [S(0), S(1)]).requires_grad_() for x in given]

    def work(x: Tensor) -> None:
        (x @ x.t()).tanh().sum().backward()

    threads = [threading.Thread(target=work, args=(x,)) for x in leaves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, leaf in zip(given, leaves, strict=True):
        work(x.requires_grad_())
        torch.testing.assert_close(leaf.grad.full_tensor(), x.grad)
