"""What it takes to excuse answers in float32 as rounding: right ones, and ones with a fault planted.

    python benchmarks/rounding.py             print the tables (a minute)
    python benchmarks/rounding.py --write     and write benchmarks/results/rounding-<date>.md
    python benchmarks/rounding.py --ops sum   only functions whose whole name matches

`shardwise coverage` excuses an answer in float32 that is farther off than its tolerance if rounding explains that: at
most FACTOR times as far as the result moves in double precision when every number in the call is shaken
(`shardwise.proof.kit.rounding`). This measures what the factor would have to be. Reductions, products, norms, losses,
factorisations, convolutions and transforms are called in some layouts, on torch's samples and on data that is larger
and worse; then again with a fault planted. Faults that change nothing even in double precision, where no rounding
hides them, do not count.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.simulated import SimulatedPort
from shardwise.dispatch import clear_cache
from shardwise.layout import Mesh, Shard
from shardwise.proof.coverage import judge
from shardwise.proof.coverage.command import Assignment, assignments, make_case, mesh_of
from shardwise.proof.coverage.forms import Form, Unusable
from shardwise.proof.coverage.plain import Case
from shardwise.proof.kit.command import versions
from shardwise.proof.kit.distance import allowed
from shardwise.proof.kit.placing import place
from shardwise.proof.kit.report import Table, page, print_tables
from shardwise.proof.kit.rounding import DOUBLE, DROWNED, FACTOR, doubled, factor_needed
from shardwise.proof.kit.samples import Sample, operator

RESULTS = Path(__file__).parent / "results"

PLAIN = (
    "sum mean var std var_mean prod norm logsumexp nansum cumsum cumprod logcumsumexp trace cov corrcoef dist cdist",
    "mm bmm matmul addmm addbmm baddbmm mv einsum tensordot kron matrix_exp softmax log_softmax",
)
LINALG = "vector_norm matrix_norm solve inv det slogdet cholesky qr svdvals eigvalsh pinv lstsq"
FUNCTIONAL = (
    "layer_norm group_norm batch_norm instance_norm rms_norm normalize local_response_norm",
    "cross_entropy nll_loss mse_loss kl_div cosine_similarity ctc_loss scaled_dot_product_attention",
    "conv1d conv2d conv_transpose2d avg_pool2d interpolate.bilinear",
)
OPERATORS = (
    *" ".join(PLAIN).split(),
    *(f"linalg.{name}" for name in LINALG.split()),
    *(f"nn.functional.{name}" for name in " ".join(FUNCTIONAL).split()),
    *("fft.fft", "fft.rfft", "fft.fft2", "fft.irfft"),
)

SAMPLES, LAYOUTS = 3, 3


# Larger and worse data than torch's samples


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def _shifted(*shape: int) -> Tensor:
    """Numbers whose mean is large beside their differences."""
    return (_normal(*shape).detach() + 300.0).requires_grad_()


def _nearly_singular(size: int) -> Tensor:
    """Hilbert's matrix, and a little more on its diagonal."""
    at = torch.arange(1.0, size + 1)
    return (1 / (at[:, None] + at - 1) + 1e-3 * torch.eye(size)).requires_grad_()


HARD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sum of 70000": (torch.sum, (_normal(700, 100),)),
    "mean that cancels": (lambda x: (x - x.mean(0)).sum(0), (_shifted(513, 9),)),
    "variance of a large mean": (lambda x: x.var(0), (_shifted(513, 9),)),
    "layer_norm of a large mean": (lambda x: F.layer_norm(x, [65]), (_shifted(33, 65),)),
    "group_norm of a large mean": (lambda x: F.group_norm(x, 3), (_shifted(5, 9, 33),)),
    "batch_norm of a large mean": (lambda x: F.batch_norm(x, None, None, training=True), (_shifted(33, 5, 7),)),
    "product of long rows": (torch.mm, (_normal(17, 2049), _normal(2049, 9))),
    "product that cancels": (lambda x, y: x @ y, (_shifted(17, 513), _normal(513, 9))),
    "log of a long sum": (lambda x: x.logsumexp(0), (_normal(4097, 5),)),
    "long running sum": (lambda x: x.cumsum(0), (_normal(257, 5),)),
    "long running product": (lambda x: (1 + x / 64).cumprod(0), (_normal(257, 5),)),
    "softmax of large numbers": (lambda x: (30 * x).softmax(0), (_normal(257, 9),)),
    "cross_entropy over many classes": (F.cross_entropy, (_normal(33, 1025), torch.arange(33))),
    "long transform": (torch.fft.fft, (_normal(5, 1025),)),
    "wide convolution": (F.conv1d, (_normal(3, 33, 65), _normal(9, 33, 7))),
    "attention over many tokens": (
        F.scaled_dot_product_attention,
        tuple(_normal(2, 3, 129 + i, 9)[:, :, :129] for i in range(3)),
    ),
    "nearly singular system": (torch.linalg.solve, (_nearly_singular(9), _normal(9, 4))),
    "nearly singular inverse": (torch.linalg.inv, (_nearly_singular(9),)),
}
"""Functions and float32 data, by name."""


