"""The results of a coverage run as tables: with Rich where it is installed, else in plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardwise.proof.kit.results import Result
from shardwise.proof.kit.rounding import DROWNED, EXCUSED

WIDTH = 100
GRADIENTS = ("compared", "without values", "none", "refused by torch")
"""What gradients a call may have; "without values" are those of random calls."""


OTHERWISE: dict[str, str] = {
    reason_of: reason
    for reason, operators in {
        "a view of data of other ranks is a copy, and lies as one": ("select", "__getitem__", "as_strided"),
        "of a part of the columns: shards do not show how far apart whole rows lie": ("diagonal", "linalg.diagonal"),
        "torch does not call it a view, so it is not remembered what it is a part of": ("unsafe_chunk", "unsafe_split"),
        "torch's are views of one result; here each is a result": ("unravel_index",),
        "torch cuts the solution out of what LAPACK returns; it is gathered": (
            *("linalg.lstsq", "linalg.lstsq.grad_oriented"),
        ),
        "torch lays out a batch of one matrix otherwise than one of several": (
            *("linalg.svd", "svd", "svd_lowrank", "pca_lowrank", "linalg.eig"),
        ),
        "of channels that lie last: parts from other ranks are put together in the order of the dims": (
            *("cat", "nn.functional.max_pool2d", "max_pool2d_with_indices_backward"),
            *("nn.functional.max_unpool2d", "nn.functional.max_unpool2d.grad"),
        ),
    }.items()
    for reason_of in operators
}
"""Operators whose results lie otherwise in memory than torch's, with the reason."""


def summary(results: Sequence[Result]) -> list[tuple[str, str]]:
    """The run in a few lines."""
    tried = [result for result in results if not result.note]
    compared = [result for result in tried if not result.valueless]
    calls = sum((Counter(result.counts) for result in tried), Counter())
    ways = sum((Counter(result.ways) for result in tried), Counter())
    forms = sum((Counter(result.forms) for result in tried), Counter())
    gradients = sum((Counter(result.gradients) for result in tried), Counter())
    rounding = sum((Counter(result.rounding) for result in tried), Counter())
    gathering = [result for result in compared if result.avoidable]
    return [
        ("operators", f"{len(results)}, of which {len(compared)} are compared by value"),
        ("right throughout", _share([r for r in compared if not r.problems], compared)),
        ("sometimes raised", _share([r for r in compared if _has(r, "raised")], compared)),
        ("sometimes wrong", _share([r for r in compared if _has(r, "wrong")], compared)),
        ("random or uninitialised", f"{len(tried) - len(compared)}, judged by shape, dtype and agreement of replicas"),
        ("calls", ", ".join(f"{calls[kind]} {kind}" for kind in ("right", "refused", "raised", "wrong"))),
        ("right as", ", ".join(f"{name} {count}" for name, count in forms.items())),
        ("their gradients", ", ".join(f"{gradients[kind]} {kind}" for kind in GRADIENTS if gradients[kind])),
        ("of them", ", ".join(f"{rounding[kind]} {kind}" for kind in (EXCUSED, DROWNED))),
        ("with a sharded input", f"{ways['sharded']} ran sharded, {ways['gathered']} gathered"),
        ("gather a batch-like dim", _share(gathering, compared)),
        ("lie otherwise in memory", _share([r for r in tried if r.strides], tried)),
        ("time", f"{sum(r.seconds for r in results):.0f} s of processes"),
    ]


def _share(some: Sequence[Any], total: Sequence[Any]) -> str:
    return f"{len(some)} ({100 * len(some) / max(len(total), 1):.1f}%)"


def _has(result: Result, kind: str) -> bool:
    return any(problem["kind"] == kind for problem in result.problems)


