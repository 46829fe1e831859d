"""Multi-head attention with weights sharded by heads, and with everything else that it takes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compare import compare
from sweep import assignments, mesh_of, normal, place
from torch import nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch.planning import first_call as dispatching
from shardwise.dispatch.steps import Steps, Whole
from shardwise.rules.nn.multihead import by_heads

R, S = sw.Replicate(), sw.Shard
BATCH, HEADS, WIDTH, ROWS, COLUMNS = 2, 4, 8, 3, 5
PACKED = {"in_proj_weight": (3 * WIDTH, WIDTH), "in_proj_bias": (3 * WIDTH,)}
SEPARATE = {"q_proj_weight": (WIDTH, WIDTH), "k_proj_weight": (WIDTH, WIDTH), "v_proj_weight": (WIDTH, WIDTH)}
DATA = {"query": (ROWS, BATCH, WIDTH), "key": (COLUMNS, BATCH, WIDTH), "value": (COLUMNS, BATCH, WIDTH)}
OUT = {"out_proj_weight": (WIDTH, WIDTH), "out_proj_bias": (WIDTH,)}
BIASES = {"bias_k": (1, 1, WIDTH), "bias_v": (1, 1, WIDTH)}
GIVEN = dict.fromkeys(("static_k", "static_v"), (BATCH * HEADS, COLUMNS, WIDTH // HEADS))

causal = torch.ones(ROWS, COLUMNS, dtype=torch.bool).triu(1)
padding = torch.tensor([[False] * 5, [False, False, False, True, True]])

CASES = {
    "packed": (PACKED, {}),
    "separate": (SEPARATE, {}),
    "separate with biases": ({**SEPARATE, "in_proj_bias": (3 * WIDTH,)}, {}),
    "weights": (SEPARATE, {"need_weights": True}),
    "weights by head": (PACKED, {"need_weights": True, "average_attn_weights": False}),
    "causal": (SEPARATE, {"attn_mask": causal, "is_causal": True}),
    "causal and padded": (SEPARATE, {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding}),
    "causal with weights": (SEPARATE, {"attn_mask": causal, "is_causal": True, "need_weights": True}),
    "padded": (PACKED, {"key_padding_mask": padding, "need_weights": True}),
    "mask of heads": (SEPARATE, {"attn_mask": normal(BATCH * HEADS, ROWS, COLUMNS)}),
    "mask of numbers": (SEPARATE, {"attn_mask": normal(ROWS, COLUMNS), "key_padding_mask": normal(BATCH, COLUMNS)}),
    "zeros": (SEPARATE, {"add_zero_attn": True, "attn_mask": causal, "need_weights": True}),
    "biases": (SEPARATE | BIASES, {"key_padding_mask": padding}),
    "given": (SEPARATE | GIVEN, {"attn_mask": causal}),
    "all dropped": (PACKED, {"dropout_p": 1.0}),
    "dropped in evaluation": (PACKED, {"dropout_p": 0.5, "training": False, "need_weights": True}),
}


def attend(names, options, *tensors, function=F.multi_head_attention_forward):
    given = dict.fromkeys(("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"))
    given |= {"add_zero_attn": False, "dropout_p": 0.0, "need_weights": False}
    given |= {"embed_dim_to_check": WIDTH, "num_heads": HEADS, "use_separate_proj_weight": "q_proj_weight" in names}
    given |= dict(zip(names, tensors, strict=True)) | options
    if isinstance(tensors[0], sw.DTensor):
        mesh = tensors[0].device_mesh
        given = {
            name: sw.distribute_tensor(x, mesh) if name.endswith("_mask") and not isinstance(x, sw.DTensor) else x
            for name, x in given.items()
        }
    return function(**given)


def by_heads_where(names):
    where = dict.fromkeys(names, R) | {name: S(0) for name in names if name.startswith(("in_", "q_", "k_", "v_"))}
    return where | {"out_proj_weight": S(1)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharded_by_heads(case, ranks):
    shapes, options = CASES[case]
    shapes = DATA | shapes | OUT
    where = by_heads_where(shapes)
    inputs = [normal(*shape) for shape in shapes.values()]
    compare(partial(attend, list(shapes), options), inputs, mesh_of((ranks,)), [[where[name]] for name in shapes])


@pytest.mark.parametrize("case", CASES)
def test_sharded_anyhow(case):
    shapes, options = CASES[case]
    shapes = DATA | shapes | OUT
    inputs = [normal(*shape) for shape in shapes.values()]
    run = partial(attend, list(shapes), options)
    for mesh, placements in assignments(inputs, most=4, sample=1):
        compare(run, inputs, mesh, placements)


@pytest.mark.parametrize("case", CASES)
def test_both_forms_give_the_same(case):
    shapes, options = CASES[case]
    shapes = DATA | shapes | OUT
    inputs = [normal(*shape) for shape in shapes.values()]
    for wanted, found in zip(
        attend(list(shapes), options, *inputs), attend(list(shapes), options, *inputs, function=by_heads), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_without_a_batch():
    def run(x, *weights):
        q, k, v, out = weights
        args = (x, x, x, WIDTH, HEADS, None, None, None, None, False, 0.0, out, None)
        return F.multi_head_attention_forward(
            *args, use_separate_proj_weight=True, q_proj_weight=q, k_proj_weight=k, v_proj_weight=v
        )

    inputs = [normal(ROWS, WIDTH), *(normal(WIDTH, WIDTH) for _ in range(4))]
    for where in ([R, S(0), S(0), S(0), S(1)], [S(0), R, R, R, R], [S(1), R, R, R, R]):
        compare(run, inputs, mesh_of((2,)), [[p] for p in where])


def test_nothing_is_gathered_for_weights_sharded_by_heads():
    shapes = DATA | SEPARATE | OUT
    where = by_heads_where(shapes)
    inputs = [place(normal(*shape), where[name]) for name, shape in shapes.items()]
    for options in ({}, {"need_weights": True}, {"attn_mask": causal}, {"key_padding_mask": padding}):
        with CommDebugMode() as comm:
            out, _ = attend(list(shapes), options, *inputs)
        moved = [c for c in comm.comms if c.kind != "broadcast"]  # of the masks
        assert moved == [] and out.placements == (sw.Partial(),)


def plans_of(monkeypatch):
    """The plans that are built from now on."""
    found, build = [], dispatching.build

    def noted(function, lowered, *args):
        found.append(build(function, lowered, *args))
        return found[-1]

    monkeypatch.setattr(dispatching, "build", noted)
    return found


@pytest.mark.parametrize("where, kind", [((S(1), R), Whole), ((R, S(0)), Steps)])
def test_shards_of_the_batch_run_the_function_itself(monkeypatch, where, kind):
    sw.dispatch.clear_cache()
    plans = plans_of(monkeypatch)
    batch, weights = where
    x = place(normal(ROWS, BATCH, WIDTH), batch)
    w, out = place(normal(3 * WIDTH, WIDTH), weights), place(normal(WIDTH, WIDTH), R)
    F.multi_head_attention_forward(
        x, x, x, WIDTH, HEADS, w, None, None, None, False, 0.0, out, None, need_weights=False
    )
    (plan,) = (plan for plan in plans if isinstance(plan, (Steps, Whole)))
    assert type(plan) is kind
    assert kind is Steps or plan.function is F.multi_head_attention_forward


def test_refusals_are_torchs():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    sw.distribute_module(module, mesh_of((2,)))
    x = place(normal(ROWS, BATCH, WIDTH).float(), R)
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        module(x, x, x, is_causal=True)
    with pytest.raises(AssertionError, match="expecting embedding dimension of 8, but got 6"):
        module(*[place(normal(ROWS, BATCH, 6).float(), R)] * 3)
    with pytest.raises(RuntimeError, match="The shape of the 2D attn_mask is"):
        module(x, x, x, attn_mask=place(torch.zeros(2, 2), R))
