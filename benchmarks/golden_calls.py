"""The calls whose layouts and communication are frozen: expressions over a few named tensors, by family.

Every name of `TENSORS` that an expression uses is an input, and gets a placement along each mesh axis. What is written
here decides the keys of the goldens: a changed expression is a call removed and another one added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

TENSORS: dict[str, Callable[[], Tensor]] = {
    "x": lambda: torch.randn(4, 6),
    "y": lambda: torch.randn(4, 6),
    "row": lambda: torch.randn(6),
    "scalar": lambda: torch.randn(()),
    "uneven": lambda: torch.randn(5, 3),  # cut into 3 and 2 rows, or 2, 2, 1 and none
    "batch": lambda: torch.randn(4, 5, 6),
    "weight": lambda: torch.randn(8, 6),
    "bias": lambda: torch.randn(8),
    "square": lambda: torch.eye(4) * 4 + torch.randn(4, 4) / 4,
    "image": lambda: torch.randn(2, 4, 8, 8),
    "kernel": lambda: torch.randn(4, 4, 3, 3),
    "channels": lambda: torch.randn(4),
    "q": lambda: torch.randn(2, 4, 6, 8),
    "k": lambda: torch.randn(2, 4, 6, 8),
    "v": lambda: torch.randn(2, 4, 6, 8),
    "ids": lambda: torch.randint(8, (4, 6)),
    "classes": lambda: torch.randint(6, (4,)),
    "along": lambda: torch.randint(4, (4, 6)),
    "rows": lambda: torch.tensor([3, 0, 2]),
    "mask": lambda: torch.arange(24).view(4, 6) % 3 > 0,
    "rotation": lambda: torch.randn(4, 6, dtype=torch.complex64),
}

PARAMETERS = frozenset({"row", "weight", "bias", "kernel", "channels"})
"""Leaves of the graph, which are gathered where they must move. The others are results, as activations are."""


# --- What expressions may call beside torch ---


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    """`x[index] = value`, as an expression."""
    x[index] = value
    return x


def to(x: sw.DTensor, *placements: sw.Placement) -> sw.DTensor:
    """`x` in other placements; one stands for all axes."""
    ndim = len(x.placements)
    return x.redistribute(placements=placements if len(placements) == ndim else placements * ndim)


def made(factory: Callable[..., sw.DTensor], like: sw.DTensor, *size: int) -> sw.DTensor:
    return factory(*size, device_mesh=like.device_mesh, placements=like.placements)


def trained(optimizer: type[torch.optim.Optimizer], p: Tensor, *, clip: bool = False, **options: Any) -> list[Tensor]:
    """A parameter after two steps towards zero, and the optimizer's state."""
    parameter = nn.Parameter(p.detach().clone())
    optim = optimizer([parameter], **options)
    for _ in range(2):
        optim.zero_grad()
        parameter.square().sum().backward()
        if clip:
            nn.utils.clip_grad_norm_([parameter], 1.0)
        optim.step()
    return [parameter.detach(), *(x for x in optim.state[parameter].values() if isinstance(x, sw.DTensor))]


NAMES: dict[str, Any] = {
    **{"torch": torch, "F": F, "nn": nn, "optim": torch.optim, "sw": sw},
    **{"put": put, "to": to, "made": made, "trained": trained},
    **{"R": sw.Replicate(), "S": sw.Shard, "P": sw.Partial},
}


# --- The calls ---