def problem_rows(results: Sequence[Result]) -> list[tuple[str, str, str, str, str]]:
    """Operators with problems, the wrong ones first: name, calls, wrong, raised, and the first problem."""
    bad = sorted((r for r in results if r.problems), key=lambda r: (-r.counts.get("wrong", 0), r.name))
    return [
        (r.name, str(r.calls), str(r.counts.get("wrong", 0)), str(r.counts.get("raised", 0)), _first_problem(r))
        for r in bad
    ]


def _first_problem(result: Result) -> str:
    problem = result.problems[0]
    example = problem["examples"][0]
    where = f"{example['call']} {example['placements']}: " if "call" in example else ""
    form = "" if problem["form"] == "function" else f"{problem['form']} "
    return f"{form}{where}{problem['detail']}"


def gathering_rows(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Operators that gathered where the shards as they lay would have done: name, how often, of how many."""
    return [
        (r.name, str(r.avoidable), str(r.ways.get("gathered", 0) + r.ways.get("sharded", 0)))
        for r in sorted(results, key=lambda r: (-r.avoidable, r.name))
        if r.avoidable and not r.note
    ]


def stride_rows(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Operators with right results that lie otherwise in memory than torch's: name, how often, and why, or where."""
    found = sorted((r for r in results if r.strides), key=lambda r: (r.name not in OTHERWISE, r.name))
    return [(r.name, str(r.strides["count"]), OTHERWISE.get(r.name, r.strides["first"])) for r in found]


def excluded_rows(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Operators that were not tried, by reason."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.note:
            reasons.setdefault(result.note, []).append(result.name)
        elif result.valueless:
            reasons.setdefault("draws random numbers, or leaves memory as it is: values not compared", []).append(
                result.name
            )
    return [(reason, ", ".join(names)) for reason, names in reasons.items()]


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def tables(results: Sequence[Result]) -> list[Table]:
    """Title, column names and rows of every table that has rows."""
    made: list[Table] = [
        ("not tried, or not compared by value", ("reason", "operators"), excluded_rows(results)),
        ("gather a batch-like dim", ("operator", "calls", "of"), gathering_rows(results)),
        ("lie otherwise in memory", ("operator", "calls", "the reason, or the first"), stride_rows(results)),
        ("problems", ("operator", "calls", "wrong", "raised", "the first"), problem_rows(results)),
        ("coverage", ("", ""), summary(results)),
    ]
    return [table for table in made if table[2]]


def page(made: Sequence[Table], title: str, about: str) -> str:
    """Tables as a page of Markdown, the last, which sums up, first."""
    *details, total = made
    lines = [f"# {title}", "", about, ""]
    for heading, columns, rows in (total, *details):
        lines += [] if heading == total[0] else [f"## {heading.capitalize()}", ""]
        lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def print_tables(made: Sequence[Table]) -> None:
    for title, columns, rows in made:
        if not _print_rich(title, columns, rows):
            print(plain(title, columns, rows))


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = RichTable(title=title, title_justify="left", show_header=any(columns))
    for i, column in enumerate(columns):
        last = i == len(columns) - 1
        table.add_column(
            column, overflow="fold", justify="left" if last or not i else "right", ratio=2 if last else None
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    return True


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text, at most `WIDTH` wide: what does not fit of the last column goes on below itself."""
    lines = [columns, *rows] if any(columns) else list(rows)
    widths = [min(max(len(line[i]) for line in lines), WIDTH // 3) for i in range(len(columns) - 1)]
    last = WIDTH - sum(widths) - 2 * len(widths)
    text = [title]
    for line in lines:
        cells = [_folded(cell, width) for cell, width in zip(line, [*widths, last], strict=True)]
        for row in range(max(map(len, cells))):
            parts = [cell[row] if row < len(cell) else "" for cell in cells]
            text.append("  ".join(part.ljust(width) for part, width in zip(parts, [*widths, last])).rstrip())
    return "\n".join([*text, ""])


def _folded(cell: str, width: int) -> list[str]:
    return [cell[at : at + width] for at in range(0, max(len(cell), 1), width)]
