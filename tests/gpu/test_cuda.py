"""On a CUDA device: one operator or more of every family on a simulated mesh of CUDA shards, and a training step over
NCCL. Skipped where there is no such device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import compare
from torch import Tensor, nn

import shardwise as sw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()
PLACEMENTS = [[R], [sw.Shard(0)], [sw.Shard(1)], [P]]


def index(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda")


def replicated(x: Tensor, like: Tensor) -> Tensor:
    """A plain tensor beside plain ones; a replicated one beside DTensors."""
    return sw.distribute_tensor(x, like.device_mesh) if isinstance(like, sw.DTensor) else x


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "element-wise": lambda x: (x * 2 + x.exp()).tanh(),
    "matmul": lambda x: x @ x.t(),
    "reductions": lambda x: [x.sum(0), x.mean(), x.var(1), x.amax(0), x.logsumexp(1), x.norm(), x.max(0).values],
    "scans": lambda x: [x.cumsum(0), x.cumsum(1), x.cummax(0).values],
    "sorting": lambda x: [x.sort(0).values, x.sort(1).values, x[:, 0].sort().values, x.topk(2, 1).values],
    "views": lambda x: [x.view(3, 8), x[1], x[:, 1:3], x.t().reshape(-1), x.unbind(0)[2]],
    "shaping": lambda x: [x.flip(0), x.roll(2, 1), F.pad(x, (1, 2)), torch.cat([x, x], 1), x.tril()],
    "gather": lambda x: x.gather(0, replicated(index(3, 0, 1, 2, 2, 1).expand(2, 6), x)),
    "index": lambda x: [x[replicated(index(2, 0, 3), x)], x.index_select(1, replicated(index(4, 1), x))],
    "scatter": lambda x: x.scatter_add(0, replicated(index(1, 3, 0, 0, 2, 3).expand(2, 6), x), x[:2] * 1),
    "softmax": lambda x: [x.softmax(0), x.log_softmax(1)],
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "convolution": lambda x: F.conv1d(x.unsqueeze(0), replicated(torch.ones(4, 4, 3, dtype=x.dtype, device="cuda"), x)),
    "pooling": lambda x: [F.max_pool1d(x.unsqueeze(0), 2), F.avg_pool1d(x.unsqueeze(0), 3, 1)],
    "cross entropy": lambda x: F.cross_entropy(x, replicated(index(0, 5, 2, 3), x), label_smoothing=0.1),
    "embedding": lambda x: F.embedding(replicated(index(3, 0, 0, 2), x), x),
    "embedding bag": lambda x: F.embedding_bag(replicated(index(3, 0, 0, 2).view(2, 2), x), x, mode="mean"),
    "linear algebra": lambda x: torch.linalg.det(x.view(2, 2, 6)[:, :, :2]),
    "fft": lambda x: torch.fft.rfft(x, dim=1).abs(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_simulated_ranks(name: str) -> None:
    mesh = sw.simulate((2,), ("tp",), device="cuda")
    x = torch.randn(4, 6, dtype=torch.float64, device="cuda")
    for placements in PLACEMENTS:
        compare(FUNCTIONS[name], [x], mesh, [placements])


EXPERTS = {
    "rows": ((50, 32), (3, 32, 48), (7, 7, 50)),
    "columns": ((3, 24, 32), (32, 48), (8, 32, 48)),
    "contracted": ((24, 48), (48, 40), (8, 32, 48)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("a", "b", "ends"), EXPERTS.values(), ids=EXPERTS)
def test_experts(a: tuple[int, ...], b: tuple[int, ...], ends: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of shards whose rows and groups do not begin where the kernel wants them; only its whole rows do."""
    mesh, offs = sw.simulate((2, 3), ("dp", "tp"), device="cuda"), torch.tensor(ends, dtype=torch.int32, device="cuda")
    x, w = (torch.randint(-3, 4, shape, device="cuda").to(dtype) for shape in (a, b))
    ways = [[R, R], [S(0), R], [R, S(0)], [S(1), S(0)], [R, S(1)], [S(0), S(1)], [S(0), S(0)], [P, R]]
    for left, right in itertools.product(ways, [*ways, *([[S(2), S(0)]] if len(b) == 3 else [])]):
        compare(
            lambda x, w: F.grouped_mm(x, w, offs=replicated(offs, x)) * 1,
            *([x, w], mesh, [left, right]),
            **({"atol": 2.0, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-3, "rtol": 1e-5}),
        )


def test_dropout_agrees_on_replicas_and_differs_on_shards() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"), device="cuda")
    x = sw.ones(32, 32, device_mesh=mesh, placements=[R, sw.Shard(0)])
    dropped = F.dropout(x, 0.5)
    shards = [shard.as_subclass(Tensor) for shard in (dropped.to_local(), *dropped.to_local()._peers)]
    assert torch.equal(shards[0], shards[2]) and torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1])


@pytest.fixture
def nccl(tmp_path: Any) -> Iterator[Any]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield sw.init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}], ids=["foreach", "fused", "default"])
def test_training_over_nccl(nccl: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).cuda()
    ours = copy.deepcopy(plain)
    for module in ours.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = sw.distribute_tensor(parameter.data, nccl, [R, sw.Shard(0)])
            module.register_parameter(name, nn.Parameter(placed))
    x, y = torch.randn(6, 8, device="cuda"), torch.randint(5, (6,), device="cuda")
    losses = []
    for model, wrap in ((plain, lambda t: t), (ours, lambda t: sw.distribute_tensor(t, nccl, [sw.Shard(0), R]))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(wrap(x)), wrap(y))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(losses[0], losses[1])
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach())
