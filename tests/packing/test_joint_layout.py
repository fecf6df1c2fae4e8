"""Text tokens carried inside strips, each modulated as its own sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hf_bucketing import PackingError
from hf_bucketing.packing import PackedLayout
from hf_bucketing.packing.layout import best_text_slots
from hf_bucketing.packing.strip_positions import position_strips
from hf_bucketing.packing.strips import from_strips, to_strips

samples = st.lists(
    st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), st.integers(0, 13)),
    min_size=1,
    max_size=6,
)


def make_layout(samples, strip_length: int, *, more_slots: int = 0, padding: int = 0) -> PackedLayout:
    """Make a layout with some more text slots than needed."""
    grids, lengths = zip(*samples, strict=True)
    layout = PackedLayout(grids=grids, text_lengths=lengths, strip_length=strip_length)
    return replace(layout, text_slots=best_text_slots(layout) + more_slots, padding_strips=padding)


@given(samples, st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=60)
def test_every_token_and_text_token_is_once_in_its_samples_part_of_the_sequence(
    samples, strip_length: int, more_slots: int, padding: int
) -> None:
    layout = make_layout(samples, strip_length, more_slots=more_slots, padding=padding)
    joint = layout.joint
    tokens = layout.segment_ids.view(layout.num_strips, -1)
    text = joint.text_by_strip(layout.text_segment_ids[:, None] + 1)[..., 0] - 1
    of_text = layout.strip_segments[joint.modulated_as][:, None]
    assert torch.equal(torch.where(text >= 0, of_text, -1), text), "text is modulated as its own sample"
    segments = torch.where(text >= 0, layout.strip_segments[:, None], -1)
    assert (joint.text_strips() is None) == torch.equal(segments, text)
    sequence = joint.gather(tokens, text)
    for sample, (start, stop) in enumerate(joint.segments.queries):
        assert set(sequence[start:stop].tolist()) == {sample}
        assert stop - start == layout.lengths[sample] + layout.text_lengths[sample]
    assert joint.segments.queries == joint.segments.keys
    assert (sequence[stop:] == -1).all(), "padding comes last"
    assert len(sequence) == joint.segments.num_queries == joint.segments.num_keys == tokens.numel() + text.numel()


@given(samples, st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=60)
def test_scattering_is_the_inverse_of_gathering(samples, strip_length: int, more_slots: int) -> None:
    layout = make_layout(samples, strip_length, more_slots=more_slots)
    tokens, text = torch.rand(layout.num_strips, strip_length, 2), torch.rand(layout.num_strips, layout.text_slots, 2)
    back, text_back = layout.joint.scatter(layout.joint.gather(tokens, text))
    assert torch.equal(back, tokens)
    assert torch.equal(text_back, text)
    texts = torch.rand(layout.num_text_tokens, 2)
    assert torch.equal(layout.joint.read_slots(layout.joint.fill_slots(texts)), texts)
    assert int(layout.joint.fill_slots(torch.ones(len(texts))).sum()) == len(texts)


@given(samples, st.integers(1, 9))
@settings(max_examples=60)
def test_a_sample_has_as_many_strips_as_its_tokens_need(samples, strip_length: int) -> None:
    layout = make_layout(samples, strip_length)
    assert layout.strips_per_sample == tuple(-(-length // strip_length) for length in layout.lengths)
    latents = [torch.rand(3, *grid) for grid, _ in samples]
    strips = to_strips(latents, (1, 1, 1), layout=layout)
    assert len(strips) == layout.num_strips == len(layout.strip_segments)
    assert all(torch.equal(a, b) for a, b in zip(latents, from_strips(strips, layout), strict=True))
    (positions,) = position_strips(layout, lambda grid: (torch.cartesian_prod(*map(torch.arange, grid)).view(-1, 3),))
    assert positions.shape == (layout.num_strips, strip_length, 3)
    for (start, stop), grid in zip(layout.spans, layout.grids, strict=True):
        assert positions.flatten(0, 1)[start:stop][-1].tolist() == [side - 1 for side in grid]


@given(samples, st.integers(1, 9))
@settings(max_examples=60)
def test_fewer_text_slots_than_the_best_hold_not_all_texts(samples, strip_length: int) -> None:
    layout = make_layout(samples, strip_length)
    assert layout.text_slots >= 1, "strips of text slots, if only empty ones"
    if layout.text_slots > 1:
        with pytest.raises(PackingError, match="texts fill"):
            replace(layout, text_slots=layout.text_slots - 1).joint  # noqa: B018


def test_text_apart_has_no_joint_sequence() -> None:
    layout = PackedLayout(grids=((1, 2, 3),), text_lengths=(4,), strip_length=4)
    assert layout.strips_per_sample == (2,)
    with pytest.raises(PackingError, match="text_slots"):
        layout.joint  # noqa: B018
    with pytest.raises(PackingError, match="text_slots"):
        PackedLayout(grids=((1, 2, 3),), text_lengths=(4,), strip_length=4, text_slots=-1)
