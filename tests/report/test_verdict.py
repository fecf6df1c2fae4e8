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
    assert str(choose_way(equal)) == (
        "Bucket these: buckets lose nothing, packs lose nothing. A sample costs 1.00 times as much in packs, and a "
        "kept pixel of its file 1.00 times; useful work is 100.0% of that, in buckets 100.0%."
    )


@pytest.mark.parametrize(("cost", "way"), [(0.9, "packs"), (1.1, ""), (0.997, "")])
def test_a_verdict_says_when_a_suggestion_would_rank_the_other_way_first(cost: float, way: str, equal: Report) -> None:
    packs = equal.strategies[-1]
    verdict = str(choose_way(changed(equal, "packing", epoch_cost=cost * packs.epoch_cost)))
    assert verdict.startswith("Bucket these:")
    said = "By the time of a kept pixel alone, packs are ahead; hf_bucketing suggest ranks by that"
    assert (said in verdict) == bool(way)
    slower = changed(changed(equal, "bucketing", cropped_area=0.2), "packing", epoch_cost=1.1 * packs.epoch_cost)
    assert "Pack these" in str(choose_way(slower))
    assert "kept pixel alone, buckets are ahead" in str(choose_way(slower))


@pytest.mark.parametrize(("name", "scale"), [("cropped_area", 1), ("cropped_frames", 1), ("efficiency", -1)])
def test_each_loss_of_buckets_above_that_of_packs_speaks_for_packs(name: str, scale: int, equal: Report) -> None:
    base = 1.0 if scale < 0 else 0.0
    for beyond, way in ((0.04, "bucketing"), (0.06, "packing")):
        assert choose_way(changed(equal, "bucketing", **{name: base + scale * beyond})).way == way
        both = changed(equal, "packing", **{name: base + scale * 0.02})
        assert choose_way(changed(both, "bucketing", **{name: base + scale * (beyond + 0.02)})).way == way
    assert choose_way(changed(equal, "packing", **{name: base + scale * 0.5})).way == "bucketing"


def test_the_largest_difference_decides(equal: Report) -> None:
    cut = changed(equal, "bucketing", cropped_frames=0.2)
    assert choose_way(changed(cut, "packing", efficiency=0.9)).way == "packing"
    assert choose_way(changed(cut, "packing", efficiency=0.7)).way == "bucketing"


def test_samples_without_a_bucket_speak_for_packs_and_are_counted(equal: Report) -> None:
    few, many = (changed(equal, "bucketing", kept=40 - count, dropped={"aspect": count}) for count in (1, 3))
    assert choose_way(few).way == "bucketing"
    assert str(choose_way(many)).startswith("Pack these: buckets drop 3 samples, packs lose nothing.")
    verdict = str(choose_way(changed(many, "bucketing", cropped_frames=0.226)))
    assert verdict.startswith("Pack these: buckets drop 3 samples and cut 22.6% of the frames, packs lose nothing.")


def test_data_that_nothing_can_take_gets_no_way() -> None:
    none = make_report(SizeColumns([-1, -1], [8, 9], [8, 9]), TABLE, spec=SPEC, config=TWO)
    assert choose_way(none).way is None
    few = replace(none, config=replace(none.config, num_processes=3))
    assert str(choose_way(few)) == (
        "Train on none of these yet: 2 samples are fewer than 3 processes, each of which takes one in every step."
    )
    assert "2 samples" in str(choose_way(none))
    only_packs = make_report(SizeColumns([1] * 4, [32] * 4, [32] * 4), TABLE, spec=SPEC, config=TWO)
    assert str(choose_way(only_packs)) == "Pack these: buckets drop 4 samples, packs lose nothing."


def test_the_text_begins_with_the_verdict_and_its_rule() -> None:
    report = make_report(SAMPLES, TABLE, spec=SPEC, config=TWO)
    assert " ".join(format_report(report).partition("\n\n")[0].split()) == f"{choose_way(report)} {RULE}"
