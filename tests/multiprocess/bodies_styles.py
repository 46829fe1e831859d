"""Bodies about plans: a decoder parallelized by styles trains as on one device."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from bodies import P, R, S, assert_close, body, doubles, leaf, per_rank
from shardwise.debug import CommDebugMode
from shardwise.experimental import local_map
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)

WIDTH, HEAD_DIM, HIDDEN, VOCAB, BATCH, TOKENS, LAYERS = 8, 2, 12, 14, 2, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Written for as many heads as a rank has."""
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
TENSOR = {
    "table": RowwiseParallel(input_layouts=R),
    **{f"layers.*.{name}": ColwiseParallel() for name in COLUMNS},
    "layers.*.attention.out": RowwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=R),
}
SEQUENCE = {
    "table": RowwiseParallel(input_layouts=R, output_layouts=S(1)),
    **{f"layers.*.norm{i}": SequenceParallel() for i in (1, 2)},
    "layers.*.attention": PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R),
    "layers.*.mlp": PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R),
    **{f"layers.*.{name}": ColwiseParallel() for name in COLUMNS},
    "layers.*.attention.out": RowwiseParallel(output_layouts=S(1)),
    "layers.*.mlp.down": RowwiseParallel(output_layouts=S(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=S(1), output_layouts=R),
}


def check_training(mesh: Any, plan: dict[str, Any], forward: dict[str, int], backward: dict[str, int]) -> None:
    plain = Decoder()
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    assert model.head.weight is model.table.weight
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    for step in range(3):
        tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        losses = []
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            with CommDebugMode() as comm:
                logits = net(tokens[:, :-1])
            assert type(logits) is Tensor
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            with CommDebugMode() as back:
                losses[-1].backward()
            optimizer.step()
        assert_close(losses[1].detach(), losses[0])
        assert (comm.get_comm_counts(), back.get_comm_counts()) == (forward, backward)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(p.detach(), q, name)


@body(2)
def a_decoder_by_a_tensor_parallel_plan(mesh: Any) -> None:
    """Queries, keys and values are computed from one plain tensor, whose gradient is reduced once."""
    check_training(mesh, TENSOR, {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1}, {"all_reduce": 1 + 2 * LAYERS})


@body(2)
def a_decoder_by_a_sequence_parallel_plan(mesh: Any) -> None:
    moves = 1 + 2 * LAYERS
    backward = {
        "reduce_scatter": moves,
        "all_gather": moves,
        "all_reduce": 1,
    }  # the last: gradients of norms, in one bucket
    check_training(mesh, SEQUENCE, {"reduce_scatter": moves, "all_gather": 1 + moves}, backward)


@body(2, 2)
def a_decoder_on_one_of_two_axes(mesh: Any) -> None:
    check_training(mesh["tp"], TENSOR, {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1}, {"all_reduce": 1 + 2 * LAYERS})


def check_fully_sharded(mesh: Any, plan: dict[str, Any]) -> None:
    """Styles on one axis, parameters sharded on the other, where each rank has a batch of its own."""
    plain = Decoder()
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    assert str(model.layers[0].mlp.up.weight.layout_on_mesh) == "[12,8] S(0)@tp,dp"
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    for step in range(3):
        tokens = torch.randint(VOCAB, (2 * BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
        own = per_rank(mesh, lambda at, tokens=tokens: tokens.chunk(2)[at[0]])
        for net, optimizer, batch in zip((plain, model), optimizers, (tokens, own), strict=True):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(p.detach(), q, name)


@body(2, 2)
def a_fully_sharded_decoder_by_a_tensor_parallel_plan(mesh: Any) -> None:
    check_fully_sharded(mesh, TENSOR)


@body(2, 2)
def a_fully_sharded_decoder_by_a_sequence_parallel_plan(mesh: Any) -> None:
    check_fully_sharded(mesh, SEQUENCE)


@body(2)
def a_plan_that_does_not_fit_is_refused_on_all_ranks(mesh: Any) -> None:
    model = Decoder()
    try:
        parallelize_module(model, mesh, {**TENSOR, "norm": ColwiseParallel()})
    except sw.errors.PlanError as error:
        assert "module 'norm': ColwiseParallel knows" in str(error)
    else:
        raise AssertionError("not refused")
    assert not any(isinstance(p, sw.DTensor) for p in model.parameters())


@body(2, same_record=False)
def a_function_written_for_one_rank(mesh: Any) -> None:
    """Uneven pieces included: ranks that hold different sizes tell each other."""
    for rows in (4, 5):
        a, b = doubles(rows, 6), doubles(6, 3)
        x, w = leaf(a, mesh, [S(0)]), leaf(b, mesh, [R])
        y = local_map(torch.mm, [S(0)], ([S(0)], [R]), ([S(0)], [P]))(x, w)
        assert_close(y, a @ b)
        y.sum().backward()
        assert_close(w.grad, a.sum(0)[:, None].expand(6, 3))


def qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4, "num_hidden_layers": LAYERS}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).double()


def hugging_face(mesh: Any) -> None:
    """A model by its own plan: losses, weights after some steps, tokens, and Megatron's schedule."""
    plain = qwen()
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh, model._tp_plan)
    ids, losses, counts = torch.randint(32, (2, 6)), [], []
    for net in (plain, model):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            with CommDebugMode() as comm:
                losses.append(net(ids, labels=ids).loss)
            counts.append(comm.get_comm_counts())
            losses[-1].backward()
            optimizer.step()
    assert counts[3:] == [{"all_reduce": 1 + 2 * LAYERS, "all_gather": 1}] * 3
    torch.testing.assert_close(losses[3:], losses[:3])
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(p.detach(), q, name)
    for way in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **way}
        assert torch.equal(*(net.generate(ids[:, :3], **options) for net in (plain, model))), way


def hugging_face_fully_sharded(mesh: Any) -> None:
    """By its own plan on one axis, its parameters sharded on the other; each rank has a batch of its own."""
    plain = qwen()
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], model._tp_plan)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    ids = torch.randint(32, (4, 6))
    own = per_rank(mesh, lambda at: ids.chunk(2)[at[0]])
    for net, batch in ((plain, ids), (model, own)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            net(batch, labels=batch).loss.backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(p.detach(), q, name)


if find_spec("transformers"):
    body(2)(hugging_face)
    body(2, 2)(hugging_face_fully_sharded)
