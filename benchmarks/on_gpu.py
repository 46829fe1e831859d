"""The GPU's benchmarks, one after the other.

    python benchmarks/on_gpu.py --out FOLDER [--liger WHEEL]   reports and logs go to FOLDER; about five minutes

Nothing else runs beside the one that measures: a compiler that tries out its kernels was seen to make a step a tenth
slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of reports and logs")
    parser.add_argument("--liger", type=Path, help="the wheel of liger-kernel")
    parser.add_argument("--seconds", type=float, default=600, help="what has not ended by then is stopped")
    parser.add_argument("--only", action="append", help="the benchmark's name; may be given several times")
    options = parser.parse_args()
    liger = ["--liger", str(options.liger)] if options.liger else []
    commands = {
        "real_sizes.py": ["--size", "0", "--size", "2", "--size", "3", "--rounds", "11"],
        "captured_gpt_gpu.py": ["--rounds", "9"],
        "captured_gpu.py": ["--rounds", "9"],
        "loss_gpu.py": ["--rounds", "9", *liger],
        "fully_sharded_gpu.py": [],
    }
    until, codes = time.monotonic() + options.seconds, {}
    for name in options.only or commands:
        with (options.out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / name), "--write", "--out", options.out, *commands[name]],
                env={**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            codes[name] = ended(process, until)
        print(f"{name}: {codes[name]}, {until - time.monotonic():.0f} seconds left", flush=True)
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
