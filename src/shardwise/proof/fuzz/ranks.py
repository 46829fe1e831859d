"""Programs on real ranks: one process each, joined by Gloo, that judge one program after the other.

The parent waits. A program that gives no verdict in time hangs: all ranks are killed, and others started for the next.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.proof.fuzz.draw import MESHES
from shardwise.proof.fuzz.judge import HUNG, RIGHT, Verdict, judge, together
from shardwise.proof.fuzz.program import Program
from shardwise.proof.kit.pool import deaf

START = 300.0
"""Seconds that ranks may take to start and find each other."""
GRACE = 4.0
"""Seconds that ranks have for their verdicts once another has one that is not "right"."""


class World:
    """Ranks that run programs. They are started with the first program, and again after one that hung."""

    def __init__(self, size: int, place: str | None = None) -> None:
        """`place` is a folder for what the ranks need to find each other."""
        self.size, self.place = size, place
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.reached: Any = None

    def judge(self, program: Program, timeout: float) -> Verdict:
        """What became of a program on all ranks."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send(program)
        heard: dict[int, Verdict] = {}
        end = time.monotonic() + timeout
        while len(heard) < self.size:
            left = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in heard}
            ready = wait(list(left), max(0.0, end - time.monotonic()))
            if not ready:
                return self._hung(heard)
            for pipe, rank in left.items():
                if pipe not in ready:
                    continue
                try:
                    heard[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    return self._hung(heard, f"rank {rank} died")
                if heard[rank].kind != RIGHT:
                    end = min(end, time.monotonic() + GRACE)
        return together([heard[rank] for rank in range(self.size)])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def _hung(self, heard: dict[int, Verdict], why: str = "") -> Verdict:
        at = max(self.reached)
        self.close()
        told = "; ".join(f"rank {rank}: {v.kind} {v.detail}".strip() for rank, v in heard.items() if v.kind != RIGHT)
        return Verdict(HUNG, why or told or "no rank has a verdict", at)

    def _start(self) -> None:
        context = get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=self.place)
        self.reached = context.RawArray("i", self.size)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            told = (rank, self.size, os.path.join(self.folder.name, "store"), theirs, self.reached)
            process = context.Process(target=_rank, args=told, name=f"rank {rank}", daemon=True)
            with deaf():
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(START):
                self.close()
                raise RuntimeError(f"rank {rank} of {self.size} did not start within {START:g} s")
            pipe.recv()


class Worlds:
    """A world for each number of ranks that programs ask for."""

    def __init__(self, place: str | None = None) -> None:
        self.place = place
        self.worlds: dict[int, World] = {}

    def judge(self, program: Program, timeout: float) -> Verdict:
        size = torch.Size(program.mesh).numel()
        return self.worlds.setdefault(size, World(size, self.place)).judge(program, timeout)

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()


def _rank(rank: int, size: int, store: str, pipe: Connection, reached: Any) -> None:
    """One rank: joins the others, and then judges what it is sent."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(hours=1)
    )
    meshes = _meshes(size)
    pipe.send("ready")
    while True:
        try:
            program = pipe.recv()
        except EOFError:
            return
        pipe.send(judge(program, meshes[program.mesh], lambda at: reached.__setitem__(rank, at)))


def _meshes(size: int) -> dict[Sequence[int], Any]:
    shapes = [shape for shape in MESHES if torch.Size(shape).numel() == size]
    names = ("axis0", "axis1")
    return {shape: init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)]) for shape in shapes}
