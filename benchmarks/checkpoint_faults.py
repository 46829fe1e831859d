"""Steps that are saved while ranks are killed, disks are full and renames fail: the last complete one always loads.

    python benchmarks/checkpoint_faults.py                     200 faults
    python benchmarks/checkpoint_faults.py --runs 12 --seed 7  some of them, others
    python benchmarks/checkpoint_faults.py --write             and write benchmarks/results/checkpoint-faults-<date>.md

Every run is a group of real processes joined by Gloo. They go on from the last step that is there, compare it with what
it must be, bit for bit, save a step, and save another, in which a fault strikes: at a call into the operating system
that is drawn from a seed, before it, after it, or half way through a write. What must hold: a step that is visible is
whole; no step that was reported as saved is lost, unless later ones took its place; ranks that live all raise; and the
next save leaves no temporary file. The next run, of another number of ranks with another layout, in the foreground or
the background, goes on in the same folder.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import json
import os
import platform
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.files.folders import UNFINISHED
from shardwise.checkpoint.steps.folders import steps_in
from shardwise.errors import CheckpointError

KINDS = ONE, ALL, FULL, RENAME = "one rank is killed", "all ranks are killed", "the disk is full", "a rename fails"
PLACEMENTS = {"rows": sw.Shard(0), "columns": sw.Shard(-1), "whole": sw.Replicate()}
PATIENCE = 60.0
"""Seconds after which ranks that still run are taken to hang."""


# The program that is saved: its state is known at every step, whatever the mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 6)
        self.register_buffer("scale", torch.linspace(0, 1, 9))


@dataclass
class Program:
    """A model, its optimizer, and how far it has come."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    progress: dict[str, Any]

    @staticmethod
    def new(lay: Callable[[nn.Module], nn.Module] = lambda net: net) -> Program:
        torch.manual_seed(3)
        net = lay(Net().double())
        return Program(net, torch.optim.AdamW(net.parameters(), lr=0.05), {"position": 0})

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "progress": self.progress}

    def train(self) -> None:
        """A step that does to every element the same on any mesh: gradients are made of it alone."""
        self.progress["position"] += 1
        for param in self.net.parameters():
            with torch.no_grad():
                param.grad = param.detach() * 0.3 + self.progress["position"]
        self.optimizer.step()

    def facts(self) -> dict[str, torch.Tensor]:
        """Everything, whole."""
        found = dict(self.net.state_dict())
        for name, param in self.net.named_parameters():
            found.update({f"{name}.{key}": value for key, value in self.optimizer.state[param].items()})
        return {key: x.full_tensor() if isinstance(x, sw.DTensor) else x for key, x in found.items()}


def compare(program: Program, step: int) -> None:
    """A program must be where one that was never stopped is."""
    reference = Program.new()
    for _ in range(step):
        reference.train()
    assert program.progress == reference.progress, (program.progress, step)
    found, right = program.facts(), reference.facts()
    assert found.keys() == right.keys()
    for key, x in right.items():
        assert torch.equal(found[key], x), f"{key} is not what it was at step {step}"


# Faults


@dataclass(frozen=True)
class Fault:
    """What strikes a rank at its `at`-th call or, if that can be, later; a kill before it, in the middle of a write, or
    after it."""

    kind: str
    at: int
    when: str


CALLS = ("open", "close", "pwrite", "ftruncate", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "scandir")


