"""Whether functions on DTensors run what plain torch runs on the shards: the cases, how they are laid out, and how what
ran is compared.

A case is a call of a function, forward and backward, once with all tensors replicated and once with those sharded on
their first dim that can be: plain torch on the parts gives the parts of what it gives on the whole, so nothing has to
move. Shardwise is one rank of a fake process group, whose collectives launch nothing.
"""

from __future__ import annotations

import bisect
import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import TestCase

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function

import shardwise as sw
from shardwise.proof.kit.samples import Sample, operators, replaced, tensors_in

if find_spec("expecttest") is None:  # torch's samples of its functions stand beside tests that need it
    stand_in: Any = ModuleType("expecttest")
    stand_in.TestCase, stand_in.ACCEPT = TestCase, False
    sys.modules["expecttest"] = stand_in

NUM_RANKS = 2
RANK = 1  # not 0: that one keeps what others must mask

FUNCTIONS = r"nn\.functional\..*|(log_)?softmax(\..*)?|softmin(\..*)?|native_(layer|batch)_norm"
DRAWS = ("*dropout*", "*rrelu*", "*fractional_max_pool*", "*multi_head_attention*", "*scaled_dot_product_attention*")
"""Functions that may draw random numbers: what they give on parts cannot be compared with that on the whole."""

Run = Callable[[], Any]
Ran = Counter[str]


@dataclass(frozen=True)
class Case:
    """A call, and which of its tensors are sharded on their first dim, by their positions; the rest are replicated."""

    name: str
    function: Callable
    sample: Sample
    split: frozenset[int] = frozenset()
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __str__(self) -> str:
        where = f"sharded: {sorted(self.split)}" if self.split else "replicated"
        return f"{self.name} #{self.sample.index}, {where}: {self.sample}"


# --- Cases ---


def torch_cases(num_samples: int) -> Iterator[Case]:
    """Torch's own samples of its functions."""
    for operator in operators(FUNCTIONS):
        if torch.float32 not in operator.info.supported_dtypes("cpu"):
            continue
        for sample in replace(operator, dtype=torch.float32).samples(num_samples):
            if sample.tensors:
                yield from laid_out(Case(operator.name, operator.function, sample))


def laid_out(case: Case) -> Iterator[Case]:
    """Replicated, and sharded if it can be."""
    yield case
    sharded = (replace(case, split=split) for split in splits(case.sample))
    yield from itertools.islice(filter(works_on_parts, sharded), 1)


def splits(sample: Sample) -> Iterator[frozenset[int]]:
    """Sets of tensors that may go together, most of them first: the first one, and others as long."""
    first, *rest = sample.tensors
    if not first.ndim or first.shape[0] < NUM_RANKS:
        return
    others = [i for i, x in enumerate(rest, 1) if x.ndim and x.shape[0] == first.shape[0]]
    for count in range(len(others), -1, -1):
        yield from (frozenset((0, *some)) for some in itertools.combinations(others, count))


def works_on_parts(case: Case) -> bool:
    """Whether plain torch on the parts gives the parts of the result, or terms of a number."""
    try:
        with torch.no_grad(), quiet():
            whole = tensors_in(result(case, lambda position, x: x))
            parts = [tensors_in(result(case, part_of(case, rank))) for rank in range(NUM_RANKS)]
            draws = _matches(case.name, DRAWS)
            return all(fit(x, list(pieces), draws=draws) for x, *pieces in zip(whole, *parts, strict=True))
    except (RuntimeError, ValueError, IndexError, AssertionError):  # sizes that do not fit together
        return False


def fit(whole: Tensor, parts: list[Tensor], *, draws: bool) -> bool:
    if not whole.ndim:
        joined = [torch.stack(parts).sum(0), torch.stack(parts).mean(0)] if whole.is_floating_point() else []
    else:
        joined = [torch.cat(parts)] if all(part.ndim for part in parts) else []
    fitting = [x for x in joined if x.shape == whole.shape]
    return bool(fitting) if draws else any(torch.allclose(x, whole, equal_nan=True) for x in fitting)