def cases(name: str) -> Iterator[Case]:
    """The calls of an operator, or the one hard call of that name, with plain torch's answers."""
    if name in HARD:
        function, tensors = HARD[name]
        yield Case(Form("function", function), Sample(0, tensors))
        return
    op = operator(name, "float32")
    for sample in op.samples(SAMPLES):
        try:
            case = make_case(op, Form("function", op.function), sample, 0)
        except Unusable:
            continue
        if sample.tensors and not case.random:
            yield case


def in_double(case: Case) -> Case:
    """The same call in double precision, where a difference is no rounding."""
    images: dict[int, Tensor] = {}
    args, kwargs = doubled(case.sample.args, images), doubled(case.sample.kwargs, images)
    return Case(case.form, Sample(case.sample.index, args, kwargs))


# Faults


def _with(change: Callable[[list[Tensor], str], list[Tensor]]) -> AbstractContextManager[Any]:
    """Reductions between ranks that give something else."""
    whole = SimulatedPort.all_reduce
    parts = SimulatedPort.reduce_scatter

    def all_reduce(self: Any, shards: Any, mesh: Mesh, axes: Any, op: str) -> list[Tensor]:
        return whole(self, change(list(shards), op), mesh, axes, op)

    def reduce_scatter(self: Any, chunks: Any, mesh: Mesh, axes: Any, op: str) -> list[Tensor]:
        columns = [change(list(column), op) for column in zip(*chunks, strict=True)]
        return parts(self, list(zip(*columns, strict=True)), mesh, axes, op)

    return mock.patch.multiple(SimulatedPort, all_reduce=all_reduce, reduce_scatter=reduce_scatter)


def _without_last(terms: list[Tensor], op: str) -> list[Tensor]:
    return [*terms[:-1], torch.zeros_like(terms[-1])] if op == "sum" else terms


def _of_uneven(terms: list[Tensor], op: str) -> list[Tensor]:
    """As if five rows counted as two times three."""
    exact = op == "sum" and terms[0].is_floating_point()
    return [term * (5 / 6) for term in terms] if exact else terms


def _placed(change: Callable[[Tensor, int], Tensor]) -> AbstractContextManager[Any]:
    """Inputs whose last shard holds something else."""

    def changed(x: Tensor, mesh: Mesh, placements: Sequence[Any], seed: int = 0) -> Any:
        dims = [p.dim for p in placements if isinstance(p, Shard)]
        if dims and x.numel() and x.shape[dims[0]] > 1 and (x.is_floating_point() or x.is_complex()):
            x = change(x.detach().clone(), dims[0]).requires_grad_(x.requires_grad)
        return place(x, mesh, placements, seed)

    return mock.patch.object(judge, "place", changed)


def _off_by_one(x: Tensor, dim: int) -> Tensor:
    """The last shard begins a row too early."""
    first = -(-x.shape[dim] // 2)
    return torch.cat([x.narrow(dim, 0, first), x.narrow(dim, first - 1, x.shape[dim] - first)], dim)


def _one_lost(x: Tensor, dim: int) -> Tensor:
    """The first element of the last row."""
    x[tuple(-1 if d == dim else 0 for d in range(x.dim()))] = 0
    return x


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a term is missing": lambda: _with(_without_last),
    "a wrong divisor": lambda: _with(_of_uneven),
    "a shard off by one": lambda: _placed(_off_by_one),
    "an element lost": lambda: _placed(_one_lost),
}


# Measuring


@dataclass
class Measured:
    """How many times as far as rounding moves them the answers of some calls are off: the largest of each call."""

    calls: int = 0
    beyond: list[float] = field(default_factory=list)  # of calls farther off than the tolerance
    drowned: list[float] = field(default_factory=list)  # the same, where rounding may be all of the result

    def add(self, other: Measured) -> None:
        self.calls += other.calls
        self.beyond += other.beyond
        self.drowned += other.drowned

    @property
    def needed(self) -> list[float]:
        return [*self.beyond, *self.drowned]


@contextmanager
def noting(found: list[tuple[float, str]]) -> Iterator[None]:
    """Inside, the judge excuses everything that may be rounding; written down is what factor that takes, and whether
    anything is compared then."""

    def note(case: Case, position: int, mine: Tensor, expected: Tensor) -> bool:
        if expected.dtype not in DOUBLE or case.spread is None:
            return False
        needed = max(factor_needed(x, position, case.spread, allowed(expected)) for x in (mine, expected))
        found.append((needed, case.spread.says(position)))
        return True

    with (
        mock.patch.object(judge, "_is_rounding", note),
        mock.patch.object(judge, "_compare_arguments", lambda *args: None),  # faults change them
    ):
        yield


def measure(case: Case, mesh: Mesh, way: Assignment, fault: Callable[[], AbstractContextManager[Any]]) -> Measured:
    """One call: what factor would excuse it; infinite if it is wrong beyond any."""
    found: list[tuple[float, str]] = []
    with noting(found), fault():
        verdict = judge.judge(case, mesh, way)
    if verdict.kind in ("wrong", "raised"):
        return Measured(1, [math.inf])
    needed = max((factor for factor, _ in found), default=0.0)
    if not needed:
        return Measured(1)
    told = any(factor and says != DROWNED for factor, says in found)
    return Measured(1, [needed]) if told else Measured(1, drowned=[needed])


