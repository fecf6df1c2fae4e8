"""Text tokens carried inside the strips of their own sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_bucketing import PackingError
from hf_bucketing.packing import PackedLayout
from hf_bucketing.packing.layout import best_text_slots
from hf_bucketing.packing.positions import position_strips
from hf_bucketing.packing.strips import from_strips, to_strips

samples = st.lists(
    st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), st.integers(0, 13)),
    min_size=1,
    max_size=6,
)


def make_layout(samples, strip_length: int, text_slots: int) -> PackedLayout:
    grids, lengths = zip(*samples, strict=True)
    return PackedLayout(grids=grids, text_lengths=lengths, strip_length=strip_length, text_slots=text_slots)


@given(samples, st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=60)
def test_every_token_and_text_token_is_once_in_its_samples_part_of_the_sequence(samples, strip_length, slots) -> None:
    layout = make_layout(samples, strip_length, slots)
    joint, strips = layout.joint, layout.num_strips
    of_strip = layout.strip_segments[:, None]
    tokens = torch.where(layout.segment_ids.view(strips, -1) >= 0, of_strip.expand(strips, strip_length), -1)
    text = joint.text_by_strip(layout.text_segment_ids[:, None] + 1)[..., 0] - 1
    assert torch.equal(torch.where(text >= 0, of_strip, -1), text), "text is carried in strips of its own sample"
    sequence = joint.gather(tokens, text)
    for sample, (start, stop) in enumerate(joint.segments.queries):
        assert set(sequence[start:stop].tolist()) == {sample}
        assert stop - start == layout.lengths[sample] + layout.text_lengths[sample]
    assert joint.segments.queries == joint.segments.keys
    assert (sequence[stop:] == -1).all(), "padding comes last"
    assert len(sequence) == joint.segments.num_queries == joint.segments.num_keys == strips * (strip_length + slots)


@given(samples, st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=60)
def test_scattering_is_the_inverse_of_gathering(samples, strip_length, slots) -> None:
    layout = make_layout(samples, strip_length, slots)
    tokens, text = torch.rand(layout.num_strips, strip_length, 2), torch.rand(layout.num_strips, slots, 2)
    back, text_back = layout.joint.scatter(layout.joint.gather(tokens, text))
    assert torch.equal(back, tokens)
    assert torch.equal(text_back, text)
    texts = torch.rand(layout.num_text_tokens, 2)
    assert torch.equal(layout.joint.read_slots(layout.joint.fill_slots(texts)), texts)
    assert int(layout.joint.fill_slots(torch.ones(len(texts))).sum()) == len(texts)


@given(samples, st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=60)
def test_a_sample_has_as_many_strips_as_its_tokens_and_its_text_need(samples, strip_length, slots) -> None:
    layout = make_layout(samples, strip_length, slots)
    for strips, length, text in zip(layout.strips_per_sample, layout.lengths, layout.text_lengths, strict=True):
        assert strips * strip_length >= length
        assert strips * slots >= text
        assert (strips - 1) * strip_length < length or (strips - 1) * slots < text
    latents = [torch.rand(3, *grid) for grid, _ in samples]
    strips = to_strips(latents, (1, 1, 1), layout=layout)
    assert len(strips) == layout.num_strips == len(layout.strip_segments)
    assert all(torch.equal(a, b) for a, b in zip(latents, from_strips(strips, layout), strict=True))
    (positions,) = position_strips(layout, lambda grid: (torch.cartesian_prod(*map(torch.arange, grid)).view(-1, 3),))
    assert positions.shape == (layout.num_strips, strip_length, 3)
    for (start, stop), grid in zip(layout.spans, layout.grids, strict=True):
        assert positions.flatten(0, 1)[start:stop][-1].tolist() == [side - 1 for side in grid]


@given(samples, st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=60)
def test_text_apart_fills_the_slots_of_any_strips_in_order(samples, strip_length: int, padding: int) -> None:
    layout = replace(make_layout(samples, strip_length, 0), text_apart=True, padding_strips=padding)
    assert layout.num_strips == padding + sum(-(-length // strip_length) for length in layout.lengths)
    slots = best_text_slots(replace(layout, padding_strips=0))
    joint = replace(layout, text_slots=slots).joint
    of_strip = layout.strip_segments[joint.modulated_as][:, None]
    text = joint.text_by_strip(layout.text_segment_ids[:, None] + 1)[..., 0] - 1
    assert torch.equal(torch.where(text >= 0, of_strip, -1), text), "text is modulated as its own sample"
    own = torch.where(text >= 0, layout.strip_segments[:, None], -1)
    assert (joint.text_strips() is None) == torch.equal(own, text)
    tokens = layout.segment_ids.view(layout.num_strips, -1)
    sequence = joint.gather(tokens, text)
    for sample, (start, stop) in enumerate(joint.segments.queries):
        assert set(sequence[start:stop].tolist()) == {sample}
    back, text_back = joint.scatter(sequence)
    assert torch.equal(back, tokens)
    assert torch.equal(text_back, text)
    if slots > 1 and not padding:
        with pytest.raises(PackingError, match="texts fill"):
            replace(layout, text_slots=slots - 1).joint  # noqa: B018


@given(samples, st.integers(1, 9))
@settings(max_examples=60)
def test_the_best_text_slots_take_the_fewest_entries(samples, strip_length: int) -> None:
    def entries(slots: int) -> int:
        return make_layout(samples, strip_length, slots).num_strips * (strip_length + slots)

    best = best_text_slots(make_layout(samples, strip_length, 0))
    assert best >= 1, "strips of text slots, if only empty ones"
    assert entries(best) == min(entries(slots) for slots in range(1, 15))


def test_text_apart_has_no_joint_sequence() -> None:
    layout = PackedLayout(grids=((1, 2, 3),), text_lengths=(4,), strip_length=4)
    assert layout.strips_per_sample == (2,)
    with pytest.raises(PackingError, match="text_slots"):
        layout.joint  # noqa: B018
    with pytest.raises(PackingError, match="text_slots"):
        PackedLayout(grids=((1, 2, 3),), text_lengths=(4,), strip_length=4, text_slots=-1)