def part_of(case: Case, rank: int) -> Callable[[int, Tensor], Tensor]:
    return lambda position, x: x.chunk(NUM_RANKS)[rank].clone() if position in case.split else x


def result(case: Case, change: Callable[[int, Tensor], Tensor]) -> Any:
    args, kwargs = arguments(case, change)
    return case.function(*args, **kwargs)


def arguments(case: Case, change: Callable[[int, Tensor], Tensor]) -> Any:
    images = {id(x): change(position, x) for position, x in enumerate(case.sample.tensors)}
    return replaced((case.sample.args, case.sample.kwargs), images)


# Sizes whose kernels are those of real programs. How many of the tensors are sharded is the last number.

SIZED: dict[str, tuple[Callable, list[tuple[int, ...]], int]] = {
    "linear": (F.linear, [(8, 64, 128), (256, 128), (256,)], 1),
    "linear, no bias": (F.linear, [(8, 64, 128), (256, 128)], 1),
    "matmul": (torch.matmul, [(8, 64, 128), (8, 128, 64)], 2),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (128,), w, b), [(8, 64, 128), (128,), (128,)], 1),
    "rms_norm": (lambda x, w: F.rms_norm(x, (128,), w), [(8, 64, 128), (128,)], 1),
    "rms_norm, no weight": (lambda x: F.rms_norm(x, (128,)), [(8, 64, 128)], 1),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [(8, 16, 32), (16,), (16,)], 1),
    "softmax": (lambda x: F.softmax(x, -1), [(8, 64, 1000)], 1),
    "softmax, long rows": (lambda x: F.softmax(x, -1), [(8, 4, 5000)], 1),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [(8, 64, 1000)], 1),
    "dropout": (lambda x: F.dropout(x, 0.1), [(8, 64, 128)], 1),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), [(8, 64, 128)], 1),
    "gated": (lambda x, gate: F.silu(gate) * x, [(8, 64, 128), (8, 64, 128)], 2),
    "residual": (lambda x, y: x + y, [(8, 64, 128), (8, 64, 128)], 2),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(8, 16, 16, 16), (32, 16, 3, 3), (32,)], 1),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [(8, 16, 16, 16)], 1),
    "cross_entropy": (lambda x, y: F.cross_entropy(x, y.abs().long()), [(64, 1000), (64,)], 2),
    "embedding": (lambda x, table: F.embedding(x.abs().long(), table), [(8, 64), (100, 128)], 1),
}


def sized_cases() -> Iterator[Case]:
    for name, (function, shapes, num_sharded) in SIZED.items():
        case = Case(name, function, drawn(shapes))
        yield from (case, replace(case, split=frozenset(range(num_sharded))))


def drawn(shapes: Sequence[tuple[int, ...]]) -> Sample:
    generator = torch.Generator().manual_seed(0)
    return Sample(0, tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes))


ATTENTION: dict[str, Callable] = {
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "full": F.scaled_dot_product_attention,
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.2),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "mask": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
}


def attention_cases(backends: Sequence[SDPBackend]) -> Iterator[Case]:
    for backend, (name, function) in itertools.product(backends, ATTENTION.items()):
        sample = drawn([(4, 4, 64, 64)] * 3 + [(4, 4, 64, 64)] * (name == "mask"))
        for x in sample.tensors[3:]:
            x.requires_grad_(False)
        title = f"scaled_dot_product_attention, {backend.name}, {name}"
        case = Case(title, function, sample, inside=lambda backend=backend: sdpa_kernel(backend))
        yield from (case, replace(case, split=frozenset(range(len(sample.tensors)))))


# --- Running ---


