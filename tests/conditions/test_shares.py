"""Shares of conditions: how a setting writes them, and what is drawn of a sample."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import BucketingError
from hf_bucketing.conditions.shares import FRAMES, ConditionShares, read_condition, read_conditions


def drawn_latents(text: str, *key: int, latent_frames: int, stride: int = 4) -> list[int]:
    drawn = read_condition(text).draw(*key, latent_frames=latent_frames, stride=stride)
    return np.flatnonzero(drawn.frames[::stride]).tolist()


def test_conditions_show_frames_at_their_places() -> None:
    def frames(text: str) -> list[int]:
        return np.flatnonzero(read_condition(text).draw(0, latent_frames=4, stride=2).frames).tolist()

    assert frames("first_frame") == [0]
    assert frames("last_frame") == [6]
    assert frames("prefix@2") == [0, 1, 2]
    assert frames("suffix@2") == [3, 4, 5, 6]
    assert frames("first_frame+last_frame") == [0, 6]
    assert frames("none") == frames("mask") == []
    assert frames("prefix@9") == [0, 1, 2, 3, 4], "the last latent frame is left to predict"
    assert read_condition("first_frame+mask").draw(0, latent_frames=4, stride=2).masked


def test_lengths_and_keyframes_are_drawn_so_that_some_frame_is_left() -> None:
    prefixes, keyframes = (
        Counter(tuple(drawn_latents(kind, index, latent_frames=4)) for index in range(600))
        for kind in ("prefix", "keyframes")
    )
    assert prefixes.keys() == {(0,), (0, 1), (0, 1, 2)}
    assert min(prefixes.values()) > 150
    sizes = Counter(len(places) for places in keyframes.elements())
    assert sizes.keys() == {1, 2, 3}
    assert len(keyframes) == 4 + 6 + 4, "every choice of frames"


@given(
    kind=st.sampled_from(FRAMES),
    latent_frames=st.integers(1, 9),
    stride=st.sampled_from([1, 4, 8]),
    index=st.integers(0, 99),
)
def test_a_clip_is_shown_some_frames_but_not_all_and_an_image_none(kind, latent_frames, stride, index) -> None:
    drawn = read_condition(kind).draw(0, 0, index, latent_frames=latent_frames, stride=stride)
    assert len(drawn.frames) == (latent_frames - 1) * stride + 1
    shown = drawn.frames[::stride]
    assert shown.any() == (latent_frames > 1)
    assert not shown.all()


def test_shares_are_those_of_the_setting_and_a_draw_depends_on_its_key_alone() -> None:
    text = "first_frame:0.3,suffix@1:0.2,none:0.5"
    drawn = Counter(tuple(drawn_latents(text, 7, 1, index, latent_frames=3)) for index in range(4000))
    shares = {places: count / 4000 for places, count in drawn.items()}
    assert shares == pytest.approx({(0,): 0.3, (2,): 0.2, (): 0.5}, abs=0.03)
    keys = [(7, 1, index) for index in range(32)]
    alone = [drawn_latents(text, *key, latent_frames=3) for key in reversed(keys)]
    assert [drawn_latents(text, *key, latent_frames=3) for key in keys] == alone[::-1]
    assert alone[::-1] != [drawn_latents(text, 7, 2, index, latent_frames=3) for index in range(32)], "another epoch"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("first_frames", "must be conditions with their shares"),
        ("first_frame@2", "must be conditions with their shares"),
        ("prefix@0", "must be conditions with their shares"),
        ("none+prefix", "must be conditions with their shares"),
        ("prefix:0.5,none", "must be conditions with their shares"),
        ("prefix:0.5,none:0.4", "add up to 1"),
        ("prefix:1.5,none:-0.5", "above 0"),
        ("prefix:nan,none:1", "above 0"),
        ("prefix:0.5:0,none:0.5", "weights of `condition` must be above 0"),
        ("prefix:0.5:inf,none:0.5", "weights of `condition` must be above 0"),
        ("prefix:0.5:x,none:0.5", "must be conditions with their shares"),
        ("prefix:0.5:1:1,none:0.5", "must be conditions with their shares"),
        ("video+audio", "has one of `video`, `audio`, `no_audio` at most"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        read_condition(text)


def test_sources_have_shares_of_their_own() -> None:
    conditions = read_conditions("first_frame:0.3,none:0.7;my clips=prefix@2;a=b=none")
    assert conditions.others == read_condition("first_frame:0.3,none:0.7")
    assert {**conditions.by_source} == {"my clips": read_condition("prefix@2"), "a=b": read_condition("none")}
    assert [conditions.of(name).shares for name in ("my clips", "others", None)] == [(1.0,), (0.3, 0.7), (0.3, 0.7)]
    conditions.check_sources(["my clips", "others"])
    read_conditions("a=none;b=prefix").check_sources(["b", "a"])
    for sources, message in ((["a", "b"], "no shares for `b`"), ([], "no shares for `the rows`")):
        with pytest.raises(BucketingError, match=message):
            read_conditions("a=none").check_sources(sources)
    for text in ("none;prefix", "a=none;a=prefix"):
        with pytest.raises(BucketingError, match="gives shares twice"):
            read_conditions(text)
    with pytest.raises(BucketingError, match="must be conditions with their shares"):
        read_conditions("none;a=")


def test_appended_frames_lie_at_latent_frames_after_the_first() -> None:
    def places(text: str, *, latent_frames: int = 4, first: tuple[int, ...] | None = None) -> Counter[tuple[int, ...]]:
        shares = read_condition(text)
        drawn = [shares.draw(index, latent_frames=latent_frames, stride=2, appended=first) for index in range(300)]
        assert not any(each.frames.any() for each in drawn)
        return Counter(each.appended for each in drawn)

    assert places("appended_last_frame").keys() == {(3,)}
    assert places("appended_keyframes@2").keys() == {(1, 2), (1, 3), (2, 3)}
    assert places("appended_keyframes@9").keys() == {(1, 2, 3)}
    assert places("appended_last_frame+appended_keyframes@1").keys() == {(1, 3), (2, 3)}
    assert len(places("appended_keyframes")) == 3 + 3 + 1
    assert places("appended_last_frame", latent_frames=1).keys() == {()}
    assert places("appended_last_frame:0.5,none:0.5").keys() == {(), (3,)}
    assert {len(each) for each in places("appended_last_frame:0.5,none:0.5", first=(1, 3))} == {2}
    assert places("appended_last_frame:0.5,none:0.5", first=()).keys() == {()}
    assert places("none", first=(2,)).keys() == {(1,), (2,), (3,)}, "as many as in the first sample of its stack"


def test_the_most_appended_frames_are_known_before() -> None:
    most = {
        "first_frame:0.5,none:0.5": 0,
        "appended_last_frame:0.1,none:0.9": 1,
        "appended_last_frame+appended_keyframes@2:0.1,none:0.9;stills=none": 3,
        "none;clips=appended_keyframes": sys.maxsize,
        "appended_first_frame:0.1,none:0.9": 1,
        "none;clips=appended_first_frame+appended_last_frame:0.1,appended_last_frame:0.9": 2,
    }
    for text, count in most.items():
        conditions = read_conditions(text)
        assert conditions.most_appended == count
        assert conditions.appends_first == ("first" in text.removeprefix("first_frame"))
        drawn = conditions.most.of(None).draw(0, latent_frames=4, stride=1)
        assert len(drawn.appended) == min(count, 3)


def test_the_first_and_the_last_frame_are_appended_alone_or_both_and_alike_in_a_stack() -> None:
    first, last = "appended_first_frame", "appended_last_frame"
    shares = read_condition(f"{first}:0.3,{last}:0.3,{first}+{last}:0.3,none:0.1")

    def places(in_first: tuple[int, ...] | None, shares: ConditionShares = shares) -> set[tuple[int, ...]]:
        drawn = [shares.draw(index, latent_frames=7, stride=4, appended=in_first) for index in range(100)]
        assert not any(sample.frames.any() for sample in drawn)
        return {sample.appended for sample in drawn}

    assert places(None) == {(0,), (6,), (0, 6), ()}
    assert (places(()), places((6,)), places((0, 6))) == ({()}, {(0,), (6,)}, {(0, 6)})
    for others in map(read_condition, ("none", last)):  # of another source
        assert places((0, 6), others) == {(0, 6)}
    assert places((0,), read_condition("none")) == {(0,)}
    assert places((), read_condition(first)) == {()}
    assert shares.draw(0, latent_frames=1, stride=4).appended == ()


def test_a_condition_has_a_weight_and_a_name_whatever_is_drawn_beside_it() -> None:
    conditions = read_conditions("prefix@2+last_frame:0.5:0.25,none:0.5;stills=mask:1:2")
    assert conditions.weighs
    assert not read_conditions("prefix:0.5,none:0.5").weighs
    assert conditions.names == ("prefix_2_and_last_frame", "none", "mask")
    weights = {"prefix_2_and_last_frame": 0.25, "none": 1.0}
    for shares in (conditions.others, conditions.dropping_references(0.5).others):
        assert shares is not None
        drawn = [shares.draw(index, latent_frames=4, stride=1) for index in range(50)]
        assert {each.name.removesuffix("reference").removesuffix("_and_") or "none" for each in drawn} == {*weights}
        assert {(bool(each.frames.any()), each.weight) for each in drawn} == {(True, 0.25), (False, 1.0)}


def test_references_are_drawn_with_other_parts() -> None:
    shares = read_condition("first_frame+reference:0.25,reference:0.25,prefix@1:0.25,none:0.25")
    drawn = [shares.draw(index, latent_frames=3, stride=1) for index in range(2000)]
    counts = Counter((bool(each.frames.any()), each.references) for each in drawn)
    assert counts.keys() == {(shown, references) for shown in (True, False) for references in (True, False)}
    assert min(counts.values()) > 430
    for references in (True, False):
        fixed = [shares.draw(index, latent_frames=3, stride=1, references=references) for index in range(400)]
        assert {each.references for each in fixed} == {references}
        assert 150 < sum(each.frames.any() for each in fixed) < 250
    always = read_condition("first_frame:0.5,none:0.5")
    assert all(always.draw(index, latent_frames=3, stride=1).references for index in range(50))
    assert not always.draw(0, latent_frames=3, stride=1, references=False).references, "as the first of its stack"


def test_dropping_references_is_drawn_beside_each_condition() -> None:
    dropping = read_condition("first_frame:0.4,none:0.6").dropping_references(0.25)
    counts = Counter()
    for index in range(4000):
        drawn = dropping.draw(index, latent_frames=3, stride=1)
        counts[bool(drawn.frames.any()), drawn.references] += 1
    shares = {key: count / 4000 for key, count in counts.items()}
    expected = {(True, True): 0.3, (True, False): 0.1, (False, True): 0.45, (False, False): 0.15}
    assert shares == pytest.approx(expected, abs=0.03)
    assert not read_condition("none").dropping_references(1.0).draw(0, latent_frames=3, stride=1).references
