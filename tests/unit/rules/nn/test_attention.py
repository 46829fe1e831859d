"""Attention whose queries or heads are sharded, and the other ways to call it."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compare import check_shards, compare
from sweep import mesh_of, normal, place, sweep

import shardwise as sw
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode
from shardwise.dispatch.planning import fallback

R, S = sw.Replicate(), sw.Shard
aten = torch.ops.aten
inf = math.inf


def attend(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


ATTENTION = {
    "causal, more keys": (attend(is_causal=True), (2, 4, 5, 2), (2, 4, 6, 2), (2, 4, 6, 3)),
    "causal, more queries": (attend(is_causal=True, scale=0.4), (3, 7, 2), (3, 4, 2), (3, 4, 2)),
    "shared heads": (attend(enable_gqa=True), (1, 8, 3, 2), (1, 4, 3, 2), (1, 4, 3, 2)),
    "one shared head": (attend(enable_gqa=True, is_causal=True), (2, 4, 5, 2), (2, 1, 6, 2), (2, 1, 6, 2)),
    "broadcast queries": (attend(), (4, 3, 2), (2, 4, 5, 2), (2, 4, 5, 3)),
    "broadcast causal keys": (attend(is_causal=True), (2, 4, 3, 2), (4, 5, 2), (2, 1, 5, 3)),
}


@pytest.mark.parametrize(("op", "shapes"), [(op, shapes) for op, *shapes in ATTENTION.values()], ids=ATTENTION)
def test_attention(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes), partial=False)


FREE = {
    "causal queries": (attend(is_causal=True), (S(2), R, R), S(2)),
    "broadcast": (lambda q, k, v: attend()(q[0], k, v), (S(1), S(1), S(1)), S(1)),
    "heads": (attend(enable_gqa=True), (S(1), S(1), S(1)), S(1)),
    "heads of queries": (attend(enable_gqa=True), (S(1), R, R), S(1)),
}


@pytest.mark.parametrize(("op", "where", "out"), FREE.values(), ids=FREE)
def test_what_moves_nothing(op, where, out):
    heads = 2 if op in (FREE["heads"][0], FREE["heads of queries"][0]) else 4
    shapes = [(2, 4, 6, 2), (2, heads, 6, 2), (2, heads, 6, 2)]
    inputs = [place(normal(*shape), p) for shape, p in zip(shapes, where, strict=True)]
    with CommDebugMode() as comm, sw.strict():
        result = op(*inputs)
    assert result.placements == (out,) and comm.get_total_counts() == 0


def test_shared_heads_in_pieces_of_any_size():
    shards = [part.clone() for part in normal(2, 4, 3, 2).split([1, 3], 1)]
    key = sw.DTensor.from_local(ranked(shards), mesh_of((2,)), [S(1)])
    out = attend(enable_gqa=True)(place(normal(2, 8, 3, 2), R), key, key)
    whole = key.full_tensor()
    torch.testing.assert_close(out.full_tensor(), attend(enable_gqa=True)(normal(2, 8, 3, 2), whole, whole))


@pytest.mark.parametrize(
    ("shape", "where", "options"),
    [
        ((2, 4, 6, 8), S(2), {"is_causal": True}),
        ((1, 4, 6, 8), S(0), {}),
        ((2, 4, 6, 8), S(3), {}),
        ((2, 4, 6, 8), S(1), {}),
    ],
)
def test_dropout_draws_once_for_all_replicas(shape, where, options):
    x = place(normal(*shape), where, R, mesh=(2, 2))
    out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, **options)
    check_shards(out)
    # Where the weights of a value are dropped, they are dropped for all of its columns.
    ones = place(torch.ones(2, 1, 6, 4, dtype=torch.float64), R, S(3), mesh=(2, 2))
    kept = F.scaled_dot_product_attention(x.new_zeros(2, 1, 6, 8), x.new_zeros(2, 1, 6, 8), ones, dropout_p=0.5)
    assert torch.equal(kept.full_tensor().std(-1), torch.zeros(2, 1, 6, dtype=torch.float64))


@pytest.mark.parametrize("dim", [0, 1])
def test_safe_softmax(dim):
    x = normal(5, 3)
    x[:, 1] = x[0, 2] = x[3] = -inf
    sweep(lambda a: aten._safe_softmax(a, dim), x, partial=False)


@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_of_a_sharded_dim(hard):
    out = F.gumbel_softmax(place(normal(4, 5), S(1), R, mesh=(2, 2)), hard=hard)
    check_shards(out)
    torch.testing.assert_close(out.full_tensor().sum(1), torch.ones(4, dtype=torch.float64))


def test_multi_head_attention():
    def run(x, *params):
        w, b, out_w, out_b = params
        return F.multi_head_attention_forward(x, x, x, 4, 2, w, b, None, None, False, 0.0, out_w, out_b)

    inputs = (normal(3, 2, 4), normal(12, 4), normal(12), normal(4, 4), normal(4))
    for where in (R, S(0), S(1), S(2)):
        compare(run, inputs, mesh_of((2,)), [[where], [R], [R], [R], [R]])


def encoder(x, *params):
    return torch._transformer_encoder_layer_fwd(x, 8, 2, *params[:4], False, False, 1e-5, *params[4:])


def test_the_fused_encoder_layer_is_gathered(monkeypatch):
    monkeypatch.setattr(fallback, "_reported", set())
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    attention = layer.self_attn
    params = [
        *(attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias),
        *(p for part in (layer.norm1, layer.norm2, layer.linear1, layer.linear2) for p in (part.weight, part.bias)),
    ]
    x = normal(4, 3, 8)
    with torch.no_grad():
        expected = encoder(x, *params)
        with pytest.warns(sw.errors.FallbackWarning):
            out = encoder(place(x, S(0)), *(place(p.detach(), R) for p in params))
        torch.testing.assert_close(out.full_tensor(), expected)
        module = sw.distribute_module(layer, mesh_of((2,)))  # which knows that it cannot use it
        torch.testing.assert_close(module(place(x, S(0))).full_tensor(), expected)
