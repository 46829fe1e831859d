"""A program as a user starts it: `torchrun`, two processes, ten lines."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = """
import torch, shardwise as sw

mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(0)
x, w = torch.randn(4, 3), torch.randn(5, 3)
dx = sw.distribute_tensor(x, mesh, [sw.Replicate()])
dw = sw.distribute_tensor(w, mesh, [sw.Shard(0)]).requires_grad_()
loss = torch.nn.functional.linear(dx, dw).relu().mean()
loss.backward()

w.requires_grad_()
expected = torch.nn.functional.linear(x, w).relu().mean()
expected.backward()
torch.testing.assert_close(loss.detach().full_tensor(), expected.detach())
torch.testing.assert_close(dw.grad.full_tensor(), w.grad)
print(f"rank {torch.distributed.get_rank()} holds {list(dw.to_local().shape)}", flush=True)
torch.distributed.destroy_process_group()
"""
LATE = """
import torch.distributed as dist

dist.init_process_group("gloo")
import shardwise as sw

sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
dist.destroy_process_group()
"""
THREADS = """
import atexit, os


def check():
    if not os.path.exists("/proc/self/task"):
        return
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    left = [name for name in names if "gloo" in name]
    os.write(1, f"threads left: {left}\\n".encode())  # at once: two processes may share a line


atexit.register(check)  # before the others, so after them
"""
COMMAND = [sys.executable, "-W", "error::UserWarning", "-m", "torch.distributed.run"]
OPTIONS = ["--standalone", "--nproc-per-node", "2"]


def run(tmp_path: Path, program: str) -> str:
    """What a program prints under torchrun, if all goes well."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        pytest.skip(f"torchrun needs sockets on this machine, and opening one failed: {error}")
    (tmp_path / "program.py").write_text(program)
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {
        "PYTHONPATH": source,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # where torch sees a device it makes groups for that alone, not for CPU tensors
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "MASTER_ADDR": "127.0.0.1",
    }
    process = subprocess.Popen(
        [*COMMAND, *OPTIONS, "program.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the ranks can be ended with their launcher
    )
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the program did not end within 60 s:\n{output}", pytrace=False)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("torchrun"), THREADS + PROGRAM)


def test_ten_lines_under_torchrun(output: str) -> None:
    lines = sorted(re.findall(r"rank \d holds \[[\d, ]+\]", output))  # two processes may share a line
    assert lines == ["rank 0 holds [3, 3]", "rank 1 holds [2, 3]"], output


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for threads where Linux lists them")
def test_no_thread_of_a_group_is_left_when_python_ends(output: str) -> None:
    """One that wants to let go of a tensor later than that would end the process with a signal."""
    assert output.count("threads left: []") == 2, output


def test_nor_where_shardwise_is_imported_late(tmp_path: Path) -> None:
    """When there are groups already, none is kept by what is imported with it."""
    output = run(tmp_path, THREADS + LATE)
    assert output.count("threads left: []") == 2, output