@dataclass(frozen=True)
class Place:
    """Where cases run: one rank's view of a mesh, and the dtype that their floating-point tensors get."""

    mesh: DeviceMesh
    dtype: torch.dtype = torch.float32

    def shard(self, case: Case, position: int, x: Tensor) -> Tensor:
        """This rank's shard, in memory of its own."""
        dtype = self.dtype if x.is_floating_point() else x.dtype
        return part_of(case, RANK)(position, x.detach()).to(self.mesh.device_type, dtype).clone()

    def plain(self, case: Case) -> Run:
        def leaf(position: int, x: Tensor) -> Tensor:
            return self.shard(case, position, x).requires_grad_(x.requires_grad)

        return running(case, arguments(case, leaf))

    def distributed(self, case: Case) -> Run:
        def leaf(position: int, x: Tensor) -> Tensor:
            placement = sw.Shard(0) if position in case.split else sw.Replicate()
            shard = self.shard(case, position, x)
            made = sw.DTensor.from_local(shard, self.mesh, [placement], run_check=False, shape=x.shape)
            return made.requires_grad_(x.requires_grad)

        return running(case, arguments(case, leaf))


def running(case: Case, given: Any) -> Run:
    """A call of a case with arguments made for it: forward, and backward if there is anything to go back for."""
    args, kwargs = given

    def run() -> None:
        with quiet(), case.inside():
            outs = [out for out in tensors_in(case.function(*args, **kwargs)) if out.requires_grad]
            if outs:
                torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])

    return run


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns of much that samples do on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- What ran ---

