"""The registry: from op to rule."""

import pytest
import torch
from sweep import normal, place

import shardwise as sw
from shardwise.rules import Call, Rule, Strategy, Value, register, replicated, rule_for
from shardwise.rules.kit import registry

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
aten = torch.ops.aten


def test_an_in_place_op_has_the_rule_of_its_base():
    assert rule_for(aten.add_.Tensor) is rule_for(aten.add.Tensor)
    assert rule_for(aten.addmm_.default).strategies is rule_for(aten.addmm.default).strategies
    assert rule_for(aten.squeeze_.dim) is rule_for(aten.squeeze.dim)


def test_elementwise_ops_are_found_by_tag():
    assert rule_for(aten.erfinv.default) is rule_for(aten.add.Tensor)
    assert rule_for(aten.mm.default) is not rule_for(aten.add.Tensor)


def test_no_rule():
    assert rule_for(aten.bincount.default) is None
    assert rule_for(aten.unique_consecutive.default) is None


def test_a_new_rule_replaces_what_was_looked_up_before():
    rule = Rule(lambda call: [replicated(call)])
    with registry.restored():
        del registry._rules["aten::cumsum"]
        assert rule_for(aten.cumsum.default) is None
        assert register("cumsum", rule=rule) is rule
        assert rule_for(aten.cumsum.default) is rule and rule_for(aten.cumsum_.default) is rule


def test_rules_that_are_tried_out_leave_nothing_behind():
    rules, homes, found = dict(registry._rules), registry.homes(), rule_for(aten.cumsum.default)
    with pytest.raises(KeyError), registry.restored():
        register("cumsum", "a_name_of_its_own", rule=Rule(lambda call: [replicated(call)]))
        assert registry.homes()["aten::cumsum"] == __name__ and rule_for(aten.cumsum.default) is not found
        raise KeyError
    assert registry._rules == rules and registry.homes() == homes and rule_for(aten.cumsum.default) is found


def test_out_is_written_where_the_result_lies():
    a, b, out = (Value(i, (4, 4), torch.float32) for i in range(3))
    call = Call(aten.mm.out, (a, b), {"out": out}, (a, b, out), (out,))
    found = rule_for(aten.mm.out).strategies(call)
    assert Strategy((0, None, 0), (0,)) in found and replicated(call) in found
    assert all(way.ins[2:] == way.outs for way in found)


@pytest.mark.parametrize(
    ("op", "where", "target"),
    [
        (lambda a, b, out=None: torch.mm(a, b, out=out), (S(0), R), S(0)),
        (lambda a, b, out=None: torch.add(a, b, out=out), (S(0), S(1)), R),
        (lambda a, b, out=None: torch.mean(a, 1, out=out), (S(1), R), S(0)),
        (lambda a, b, out=None: torch.var(a, 1, out=out), (S(1), R), R),
        (lambda a, b, out=None: torch.logsumexp(a, 1, out=out), (S(1), R), R),
        (lambda a, b, out=None: torch.amax(a, 1, out=out), (S(1), R), R),
    ],
)
def test_out(op, where, target):
    a, b = normal(5, 5), normal(5, 5) + 1
    expected = op(a, b)
    out = place(torch.zeros_like(expected), target)
    result = op(place(a, where[0]), place(b, where[1]), out=out)
    assert result is out and out.placements == (target,)
    torch.testing.assert_close(out.full_tensor(), expected)
