"""Random programs are the same everywhere, in text that runs; their judge finds what is wrong, and shrinks it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from fresh import run
from tasks import count_down
from torch import Tensor

import shardwise as sw
from shardwise.cli import main
from shardwise.proof.fuzz.calls.layers import batch_norm, normalised
from shardwise.proof.fuzz.calls.writes import indexed, is_recorded, refuse_overlap
from shardwise.proof.fuzz.command import Result, classes_of, smallest
from shardwise.proof.fuzz.draw import MESHES, Draw, Refused, Var, mesh_of
from shardwise.proof.fuzz.families import FAMILIES, draw
from shardwise.proof.fuzz.judge import APART, HUNG, INVALID, RAISED, RIGHT, WRONG, Verdict, judge, together
from shardwise.proof.fuzz.leaves import Device
from shardwise.proof.fuzz.program import Leaf, Line, Program
from shardwise.proof.fuzz.shrink import shrunk
from shardwise.proof.kit.command import How, run_tasks
from shardwise.tensor import DTensor

X = Leaf("x1", (3, 4), torch.float64, (sw.Shard(0),), 1, grad=True)
Y = Leaf("x2", (3, 4), torch.float64, (sw.Partial(),), 2, grad=True)


def program(*parts: Leaf | str) -> Program:
    """A program of leaves and lines; a line gives the names before its first equals sign."""
    made = [Line(p, _gives(p)) if isinstance(p, str) else p for p in parts]
    return Program((2,), tuple(made))


def _gives(text: str) -> tuple[str, ...]:
    left, sign, _ = text.partition(" = ")
    return tuple(left.split(", ")) if sign and left.replace(", ", "").isalnum() else ()


def judged(*parts: Leaf | str) -> Verdict:
    return judge(program(*parts), sw.simulate((2,)))


# Drawing


def test_a_program_is_the_same_in_every_process() -> None:
    code = "from shardwise.proof.fuzz.families import draw; print([draw(3, n).text for n in range(5)])"
    assert run(code).strip() == str([draw(3, number).text for number in range(5)])


def test_programs_differ_by_seed_and_number() -> None:
    assert len({draw(seed, number).text for seed in range(3) for number in range(3)}) == 9


def test_the_mesh_is_known_before_a_program_is_drawn() -> None:
    assert all(draw(0, number).mesh == mesh_of(0, number) for number in range(8))
    assert {mesh_of(0, number) for number in range(40)} == set(MESHES)


def test_a_program_runs_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--program", "0:0"]) == 0
    text = capsys.readouterr().out
    names: dict[str, object] = {}
    exec(text, names)
    assert any(isinstance(value, DTensor) for value in names.values())
    assert "# right" in text


def test_every_family_is_drawn() -> None:
    text = "\n".join(draw(0, number).body for number in range(150))
    for word in (
        *("F.group_norm", ".unbind(", "checkpoint(", "use_reentrant=True", "use_reentrant=False", ".register_hook("),
        *(".retain_grad()", "torch.autograd.grad(", "create_graph=True", "torch._foreach_", "view_as_real", "cdist"),
        *("multi_head_attention_forward", "F.conv", "F.interpolate", "index_put", "Partial('avg')", "sizes=", "local="),
        *("torch.optim.", "on.redistribute(", ".detach()", "torch.no_grad()", "float32", "complex128", ".contiguous()"),
    ):
        assert word in text, word
    assert len(FAMILIES) == 12


def drawn(*parts: Leaf | str) -> Draw:
    """A drawing that has come so far."""
    made = Draw(0, 0)
    for part in program(*parts).parts:
        made.parts.append(part)
        made.run.do(part)
    return made


@pytest.mark.parametrize(
    ("lines", "recorded"),
    [
        (["v1 = x1.detach()"], True),
        (["v1 = x1.detach().clone()"], False),
        (["v1 = x1.detach().clone()", "v2 = v1[0]", "v3 = v2 * x1"], True),
        (["v1 = x1.detach().clone()", "v2 = v1[0]", "with torch.no_grad(): v3 = v2 * x1.detach()"], True),
        (["v1 = x1.detach().clone()", "v2 = v1 * 2", "v3 = v2 * x1"], False),
    ],
)
def test_memory_that_a_graph_may_have_saved(lines: list[str], recorded: bool) -> None:
    made = drawn(X, *lines)
    assert is_recorded(made, Var.of("v1", made.tensors["v1"])) is recorded


def test_writes_that_change_what_they_have_yet_to_read_are_not_drawn() -> None:
    x = torch.arange(16.0).reshape(4, 4)
    for source in (x[-1], x[0], torch.ones(4)):
        refuse_overlap(x[-1], source)
    for source in (x[:, 0], x[-1, :1].expand(4)):
        with pytest.raises(Refused, match="overlap"):
            refuse_overlap(x[-1], source)
    with pytest.raises(Refused, match="overlap"):
        refuse_overlap(x[-1], x[-1], by_index=True)


def test_rows_are_not_added_to_what_they_are_read_from() -> None:
    texts = []
    for seed in range(80):
        made = drawn(Leaf("x1", (4,), torch.float64, (sw.Shard(0),), 1), "v1 = x1[:]", "v2 = x1[::2]")
        made.count = 9
        made.chance.seed(seed)
        with suppress(Refused):
            texts.append(indexed(made).text)
    added = [text.partition("index_add_")[2] for text in texts if "index_add_" in text]
    assert added and not any(re.search(r"\b(x1|v1|v2)\b", text) for text in added)


def test_gradients_that_share_memory_are_not_drawn() -> None:
    made = drawn(X, "v1 = x1 + 1", "v2 = v1 * 2")
    assert not made.add(lambda d: "torch.autograd.grad(v2.sum(), [x1, v1], retain_graph=True)")
    assert made.add(lambda d: "torch.autograd.grad((v2 * v2).sum(), [x1, v2], retain_graph=True)")


def test_gradients_whose_strides_are_kernels_own_are_not_drawn() -> None:
    made = drawn(X, "v1 = x1 + 1")
    assert not made.add(lambda d: "torch.autograd.grad(v1.sum(), [v1], retain_graph=True)")  # it is expanded
    assert made.add(lambda d: "torch.autograd.grad(v1.sin().sum(), [v1], retain_graph=True)")


def test_gradients_that_are_kept_for_the_sake_of_another_are_not_drawn() -> None:
    asks = "torch.autograd.grad((v1 * v1).sin().sum(), [v2], retain_graph=True, allow_unused=True)"
    for first, fits in (("v1, v2, v3 = x1.unbind(0)", False), ("v1, v2 = x1[0], x1[1]", True)):
        made = drawn(X, first, "v1.retain_grad()")
        assert made.add(lambda d: asks) is fits


def test_results_in_formulas_that_are_watched_in_gradients_of_gradients_are_not_drawn() -> None:
    reductions = (
        "v1 = x1.norm()",
        "v1 = x1.flatten().logsumexp(0)",
        "v1 = x1.std()",
        "v1 = x1.flatten()[:1].logcumsumexp(0)",
    )
    for first, fits in (*((text, False) for text in reductions), ("v1 = x1.sum()", True)):
        made = drawn(X, first, "v2, = torch.autograd.grad(v1.sin().sum(), [x1], create_graph=True)")
        assert made.add(lambda d: Line("v1.retain_grad()")) == fits


@pytest.mark.parametrize("watch", ["v1.retain_grad()", "v1.register_hook(lambda g: g * 2)"])
def test_hidden_views_whose_gradient_is_watched_are_not_written_to(watch: str) -> None:
    for given, fits in (("v1 = (x1 * 2).view(-1)", False), ("v1 = x1 * 2", True)):
        made = drawn(X, given, "v2 = v1.view(2, 6)")
        assert made.add(lambda d: Line(watch))
        assert made.add(lambda d: Line("v2.mul_(3)")) is fits


def test_expanded_tensors_are_not_written_to() -> None:
    made = drawn(Leaf("x1", (3,), torch.float64, (sw.Shard(0),), 1), "v1 = x1.expand(2, 3)")
    assert made.target(1) == "x1"
    with pytest.raises(Refused, match="expanded"):
        made.target(2)


def test_strided_weights_of_batch_norms_are_not_drawn() -> None:
    texts = []
    for seed in range(40):
        made = drawn(X, Leaf("x2", (4, 3), torch.float64, (sw.Shard(0),), 2), "v1 = x2[:, 0]")
        made.chance.seed(seed)
        with suppress(Refused):
            texts.append(str(batch_norm(made)))
    assert any("v1, training" in text or "v1, eps" in text for text in texts)  # biases are
    assert not any("v1, x" in text or "v1, v" in text for text in texts)


def test_norms_of_one_number_and_of_equal_ones_are_drawn_only_where_rounding_does_not_grow() -> None:
    texts = []
    for row in ("x1[:, :1].expand(3, 4)", "x1[:, :1]", "x1"):
        for seed in range(60):
            made = drawn(X, f"v1 = {row}.clone()")
            made.count = 9
            made.chance.seed(seed)
            with suppress(Refused):
                texts.append((row, str(normalised(made))))
    texts = [(row, text) for row, text in texts if re.search(r"_norm\(v1, \(\d,", text) and "(3," not in text]
    assert len({row for row, _ in texts}) == 3
    assert {row for row, text in texts if "eps" not in text} == {"x1"}


# Leaves

WAYS = (sw.Replicate(), sw.Shard(0), sw.Shard(1), *(sw.Partial(op) for op in ("sum", "avg", "max", "min")))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("mesh", [(2,), (4,)])
def test_a_leaf_has_the_same_value_in_all_layouts(way: sw.Placement, mesh: tuple[int, ...]) -> None:
    whole = Device().leaf((3, 2), torch.float64, seed=4)
    laid = Device(sw.simulate(mesh)).leaf((3, 2), torch.float64, [way], seed=4)
    assert isinstance(laid, DTensor) and laid.placements == (way,)
    torch.testing.assert_close(laid.full_tensor(), whole, rtol=1e-15, atol=0)


def test_ranks_may_bring_as_much_as_they_like() -> None:
    laid = Device(sw.simulate((3,))).leaf((4, 2), torch.float64, [sw.Shard(0)], seed=4, sizes=(3, 0, 1))
    assert isinstance(laid, DTensor)
    assert laid.layout_on_mesh.held_shapes == ((3, 2), (0, 2), (1, 2))
    assert laid.full_tensor().equal(Device().leaf((4, 2), torch.float64, seed=4))


def test_terms_differ() -> None:
    laid = Device(sw.simulate((2,))).leaf((5,), torch.float64, [sw.Partial("max")], seed=4)
    assert isinstance(laid, DTensor)
    first, second = laid.to_local(), laid.to_local()._peers[0]  # type: ignore[attr-defined]
    assert not first.as_subclass(Tensor).equal(second)


# Judging


def test_a_right_program() -> None:
    assert judged(X, Y, "v1 = x1 @ x2.t()", "v1.sum().backward()").kind == RIGHT


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda x: honest(x) * (1 + 1e-6))
    verdict = judged(X, "v1 = x1 * 2")
    assert verdict.kind == WRONG and verdict.detail.startswith("x1: off by") and verdict.at == 0


def test_replicas_that_differ_in_a_bit_are_found() -> None:
    spoil = "v1 = x1.detach(); [peer.mul_(1 + 2**-52) for peer in getattr(v1, '_peers', ())]"
    verdict = judge(Program((2,), (replace(X, placements=(sw.Replicate(),)), Line(spoil, ("v1",)))), sw.simulate((2,)))
    assert verdict.kind == WRONG and verdict.detail == "v1: replicas differ as [3,4] R"


def test_strides_that_differ_between_ranks_are_found() -> None:
    widen = "v1 = x1.detach().clone(); [p.set_(p.new_zeros(1, 5)[:, :4].copy_(p)) for p in getattr(v1, '_peers', ())]"
    verdict = judged(X, widen)
    assert verdict.kind == WRONG and verdict.detail == "v1, its strides: replicas differ as [3,4] S(0)@axis0"


def test_views_without_a_history_are_no_failure() -> None:
    leaf = replace(X, shape=(4, 4))
    assert judged(leaf, "v1 = x1 * 2", "v2, v3, v4, v5 = v1.unbind(0)", "v1.mul_(2)", "v6 = v1.sin()").kind == RIGHT


def test_a_gradient_that_should_be_none_is_found() -> None:
    give = "x2.grad = x2.detach() * 0 if hasattr(x2, '_layout') else None; x1.sum().backward()"
    verdict = judged(X, Y, give)
    assert verdict == Verdict(WRONG, "x2.grad: should be None", 2)


def test_zeros_after_gradients_of_gradients_are_excused_and_not_decayed() -> None:
    first = "v2, = torch.autograd.grad((x1 * x2).sum(), [x1], create_graph=True)"
    decay = "o1 = torch.optim.SGD([x1, x2], lr=0.1, weight_decay=0.1); o1.step()"
    assert judged(X, Y, first, "v2.sum().backward()", decay).kind == RIGHT


def test_what_is_written_is_compared_though_it_is_not_given() -> None:
    verdict = judged(X, "x1.data.add_(1 if hasattr(x1, '_layout') else 2)")
    assert verdict.kind == WRONG and verdict.detail.startswith("x1 at the end: off by 1")


def test_an_error_that_torch_does_not_raise() -> None:
    verdict = judged(X, "if hasattr(x1, '_layout'): raise ValueError('no')")
    assert verdict == Verdict(RAISED, "ValueError: no", 1)


def test_an_error_after_having_written_is_wrong() -> None:
    verdict = judged(
        X, "v1 = x1.detach()", "v1.add_(1)", "if hasattr(v1, '_layout'): v1.add_(1); raise ValueError('no')"
    )
    assert verdict.kind == WRONG and "after ValueError: no: off by 1" in verdict.detail


def test_a_checkpoint_that_stops_early_is_no_failure() -> None:
    inner = "checkpoint(lambda a: F.elu(torch.rsqrt(a * a + 0.3)), x1, use_reentrant=False)"
    assert judged(X, f"v1 = {inner}", "v1.sum().backward()").kind == RIGHT


def test_what_torch_refuses_is_no_program() -> None:
    assert judged(X, "v1 = x1 @ x1").kind == INVALID


def test_rounding_in_single_precision_is_no_difference() -> None:
    x = replace(X, dtype=torch.float32)
    grown = "v1 = (x1 * 1e8 + (0.1 if hasattr(x1, '_layout') else 0)) - x1 * 1e8 if x1.dtype == torch.float32 else x1"
    assert judged(x, grown).kind == RIGHT
    assert judged(replace(x, dtype=torch.float64), grown.replace("float32", "float64")).kind == WRONG


def test_ranks_that_come_to_different_verdicts() -> None:
    assert together([Verdict(RIGHT), Verdict(RAISED, "no", 3)]) == Verdict(APART, "ranks differ: right; raised no", 3)
    bits = [[("v1", (1, ()), number)] for number in (7, 7, 8)]
    assert together([Verdict(RIGHT, prints=b) for b in bits[:2]]) == Verdict(RIGHT)
    assert together([Verdict(RIGHT, prints=b) for b in bits]) == Verdict(WRONG, "v1: replicas differ")


# Shrinking


def test_what_matters_is_left() -> None:
    parts = (
        X,
        Y,
        "v1 = x1 * 2",
        "v2 = v1 + x2",
        "v3 = x2.tanh()",
        "if hasattr(v1, '_layout'): raise ValueError('no')",
        "v4 = v3 * 2",
    )
    small, verdict = smallest(program(*parts), judged(*parts))
    assert verdict.kind == RAISED and verdict.detail == "ValueError: no"
    assert small.body.splitlines()[1:] == [
        "x1 = on.leaf((), torch.float64, [Replicate()], seed=1)",
        "v1 = x1 * 2",
        "if hasattr(v1, '_layout'): raise ValueError('no')",
    ]


def test_shrinking_ends() -> None:
    tried: list[Program] = []
    assert shrunk(program(X, Y), lambda p: not tried.append(p), most=7) is tried[-1]
    assert len(tried) <= 7


# Results


def test_problems_are_sorted_into_classes() -> None:
    results = [
        Result("0:1", RAISED, 9, detail="E: v3"),
        Result("0:2", RAISED, 9, detail="E: v4"),
        Result("0:3", WRONG, 9, detail="v5: off by 2.5e-3"),
        Result("0:4", RIGHT, 9),
    ]
    assert [(first.name, number) for first, number in classes_of(results)] == [("0:3", 1), ("0:1", 2)]


@pytest.mark.slow
def test_programs_that_end_their_process_cost_no_others() -> None:
    """One that dies before it was drawn is torch's affair."""
    names = [f"0:{number}" for number in range(2, 8)]
    results = run_tasks("", count_down, names, None, Result, How(jobs=1, timeout=20.0))
    assert [result.name for result in results] == names
    assert [result.kind for result in results] == [RIGHT, INVALID, RIGHT, HUNG, RIGHT, RIGHT]
