"""Programs as text: what a person reads of them, at the width of a terminal."""

from __future__ import annotations

import importlib.util
import io
import re
from typing import Any

import pytest
import torch
from captured import WIDTH, batch, net_on
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import CaptureWarning
from shardwise.graph.show.lines import OpLine
from shardwise.graph.show.repeats import Repeat, folded

R, S = sw.Replicate(), sw.Shard


def mesh_2x2() -> Any:
    return sw.simulate((2, 2), ("dp", "tp"))


def stepped(passes: Any = ()) -> Any:
    """A step of two layers, after it was captured."""
    mesh = mesh_2x2()
    up = nn.Parameter(sw.distribute_tensor(torch.ones(32, 16), mesh, [R, S(0)]))
    down = nn.Parameter(sw.distribute_tensor(torch.ones(16, 32), mesh, [R, S(1)]))
    optimizer = torch.optim.SGD([up, down], lr=0.1)

    def step(x: Any, scale: float) -> Tensor:
        optimizer.zero_grad()
        loss = F.linear(F.gelu(F.linear(x, up)), down).mul(scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = sw.compile(step, backend="fx", passes=passes)
    x = sw.distribute_tensor(torch.ones(8, 16), mesh, [S(0), R])
    for scale in (2.0, 2.0, 3.0):
        compiled(x, scale)
    return compiled


def shown(compiled: Any, width: int = 120, *, every: bool = False) -> str:
    """What is printed, without the lines of this file."""
    out = io.StringIO()
    compiled.show(out, width=width, every=every)
    return re.sub(r"\S*test_show\.py:\d+", "LINE", out.getvalue())


PROGRAM = """\
stepped.<locals>.step: 2 programs captured

program 1 of 2, captured at the first call
given     x f32[8,16] S(0)@dp, scale=2.0
ranks     dp=2 × tp=2, simulated: 4 programs in lockstep, of which rank 0's is shown
run       node by node, as torch runs it (fx)
ops       23, and 2 on numbers of the host
sends     2.3 kB in 3 collectives (3 all_reduce)
memory    5.4 kB at most: 2.3 kB that it is given, and 3.1 kB that it makes

f32[8,4] S(0)@dp: a whole tensor and how it lies; f32(4,4): this rank's, where that is not known
forward
   %1  mm(x f32[8,16] S(0)@dp, up.t f32[16,32] S(1)@tp) -> f32[8,32] S(0)@dp S(1)@tp  # LINE
   %2  gelu(%1 f32[8,32] S(0)@dp S(1)@tp) -> f32[8,32] S(0)@dp S(1)@tp  # LINE
   %3  mm(%2 f32[8,32] S(0)@dp S(1)@tp, down.t f32[32,16] S(0)@tp) -> f32[8,16] S(0)@dp P(sum)@tp  # LINE
   %4  mul(%3 f32[8,16] S(0)@dp P(sum)@tp, 2) -> f32[8,16] S(0)@dp P(sum)@tp  # LINE
   %5  all_reduce[sum, tp](%4 f32[8,16] S(0)@dp P(sum)@tp) -> f32[8,16] S(0)@dp  # LINE
   %6  pow(%5 f32[8,16] S(0)@dp, 2) -> f32[8,16] S(0)@dp  # LINE
   %7  mean(%6 f32[8,16] S(0)@dp, [0, 1]) -> f32()  # LINE
   %8  div(%7 f32(), 2) -> f32[] P(sum)@dp  # LINE
backward
   %9  ones_like(%8 f32[] P(sum)@dp) -> f32()  # LINE
  %10  div(%9 f32(), 2) -> f32()  # LINE
  %11  div(%10 f32(4,16), 64) -> f32(4,16)  # LINE
  %12  pow(%5 f32[8,16] S(0)@dp, 1) -> f32[8,16] S(0)@dp  # LINE
  %13  mul(%12 f32[8,16] S(0)@dp, 2) -> f32[8,16] S(0)@dp  # LINE
  %14  mul(%11 f32(4,16), %13 f32[8,16] S(0)@dp) -> f32(4,16)  # LINE
  %15  mul(%14 f32(4,16), 2) -> f32(4,16)  # LINE
  %16  mm(%15.t f32(16,4), %2 f32[8,32] S(0)@dp S(1)@tp) -> f32[16,32] S(1)@tp P(sum)@dp  # LINE
  %17  mm(%15 f32(4,16), down f32[16,32] S(1)@tp) -> f32(4,16)  # LINE
  %18  all_reduce[sum, dp](%16 f32[16,32] S(1)@tp P(sum)@dp) -> f32[16,32] S(1)@tp  # LINE
  %19  gelu_backward(%17 f32(4,16), %1 f32[8,32] S(0)@dp S(1)@tp) -> f32(4,16)  # LINE
  %20  mm(%19.t f32(16,4), x f32[8,16] S(0)@dp) -> f32[32,16] S(0)@tp P(sum)@dp  # LINE
  %21  all_reduce[sum, dp](%20 f32[32,16] S(0)@tp P(sum)@dp) -> f32[32,16] S(0)@tp  # LINE
optimizer
  %22  add_(up f32[32,16] S(0)@tp, %21 f32[32,16] S(0)@tp, alpha=-optimizer.lr)  # LINE
  %23  add_(down f32[16,32] S(1)@tp, %18 f32[16,32] S(1)@tp, alpha=-optimizer.lr)  # LINE
returns   %8 f32[] P(sum)@dp
leaves    up.grad = %21, down.grad = %18
"""


def test_a_program_is_read_line_by_line() -> None:
    found = shown(stepped(), 160)
    program, second = found.split("\nprogram 2 of 2, ")
    assert program.partition("\nCollectives")[0].splitlines() == PROGRAM.splitlines()
    assert "all_reduce tp=2, forward" in program and "pending sum reduced" in program
    assert second.startswith("captured since scale: 2.0 is now 3.0\n")


def test_what_passes_have_changed_is_said() -> None:
    found = shown(stepped(("bucket", "overlap")))
    said = "bucket: 2 reductions of gradients in 1; 3 all_reduce, 2.3 kB → 2 all_reduce, 2.3 kB"
    assert f"\npasses    {said}\n" in found
    assert "all_reduce[sum, dp](" in found and "2 gradients" in found
    assert "passes" not in shown(stepped())


class Chain(nn.Module):
    """A collective that need not be waited for at once."""

    def forward(self, x: Any, y: Any) -> Any:
        whole = x.redistribute(placements=[R, R])
        for _ in range(3):
            y = y.sin() @ y
        return whole.sum() + y.sum()


def test_collectives_that_are_started_and_waited_for() -> None:
    mesh = mesh_2x2()
    x = sw.distribute_tensor(torch.ones(8, 8), mesh, [S(0), R])
    y = sw.distribute_tensor(torch.ones(8, 8), mesh, [R, R])
    compiled = sw.compile(Chain().forward, backend="fx", passes=("overlap",))
    with torch.no_grad():
        compiled(x, y)
    found = shown(compiled)
    assert "start all_gather[dp](x f32[8,8] S(0)@dp)" in found and " wait(%1" in found
    assert [comm.kind for comm in compiled.comms()] == ["all_gather"]


def test_every_op_is_shown_if_asked_for() -> None:
    every = shown(stepped(), every=True)
    found = set(re.findall(r"^ +%\d+  (\S+)\(", every, re.MULTILINE))
    assert found >= {"t", "expand", "detach", "mm", "add_.Tensor", "ones_like"}, found
    assert "pin_memory=False" in every


@pytest.mark.parametrize("width", [80, 120])
def test_lines_are_as_wide_as_the_terminal(width: int) -> None:
    compiled = stepped()
    lines = shown(compiled, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) > len(shown(compiled, 160).splitlines())


def test_str_is_what_is_shown() -> None:
    compiled = stepped()
    out = io.StringIO()
    compiled.show(out, width=120)
    assert str(compiled) == out.getvalue()
    assert repr(compiled) == "<Compiled stepped.<locals>.step, programs: 2>"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_where_rich_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    compiled = stepped()
    coloured, plain = Terminal(), Terminal()
    compiled.show(coloured, width=100)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compiled.show(plain, width=100)
    assert "\x1b[" in coloured.getvalue() and "\x1b[" not in plain.getvalue()
    without = re.sub(r"\x1b\[[\d;]*m", "", coloured.getvalue())
    ops = [line.rstrip() for line in without.splitlines() if re.match(r" +%\d", line)]
    assert ops == [line for line in plain.getvalue().splitlines() if re.match(r" +%\d", line)]


def test_what_is_not_captured_says_why() -> None:
    waiting = sw.compile(stepped, backend="fx")
    assert str(waiting) == "stepped: no programs captured\nrun       it is captured when it is called\n"

    def branches(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x

    gave_up = sw.compile(branches, backend="fx", fullgraph=False)
    with pytest.warns(CaptureWarning, match="runs as it is: the program depends on the data"):
        gave_up(torch.ones(3))
    assert "run       it runs as it is: the program depends on the data it computes" in str(gave_up)


def test_a_module_with_gradients_leaves_some_to_be_summed() -> None:
    mesh = mesh_2x2()
    net = net_on(mesh, dropout=0.1)
    sw.compile(net, backend="fx")
    net(batch(mesh, 0)).sum().backward()
    found = shown(sw.graph.programs_of(net), 300)
    assert found.startswith("Net: 1 program captured\n")
    assert "seed drawn" in found
    assert "leaves    up.weight.grad = " in found and "(a term of a sum over dp)" in found
    assert "gradient of a replicated tensor used on shards: summed behind the program, with others" in found


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).cos().sin() + x
        return x


def test_equal_layers_are_shown_once() -> None:
    compiled = sw.compile(Layers(24).forward, backend="fx")
    with torch.no_grad():
        compiled(torch.ones(2, WIDTH))
    found = str(compiled)
    assert found.count("tanh(") == 2, found  # the first one reads the argument
    assert "┌ 23 ×, of which this is the first" in found and "└ to %120" in found
    assert "layers.1.weight" in found and "layers.2.weight" not in found
    out = io.StringIO()
    compiled.show(out, every=True)
    assert out.getvalue().count("tanh(") == 24


# Folding


def lines_of(text: str, reads: dict[int, tuple[int, ...]] | None = None) -> list[OpLine]:
    """A line for each letter; letters are alike or not."""
    return [OpLine(i + 1, ((kind, "op"),), (reads or {}).get(i + 1, ()), "", "") for i, kind in enumerate(text)]


def drawn(found: list[OpLine | Repeat]) -> str:
    return "".join(
        f"{x.count}({drawn([*x.body])})" if isinstance(x, Repeat) else "".join(text for text, _ in x.said)
        for x in found
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ""),
        ("abc", "abc"),
        ("abab", "abab"),  # it saves too little
        ("ababab", "3(ab)"),
        ("aaaaaa", "6(a)"),
        ("xabcdabcdy", "x2(abcd)y"),
        ("abbbbbcabbbbbc", "2(a5(b)c)"),
        ("abcabcabdabcabcabd", "2(abcabcabd)"),
    ],
)
def test_repetitions(text: str, wanted: str) -> None:
    assert drawn(folded(lines_of(text))) == wanted


def test_layers_that_read_otherwise_are_not_alike() -> None:
    alike = {1: (0,), 2: (1,), 4: (3,), 5: (4,), 7: (6,), 8: (7,), 10: (9,), 11: (10,)}
    assert drawn(folded(lines_of("abcabcabcabc", alike))) == "4(abc)"
    assert drawn(folded(lines_of("abcabcabcabc", {**alike, 10: (2,)}))) != "4(abc)"
