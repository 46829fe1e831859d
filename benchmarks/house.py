"""The house in numbers: lines and files of each folder, functions, and the way of a first call through the files.

    python benchmarks/house.py           print the tables
    python benchmarks/house.py --json    print the numbers as JSON, to compare two commits

A function's length is from `def` to its last line, without its docstring. Triton programs are listed apart: each is one
loop over a row, and takes an address and strides for every tensor. The way of a first call is measured in a
fresh process on one rank of a fake process group of two, by `sys.setprofile`: how many functions of the package are
called, in how many files, and how often the next call is in another file than the last.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape

from race import Table

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "shardwise"
MAX_PARAMETERS = 7


# --- Files and functions ---


@dataclasses.dataclass(frozen=True)
class Function:
    where: str
    name: str
    lines: int
    parameters: int
    by_name: int  # of the parameters, those that can only be given by name
    is_triton: bool


def source_files() -> Iterator[tuple[str, Path]]:
    """Every file of the package, with its folder: `dispatch/planning`, or `.` for those at the top."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.parent.relative_to(PACKAGE)), file


def functions_in(file: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            where = f"{file.relative_to(PACKAGE)}:{node.lineno}"
            is_triton = any(ast.unparse(one).startswith(("triton.jit", "program(")) for one in node.decorator_list)
            counts = num_parameters(node), len(node.args.kwonlyargs)
            yield Function(where, node.name, length(node), *counts, is_triton)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    is_docstring = ast.get_docstring(function, clean=False) is not None
    return lines - ((first.end_lineno or first.lineno) - first.lineno + 1 if is_docstring else 0)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many a caller may give; `self` and `cls` are not given."""
    taken = function.args
    positional = [arg.arg for arg in (*taken.posonlyargs, *taken.args)]
    named = len(positional[positional[:1] in (["self"], ["cls"]) :]) + len(taken.kwonlyargs)
    return named + (taken.vararg is not None) + (taken.kwarg is not None)


# --- First calls ---


def calls_on(mesh: Any) -> dict[str, Callable[[], object]]:
    """The calls whose way is measured. Nothing but the call itself runs when it is called."""
    import torch
    import torch.nn.functional as F

    import shardwise as sw

    def placed(x: torch.Tensor, placement: sw.Placement) -> sw.DTensor:
        return sw.distribute_tensor(x, mesh, [placement])

    x, weight = placed(torch.randn(4, 8), sw.Replicate()), placed(torch.randn(8, 8), sw.Shard(0)).requires_grad_()
    bias = placed(torch.randn(8), sw.Shard(0)).requires_grad_()
    written, mask = placed(torch.randn(4, 8), sw.Shard(0)), placed(torch.randn(4, 8) > 0, sw.Shard(0))
    logits, classes = placed(torch.randn(4, 8), sw.Shard(1)).requires_grad_(), placed(torch.arange(4), sw.Replicate())

    def assign() -> None:
        written[mask] = 0

    return {
        "F.linear": lambda: F.linear(x, weight, bias),
        "x[mask] = 0": assign,
        "cross_entropy, sharded classes": lambda: F.cross_entropy(logits, classes),
    }


CALLS = ("F.linear", "x[mask] = 0", "cross_entropy, sharded classes")


def way_of(call: Callable[[], object]) -> dict[str, int]:
    """Calls of functions of the package, files they are in, and changes from one file to another."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {"calls": len(files), "files": len(set(files)), "hops": sum(a != b for a, b in pairwise(files))}


def first_and_second(name: str) -> dict[str, dict[str, int]]:
    """The ways of a call in this process, which must not have made it before."""
    from scheduled import Size, mesh_on

    with mesh_on("fake", Size(1, 1, 64, tp=2)) as mesh:
        call = calls_on(mesh)[name]
        return {"first": way_of(call), "second": way_of(call)}


def in_a_fresh_process(name: str) -> dict[str, dict[str, int]]:
    command = [sys.executable, __file__, "--way-of", name]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout)


# --- The report ---


def measured() -> dict[str, Any]:
    """All numbers."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    functions: list[Function] = []
    for folder, file in source_files():
        lines[folder] += len(file.read_text().splitlines())
        files[folder] += 1
        functions += functions_in(file)
    lengths = [function.lines for function in functions]
    ordinary = [function for function in functions if not function.is_triton]
    longest = sorted(ordinary, key=lambda function: -function.lines)
    many = [function for function in ordinary if function.parameters > MAX_PARAMETERS]
    programs = [function for function in functions if function.is_triton]
    return {
        "folders": {folder: {"lines": lines[folder], "files": files[folder]} for folder in sorted(lines)},
        "functions": {
            **{"number": len(functions), "median": statistics.median(lengths)},
            **{"90%": statistics.quantiles(lengths, n=10)[-1], "longest": longest[0].lines},
        },
        "longest": [dataclasses.asdict(function) for function in longest[:5]],
        "more than seven parameters": [dataclasses.asdict(function) for function in many],
        "triton programs": [dataclasses.asdict(function) for function in programs],
        "first calls": {name: in_a_fresh_process(name) for name in CALLS},
    }


def tables(found: dict[str, Any]) -> Iterator[Table]:
    folders = found["folders"]
    rows = [(folder, str(n["lines"]), str(n["files"])) for folder, n in folders.items()]
    totals = ("all", *(str(sum(n[what] for n in folders.values())) for what in ("lines", "files")))
    yield Table("src/shardwise", ("folder", "lines", "files"), [*rows, totals])
    yield Table("Functions", tuple(found["functions"]), [tuple(f"{n:g}" for n in found["functions"].values())])
    for title in ("longest", "more than seven parameters", "triton programs"):
        columns = ("where", "name", "lines", "parameters", "by_name")
        listed = [tuple(str(function[column]) for column in columns) for function in found[title]]
        yield Table(title.capitalize(), ("where", "function", "lines", "parameters", "by name"), listed)
    ways = [
        (escape(name), which, *(str(n) for n in way.values()))
        for name, pair in found["first calls"].items()
        for which, way in pair.items()
    ]
    yield Table("The way of a call", ("call", "", "calls", "files", "hops"), ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--way-of", choices=CALLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way_of:
        print(json.dumps(first_and_second(options.way_of)))
        return
    found = measured()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    console = Console()
    for table in tables(found):
        table.print(console)


if __name__ == "__main__":
    main()
