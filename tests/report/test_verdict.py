"""Which way of batching a report recommends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_bucketing.report import Report, SizeColumns, format_report, make_report
from hf_bucketing.report.verdict import RULE, choose_way
from tests.report.test_report import SAMPLES, SPEC, TABLE, TWO


@pytest.fixture(scope="module")
def equal() -> Report:
    """A report in which buckets and packs lose the same, nothing."""
    config = replace(TWO, strip_length=16)
    return make_report(SizeColumns([1] * 40, [64] * 40, [64] * 40), TABLE, spec=SPEC, config=config)


def changed(report: Report, name: str, **values) -> Report:
    return replace(
        report, strategies=tuple(replace(way, **values) if way.name == name else way for way in report.strategies)
    )


def test_buckets_that_lose_as_little_as_packs_are_recommended(equal: Report) -> None:
    assert str(choose_way(equal)) == "Train these in buckets: packs would gain nothing."


def test_figures_below_the_sentence_say_what_both_keep_and_cost(equal: Report) -> None:
    packs = equal.strategies[-1]
    slower = changed(changed(equal, "bucketing", kept_area=0.8), "packing", epoch_cost=1.1 * packs.epoch_cost)
    verdict = choose_way(slower)
    assert str(verdict) == "Train these in packs: buckets would crop away 20.0% of the area, packs none."
    assert verdict.figures == (
        ("samples dropped", "0", "0"),
        ("kept area, mean", "80.0%", "100.0%"),
        ("kept frames, mean", "100.0%", "100.0%"),
        ("useful work", "100.0%", "100.0%"),
        ("time per sample", "1.00×", "1.10×"),
        ("time per kept pixel", "1.00×", "1.10×"),
    )


@pytest.mark.parametrize(
    ("name", "said"), [("kept_area", "the area"), ("kept_frames", "the frames"), ("efficiency", "the time")]
)
def test_each_loss_of_buckets_above_that_of_packs_speaks_for_packs(name: str, said: str, equal: Report) -> None:
    for beyond, way in ((0.04, "bucketing"), (0.06, "packing")):
        for verdict in (
            choose_way(changed(equal, "bucketing", **{name: 1 - beyond})),
            choose_way(changed(changed(equal, "packing", **{name: 0.98}), "bucketing", **{name: 0.98 - beyond})),
        ):
            assert verdict.way == way
            assert f"{beyond:.1%} of {said}" in str(verdict) or way == "packing"
            assert said in str(verdict)
    wasteful = choose_way(changed(equal, "packing", **{name: 0.5}))
    assert wasteful.way == "bucketing"
    assert "packs would" in str(wasteful)
    assert f"50.0% of {said}" in str(wasteful)


def test_the_largest_difference_decides(equal: Report) -> None:
    cut = changed(equal, "bucketing", kept_frames=0.8)
    assert choose_way(changed(cut, "packing", efficiency=0.9)).way == "packing"
    assert choose_way(changed(cut, "packing", efficiency=0.7)).way == "bucketing"


def test_samples_without_a_bucket_speak_for_packs_and_are_counted(equal: Report) -> None:
    few, many = (changed(equal, "bucketing", kept=40 - count, dropped={"aspect": count}) for count in (1, 3))
    assert choose_way(few).way == "bucketing"
    assert str(choose_way(many)) == "Train these in packs: buckets would leave out 7.5% of the samples, packs none."
    assert choose_way(many).figures[0] == ("samples dropped", "3", "0")
    verdict = str(choose_way(changed(many, "bucketing", kept_frames=0.774)))
    assert verdict == "Train these in packs: buckets would cut off 22.6% of the frames, packs none."


def test_data_that_nothing_can_take_gets_no_way() -> None:
    none = make_report(SizeColumns([-1, -1], [8, 9], [8, 9]), TABLE, spec=SPEC, config=TWO)
    assert choose_way(none).way is None
    few = replace(none, config=replace(none.config, num_processes=3))
    assert str(choose_way(few)) == (
        "Train on none of these yet: 2 samples are fewer than 3 processes, each of which takes one in every step."
    )
    assert "2 samples" in str(choose_way(none))
    only_packs = make_report(SizeColumns([1] * 4, [32] * 4, [32] * 4), TABLE, spec=SPEC, config=TWO)
    assert str(choose_way(only_packs)) == "Train these in packs: buckets take none of the 4 samples."


def test_the_text_begins_with_the_verdict_its_figures_and_its_rule() -> None:
    report = make_report(SAMPLES, TABLE, spec=SPEC, config=TWO)
    begins = " ".join(format_report(report).partition("\n\n")[0].split())
    figures = " ".join(" ".join(line) for line in choose_way(report).figures)
    assert begins == f"{choose_way(report)} buckets packs {figures} {RULE}"
