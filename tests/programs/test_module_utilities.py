"""What torch offers around modules, with sharded parameters and with plain ones: the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import beside, full
from programs import To, check_program
from sweep import normal, place
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils

import shardwise as sw
from shardwise.experimental import implicit_replication

R, S = sw.Replicate(), sw.Shard
pytestmark = [
    pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning"),
    pytest.mark.usefixtures("double_precision"),
]


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def trained(model: nn.Module, to: To) -> list[Tensor]:
    optimizer, losses = optim.SGD(model.parameters(), 0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append((model(to(torch.randn(4, 6))) - 1).square().mean())
        losses[-1].backward()
        optimizer.step()
    return losses


PARAMETRISED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 3), dim=1)
    ),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3)),
    **{
        f"orthogonal by {way}": lambda way=way: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map=way)
        for way in ("matrix_exp", "cayley", "householder")
    },
}


@pytest.mark.parametrize("name", PARAMETRISED)
def test_parametrisations(name: str) -> None:
    with implicit_replication():  # the identity matrices that some of them make are alike on all ranks
        check_program(PARAMETRISED[name], trained, meta="refused by torch" if "orthogonal" in name else "the same")


def pruned(model: Any, to: To) -> list[Tensor]:
    prune.l1_unstructured(model[0], "weight", 0.3)
    prune.ln_structured(model[2], "weight", 0.5, n=2, dim=0)
    results = trained(model, to)
    prune.remove(model[0], "weight")
    return [*results, model[0].weight]


def pruned_together(model: Any, to: To) -> list[Tensor]:
    layers = [(model[0], "weight"), (model[2], "weight")]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.4)
    return trained(model, to)


def as_a_vector(model: nn.Module, to: To) -> list[Tensor]:
    """What is written through `data` may lie elsewhere; gradients that are already there follow."""
    first = trained(model, to)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    loss = model(to(torch.randn(4, 6))).square().sum()
    loss.backward()
    return [*first, vector, loss]


def averaged(model: nn.Module, to: To) -> list[Tensor]:
    averages = [
        swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        swa_utils.AveragedModel(model),
    ]
    for _ in range(2):
        trained(model, to)
        for average in averages:
            average.update_parameters(model)
    x = to(torch.randn(4, 6))
    return [average(x) for average in averages]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("step", [pruned, pruned_together, as_a_vector, averaged], ids=lambda f: f.__name__)
def test_utilities(step: Callable[[Any, To], list[Tensor]]) -> None:
    check_program(small, step, meta="needs data" if step is pruned_together else "the same")


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)
        self.judge = nn.Sequential(nn.Linear(6, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1))


def contested(model: Any, to: To) -> list[Tensor]:
    """Several losses through one graph, and a penalty on a gradient."""
    x, noise = to(torch.randn(5, 6)), to(torch.randn(5, 2))
    makers = optim.Adam([*model.encode.parameters(), *model.decode.parameters()], 0.01)
    judges, results = optim.Adam(model.judge.parameters(), 0.01), []
    for _ in range(2):
        mean, spread = model.encode(x).chunk(2, 1)
        made = model.decode(mean + noise * (spread / 2).exp())
        losses = [
            F.mse_loss(made, x),
            -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean(),
            F.binary_cross_entropy_with_logits(model.judge(made), torch.ones_like(model.judge(made))),
        ]
        makers.zero_grad()
        for loss in losses:
            loss.backward(retain_graph=True)
        makers.step()
        judges.zero_grad()
        points = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model.judge(points).sum(), points, create_graph=True)
        losses.append(
            F.softplus(model.judge(made.detach()) - model.judge(x)).mean() + (slope.norm(dim=1) - 1).square().mean()
        )
        losses[-1].backward()
        judges.step()
        results += losses
    return results


@pytest.mark.parametrize("mesh", [(3,), (2, 1, 2)], ids=str)
def test_several_losses_and_a_gradient_penalty(mesh: tuple[int, ...]) -> None:
    check_program(Adversaries, contested, mesh=mesh)


class Recommender(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, 4, mode=mode) for rows in (7, 11)])
        self.dense, self.out = nn.Linear(3, 4), nn.Linear(13, 1)

    def forward(self, x: Tensor, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        looked_up = [table(i, o) for table, i, o in zip(self.tables, ids, offsets, strict=True)]
        vectors = torch.stack([self.dense(x), *looked_up], 1)
        return self.out(torch.cat([vectors[:, 0], torch.bmm(vectors, vectors.mT).flatten(1)], 1))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_recommender(mode: str) -> None:
    def step(model: nn.Module, to: To) -> list[Tensor]:
        ids = [to(torch.randint(0, 7, (9,))), to(torch.randint(0, 11, (8,)))]
        offsets = [to(torch.tensor([0, 3, 3, 7]), R, R), to(torch.tensor([0, 1, 4, 6]), R, R)]
        scores = model(to(torch.randn(4, 3)), ids, offsets)
        F.binary_cross_entropy_with_logits(scores, to(torch.rand(4, 1).round())).backward()
        return [scores]

    check_program(lambda: Recommender(mode), step, meta="the same" if mode == "max" else "needs data")


def test_a_transformer_of_torchs() -> None:
    def step(model: Any, to: To) -> list[Tensor]:
        source, target = to(torch.randn(4, 5, 8), S(0), R), to(torch.randn(4, 3, 8), S(0), R)
        mask = to(nn.Transformer.generate_square_subsequent_mask(3), R, R)
        with implicit_replication():  # torch compares the mask with a causal one that it makes
            found = model(source, target, tgt_mask=mask)
        found.square().mean().backward()
        return [found]

    def make() -> nn.Module:
        return nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)

    check_program(make, step, meta="needs data")  # whether the mask is causal


@pytest.mark.parametrize("grad_first", [True, False])
def test_data_may_be_set_to_a_tensor_that_lies_elsewhere(grad_first: bool) -> None:
    p, d = nn.Parameter(normal(4, 6)), nn.Parameter(place(normal(4, 6), S(0)))
    for x, data in ((p, normal(4, 6) * 3), (d, place(normal(4, 6) * 3, S(1)))):
        kept = (x * x).sum()
        if grad_first:
            kept.backward()
        x.data = data
        (x * x * x).sum().backward()
    assert d.placements == (S(1),)
    assert torch.equal(d.detach().full_tensor(), p.detach())
    torch.testing.assert_close(d.grad.full_tensor(), p.grad)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("name", ["spectral_norm", "orthogonal"])
def test_a_sharded_weight_is_parametrised(name: str) -> None:
    torch.manual_seed(0)
    plain, dist_ = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()
    dist_.load_state_dict(plain.state_dict())
    dist_.weight = nn.Parameter(place(dist_.weight.detach(), S(0)))
    for module in (plain, dist_):
        torch.manual_seed(1)
        with implicit_replication():  # the identity that one of them makes is alike on all ranks
            getattr(parametrizations, name)(module)
    torch.testing.assert_close(full(dist_.weight.detach()), plain.weight.detach())
    parametrize.remove_parametrizations(dist_, "weight")


@pytest.mark.parametrize("dim", [None, 0, -1])
def test_weight_norm_over_all_dims(dim: int | None) -> None:
    x, layers = normal(3, 6).float(), [nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)]
    weight = normal(4, 6).float()
    layers[0].weight = nn.Parameter(weight.clone())
    layers[1].weight = nn.Parameter(place(weight, S(0)))
    outs = []
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer, dim=dim)
        out = layer(beside(layer.weight, x))
        out.square().sum().backward()
        outs.append([out.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close([full(t) for t in outs[1]], outs[0])
