"""Where the time of the block goes: op by op beside plain torch, then function by function."""

from __future__ import annotations

import cProfile
import pstats
from contextlib import nullcontext

import torch
from rich.console import Console
from torch.overrides import TorchFunctionMode, resolve_name

from block import Training
from race import Call, Row, Table, race


class RecordCalls(TorchFunctionMode):
    """Keeps every torch call made by user code, with its arguments, so that it can be run again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Call]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if "__get__" not in name:
            self.calls.append((name.rpartition(".")[2], lambda: func(*args, **kwargs)))
        return func(*args, **kwargs)


def profile(trainings: dict[str, Training], console: Console, *, num_rounds: int) -> None:
    """Compares the systems with the first of them; of the last, shows the functions of a train step too."""
    first, *_, last = trainings
    columns = ("op", *(f"{system}, us" for system in trainings), f"{last} - {first}")
    for grad in (True, False):
        with nullcontext() if grad else torch.no_grad():
            rows = op_rows(trainings, num_rounds=num_rounds // 4 or 1)
            rows += whole_rows(trainings, grad=grad, num_rounds=num_rounds)
        Table(f"The block op by op, {'grad' if grad else 'no_grad'}", columns, rows).print(console)
    step = trainings[last].step
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(200):
            step()
    console.print(f"200 train steps of {last}, by time in the function itself")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(40)


def op_rows(trainings: dict[str, Training], *, num_rounds: int) -> list[Row]:
    """Every torch call of the first system's loss, run again beside the same call of the others."""
    recorded = {}
    for system, training in trainings.items():
        with RecordCalls() as record:
            training.loss()
        recorded[system] = record.calls
    rows: list[Row] = []
    totals = dict.fromkeys(trainings, 0.0)
    rest = {system: iter(calls) for system, calls in recorded.items()}
    for name, _ in next(iter(recorded.values())):
        # Others may make calls in between, such as for a redistribution that is spelled out.
        calls = {s: next(call for other, call in rest[s] if other == name) for s in trainings}
        medians = race_medians(calls, num_rounds)
        totals = {system: totals[system] + medians[system] for system in trainings}
        rows.append(profile_row(name, medians))
    return [*rows, profile_row("sum of the above", totals)]


def whole_rows(trainings: dict[str, Training], *, grad: bool, num_rounds: int) -> list[Row]:
    forward = race_medians({s: training.loss for s, training in trainings.items()}, num_rounds)
    rows = [profile_row("loss, as a whole", forward)]
    if grad:
        both = race_medians({s: t.forward_backward for s, t in trainings.items()}, num_rounds)
        step = race_medians({s: t.step for s, t in trainings.items()}, num_rounds)
        rows += [
            profile_row("backward, by difference", {s: both[s] - forward[s] for s in trainings}),
            profile_row("optimizer, by difference", {s: step[s] - both[s] for s in trainings}),
            profile_row("step, as a whole", step),
        ]
    return rows


def race_medians(calls: dict[str, Call], num_rounds: int) -> dict[str, float]:
    timings = race(calls, num_rounds=num_rounds)
    return {system: timing.median for system, timing in timings.items()}


def profile_row(name: str, medians: dict[str, float]) -> Row:
    first, *_, last = medians.values()
    extra = last - first
    return (name, *(f"{m * 1e6:.2f}" for m in medians.values()), f"{extra * 1e6:+.2f}")
