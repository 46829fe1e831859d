"""Scripts in processes as new as if they had just imported torch: they are forked from one that has done so, and waits.

Importing torch takes a second, and most of a short script's time."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

WAITING = """
import json, os, sys, traceback
import torch

for line in sys.stdin:
    job = json.loads(line)
    process = os.fork()
    if process == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), number)
        sys.argv[1:], status = job["arguments"], 0
        try:
            exec(compile(job["script"], "<script>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@functools.cache
def _waiting() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    atexit.register(process.communicate)  # which closes its input: it ends
    return process


def run(script: str, *arguments: str) -> str:
    """What a script prints. It finds the folder of this file among those to import from."""
    process = _waiting()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{script}"
        job = {"script": script, "arguments": arguments, "out": str(out), "err": str(err)}
        process.stdin.write(json.dumps(job) + "\n")
        status = process.stdout.readline().strip()
        assert status == "0", f"exit code {status}\n{err.read_text()}"
        return out.read_text()
