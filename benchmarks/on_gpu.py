"""The GPU's benchmarks side by side: while one compiles another measures, and only one measures at a time.

    python benchmarks/on_gpu.py --out FOLDER [--liger WHEEL]   reports and logs go to FOLDER; about three minutes

Real sizes have cores of their own: there the host is measured, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOSTS = 4
"""Cores that are left to what measures the host."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of reports and logs")
    parser.add_argument("--liger", type=Path, help="the wheel of liger-kernel")
    parser.add_argument("--seconds", type=float, default=600, help="what has not ended by then is stopped")
    options = parser.parse_args()
    liger = ["--liger", str(options.liger)] if options.liger else []
    commands = {
        "real_sizes.py": ["--size", "0", "--size", "2", "--size", "3", "--rounds", "11"],
        "captured_gpu.py": ["--rounds", "9"],
        "captured_gpt_gpu.py": ["--rounds", "7", "--patience", f"{0.85 * options.seconds:.0f}"],
        "loss_gpu.py": ["--rounds", "7", *liger],
    }
    threads = {"captured_gpt_gpu.py": "3"}  # of each compiler; two there compile at once, for each way
    cores, until = sorted(os.sched_getaffinity(0)), time.monotonic() + options.seconds
    with tempfile.NamedTemporaryFile() as lock:
        running = {}
        for name, arguments in commands.items():
            own = cores[:HOSTS] if name == "real_sizes.py" else cores[HOSTS:] or cores
            log = (options.out / f"{name}.log").open("w")
            running[name] = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / name), "--write", "--out", str(options.out), *arguments],
                env={
                    **os.environ,
                    "RACE_LOCK": lock.name,
                    "PYTHONUNBUFFERED": "1",
                    "TORCHINDUCTOR_COMPILE_THREADS": threads.get(name, "1"),
                },
                preexec_fn=lambda own=own: os.sched_setaffinity(0, own),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        codes = {name: ended(process, until) for name, process in running.items()}
    print(codes)
    return int(any(codes.values()))


def ended(process: subprocess.Popen[bytes], until: float) -> int:
    """How a process ended, with those it started."""
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
