"""Short programs of ops of every family, on random shapes and layouts, give what they give on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from compare import check_shards
from hypothesis import given, note, settings
from hypothesis import strategies as st
from sweep import mesh_of
from torch import Tensor, linalg

import shardwise as sw

MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2)]
LARGEST = 200


class Tools:
    """What ops need beside their operand: numbers that are the same on one device and on many, placed at random."""

    def __init__(self, mesh: Any, where: list[int]) -> None:
        self.mesh, self.where, self.generator, self.turn = mesh, where, torch.Generator().manual_seed(0), count()

    def put(self, x: Tensor) -> Tensor:
        turn = next(self.turn)
        if self.mesh is None:
            return x
        choices = [sw.Replicate(), *map(sw.Shard, range(x.ndim))]
        at = [choices[self.where[(turn + axis) % len(self.where)] % len(choices)] for axis in range(self.mesh.ndim)]
        return sw.distribute_tensor(x, self.mesh, at)

    def ints(self, high: int, *shape: int) -> Tensor:
        return self.put(torch.randint(high, shape, generator=self.generator))

    def reals(self, *shape: int) -> Tensor:
        return self.put(torch.randn(shape, dtype=torch.float64, generator=self.generator))

    def untied(self, a: Tensor) -> Tensor:
        """`a` without equal elements, of which an op might take either."""
        return a + 0.01 * self.reals(*a.shape)


Op = Callable[[Tensor, int, Tools], Tensor]


def shorter(a: Tensor, d: int) -> list[int]:
    return [max(1, size - 1) if dim != d else 4 for dim, size in enumerate(a.shape)]


INDEXING: dict[str, Op] = {
    "rows": lambda a, d, t: a[t.ints(a.shape[0], 4)],
    "columns": lambda a, d, t: a[:, t.ints(a.shape[1], 2, 2)],
    "places": lambda a, d, t: a[t.ints(a.shape[0], 3), :, t.ints(a.shape[2], 3)],
    "index_select": lambda a, d, t: a.index_select(d, t.ints(a.shape[d], 3)),
    "gather": lambda a, d, t: a.gather(d, t.ints(a.shape[d], *shorter(a, d))),
    "take": lambda a, d, t: a.take(t.ints(a.numel(), 2, 3)),
    "index_put": lambda a, d, t: a.index_put((t.ints(a.shape[0], 3),), a[:1] * 0.5, accumulate=True),
    "index_add": lambda a, d, t: a.index_add(d, t.ints(a.shape[d], a.shape[d]), a * 0.5, alpha=-2),
    "scatter_add": lambda a, d, t: a.scatter_add(d, t.ints(a.shape[d], *a.shape), a * 0.5),
    "scatter": lambda a, d, t: a.scatter(d, t.reals(*a.shape).argsort(d), a * 0.5),
    "scatter mean": lambda a, d, t: a.scatter_reduce(d, t.ints(a.shape[d], *a.shape), a.sin(), "mean"),
    "masked_fill": lambda a, d, t: a.masked_fill(t.untied(a) > 0.1, 0.1),
    "masked_select": lambda a, d, t: a * a.masked_select(t.untied(a) > 0).sum(),
}
SCANS_AND_SORTING: dict[str, Op] = {
    "cumsum": lambda a, d, t: a.cumsum(d),
    "cumprod": lambda a, d, t: a.cos().cumprod(d),
    "logcumsumexp": lambda a, d, t: a.logcumsumexp(d),
    "cummax": lambda a, d, t: t.untied(a).cummax(d)[0],
    "sort": lambda a, d, t: t.untied(a).sort(d, descending=True)[0],
    "argsort": lambda a, d, t: a.gather(d, t.untied(a).argsort(d)),
    "topk": lambda a, d, t: t.untied(a).topk((a.shape[d] + 1) // 2, d)[0],
    "kthvalue": lambda a, d, t: t.untied(a).kthvalue((a.shape[d] + 1) // 2, d, keepdim=True)[0] - a,
    "kthvalue of all": lambda a, d, t: t.untied(a).flatten().kthvalue((a.numel() + 1) // 2)[0] * a,
    "sort of all": lambda a, d, t: t.untied(a).flatten().sort()[0][1:],
    "median": lambda a, d, t: t.untied(a).median(d, keepdim=True)[0] * a,
    "quantile": lambda a, d, t: torch.quantile(t.untied(a), 0.3, dim=d, keepdim=True) + a,
}
REDUCTIONS: dict[str, Op] = {
    "sum": lambda a, d, t: a.sum(d),
    "mean": lambda a, d, t: a.mean((d, (d + 1) % 3), keepdim=True) - a,
    "variance": lambda a, d, t: a * a.var(d, correction=0, keepdim=True),
    "norm": lambda a, d, t: a / (1 + linalg.vector_norm(a, 3, d, keepdim=True)),
    "amax": lambda a, d, t: t.untied(a).amax(d, keepdim=True) - a,
    "prod": lambda a, d, t: a.cos().prod(d),
    "logsumexp": lambda a, d, t: a.logsumexp(d),
    "cdist": lambda a, d, t: torch.cdist(a, t.untied(a)),
}
SHAPING: dict[str, Op] = {
    "permute": lambda a, d, t: a.permute(d, (d + 1) % 3, (d + 2) % 3),
    "merge": lambda a, d, t: a.flatten(d // 2, d // 2 + 1),
    "reshape": lambda a, d, t: a.reshape(a.shape[2], -1, 1),
    "flip": lambda a, d, t: a.flip((d, (d + 1) % 3)),
    "roll": lambda a, d, t: a.roll((1, -2), (d, (d + 1) % 3)),
    "roll of all": lambda a, d, t: a.roll(3),
    "windows": lambda a, d, t: a.unfold(d, min(2, a.shape[d]), 1),
    "repeat": lambda a, d, t: a.repeat(1, 2, 1),
    "repeat_interleave": lambda a, d, t: a.repeat_interleave(2, d),
    "tril": lambda a, d, t: a.tril(d - 1),
    "diagonal": lambda a, d, t: a.diagonal(0, d, (d + 1) % 3),
    "rot90": lambda a, d, t: a.rot90(1, (d, (d + 1) % 3)),
    "turned": lambda a, d, t: torch.cat(a.tensor_split(2, d)[::-1], d),
    "unbind": lambda a, d, t: torch.stack(a.unbind(d)[::-1], (d + 1) % 3),
    "steps": lambda a, d, t: a[1::2] if a.shape[0] > 1 else a,
    "narrow": lambda a, d, t: a.narrow(d, a.shape[d] // 2, (a.shape[d] + 1) // 2),
    "pad": lambda a, d, t: F.pad(a, (1, 0, 0, 2, 1, 0), value=0.3),
    "cut": lambda a, d, t: F.pad(a, (0, 0, -1, 1)),
    "circular": lambda a, d, t: F.pad(a, (1, 1), mode="circular"),
    "replicate": lambda a, d, t: F.pad(a, (2, 1), mode="replicate"),
    "reflect": lambda a, d, t: F.pad(a, (1, 1), mode="reflect") if a.shape[2] > 1 else a,
}
NETWORKS: dict[str, Op] = {
    "conv1d": lambda a, d, t: F.conv1d(a, t.reals(2, a.shape[1], 3), t.reals(2), padding=1 + d, dilation=1 + d % 2),
    "conv2d": lambda a, d, t: F.conv2d(a.unsqueeze(1), t.reals(2, 1, 2, 2), padding=1, stride=1 + d % 2),
    "conv_transpose": lambda a, d, t: F.conv_transpose1d(a, t.reals(a.shape[1], 2, 3), stride=1 + d),
    "max_pool": lambda a, d, t: F.max_pool1d(t.untied(a), 2, 1, padding=1),
    "avg_pool": lambda a, d, t: F.avg_pool2d(a, (1, 2), 1, padding=(0, 1), count_include_pad=d == 1),
    "adaptive": lambda a, d, t: F.adaptive_avg_pool1d(a, 1 + d),
    "interpolate": lambda a, d, t: F.interpolate(a, size=4, mode="linear", align_corners=d == 0),
    "layer_norm": lambda a, d, t: F.layer_norm(a, a.shape[1:], eps=0.1),
    "group_norm": lambda a, d, t: F.group_norm(torch.cat([a, -a], 2), a.shape[1], eps=0.1),
    "batch_norm": lambda a, d, t: F.batch_norm(
        a.repeat(2, 1, 1), None, None, t.reals(a.shape[1]), training=True, eps=1
    ),
    "instance_norm": lambda a, d, t: F.instance_norm(torch.cat([a, -a], 2), eps=0.1),
    "response_norm": lambda a, d, t: F.local_response_norm(a, 2),
    "softmax": lambda a, d, t: a.softmax(d),
    "attention": lambda a, d, t: F.scaled_dot_product_attention(a, a, t.untied(a), is_causal=d == 1),
    "embedding": lambda a, d, t: F.embedding(t.ints(a.shape[0], 3), a.flatten(1), padding_idx=0),
    "bag": lambda a, d, t: F.embedding_bag(
        t.ints(a.shape[0], 3, 2), a.flatten(1), mode=("sum", "mean", "sum")[d], padding_idx=0
    ),
    "glu": lambda a, d, t: F.glu(torch.cat([a, a.sin()], d), d),
}
LOSSES: dict[str, Op] = {
    "mse": lambda a, d, t: F.mse_loss(a, t.reals(*a.shape)) * a,
    "smooth_l1": lambda a, d, t: F.smooth_l1_loss(t.untied(a), t.reals(*a.shape)) * a,
    "huber rows": lambda a, d, t: F.huber_loss(a, t.reals(*a.shape), reduction="none"),
    "entropy": lambda a, d, t: F.cross_entropy(a, t.ints(a.shape[1], a.shape[0], a.shape[2]), label_smoothing=0.1) * a,
    "weighted": lambda a, d, t: F.cross_entropy(
        a, t.ints(a.shape[1], a.shape[0], a.shape[2]), t.reals(a.shape[1]).abs() + 0.1, ignore_index=0, reduction="sum"
    ),
    "nll": lambda a, d, t: F.nll_loss(a, t.ints(a.shape[1], a.shape[0], a.shape[2])) * a,
    "logits": lambda a, d, t: F.binary_cross_entropy_with_logits(a, t.reals(*a.shape).sigmoid()) * a,
    "kl_div": lambda a, d, t: F.kl_div(a.log_softmax(d), t.reals(*a.shape).softmax(d), reduction="batchmean") * a,
    "cosine": lambda a, d, t: F.cosine_similarity(a + 2, t.untied(a), d),
}


def definite(a: Tensor, t: Tools) -> Tensor:
    a = a.tanh()
    return a @ a.mT + 2 * t.put(torch.eye(a.shape[1], dtype=torch.float64))


ALGEBRA: dict[str, Op] = {
    "bmm": lambda a, d, t: a @ t.untied(a).mT * 0.2,
    "einsum": lambda a, d, t: torch.einsum(("bij,bkj->ik", "bij,bij->bi", "bij,ckj->bcik")[d], a, t.untied(a)) * 0.2,
    "inv": lambda a, d, t: linalg.inv(definite(a, t)),
    "solve": lambda a, d, t: linalg.solve(definite(a, t), a),
    "cholesky": lambda a, d, t: linalg.cholesky(definite(a, t)),
    "triangular": lambda a, d, t: linalg.solve_triangular(definite(a, t).tril(), a, upper=False),
    "det": lambda a, d, t: linalg.det(definite(a, t)),
    "matrix_exp": lambda a, d, t: linalg.matrix_exp(definite(a, t) * 0.1),
    "rfft": lambda a, d, t: torch.fft.rfft(a, dim=d).imag,
    "filter": lambda a, d, t: torch.fft.ifft(torch.fft.fft(a, dim=d) * 0.5, dim=d).real,
    "fftshift": lambda a, d, t: torch.fft.fftshift(a, (d,)),
    "outer": lambda a, d, t: torch.outer(a[0, 0], a[0, :, 0]),
}


def written(write: Callable[[Tensor, int, Tools], object]) -> Op:
    """An op that writes to a tensor of its own."""

    def op(a: Tensor, d: int, t: Tools) -> Tensor:
        own = a.sin()  # which is never pending
        write(own, d, t)
        return own

    return op


WRITES: dict[str, Op] = {
    "mul_": written(lambda a, d, t: a.mul_(0.5).add_(1)),
    "slice": written(lambda a, d, t: a[1:, :2].mul_(3)),
    "turned slice": written(lambda a, d, t: a.transpose(0, d)[:2].add_(1)),
    "row": written(lambda a, d, t: a[0].mul_(2)),
    "assigned": written(lambda a, d, t: a.__setitem__((slice(None), -1), 0.3)),
    "assigned rows": written(lambda a, d, t: a.__setitem__(t.ints(a.shape[0], 2), 0.5)),
    "flat": written(lambda a, d, t: a.view(-1)[1:].mul_(2)),
    "index_fill_": written(lambda a, d, t: a.index_fill_(d, t.ints(a.shape[d], 2), 0.7)),
    "index_add_": written(lambda a, d, t: a.index_add_(d, t.ints(a.shape[d], a.shape[d]), t.untied(a))),
    "masked_fill_": written(lambda a, d, t: a.masked_fill_(t.untied(a) > 0.2, 0.2)),
    "copy_": written(lambda a, d, t: a.copy_(t.untied(a).flip(d))),
    "relu": written(lambda a, d, t: F.relu(a, inplace=True)),
}

FAMILIES = {
    "indexing": INDEXING,
    "scans and sorting": SCANS_AND_SORTING,
    "reductions": REDUCTIONS,
    "shaping": SHAPING,
    "networks": NETWORKS,
    "losses": LOSSES,
    "algebra": ALGEBRA,
    "writes": WRITES,
}

Step = tuple[str, str, int]


def three_dims(a: Tensor) -> Tensor:
    """As the next op takes it: three dims, none empty, not too large."""
    while a.ndim < 3:
        a = a.unsqueeze(-1)
    a = a.flatten(0, a.ndim - 3)
    return a[:5, :5, :5] if a.numel() > LARGEST else a


def run(steps: list[Step], a: Tensor, tools: Tools) -> Tensor:
    for family, name, dim in steps:
        a = three_dims(FAMILIES[family][name](a, dim, tools))
        if not a.numel():
            break
    return a


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[sw.Placement], int, list[int], list[Step]]:
    """A mesh, the shape of the input (uneven, or shorter than the mesh), its layout, where it is cut first so that its
    pieces are of any size, where other operands lie, and one to three steps."""
    mesh = draw(st.sampled_from(MESHES))
    shape = [draw(st.integers(1, 5)) for _ in range(3)]
    one = st.sampled_from([sw.Replicate(), *map(sw.Shard, range(3)), sw.Partial()])
    step = st.sampled_from([(family, name) for family, ops in FAMILIES.items() for name in ops])
    steps = draw(st.lists(st.tuples(step, st.integers(0, 2)), min_size=1, max_size=3))
    return (
        mesh,
        shape,
        [draw(one) for _ in mesh],
        draw(st.integers(0, 2)),
        [draw(st.integers(0, 3)) for _ in range(5)],
        [(family, name, dim) for (family, name), dim in steps],
    )


@settings(max_examples=600)
@given(programs())
def test_program(program: tuple) -> None:
    shape, placements, cut, where, steps = program[1:]
    mesh = mesh_of(program[0])
    whole = torch.randn([shape[0] + cut, *shape[1:]], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, dist = whole.clone().requires_grad_(), sw.distribute_tensor(whole, mesh, placements).requires_grad_()
    note(f"{dist._layout}, others at {where}: {steps}")
    expected = run(steps, plain[cut:], Tools(None, where))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.errors.FallbackWarning)
        result = run(steps, dist[cut:], Tools(mesh, where))
    assert result.shape == expected.shape and result.requires_grad == expected.requires_grad
    check_shards(result)
    torch.testing.assert_close(result.detach().full_tensor(), expected.detach(), atol=1e-8, rtol=1e-7)
    if not expected.requires_grad:
        return
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (result * sw.distribute_tensor(weights, mesh)).sum().backward()
    assert dist.grad is not None
    check_shards(dist.grad)
    torch.testing.assert_close(dist.grad.full_tensor(), plain.grad, atol=1e-8, rtol=1e-6)