BATCH = 200  # runs in one session of the profiler, which costs a tenth of a second to start and stop
MARK = "kernels: run "
NOTHING = frozenset(
    f"aten::{name}"
    for name in (
        *("alias", "as_strided", "as_strided_", "detach", "detach_", "expand", "permute", "select", "slice", "split"),
        *("squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "lift_fresh"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
        *("_has_compatible_shallow_copy_type", "result_type"),
    )
)
"""Ops that compute nothing."""


def ran(runs: Sequence[Run], device: str) -> Iterator[Ran]:
    """What each run had torch do: on CUDA the kernels launched, by name, elsewhere the ops that compute something. The
    profiler only looks on: a mode that sees every op would hold tensors, and then nobody else could own them."""
    for start in range(0, len(runs), BATCH):
        yield from _profiled(runs[start : start + BATCH], device)


def _profiled(runs: Sequence[Run], device: str) -> list[Ran]:
    on_cuda = device == "cuda"
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:  # without, torch 2.11 warns of lost cycles
        for number, run in enumerate(runs):
            with record_function(f"{MARK}{number}"):
                run()
                wait()
    events = profiler.profiler.kineto_results.events()
    return by_run(events, len(runs), kernels(events) if on_cuda else ops(events))


def by_run(events: Sequence[Any], num_runs: int, found: Sequence[tuple[int, str]]) -> list[Ran]:
    """What was found at times of the host's clock, counted for each run that was marked."""
    marks = [event for event in events if event.name().startswith(MARK) and event.device_type() == DeviceType.CPU]
    begins = [event.start_ns() for event in sorted(marks, key=lambda event: event.start_ns())]
    assert len(begins) == num_runs, "the profiler has lost some runs"
    counts: list[Ran] = [Counter() for _ in range(num_runs)]
    for time, name in found:
        if (number := bisect.bisect_right(begins, time) - 1) >= 0:
            counts[number][name] += 1
    return counts


def ops(events: Sequence[Any]) -> list[tuple[int, str]]:
    names = ((event.start_ns(), event.name()) for event in events if event.device_type() == DeviceType.CPU)
    return [(time, name) for time, name in names if computes(name)]


@cache
def computes(name: str) -> bool:
    """Whether a name is that of an op of torch's that computes: itself, not by ops that have names of their own."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if not name.startswith("aten::") or packet is None or name in NOTHING:
        return False
    known = [
        getattr(packet, overload)._name for overload in packet.overloads() if not re.search("out|[nN]ame", overload)
    ]
    registered = [op for op in known if torch._C._dispatch_has_kernel(op)]
    return not all(torch._C._dispatch_has_kernel_for_dispatch_key(op, "CompositeImplicitAutograd") for op in registered)


def kernels(events: Sequence[Any]) -> list[tuple[int, str]]:
    """Each kernel, copy and fill of the device, at the time when the host launched it."""
    on_host = (event for event in events if event.device_type() == DeviceType.CPU)
    launched = {event.correlation_id(): event.start_ns() for event in on_host if event.name().startswith("cu")}
    on_device = (event for event in events if event.device_type() == DeviceType.CUDA)
    return [
        (launched.get(event.correlation_id(), event.start_ns()), event.name())
        for event in on_device
        if not event.name().startswith(MARK)
    ]


# --- Comparing ---


@dataclass(frozen=True)
class Reason:
    """Why some functions run more than plain torch does, or something else; and what, by patterns."""

    text: str
    functions: Sequence[str]
    may_differ: Sequence[str]
    kernels: Sequence[str] = ("*",)
    """The same on a GPU."""

    def covers(self, case: Case, found: Iterable[str]) -> bool:
        return _matches(case.name, self.functions) and all(_matches(name, self.may_differ) for name in found)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def ops_named(*names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}" for name in names)


COPIES = ops_named("clone", "copy_")
COPY_KERNELS = ("*copy*", "Memcpy*", "Memset*", "*FillFunctor*")
CHECK = ops_named(
    *("lt", "ge", "le", "eq", "ne", "any", "bitwise_and", "bitwise_not", "bitwise_or", "index", "nonzero", "aminmax"),
    *("_local_scalar_dense", "_to_copy", "new_full", "fill_", "masked_fill", "masked_fill_"),
)
"""How ranks find out on the CPU whether somebody has an index that torch would refuse."""
SUMS = ops_named("mean", "sum", "div", "div_", "mul", "neg", "cat", "stack")
SUM_KERNELS = ("*reduce_kernel*", "*elementwise_kernel*", "*CatArrayBatchedCopy*", *COPY_KERNELS)
LOOK_UP = ops_named(
    *("add", "add_", "arange", "clamp", "index_add_", "index_select", "new_zeros", "resize_as_", "scalar_tensor"),
    *("select_backward", "sub", "where", "zero_", "zeros", "zeros_like"),
    *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
)
LOOK_UP_KERNELS = ("*indexSelect*", "*indexFunc*", "*nll_loss*")

SHARED_REASONS = (
    Reason(
        "the gradient of a replicated tensor is summed over the ranks: in a copy, where autograd gives a view",
        ("*linear", "*linear, no bias", "*linear_cross_entropy.chunked", "*rms_norm", "*batch_norm", "*prelu"),
        (*COPIES, *ops_named("new_zeros", "zero_", "fill_")),
        COPY_KERNELS,
    ),
    Reason(
        "the mean of a sharded batch: the ranks' sums, divided by how many there are in all",
        ("*kl_div", "*triplet_margin_loss"),
        (*SUMS, *COPIES, *ops_named("_to_copy")),
        SUM_KERNELS,
    ),
    Reason(
        "the mean of what targets of a sharded batch name: the ranks' sums of losses and of weights, reduced together",
        ("*cross_entropy", "*multi*margin_loss"),
        (*SUMS, *CHECK, *COPIES, *ops_named("masked_fill", "masked_fill_", "zero_", "zeros")),
        (*SUM_KERNELS, "*nll_loss*", "*[Mm]ulti*argin*"),
    ),
    Reason(
        "the mean of log-probabilities: those that targets name are looked up",
        ("*.nll_loss", "*linear_cross_entropy"),
        (*SUMS, *LOOK_UP, *CHECK, *COPIES),
        (*SUM_KERNELS, *LOOK_UP_KERNELS),
    ),
    Reason(
        "running statistics are those of the whole batch",
        ("*instance_norm",),
        (
            *(*SUMS, *COPIES),
            *ops_named("_to_copy", "add", "add_", "constant_pad_nd", "fill_", "pow", "rsqrt", "sub"),
            *ops_named("native_batch_norm", "native_batch_norm_backward"),
        ),
    ),
    Reason(
        "draws for every channel of the whole batch, and takes its part of that",
        ("*dropout2d", "*dropout3d", "*feature_alpha_dropout*"),
        (*COPIES, *ops_named("slice")),
        COPY_KERNELS,
    ),
    Reason(
        "runs op by op, and what it writes in place inside is written to a copy",
        (
            *("*margin_ranking_loss", "*hinge_embedding_loss", "*cosine_similarity", "*cosine_embedding_loss"),
            "*gaussian_nll_loss",
        ),
        (
            *COPIES,
            *ops_named("ge", "scalar_tensor", "where", "add", "add_", "clamp", "clamp_", "div", "sub", "_to_copy"),
        ),
    ),
    Reason(
        "looks whether bags end before they begin: torch would read what is not there",
        ("*embedding_bag",),
        ops_named("_local_scalar_dense", "any", "copy_", "fill_", "gt", "lt", "sub", "slice"),
    ),
    Reason(
        "has no rule: gathered, and run on the whole",
        ("*linear_cross_entropy.chunked_none", "*fractional_max_pool*"),
        ("*",),
    ),
)
"""On every device."""


def difference(plain: Ran, ours: Ran) -> dict[str, int]:
    """What ran more often on DTensors than on the shards, and less often below zero."""
    return {name: ours[name] - plain[name] for name in sorted(plain | ours) if ours[name] != plain[name]}


@dataclass
class Report:
    """What was compared, and what was found to differ: for one of the reasons given, or for none."""

    reasons: Sequence[Reason]
    num_equal: int = 0
    explained: dict[str, list[Case]] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return self.num_equal + sum(map(len, self.explained.values())) + len(self.unexplained)

    def add(self, case: Case, plain: Ran, ours: Ran) -> None:
        found = difference(plain, ours)
        reason = next((reason for reason in self.reasons if reason.covers(case, found)), None)
        if not found:
            self.num_equal += 1
        elif reason is not None:
            self.explained.setdefault(reason.text, []).append(case)
        else:
            self.unexplained.append(f"{case}\n" + "\n".join(f"  {count:+d} {name}" for name, count in found.items()))

    def check(self, *, at_least: int) -> None:
        assert not self.unexplained, "not what plain torch runs on the shards:\n" + "\n".join(self.unexplained)
        assert self.num_cases >= at_least, f"only {self.num_cases} cases could be run"

    def markdown(self, title: str) -> str:
        rows = [("the same", self.num_equal, "")]
        for text, cases in self.explained.items():
            rows.append((text, len(cases), ", ".join(sorted({f"`{case.name}`" for case in cases}))))
        rows.append(("differs for no reason known", len(self.unexplained), ""))
        lines = [f"| {text} | {count} | {names} |" for text, count, names in rows]
        listed = [f"```\n{text}\n```\n" for text in self.unexplained]
        return "\n".join([f"## {title}\n", "| | cases | functions |", "|---|---|---|", *lines, "", *listed])


def compared(place: Place, cases: Iterable[Case], reasons: Sequence[Reason]) -> Report:
    """Every case that plain torch can run here, beside plain torch."""
    device, report = place.mesh.device_type, Report(reasons)
    pairs: list[tuple[Case, Run, Run]] = []
    for case in cases:
        try:
            place.plain(case)()  # each once before, when kernels are loaded and calls are planned
        except (RuntimeError, NotImplementedError):  # no kernel for this dtype, or this device
            continue
        try:
            place.distributed(case)()
        except Exception as error:
            report.unexplained.append(f"{case}\n  raised {type(error).__name__}: {error}")
            continue
        pairs.append((case, place.plain(case), place.distributed(case)))
    plain = ran([run for _, run, _ in pairs], device)
    ours = ran([run for _, _, run in pairs], device)
    for (case, _, _), theirs, mine in zip(pairs, plain, ours, strict=True):
        report.add(case, theirs, mine)
    return report
