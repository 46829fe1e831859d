"""What models of others were seen to do, and did wrong or not at all here: each in a few lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compare import beside, full
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.experimental import implicit_replication

MESH = sw.simulate((2,), ("tp",))
R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)
PLACEMENTS = pytest.mark.parametrize("placement", [R, S0, S1, sw.Shard(2)], ids=str)


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# Sizes and dims in 0-d tensors: `torch.div(n, k)` makes one in many a model


SIZES: dict[str, Callable[[Tensor, Callable[[int], Tensor]], Tensor]] = {
    "view": lambda x, n: x.view(3, 6, n(2), 4),
    "reshape": lambda x, n: torch.reshape(x, (3, 6, n(2), n(4))),
    "expand": lambda x, n: x.unsqueeze(0).expand(n(2), 3, 6, 8),
    "pad": lambda x, n: F.pad(x, (n(1), n(2)), mode="reflect"),
    "split": lambda x, n: torch.split(x, [n(3), n(5)], 2)[1],
    "sum": lambda x, n: x.sum(n(1)),
    "permute": lambda x, n: x.permute(n(2), 0, 1),
    "one_hot": lambda x, n: F.one_hot(x.argmax(-1), n(8)),
    "conv1d": lambda x, n: F.conv1d(x, beside(x, torch.ones(6, 1, 3, dtype=torch.float64)), groups=n(6)),
}


@PLACEMENTS
@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_tensors_and_nothing_is_gathered_for_it(name: str, placement: sw.Placement) -> None:
    x, call = data(3, 6, 8), SIZES[name]
    d = sw.distribute_tensor(x, MESH, [placement])
    for n in (torch.tensor, lambda size: sw.distribute_tensor(torch.tensor(size), MESH)):
        got = call(d, n)  # a fallback is a warning, and that an error
        torch.testing.assert_close(got.full_tensor(), call(x, torch.tensor))
        assert got.placements == call(d, int).placements  # type: ignore[arg-type]


def test_sizes_in_tensors_are_read_in_every_call() -> None:
    d = sw.distribute_tensor(data(4, 12), MESH, [S0])
    assert [d.view(4, torch.tensor(n), -1).shape[2] for n in (2, 3, 4)] == [6, 4, 3]


def test_bad_sizes_in_tensors_are_refused_in_torchs_words() -> None:
    d = sw.distribute_tensor(data(4, 12), MESH, [S0])
    with pytest.raises(RuntimeError, match=r"shape '\[4, 5, -1\]' is invalid for input of size 48"):
        d.view(4, torch.tensor(5), -1)
    with pytest.raises(RuntimeError, match="duplicate dims are not allowed"):
        d.permute(torch.tensor(1), 1)


# Plain tensors that a model makes for itself


@PLACEMENTS
def test_a_plain_tensor_is_converted_to_the_dtype_of_a_dtensor(placement: sw.Placement) -> None:
    d = sw.distribute_tensor(data(3, 6, 8), MESH, [placement])
    for made in (torch.arange(4).type_as(d), torch.arange(4).to(d)):
        assert type(made) is Tensor
        assert torch.equal(made, torch.arange(4, dtype=torch.float64))


@PLACEMENTS
def test_parts_of_a_plain_tensor_are_set_where_it_is_replicated_implicitly(placement: sw.Placement) -> None:
    """A mask, or a cache, that a model makes plain and fills with what it computes."""
    x = data(3, 6, 8)
    d = sw.distribute_tensor(x, MESH, [placement])
    kept: list[Tensor] = []
    for t in (x.clone().requires_grad_(), d.requires_grad_()):
        cache = torch.zeros(3, 6, 8, dtype=torch.float64)
        with implicit_replication():
            cache[:, 1:3] = t[:, 2:4] * t[:, :2]
            cache[torch.arange(3), (t[:, :, 0] > 0).sum(1) - 1] = 1.0
            (cache * t).sum().backward()
        kept += [cache, t.grad]
    torch.testing.assert_close(kept[2], kept[0])
    torch.testing.assert_close(full(kept[3]), kept[1])


def test_parts_of_a_plain_tensor_are_not_set_elsewhere() -> None:
    d = sw.distribute_tensor(torch.tensor([0, 2]), MESH)
    plain = torch.zeros(3)
    with pytest.raises(sw.errors.MixedTensorError, match="nor named by one"):
        plain[d] = 1.0
    assert not plain.any()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("placement", [S0, S1, sw.Shard(2)], ids=str)
def test_what_is_written_to_a_plain_tensor_has_a_gradient(placement: sw.Placement, times: int) -> None:
    """The sum over experts that many models make as `torch.zeros` and `index_add_` to."""
    x = data(3, 6, 8)
    grads: list[Tensor] = []
    for t in (x.clone().requires_grad_(), sw.distribute_tensor(x, MESH, [placement]).requires_grad_()):
        total = torch.zeros(3, 6, 8, dtype=torch.float64)
        with implicit_replication():
            for _ in range(times):
                total.index_add_(0, beside(t, torch.tensor([2, 0])), t[:2] * t[1:])
            (total * t).sum().backward()
        grads.append(full(t.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 1, 2)], ids=str)
def test_strides_of_a_tensor_that_lies_in_another_order(order: tuple[int, ...]) -> None:
    """Overlapping chunks of a sequence, as some attentions make them."""
    x = data(3, 6, 8)
    for dim in range(3):
        d = sw.distribute_tensor(x, MESH, [sw.Shard(dim)]).permute(order)
        p = x.clone().permute(order)
        chunks = d.as_strided((5, 12), (24, 1))
        torch.testing.assert_close(chunks.full_tensor(), p.as_strided((5, 12), (24, 1)))  # type: ignore[attr-defined]
        with pytest.raises(sw.errors.InPlaceError, match="the write would be lost"):
            chunks.zero_()


# Checkpoints


def test_a_checkpoint_takes_writes_to_new_tensors() -> None:
    """A router's scores: only the chosen ones are kept."""

    def route(h: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, w)
        top, chosen = logits.topk(1, dim=1)
        return torch.full_like(logits, -1.0).scatter_(1, chosen, top).sigmoid()

    def run(placement: sw.Placement | None) -> list[Tensor]:
        tensors = [data(6, 4), data(3, 4)]
        if placement is not None:
            tensors = [sw.distribute_tensor(t, MESH, [placement]) for t in tensors]
        h, w = (t.requires_grad_() for t in tensors)
        out = checkpoint(route, h, w, use_reentrant=False)
        out.square().sum().backward()
        return [full(t) for t in (out, h.grad, w.grad)]

    for placement in (R, S0, S1):
        torch.testing.assert_close(run(placement), run(None))
