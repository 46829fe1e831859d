"""What was found out about rules, by op, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.proof.kit.report import Table, by_reason
from shardwise.proof.kit.results import Result
from shardwise.proof.verify.catalogue import num_ways


@dataclass
class OpReport(Result):
    """What was found out about one op."""

    has_rule: bool = False
    calls: int = 0
    trials: int = 0
    true: int = 0
    claimed: int = 0
    unsound: list[dict[str, str]] = field(default_factory=list)
    shapes: int = 0  # calls whose results have no value to compare: only their shapes, and that replicas agree
    gaps: list[dict[str, str]] = field(default_factory=list)
    excluded: dict[str, int] = field(default_factory=dict)
    ways: Sequence[str] = ()  # how it may be sharded, of the call with the most ways: cells of the catalogue
    failure: str = ""  # what ended the judgement early
    seconds: float = 0.0

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

    def add(self, part: OpReport) -> None:
        ways = max(self.ways, part.ways, key=lambda cells: num_ways(cells) if cells else (-1, -1))
        super().add(part)
        self.ways = ways

    def ended(self, why: str, num_parts: int) -> None:
        self.failure = why.split("\n")[0][:200]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.status} ({self.calls} calls, {self.trials} trials, {self.claimed}/{self.true})"]
        lines += [f"  unsound: {found['call']} {found['strategy']}: {found['problem']}" for found in self.unsound]
        lines += [f"  gap: {found['call']} {found['true']} {found['reason']}" for found in self.gaps]
        return "\n".join(lines)


# The results as tables


def tables(reports: Sequence[OpReport]) -> list[Table]:
    unsound = [(r.name, str(r.trials), str(len(r.unsound)), _first_failure(r)) for r in reports if not r.sound]
    gaps = [(r.name, str(r.true), str(r.claimed), _gaps(r)) for r in sorted(reports, key=lambda r: -len(r.gaps))]
    unjudged = [(r.status, r.name.removeprefix("aten::")) for r in reports if not r.calls]
    return [
        ("not judged by value", ("reason", "ops"), by_reason(unjudged)),
        ("true, but not listed", ("op", "true", "listed", "why not the others"), [row for row in gaps if row[3]]),
        ("unsound", ("op", "trials", "failed", "the first"), unsound),
        ("verify", ("", ""), summary(reports)),
    ]


def _first_failure(report: OpReport) -> str:
    if not report.unsound:
        return report.failure
    first = report.unsound[0]
    return f"{first['call']} {first['strategy']}: {first['problem']}"


def _gaps(report: OpReport) -> str:
    """Why ways that are true are not listed, each reason once."""
    return "; ".join(dict.fromkeys(gap["reason"] or f"missing: {gap['call']} {gap['true']}" for gap in report.gaps))


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