class Calls:
    """The calls of this process into the operating system, counted, and struck by a fault while there is one."""

    def __init__(self) -> None:
        self.count = 0
        self.fault: Fault | None = None
        for name in CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))

    @contextmanager
    def struck(self, fault: Fault) -> Iterator[None]:
        """Inside, a fault strikes at its call, counted from here."""
        self.count, self.fault = 0, fault
        try:
            yield
        finally:
            self.fault = None

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            fault = self.fault
            if fault is None or self.count < fault.at:
                return original(*args, **kwargs)
            if fault.kind == FULL and name == "pwrite":
                raise OSError(errno.ENOSPC, "No space left on device")
            if fault.kind == RENAME and name in ("rename", "replace"):
                raise OSError(errno.EIO, "Input/output error")
            if fault.kind not in (ONE, ALL) or self.count > fault.at:
                return original(*args, **kwargs)
            if fault.when == "within" and name == "pwrite":
                file, memory, offset = args
                original(file, memory[: len(memory) // 2], offset)
            elif fault.when == "after":
                original(*args, **kwargs)
            if fault.kind == ALL:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        return call


# A run


@dataclass(frozen=True)
class Run:
    """What one group of ranks does. `moment` says when the fault strikes, as a part of the calls of a save."""

    number: int
    size: int
    kind: str
    rank: int
    moment: float
    when: str
    background: bool
    shards: str

    @staticmethod
    def drawn(number: int, seed: int) -> Run:
        chance = random.Random(f"{seed} {number}")
        size, kind = chance.choice((2, 2, 3)), chance.choice(KINDS)
        rank = 0 if kind == RENAME else chance.randrange(size)
        when = chance.choice(("before", "within", "after"))
        return Run(
            number, size, kind, rank, chance.random(), when, chance.random() < 0.5, chance.choice(tuple(PLACEMENTS))
        )

    def fault(self, rank: int, num_calls: int) -> Fault:
        """On ranks that it does not strike it never comes."""
        at = 1 + int(self.moment * num_calls) if rank == self.rank else sys.maxsize
        return Fault(self.kind, at, self.when)

    def lay(self, net: nn.Module) -> nn.Module:
        mesh = sw.init_device_mesh("cpu", (self.size,), mesh_dim_names=("dp",))

        def place(name: str, module: nn.Module, mesh: Any) -> None:
            for key, param in list(module._parameters.items()):
                if param is not None:
                    laid = sw.distribute_tensor(param.detach(), mesh, [PLACEMENTS[self.shards]])
                    module._parameters[key] = nn.Parameter(laid)

        return sw.distribute_module(net, mesh, place)


class Rank:
    """One process of a run. What it has to say it writes down at once: it may be killed."""

    def __init__(self, run: Run, number: int, folder: Path, notes: Path) -> None:
        self.run, self.number, self.folder = run, number, folder
        self.notes = open(notes / f"{run.number}-{number}", "a")  # noqa: SIM115
        self.calls = Calls()

    def note(self, what: str, value: Any = None) -> None:
        self.notes.write(json.dumps([what, value]) + "\n")
        self.notes.flush()

    def main(self, store: str) -> None:
        timeout = datetime.timedelta(seconds=PATIENCE)
        where = dist.FileStore(store, self.run.size)
        dist.init_process_group("gloo", store=where, rank=self.number, world_size=self.run.size, timeout=timeout)
        program = Program.new(self.run.lay)
        step = checkpoint.load_latest(self.folder, **program.state) or 0
        self.note("loaded", step)
        compare(program, step)
        program.train()
        self.calls.count = 0
        self.save(program, step + 1)
        num_calls = self.calls.count
        program.train()
        try:
            with self.calls.struck(self.run.fault(self.number, num_calls)):
                self.save(program, step + 2)
        except CheckpointError as error:
            self.note("raised", getattr(error, "errno", None))
            if self.run.kind in (ONE, ALL):
                return
            self.save(program, step + 2)
        dist.destroy_process_group()

    def save(self, program: Program, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sw.errors.CheckpointWarning)  # that an older step could not be removed
            saving = checkpoint.save_step(
                self.folder, step=step, keep=2, background=self.run.background, **program.state
            )
            saving.wait()
        self.note("saved", step)
        left = [path.name for path in self.folder.iterdir() if path.name.startswith(UNFINISHED)]
        assert not left or self.calls.fault is not None, f"the next save has left {left}"


def play(run: Run, folder: Path, notes: Path) -> None:
    """Fork the ranks of a run, wait for them, and look at what is there now. AssertionError if anything is wrong."""
    before = max((one.step for one in steps_in(folder)), default=0)
    ended, held = os.pipe()
    begin, begun = os.pipe()
    pids: list[int] = []
    with tempfile.TemporaryDirectory() as store:
        for number in range(run.size):
            pid = os.fork()
            if pid == 0:
                os.read(begin, 1)  # until all are in one group
                _as_rank(run, number, folder, notes, f"{store}/store")
            pids.append(pid)
            os.setpgid(pid, pids[0])
        os.write(begun, bytes(run.size))
        for end in (held, begin, begun):
            os.close(end)
        is_over = bool(select.select([ended], [], [], PATIENCE)[0])  # when the last of them has ended
        os.close(ended)
        if not is_over:
            os.killpg(pids[0], signal.SIGKILL)
        exits = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = [_notes(notes / f"{run.number}-{number}") for number in range(run.size)]
    assert is_over, f"{run}: ranks hang: {said}"
    allowed = {0, -signal.SIGKILL} if run.kind in (ONE, ALL) else {0}
    assert {*exits} <= allowed, f"{run}: exit codes {exits}: {said}"
    assert all(("loaded", before) in one for one in said), f"{run}: {before} is there, and was not loaded: {said}"
    if run.kind in (FULL, RENAME):
        assert all(one == said[0] for one in said), f"{run}: ranks do not do the same: {said}"
    _check_folder(run, folder, max((step for one in said for what, step in one if what == "saved"), default=before))


def _as_rank(run: Run, number: int, folder: Path, notes: Path, store: str) -> None:
    rank = Rank(run, number, folder, notes)
    try:
        rank.main(store)
    except BaseException:
        rank.note("failed", traceback.format_exc())
        os._exit(1)
    os._exit(0)  # what this process was forked from has things to do at its end, and this one has not


def _notes(file: Path) -> list[tuple[str, Any]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _check_folder(run: Run, folder: Path, saved: int) -> None:
    """Every step that can be seen is whole, and none that was saved is lost."""
    there = steps_in(folder)
    latest = max((one.step for one in there), default=0)
    assert latest >= saved, f"{run}: step {saved} was saved, and the latest is {latest}"
    for one in there:
        program = Program.new()
        assert checkpoint.load_step(one.path, **program.state) == one.step
        compare(program, one.step)


def run_all(runs: int, seed: int, done: Callable[[Run, list[Any]], None] = lambda run, said: None) -> None:
    """One run after the other, in one folder."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    warnings.simplefilter("error", sw.errors.CheckpointWarning)  # a step that is passed over
    with tempfile.TemporaryDirectory() as where:
        folder, notes = Path(where, "steps"), Path(where, "notes")
        notes.mkdir()
        for number in range(runs):
            run = Run.drawn(number, seed)
            play(run, folder, notes)
            done(run, [_notes(notes / f"{number}-{rank}") for rank in range(run.size)])


# The report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/checkpoint-faults-<date>.md")
    options = parser.parse_args()
    struck: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    began = time.monotonic()

    def done(run: Run, said: list[Any]) -> None:
        drawn[run.kind] += 1
        struck[run.kind] += any(what == "raised" for one in said for what, _ in one) or any(
            sum(what == "saved" for what, _ in one) < 2 for one in said
        )
        if sys.stderr.isatty():
            print(f"\r{sum(drawn.values())}/{options.runs}", end="", file=sys.stderr)

    run_all(options.runs, options.seed, done)
    lines = [
        f"# Faults while steps are saved, {datetime.date.today()}",
        "",
        f"`python benchmarks/checkpoint_faults.py --runs {options.runs} --seed {options.seed}`: Python "
        f"{platform.python_version()}, torch {torch.__version__}, 2 or 3 processes on Gloo.",
        "",
        "After every fault the last step that was complete was there, whole, and loaded bit for bit on another number "
        "of ranks; ranks that lived all raised; the next save left no temporary file.",
        "",
        "| fault | runs | a save did not end |",
        "| --- | --- | --- |",
        *(f"| {kind} | {drawn[kind]} | {struck[kind]} |" for kind in KINDS),
        f"| all | {options.runs} | {sum(struck.values())} |",
        "",
        f"{time.monotonic() - began:.0f} seconds. In the rest of the runs the step was complete before the fault "
        f"struck, or the calls that were to fail were over.",
    ]
    print("\n".join(lines))
    if options.write:
        results = Path(__file__).parent / "results"
        (results / f"checkpoint-faults-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
