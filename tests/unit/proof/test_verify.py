"""`shardwise verify`: a part of torch's samples, a user's own ops, and the command."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sweep import normal

from shardwise.cli import main
from shardwise.experimental import register_sharding
from shardwise.layout import Partial
from shardwise.proof.kit.command import How
from shardwise.proof.kit.report import page
from shardwise.proof.kit.results import Store
from shardwise.proof.kit.samples import spread
from shardwise.proof.verify import command
from shardwise.proof.verify.case import Case
from shardwise.proof.verify.command import Settings, _chosen, collect, is_claimed, judge_all, verify
from shardwise.proof.verify.extra import EXTRA, exists, extra_calls
from shardwise.proof.verify.forced import Impossible, Trial
from shardwise.proof.verify.oracle import Truth
from shardwise.proof.verify.verdicts import OpReport, summary, tables
from shardwise.rules import Rule, Strategy, register
from shardwise.rules.kit import registry
from shardwise.rules.kit.registry import homes

SUM, MAX = Partial("sum"), Partial("max")


@pytest.fixture(scope="module")
def calls() -> dict[str, list[Case]]:
    """Two calls of every op that torch's first samples, and ours, make. The whole run is `make verify`.

    For every sample torch looks through the stack, which under pytest is deep; that of a thread is not.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(collect, Settings(samples=3, calls=2, seed=20261115)).result()


@pytest.mark.slow
def test_every_rule_is_sound(calls: dict[str, list[Case]]) -> None:
    """Nothing that a rule lists is wrong, and of what is true nothing is missing without a reason."""
    reports = judge_all(calls, How(jobs=1))  # apart: torch may crash
    assert [report.name for report in reports] == sorted(calls)
    assert [str(report) for report in reports if not report.sound] == []
    assert [gap for report in reports for gap in report.gaps if not gap["reason"]] == []


def test_every_rule_is_called(calls: dict[str, list[Case]]) -> None:
    ours = {name for name, module in homes().items() if module.startswith("shardwise.rules.") and exists(name)}
    assert ours - set(calls) == set()


def test_extra_calls_are_of_ops_with_a_rule(calls: dict[str, list[Case]]) -> None:
    assert set(EXTRA) <= set(homes())
    assert [name for name, functions in EXTRA.items() if len(extra_calls(name)) < len(functions)] == []


def test_calls_are_chosen_by_a_seed() -> None:
    def chosen(seed: int | None) -> list[str]:
        return [str(call) for call in collect(Settings(names=("aten::mm",), samples=8, calls=2, seed=seed))["aten::mm"]]

    assert chosen(1) == chosen(1)
    assert len({tuple(chosen(seed)) for seed in (None, 1, 2, 3)}) > 1


def test_what_a_seed_chooses_does_not_depend_on_other_calls(calls: dict[str, list[Case]]) -> None:
    some = [recorded for name in ("aten::mm", "aten::add", "aten::sum") for recorded in calls[name]]
    first, second = _chosen(some, Settings(calls=2, seed=0))
    assert _chosen([x for x in some if x is not first], Settings(calls=1, seed=0)) == [second]


def test_what_is_drawn_is_judged_by_its_shape() -> None:
    x = (normal(5, 4).abs(),)
    poisson = torch.ops.aten.poisson.default  # torch.poisson looks at its argument first, by an op of its own
    assert verify(poisson, [x]).status == "only in shape: draws random numbers"
    assert verify(torch.empty_like, [x]).status == "only in shape: its result is uninitialised memory"
    wrong = Rule(lambda call: [Strategy((None,), (None,)), Strategy((0,), (None,))])
    with registry.restored():
        register("poisson", rule=wrong)
        report = verify(poisson, [x])
    assert report.status == "unsound"
    assert "do not fit [5,4] R" in report.unsound[0]["problem"]


@pytest.mark.parametrize(
    ("ins", "outs", "claimed"),
    [
        ((0,), (0,), True),
        ((0,), (None,), False),
        ((1,), (SUM,), True),
        ((1,), (0,), True),  # whole is better than sharded
        ((2,), (SUM,), True),  # so is sharded than pending
        ((3,), (SUM,), False),
    ],
)
def test_what_counts_as_claimed(ins: tuple, outs: tuple, claimed: bool) -> None:
    ways = [Strategy((None,), (None,)), Strategy((0,), (0,)), Strategy((1,), (None,)), Strategy((2,), (1,))]
    assert is_claimed(Truth(ins, outs), ways) == claimed


def test_calls_are_collected_once_and_spread() -> None:
    calls = collect(Settings(ops="mm|addmm", samples=4, calls=3))
    assert {"aten::mm", "aten::addmm"} <= set(calls)
    for found in calls.values():
        assert 1 <= len(found) <= 3
        assert len({str(recorded) for recorded in found}) == len(found)
    assert spread(9, 3) == [0, 4, 8]


