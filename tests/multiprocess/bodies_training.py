"""Bodies about whole programs: training steps, dropout, hooks, accumulation, checkpoints, saving."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from bodies import P, R, S, assert_close, body, doubles, everywhere, held, leaf
from shardwise.comm.record import off_the_record
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.redistribute.backward import buckets

WIDTH, HEADS, TOKENS, BATCH, CLASSES = 8, 2, 3, 4, 6


class Block(nn.Module):
    """A transformer block and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.view(BATCH, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2)

        h = self.norm1(x)
        mixed = F.scaled_dot_product_attention(heads(self.q(h)), heads(self.k(h)), heads(self.v(h)), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x)


def shard_block(block: Block, mesh: Any) -> None:
    """Megatron's way: q, k, v, up and the head by output, out and down by input; the rest replicated."""
    columns, rows = ("q", "k", "v", "up", "head"), ("out", "down")
    for name, module in block.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            along_tp: Any = R
            if name in columns:
                along_tp = S(0)
            elif name in rows and key == "weight":
                along_tp = S(1)
            module.register_parameter(key, nn.Parameter(sw.distribute_tensor(parameter.data, mesh, [R, along_tp])))


def train(block: Block, batches: list[tuple[Tensor, Tensor]], options: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, **options)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(block(x).flatten(0, 1), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_training(mesh: Any, options: dict[str, Any]) -> None:
    plain = Block()
    sharded = copy.deepcopy(plain)
    shard_block(sharded, mesh)
    data = [(doubles(BATCH, TOKENS, WIDTH), torch.randint(CLASSES, (BATCH * TOKENS,))) for _ in range(4)]
    dist_data = [(sw.distribute_tensor(x, mesh, [S(0), R]), sw.distribute_tensor(y, mesh, [S(0), R])) for x, y in data]
    expected, actual = train(plain, data, options), train(sharded, dist_data, options)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected))
    for (name, a), b in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(a, sw.DTensor), name
        assert_close(a, b, name)
        shards = everywhere(held(a))
        for (dp, tp), shard in shards.items():
            assert torch.equal(shard, shards[0, tp]), f"{name}: replica {dp} has drifted"
    state = {name: x.full_tensor() for name, x in sharded.state_dict().items()}
    for name, x in plain.state_dict().items():
        assert_close(state[name], x, name)


@body(2, 2)
def training_with_foreach_adamw(mesh: Any) -> None:
    check_training(mesh, {"foreach": True})


@body(2, 2)
def training_with_fused_adamw(mesh: Any) -> None:
    check_training(mesh, {"fused": True})


@body(2, 2)
def training_with_plain_adamw(mesh: Any) -> None:
    check_training(mesh, {"foreach": False})


@body(2, 2, same_record=False)
def a_model_is_freed_and_steps_leave_nothing_behind(mesh: Any) -> None:
    block = Block()
    shard_block(block, mesh)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, foreach=True)
    x = sw.distribute_tensor(doubles(BATCH, TOKENS, WIDTH), mesh, [S(0), R])
    y = sw.distribute_tensor(torch.randint(CLASSES, (BATCH * TOKENS,)), mesh, [S(0), R])
    counts = []
    for step in range(8):
        with off_the_record():  # the record of what is communicated is meant to grow
            optimizer.zero_grad()
            F.cross_entropy(block(x).flatten(0, 1), y).backward()
            optimizer.step()
        if step in (3, 7):  # the first steps fill caches
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 8, counts
    alive = [weakref.ref(parameter) for parameter in block.parameters()]
    del block, optimizer
    gc.collect()
    assert not any(parameter() is not None for parameter in alive)


@body(2, 2)
def dropout_is_equal_on_replicas_and_distinct_on_shards(mesh: Any) -> None:
    x = sw.ones(64, 64, device_mesh=mesh, placements=[R, S(0)])
    for _ in range(2):
        shards = everywhere(held(F.dropout(x, 0.5)))
        assert torch.equal(shards[0, 0], shards[1, 0])
        assert torch.equal(shards[0, 1], shards[1, 1])
        assert not torch.equal(shards[0, 0], shards[0, 1])
    after = set(everywhere({at: torch.rand(()).item() for at in held(x)}).values()) if len(held(x)) == 1 else {0.0}
    assert len(after) == 1, "the generators of the ranks are out of step"


