"""What was found out about rules, by op, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.proof.kit.report import Table
from shardwise.proof.verify.catalogue import num_ways


@dataclass
class OpReport:
    """What was found out about one op."""

    name: str
    has_rule: bool = False
    calls: int = 0
    trials: int = 0
    true: int = 0
    claimed: int = 0
    unsound: list[dict[str, str]] = field(default_factory=list)
    shapes: int = 0  # calls whose results have no value to compare: only their shapes, and that replicas agree
    gaps: list[dict[str, str]] = field(default_factory=list)
    excluded: dict[str, int] = field(default_factory=dict)
    ways: Sequence[str] = field(
        default_factory=list
    )  # how it may be sharded, of the call with the most ways: cells of the catalogue
    failure: str = ""  # what ended the judgement early

    @property
    def sound(self) -> bool:
        return not self.unsound and not self.failure

    @property
    def status(self) -> str:
        if not self.sound:
            return "unsound" if self.unsound else self.failure
        if not self.calls:
            return ("only in shape: " if self.shapes else "not judged: ") + next(iter(self.excluded), "no samples")
        if self.gaps:
            return f"sound; {self.claimed} of {self.true} true ways"
        return "verified" if self.has_rule else "no rule, none needed"

    def add(self, other: OpReport) -> None:
        """Take in what was found out about another call."""
        self.has_rule |= other.has_rule
        for name in ("calls", "trials", "true", "claimed", "shapes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unsound += other.unsound
        self.gaps += other.gaps
        for reason, count in other.excluded.items():
            self.excluded[reason] = self.excluded.get(reason, 0) + count
        self.ways = max(self.ways, other.ways, key=lambda cells: num_ways(cells) if cells else (-1, -1))

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.status} ({self.calls} calls, {self.trials} trials, {self.claimed}/{self.true})"]
        lines += [f"  unsound: {found['call']} {found['strategy']}: {found['problem']}" for found in self.unsound]
        lines += [f"  gap: {found['call']} {found['true']} {found['reason']}" for found in self.gaps]
        return "\n".join(lines)


# The results as tables


def tables(reports: Sequence[OpReport]) -> list[Table]:
    """Title, column names and rows of every table that has rows."""
    unsound = [(r.name, str(r.trials), str(len(r.unsound)), _first_failure(r)) for r in reports if not r.sound]
    gaps = [(r.name, str(r.true), str(r.claimed), _first_gap(r)) for r in reports if r.gaps]
    made: list[Table] = [
        (
            "not judged by value",
            ("reason", "ops"),
            [(why, ", ".join(names)) for why, names in _unjudged(reports).items()],
        ),
        ("true, but not claimed", ("op", "true", "claimed", "the first"), gaps),
        ("unsound", ("op", "trials", "failed", "the first"), unsound),
        ("verify", ("", ""), summary(reports)),
    ]
    return [table for table in made if table[2]]


def _unjudged(reports: Sequence[OpReport]) -> dict[str, list[str]]:
    """Ops that no call of was judged by value, by reason."""
    found: dict[str, list[str]] = {}
    for report in reports:
        if not report.calls:
            found.setdefault(report.status, []).append(report.name.removeprefix("aten::"))
    return found


def _first_failure(report: OpReport) -> str:
    if not report.unsound:
        return report.failure
    first = report.unsound[0]
    return f"{first['call']} {first['strategy']}: {first['problem']}"


def _first_gap(report: OpReport) -> str:
    first = min(report.gaps, key=lambda gap: bool(gap["reason"]))
    return f"{first['call']} {first['true']}{': ' if first['reason'] else ''}{first['reason']}"


def summary(reports: Sequence[OpReport]) -> list[tuple[str, str]]:
    """The run in a few lines."""
    judged = [report for report in reports if report.calls]
    trials, failed = sum(r.trials for r in judged), sum(len(r.unsound) for r in judged)
    true, claimed = sum(r.true for r in judged), sum(r.claimed for r in judged)
    explained = sum(bool(gap["reason"]) for r in judged for gap in r.gaps)
    return [
        ("ops", f"{len(reports)}, of which {len(judged)} were judged, by {sum(r.calls for r in judged)} calls"),
        ("with a rule", f"{sum(r.has_rule for r in judged)}"),
        ("sound", f"{sum(r.sound for r in judged)} of {len(judged)} ops; {trials - failed} of {trials} trials"),
        ("complete", f"{claimed} of {true} true sharded ways ({100 * claimed / max(true, 1):.1f}%)"),
        ("gaps", f"{true - claimed}, of which {explained} have a known reason"),
    ]


def page(reports: Sequence[OpReport], title: str, about: str = "") -> str:
    """The results as a page of Markdown: what is sound, what is missing and why."""
    lines = [
        f"# {title}",
        "",
        *([about, ""] if about else []),
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in summary(reports)),
        "",
    ]
    unsound = [report for report in reports if not report.sound]
    lines += ["## Unsound", "", *([f"- `{report.name}`: {_first_failure(report)}" for report in unsound] or ["None."])]
    lines += [
        "",
        "## True, but not listed",
        "",
        "| op | true ways | listed | why not the others |",
        "|---|---|---|---|",
    ]
    for report in sorted(reports, key=lambda report: -len(report.gaps)):
        if report.gaps:
            why = "; ".join(dict.fromkeys(gap["reason"] or f"missing: {gap['true']}" for gap in report.gaps))
            lines.append(f"| `{report.name}` | {report.true} | {report.claimed} | {why} |")
    lines += ["", "## Not judged by value", "", "| why | ops |", "|---|---|"]
    lines += [f"| {why} | {', '.join(f'`{name}`' for name in names)} |" for why, names in _unjudged(reports).items()]
    return "\n".join([*lines, ""])