@pytest.mark.parametrize(("name", "op"), [("softmax", "aten::_softmax"), ("aten::mm", "aten::mm")])
def test_ops_go_by_the_names_users_know(name: str, op: str) -> None:
    assert list(collect(Settings(names=(name,), samples=1))) == [op]


def test_a_gap_is_found() -> None:
    whole = Strategy((None, None), (None,))
    with registry.restored():
        register("mm", rule=Rule(lambda call: [whole, Strategy((0, None), (0,))]))
        report = verify(torch.mm, [(normal(5, 4), normal(4, 6))])
    assert (report.sound, report.true, report.claimed, len(report.gaps)) == (True, 3, 1, 2)
    assert [gap["true"] for gap in report.gaps] == ["R, S(1) -> S(1)", "S(1), S(0) -> P(sum)"]
    assert report.status == "sound; 1 of 3 true ways"


def test_a_way_that_is_never_tried_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """And trials that cannot be do not count."""
    complete = verify(torch.mm, [(normal(5, 4), normal(4, 6))])

    def failure(case: Case, trial: Trial) -> str | None:
        if any(way.ins == (0, None) for way in trial.chosen):
            raise Impossible
        return None

    monkeypatch.setattr(command, "failure", failure)
    report = verify(torch.mm, [(normal(5, 4), normal(4, 6))])
    assert 0 < report.trials < complete.trials
    assert [(found["strategy"], found["problem"]) for found in report.unsound] == [
        ("S(0), R -> S(0)", "could not be tried in any way")
    ]


def test_there_is_no_largest_complex_number() -> None:
    report = verify(torch.ops.aten.clone.default, [(normal(5, 4).to(torch.complex128),)])
    assert report.status == "verified"


def test_a_process_that_died_is_not_sound() -> None:
    report = OpReport("aten::mm")
    report.ended("its process died", 0)
    assert not report.sound
    assert ("aten::mm", "0", "0", "its process died") in {t[0]: t[2] for t in tables([report])}["unsound"]


def test_reports_add_up() -> None:
    one, other = (OpReport("aten::mm", True, 1, 10, 4, 3, gaps=[{"call": "", "true": "", "reason": ""}]) for _ in "ab")
    one.add(other)
    assert (one.calls, one.trials, one.true, one.claimed, len(one.gaps)) == (2, 20, 8, 6, 2)
    assert dict(summary([one]))["complete"] == "6 of 8 true sharded ways (75.0%)"


def test_reports_as_a_page() -> None:
    gap = {"call": "", "true": "S(0) -> S(0)", "reason": "it is hidden"}
    good = OpReport("aten::mm", True, 1, 10, 4, 3, gaps=[gap])
    drawn = OpReport("aten::poisson", True, shapes=1, excluded={"draws random numbers": 1})
    text = page(tables([good, drawn]), "Title", "")
    assert text.startswith("# Title\n")
    assert "| sound | 1 of 1 ops; 10 of 10 trials |" in text and "## Unsound" not in text
    assert "| aten::mm | 4 | 3 | it is hidden |" in text
    assert "| only in shape: draws random numbers | poisson |" in text
    good.unsound.append({"call": "mm()", "strategy": "2: R -> R", "problem": "wrong"})
    assert "| aten::mm | 10 | 1 | mm() 2: R -> R: wrong |" in page(tables([good]), "Title", "")


# The command


def test_the_command_resumes(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "verify.json"
    arguments = ["verify", "mm", "--samples", "2", "--calls", "2", "--jobs", "0", "--quiet", "--json", str(file)]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "1 of 1 ops" in first
    results = json.loads(file.read_text())["results"]
    assert results["aten::mm"]["trials"] > 0
    monkeypatch.setattr(command, "judge_call", None)  # nothing is judged again
    assert main([*arguments, "--resume"]) == 0
    assert capsys.readouterr().out == first


@torch.library.custom_op("verifytest::mean_rows", mutates_args=())
def mean_rows(x: torch.Tensor) -> torch.Tensor:
    return x.mean(0)


mean_rows.register_fake(lambda x: x.new_empty(x.shape[1:]))


@pytest.mark.parametrize(("rule", "sound"), [("Ij -> j", True), ("ij -> j", False)])
def test_a_rule_of_one_s_own(rule: str, sound: bool) -> None:
    with registry.restored():
        register_sharding(mean_rows, rule=rule, reduce="avg")
        report = verify(mean_rows, [(normal(5, 4),), ((normal(4, 6),), {})])
    assert (report.calls, report.sound) == (2, sound)


def test_a_sample_is_a_tuple() -> None:
    with pytest.raises(TypeError, match="a sample is a tuple of arguments, not a Tensor"):
        verify(torch.relu, [normal(3)])


def test_results_are_kept_by_kind(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    Store(file, {}, kind=OpReport).add(OpReport("aten::mm", calls=3, ways=["a"]))
    assert Store(file, {}, resume=True, kind=OpReport).results == {
        "aten::mm": OpReport("aten::mm", calls=3, ways=["a"])
    }