class WithDropout(nn.Module):
    """Dropout of activations that tensor parallelism shards, and of those that it replicates."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.dropout(F.gelu(self.up(x)), 0.5, self.training)
        return F.dropout(x + self.down(inside), 0.2, self.training)


@body(2, 2)
def training_goes_on_from_a_saved_state_of_random_numbers(mesh: Any) -> None:
    """Bit for bit, on all ranks, from what one of them saved."""
    net = WithDropout()
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    parallelize_module(net, mesh["tp"], plan)
    sw.distribute_module(net, mesh)
    x = sw.distribute_tensor(doubles(6, 4), mesh, [S(0), R])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def train() -> list[float]:
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append((net(x) - 1).square().mean())
            losses[-1].backward()
            optimizer.step()
        return [loss.item() for loss in losses]

    train()
    state = torch.get_rng_state()
    assert all(torch.equal(other, state) for other in everywhere(dict.fromkeys(held(x), state)).values())
    saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    expected = train()
    torch.rand(7)  # on the way from one process to the next
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(state)
    assert train() == expected
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train() != expected, "what was dropped did not depend on the state"
    assert torch.equal(net.eval()(x).full_tensor(), net(x).full_tensor())


@body(2, 2)
def factories_draw_what_one_device_draws(mesh: Any) -> None:
    for placements in ([R, R], [S(0), S(1)], [S(0), S(0)], [P, S(1)]):
        for ours, theirs in ((sw.randn, torch.randn), (sw.rand, torch.rand)):
            torch.manual_seed(3)
            expected = theirs(5, 3)
            torch.manual_seed(3)
            assert torch.equal(ours(5, 3, device_mesh=mesh, placements=placements).full_tensor(), expected)


@body(2, 2)
def gradients_accumulate(mesh: Any) -> None:
    w, batches = doubles(4, 3), [doubles(5, 3) for _ in range(3)]
    plain = w.clone().requires_grad_()
    for placements in ([R, S(0)], [S(1), S(0)], [R, R], [S(0), S(0)]):
        plain.grad, x = None, leaf(w, mesh, placements)
        for batch in batches:
            F.linear(batch, plain).pow(2).mean().backward()
            F.linear(sw.distribute_tensor(batch, mesh, [S(0), R]), x).pow(2).mean().backward()
        assert_close(x.grad, plain.grad, placements)
        assert x.grad.placements == x.placements


@body(2, 2)
def gradients_wait_and_are_reduced_once(mesh: Any) -> None:
    w, batches = doubles(4, 3), [doubles(5, 3) for _ in range(3)]
    plain = w.clone().requires_grad_()
    for batch in batches:
        F.linear(batch, plain).pow(2).mean().backward()
    for placements in ([R, S(0)], [S(1), S(0)], [R, R], [S(0), S(0)]):
        x, counts = nn.Parameter(leaf(w, mesh, placements)), []
        for i, batch in enumerate(batches):
            loss = F.linear(sw.distribute_tensor(batch, mesh, [S(0), R]), x).pow(2).mean()
            with sw.parallel.no_sync(enabled=i < 2), sw.debug.CommDebugMode() as comms:
                loss.backward()
            counts.append(comms.get_total_counts())
        assert_close(x.grad, plain.grad, placements)
        assert counts[0] == counts[1] < counts[2], counts


@body(2, 2)
def hooks_see_distributed_gradients(mesh: Any) -> None:
    whole, seen = doubles(4, 3), []
    x = leaf(whole, mesh, [R, S(0)])
    done = []

    def double(gradient: Tensor) -> Tensor:
        assert isinstance(gradient, sw.DTensor)
        seen.append(gradient.full_tensor())  # a collective inside the backward pass
        return gradient * 2

    x.register_hook(double)
    x.register_post_accumulate_grad_hook(lambda t: done.append(t.grad.full_tensor()))
    (x * sw.distribute_tensor(whole, mesh, [S(0), R])).sum().backward()
    assert len(seen) == len(done) == 1
    assert_close(seen[0], whole)
    assert_close(done[0], 2 * whole)
    assert_close(x.grad, 2 * whole)


@body(2, 2, same_record=False)
def recomputation(mesh: Any) -> None:
    w, x = doubles(4, 3), doubles(5, 3)
    plain = w.clone().requires_grad_()
    F.linear(x, plain).tanh().sum().backward()
    d = leaf(w, mesh, [R, S(0)])
    batch = sw.distribute_tensor(x, mesh, [S(0), R])
    checkpoint(lambda w: F.linear(batch, w).tanh().sum(), d, use_reentrant=False).backward()
    assert_close(d.grad, plain.grad)


def _torch_saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@body(2, 2)
def saving_and_loading_per_rank(mesh: Any) -> None:
    whole = doubles(5, 3)
    again: list[Callable[[Any], Any]] = [lambda x: pickle.loads(pickle.dumps(x)), _torch_saved, copy.deepcopy]
    for placements in ([S(0), S(1)], {0: ("tp", "dp")}, [P, R]):
        x = leaf(whole, mesh, placements)
        for reload in again:
            y = reload(x)
            assert isinstance(y, sw.DTensor)
            assert y.layout_on_mesh is x.layout_on_mesh
            assert y.requires_grad
            assert_close(y, whole)
            assert_close(x + y, 2 * whole)
    parameter = pickle.loads(pickle.dumps(nn.Parameter(leaf(whole, mesh, [R, S(0)]))))
    assert isinstance(parameter, nn.Parameter)


@body(2, 2)
def communication_of_a_block(mesh: Any) -> None:
    """Tensor parallelism costs two all-reduces forward and two backward; data parallelism one per parameter."""
    block = Block()
    shard_block(block, mesh)
    x = leaf(doubles(BATCH, TOKENS, WIDTH), mesh, [S(0), R])
    with sw.debug.CommDebugMode() as comm:
        out = block.down(F.gelu(block.up(block.norm2(x))))
        out.redistribute(placements=[S(0), R]).sum().backward()
    along_tp = [c for c in comm.comms if c.axes == ("tp",)]
    assert [(c.kind, c.backward) for c in along_tp] == [("all_reduce", False), ("all_reduce", True)]
    assert all(c.kind == "all_reduce" and c.backward for c in comm.comms if c.axes == ("dp",))


@body(2)
def frozen_and_inference(mesh: Any) -> None:
    w, x = doubles(4, 3), doubles(5, 3)
    d, batch = sw.distribute_tensor(w, mesh, [S(0)]), sw.distribute_tensor(x, mesh, [R])
    with torch.inference_mode():
        assert_close(F.linear(batch, d), F.linear(x, w))
    with torch.no_grad():
        assert_close(F.linear(batch, d.requires_grad_()), F.linear(x, w))
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(batch.float(), d.float()).dtype == torch.bfloat16


@body(2)
def data_parallel_in_buckets(mesh: Any) -> None:
    """Several buckets, of which some are under way while the backward pass goes on; nobody waits for them before."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))).double()
    plain, rows = copy.deepcopy(layers), doubles(BATCH, WIDTH)
    ours, x = sw.distribute_module(layers, mesh), sw.distribute_tensor(rows, mesh, [S(0)])
    started: list[int] = []
    before = buckets.FIRST, buckets.LARGEST
    buckets.FIRST, buckets.LARGEST = 500, 1000
    try:
        for _ in range(2):
            hidden = ours[0](x)
            hidden.register_hook(lambda grad: started.append(_in_flight()))
            ours[1:](hidden).square().mean().backward()
    finally:
        buckets.FIRST, buckets.LARGEST = before
    assert len(started) == 2 and min(started) >= 2
    for _ in range(2):
        plain(rows).square().mean().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)


def _in_flight() -> int:
    """The buckets of this pass that are under way."""
    (found,) = buckets._passes.values()
    now = found()
    assert now is not None
    return len(now.started)