CALLS: dict[str, tuple[str, ...]] = {
    "pointwise": (
        "x + y",
        "x * y",
        "x / 2 - 1",
        "x + row",
        "x * scalar",
        "torch.relu(x)",
        "F.gelu(x)",
        "x.exp()",
        "-x",
        "x.abs().sqrt()",
        "torch.where(mask, x, y)",
        "torch.addcmul(x, y, y)",
        "torch.lerp(x, y, 0.5)",
        "torch.maximum(x, y)",
        "x > 0",
        "x.to(torch.float64)",
        "x.bfloat16()",
        "x.clamp(-0.5, 0.5)",
        "uneven.tanh()",
        "x.pow(2)",
        "rotation.abs()",
        "rotation * rotation.conj()",
        "x.masked_fill(mask, 0.0)",
        "x.detach()",
        "ids % 3",
    ),
    "matmul": (
        "F.linear(x, weight, bias)",
        "F.linear(x, weight)",
        "F.linear(batch, weight, bias)",
        "x @ y.t()",
        "x.t() @ y",
        "torch.addmm(bias, x, weight.t())",
        "x @ row",
        "batch @ batch.mT",
        "torch.bmm(batch, batch.mT)",
        "torch.matmul(batch, weight.t())",
        "torch.einsum('bsw,hw->bsh', batch, weight)",
        "torch.outer(bias, row)",
        "torch.dot(row, row)",
        "torch.baddbmm(batch @ batch.mT, batch, batch.mT)",
        "torch.linalg.solve(square, x)",
        "torch.linalg.inv(square)",
        "torch.linalg.vector_norm(x)",
        "torch.cdist(x, y)",
    ),
    "reductions": (
        "x.sum()",
        "x.sum(0)",
        "x.sum(1, keepdim=True)",
        "x.mean()",
        "x.mean(0)",
        "uneven.mean(0)",
        "x.amax(1)",
        "x.max(0)",
        "x.argmax(1)",
        "x.argmin()",
        "x.prod(0)",
        "x.var(0)",
        "x.std()",
        "x.norm()",
        "x.logsumexp(1)",
        "x.softmax(1)",
        "x.log_softmax(0)",
        "x.cumsum(0)",
        "x.cumprod(1)",
        "(x > 0).any(0)",
        "(x > 0).all()",
        "x.median(0)",
        "x.sort(0)",
        "x.topk(2, 1)",
        "x.argsort(1)",
        "x.aminmax()",
        "torch.count_nonzero(mask, 0)",
        "x.kthvalue(2, 0)",
        "ids.flatten().bincount(minlength=8)",
        "x.allclose(y)",
        "x.detach().unique()",
    ),
    "views": (
        "x.view(-1)",
        "x.view(2, 2, 6)",
        "x.view(4, 2, 3)",
        "x.t()",
        "batch.transpose(0, 1)",
        "batch.permute(2, 0, 1)",
        "batch.flatten(0, 1)",
        "batch.flatten(1)",
        "batch.reshape(20, 6)",
        "x.unsqueeze(1)",
        "x[:, None].squeeze(1)",
        "x.expand(3, 4, 6)",
        "row.expand(4, 6)",
        "x[1:3]",
        "x[:, ::2]",
        "x[0]",
        "x[..., -1]",
        "x.narrow(0, 1, 2)",
        "x.chunk(2, 0)",
        "x.split(4, 1)",
        "x.unbind(0)",
        "torch.cat([x, y])",
        "torch.cat([x, y], 1)",
        "torch.stack([x, y])",
        "x.repeat(2, 1)",
        "x.repeat_interleave(2, 0)",
        "x.roll(1, 0)",
        "x.flip(0)",
        "x.tril()",
        "x.diagonal()",
        "x.unfold(1, 2, 2)",
        "F.pad(x, (1, 1))",
        "uneven.t().contiguous()",
        "x.view(torch.int32)",
        "torch.view_as_real(rotation)",
        "batch.movedim(0, 2).reshape(5, -1)",
        "x.tile(1, 2)",
    ),
    "indexing": (
        "x[rows]",
        "x[:, rows]",
        "x[rows, rows]",
        "x[mask]",
        "x[rows, None]",
        "x.gather(0, along)",
        "x.index_select(0, rows)",
        "x.scatter(0, along, y)",
        "x.scatter_add(0, along, y)",
        "x.index_add(0, rows, y[:3])",
        "x.masked_select(mask)",
        "x.take(along)",
        "mask.nonzero()",
        "torch.take_along_dim(x, along, 0)",
        "x.masked_scatter(mask, y)",
        "x.index_put((rows,), y[:3])",
        "x.slice_scatter(y[:2], 0, 1, 3)",
        "torch.searchsorted(row.sort().values, x)",
        "x.select_scatter(row, 0, 2)",
    ),
    "norms": (
        "F.layer_norm(x, (6,))",
        "F.layer_norm(x, (6,), row, row)",
        "F.layer_norm(batch, (5, 6))",
        "F.rms_norm(x, (6,), row)",
        "F.group_norm(image, 2, channels, channels)",
        "F.batch_norm(image, None, None, channels, channels, training=True)",
        "F.batch_norm(image, channels.detach(), channels.detach().abs(), channels)",
        "F.instance_norm(image)",
        "F.normalize(x, dim=1)",
        "F.local_response_norm(image, 2)",
    ),
    "losses": (
        "F.cross_entropy(x, classes)",
        "F.cross_entropy(x, classes, row.detach().abs(), label_smoothing=0.1)",
        "F.cross_entropy(x, classes, reduction='none')",
        "F.cross_entropy(x, classes, ignore_index=1, reduction='sum')",
        "F.cross_entropy(x, y.softmax(1))",
        "F.nll_loss(x.log_softmax(1), classes)",
        "F.mse_loss(x, y)",
        "F.mse_loss(x, y, reduction='sum')",
        "F.l1_loss(x, y)",
        "F.huber_loss(x, y)",
        "F.binary_cross_entropy_with_logits(x, y.sigmoid())",
        "F.kl_div(x.log_softmax(1), y.softmax(1), reduction='batchmean')",
        "F.cosine_similarity(x, y)",
        "F.multi_margin_loss(x, classes)",
        "F.triplet_margin_loss(x, y, x.flip(0))",
    ),
    "attention": (
        "F.scaled_dot_product_attention(q, k, v)",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "F.scaled_dot_product_attention(q, k, v, q @ k.mT)",
        "(q @ k.mT / 8 ** 0.5).softmax(-1) @ v",
    ),
    "embedding": (
        "F.embedding(ids, weight)",
        "F.embedding(ids, weight, padding_idx=0)",
        "F.embedding(classes, weight)",
        "F.embedding_bag(ids, weight)",
        "F.embedding_bag(ids, weight, mode='max')",
        "F.one_hot(ids, 8)",
    ),
    "convolution": (
        "F.conv2d(image, kernel)",
        "F.conv2d(image, kernel, channels, padding=1)",
        "F.conv2d(image, kernel, stride=2)",
        "F.conv1d(batch, batch[:3, :, :3])",
        "F.conv_transpose2d(image, kernel, stride=2)",
        "F.conv2d(image, kernel[:, :1], groups=4)",
        "F.max_pool2d(image, 2)",
        "F.avg_pool2d(image, 2)",
        "F.adaptive_avg_pool2d(image, 2)",
        "F.interpolate(image, scale_factor=2)",
        "F.interpolate(image, scale_factor=2, mode='bilinear')",
        "F.unfold(image, 3)",
        "F.pixel_shuffle(image, 2)",
        "torch.fft.fft(x)",
    ),
    "foreach": (
        "torch._foreach_add([x, y], 1.0)",
        "torch._foreach_mul([x, row], [x, row])",
        "torch._foreach_norm([x, row])",
        "torch._foreach_add_([x.clone(), y.clone()], [y, x])",
        "torch._foreach_addcdiv([x, y], [y, x], [y.exp(), x.exp()], 0.1)",
        "nn.utils.get_total_norm([x, row, uneven])",
    ),
    "optimizers": (
        "trained(optim.SGD, x, lr=0.1)",
        "trained(optim.SGD, x, lr=0.1, momentum=0.9, foreach=True)",
        "trained(optim.AdamW, x, foreach=True)",
        "trained(optim.AdamW, uneven, fused=True)",
        "trained(optim.Adam, x, foreach=False, clip=True)",
        "trained(optim.Adafactor, x)",
        "trained(optim.RMSprop, row)",
    ),
    "in-place": (
        "x.clone().add_(y)",
        "x.clone().mul_(2)",
        "x.clone().add_(row)",
        "x.clone().copy_(y)",
        "x.clone().zero_()",
        "F.relu(x.clone(), inplace=True)",
        "put(x.clone(), mask, 0)",
        "put(x.clone(), 0, row)",
        "put(x.clone(), (slice(None), slice(1, 3)), 1.0)",
        "put(x.clone(), rows, y[:3])",
        "x.clone().masked_fill_(mask, 0.0)",
        "x.clone().addmm_(x, square.new_ones(6, 6))",
        "x.clone().scatter_add_(0, along, y)",
        "x.clone().t_()",
        "torch.add(x.detach(), y.detach(), out=x.detach().clone())",
        "put(x.clone().view(2, 12), 0, 0.0)",
        "x.clone().clamp_(min=0)",
    ),
    "random": (
        "F.dropout(x, 0.5)",
        "torch.rand_like(x)",
        "torch.randn_like(uneven)",
        "x.detach().clone().normal_()",
        "torch.bernoulli(x.sigmoid())",
        "x.softmax(1).multinomial(2)",
        "nn.init.xavier_uniform_(x.detach().clone())",
        "nn.init.orthogonal_(x.detach().clone())",
        "F.gumbel_softmax(x, dim=1)",
        "torch.randint_like(ids, 5)",
        "F.dropout(F.linear(x, weight), 0.1)",
    ),
    "factories": (
        "made(sw.zeros, x, 4, 6)",
        "made(sw.randn, x, 5, 7)",
        "made(sw.empty, x, 4, 6)",
        "made(sw.rand, uneven, 5, 3)",
        "torch.zeros_like(x)",
        "torch.ones_like(x, dtype=torch.float64)",
        "x.new_zeros(3, 4)",
        "x.new_full((4,), 2.0)",
        "torch.full_like(uneven, 3.0)",
        "torch.empty_like(x).fill_(0)",
    ),
    "redistribute": (
        "to(x, R)",
        "to(x, S(0))",
        "to(x, S(1))",
        "to(uneven, S(0))",
        "to(x, P())",
        "to(uneven.abs(), P('max'))",
        "to(x, R).to_local().sum()",
        "x.full_tensor()",
        "x.to_local() * 2",
        "to(x, R) + to(x, S(0))",
        "F.linear(to(x, S(0)), weight) + to(x, S(1)).sum()",
    ),
    "gradients": (  # of gradients, and of tensors that several calls share
        "torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]",
        "torch.autograd.grad(F.linear(x, weight).square().sum(), weight, create_graph=True)[0]",
        "F.linear(x, weight) + F.linear(y, weight)",
        "F.linear(F.relu(F.linear(x, weight)), weight.t()) + x",
        "torch.utils.checkpoint.checkpoint(F.linear, x, weight, use_reentrant=False)",
        "x.sum() * x",
    ),
}