def is_wrong_in_double(case: Case, mesh: Mesh, way: Assignment, fault: Callable[[], Any]) -> bool:
    with mock.patch.object(judge, "_compare_arguments", lambda *args: None), fault():
        return judge.judge(case, mesh, way).kind == "wrong"


def measure_all(names: Sequence[str]) -> dict[str, dict[str, Measured]]:
    """By operator, and by fault, or "honest"."""
    found: dict[str, dict[str, Measured]] = {}
    mesh = mesh_of((2,))
    for name in names:
        mine = found[name] = {kind: Measured() for kind in ("honest", *FAULTS)}
        clear_cache()
        for case in cases(name):
            double = in_double(case)
            for way in assignments(case.sample.tensors, 1, LAYOUTS, random.Random(0)):
                mine["honest"].add(measure(case, mesh, way, nullcontext))
                for kind, fault in FAULTS.items():
                    if is_wrong_in_double(double, mesh, way, fault):
                        mine[kind].add(measure(case, mesh, way, fault))
    return found


# Telling


def _number(x: float) -> str:
    return "∞" if math.isinf(x) else f"{x:.3g}"


def tables(found: dict[str, dict[str, Measured]]) -> list[Table]:
    total = {kind: Measured() for kind in ("honest", *FAULTS)}
    for each in found.values():
        for kind, measured in each.items():
            total[kind].add(measured)
    honest, faulty = total.pop("honest"), total
    every = [x for measured in faulty.values() for x in measured.needed]
    told = [x for measured in faulty.values() for x in measured.beyond]
    summary = [
        ("right calls", f"{honest.calls} of {len(found)} functions, {len(honest.needed)} beyond the tolerance"),
        (
            "largest factor that one needs",
            f"{_number(max(honest.needed, default=0))}; {_number(max(honest.beyond, default=0))} without the drowned",
        ),
        ("faulty calls", str(sum(measured.calls for measured in faulty.values()))),
        (
            "smallest factor that excuses one",
            f"{_number(min(every, default=math.inf))}; {_number(min(told, default=math.inf))} without the drowned",
        ),
        (
            f"faults that {FACTOR:g} excuses",
            f"{sum(x <= FACTOR for x in every)}, all of them drowned"
            if not any(x <= FACTOR for x in told)
            else str(sum(x <= FACTOR for x in every)),
        ),
    ]
    columns = ("fault", "calls", "tolerated", "drowned", f"excused by {FACTOR:g}", "smallest factor", "not drowned")
    return [
        ("right, but beyond the tolerance", ("function", "calls", "of", "drowned", "largest factor"), _honest(found)),
        ("faulty", columns, _faulty(faulty)),
        ("rounding", ("", ""), summary),
    ]


def _honest(found: dict[str, dict[str, Measured]]) -> list[tuple[str, ...]]:
    """Functions whose right answers need a factor, the largest first."""
    needing = {name: each["honest"] for name, each in found.items() if each["honest"].needed}
    rows = sorted(needing.items(), key=lambda row: -max(row[1].needed))
    return [(name, str(len(m.needed)), str(m.calls), str(len(m.drowned)), _number(max(m.needed))) for name, m in rows]


def _faulty(faulty: dict[str, Measured]) -> list[tuple[str, ...]]:
    """By fault: how many calls show it in double precision, and what would excuse them, drowned or not."""
    return [
        (
            *(kind, str(m.calls), str(m.calls - len(m.needed)), str(len(m.drowned))),
            str(sum(x <= FACTOR for x in m.needed)),
            _number(min(m.needed, default=math.inf)),
            _number(min(m.beyond, default=math.inf)),
        )
        for kind, m in faulty.items()
    ]


ABOUT = (
    "What factor an answer in float32 needs to be excused as rounding (`benchmarks/rounding.py`): how far it is off, "
    "beside how far the result moves in double precision when every number in the call is shaken by up to 2⁻²⁴. "
    "Answers within the tolerance need none. Faults count where the answer in double precision is wrong. Drowned are "
    "calls where FACTOR times that is more than the largest number of the result: there nothing can be told in "
    "float32, faults are excused, and no factor parts them from right answers. They were set apart after a first run "
    "had shown such faults; `shardwise coverage` counts them. Tolerated faults are smaller than the tolerance."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=".*", metavar="PATTERN", help="only operators whose whole name matches")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/rounding-<date>.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    made = tables(measure_all([name for name in (*OPERATORS, *HARD) if re.fullmatch(given.ops, name)]))
    print_tables(made)
    if given.write:
        title = f"Rounding and faults in float32, {date.today()}"
        (RESULTS / f"rounding-{date.today()}.md").write_text(page(made, title, f"{versions()} {ABOUT}"))


if __name__ == "__main__":
    main()
