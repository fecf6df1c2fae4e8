"""Layouts, strips and segment attention, without a model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from hf_bucketing import PackingError
from hf_bucketing.packing import PackedLayout, packed_attention
from hf_bucketing.packing.positions import axis_coordinates
from hf_bucketing.packing.strips import from_strips, strips_to_tokens, to_strips, token_grid

grids = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6)
patches = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3))


@given(grids, patches, st.integers(1, 9))
@settings(max_examples=50)
def test_strips_hold_each_token_once_and_come_apart_again(grids, patch, strip_length: int) -> None:
    latents = [torch.rand(2, *(side * part for side, part in zip(grid, patch, strict=True))) for grid in grids]
    assert [token_grid(latent, patch, sample=0) for latent in latents] == grids
    layout = PackedLayout(grids=tuple(grids), text_lengths=(1,) * len(grids), strip_length=strip_length)
    strips = to_strips(latents, patch, layout=layout)
    assert strips.shape == (layout.num_strips, 2, patch[0], patch[1], strip_length * patch[2])
    assert all(torch.equal(a, b) for a, b in zip(latents, from_strips(strips, layout), strict=True))
    assert strips_to_tokens(strips, layout).flatten(0, 1)[layout.segment_ids < 0].count_nonzero() == 0


def test_tokens_stand_in_the_order_of_a_patch_embedding() -> None:
    latent = torch.rand(3, 4, 6, 8)
    layout = PackedLayout(grids=((2, 3, 4),), text_lengths=(0,), strip_length=5)
    tokens = strips_to_tokens(to_strips([latent], (2, 2, 2), layout=layout), layout).flatten(0, 1)[:24]
    embed = torch.nn.Conv3d(3, 7, kernel_size=(2, 2, 2), stride=(2, 2, 2))
    by_model = embed(latent[None]).flatten(2)[0].T
    by_strips = embed(tokens).flatten(1)
    assert torch.allclose(by_model, by_strips, atol=1e-6)


@given(grids, st.integers(1, 7))
@settings(max_examples=50)
def test_masks_and_segments_are_views_of_one_layout(grids, strip_length: int) -> None:
    lengths = tuple(range(len(grids)))
    layout = PackedLayout(grids=tuple(grids), text_lengths=lengths, strip_length=strip_length)
    ids, text_ids = layout.segment_ids, layout.text_segment_ids
    assert len(ids) == layout.num_tokens == layout.num_strips * strip_length
    assert len(text_ids) == layout.num_text_tokens == sum(lengths)
    assert [int((ids == sample).sum()) for sample in range(len(layout))] == list(layout.lengths)
    for strip, sample in zip(ids.view(-1, strip_length), layout.strip_segments, strict=True):
        assert set(strip.tolist()) <= {int(sample), -1}, "a strip belongs to one sample"
    for mask, segments in (
        (layout.self_attention_mask(), layout.self_segments),
        (layout.cross_attention_mask(), layout.cross_segments),
    ):
        drawn = torch.zeros_like(mask)
        for queries, keys in zip(segments.queries, segments.keys, strict=True):
            drawn[slice(*queries), slice(*keys)] = True
        assert torch.equal(drawn, mask)


@given(grids, st.integers(1, 7), st.booleans())
@settings(max_examples=50)
def test_segment_attention_equals_a_masked_dense_one(grids, strip_length: int, cross: bool) -> None:
    layout = PackedLayout(grids=tuple(grids), text_lengths=(2,) * len(grids), strip_length=strip_length)
    segments = layout.cross_segments if cross else layout.self_segments
    mask = layout.cross_attention_mask() if cross else layout.self_attention_mask()
    query = torch.randn(segments.num_queries, 2, 4, dtype=torch.float64)
    key, value = torch.randn(2, segments.num_keys, 2, 4, dtype=torch.float64).unbind(0)
    q, k, v = (tokens.transpose(0, 1)[None] for tokens in (query, key, value))
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)
    dense = torch.where((layout.segment_ids >= 0)[:, None, None], dense, 0)
    assert torch.allclose(packed_attention(query, key, value, segments), dense, atol=1e-12)


def test_segments_of_equal_lengths_share_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **_: calls.append(q.shape) or attend(q, k, v)
    )
    layout = PackedLayout(grids=((1, 2, 3), (1, 3, 2), (2, 2, 2), (6, 1, 1)), text_lengths=(1,) * 4, strip_length=4)
    tokens = torch.randn(layout.num_tokens, 2, 4)
    packed_attention(tokens, tokens, tokens, layout.self_segments)
    assert sorted(calls) == [(1, 2, 8, 4), (3, 2, 6, 4)]


def test_a_token_at_i_of_n_has_the_coordinate_i_times_base_over_n() -> None:
    frames, rows, columns = axis_coordinates((3, 4, 5), (6, 3, 5), device="cpu")
    assert frames.tolist() == [0.0, 2.0, 4.0]
    assert rows.tolist() == [0.0, 0.75, 1.5, 2.25]
    assert columns.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [axis.tolist() for axis in axis_coordinates((1, 2, 1), None, device="cpu")] == [[0.0], [0.0, 1.0], [0.0]]


def test_impossible_layouts_and_tokens_are_errors() -> None:
    good = {"grids": ((1, 2, 3),), "text_lengths": (4,), "strip_length": 4}
    for change in (
        {"grids": ()},
        {"strip_length": 0},
        {"text_lengths": ()},
        {"grids": ((0, 1, 1),)},
        {"text_lengths": (-1,)},
    ):
        with pytest.raises(PackingError):
            PackedLayout(**{**good, **change})
    layout = PackedLayout(**good)
    tokens = torch.zeros(layout.num_tokens, 1, 4)
    with pytest.raises(PackingError, match="8 queries"):
        packed_attention(tokens[1:], tokens, tokens, layout.self_segments)
    with pytest.raises(PackingError, match="backend"):
        packed_attention(tokens, tokens, tokens, layout.self_segments, backend="magic")


def test_learned_tokens_fill_up_samples_and_texts_and_are_attended_to() -> None:
    layout = PackedLayout(
        grids=((1, 2, 3), (1, 1, 1)), text_lengths=(2, 5), strip_length=4, text_slots=6, multiple_of=4
    )
    assert layout.attended_lengths == (8, 4)
    assert layout.strips_per_sample == (2, 1)
    assert layout.spans == ((0, 6), (8, 9))
    assert layout.self_segments.queries == ((0, 8), (8, 12))
    assert layout.joint.text_segments.queries == ((0, 4), (6, 14))
    assert layout.joint.text_target.tolist() == [0, 1, 6, 7, 8, 9, 10]
    assert [stop - start for start, stop in layout.joint.segments.queries] == [8 + 4, 4 + 8]
