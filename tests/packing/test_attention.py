"""The backends of packed attention against a masked softmax in float64, and against each other."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from hf_bucketing import PackingError
from hf_bucketing.packing import PackedLayout, SegmentSpans, attention, packed_attention
from hf_bucketing.packing.attention import dispatch, torch_backends
from tests.packing.flash_attention import flash_attention_4

CPU = torch.device("cpu")
HEADS, HEAD_DIM = 4, 8


def spans_of(parts: list[tuple[int, int]], *, shuffle_keys: bool = False) -> SegmentSpans:
    """Return segments from `(padding before, length)` of queries and keys, three queries to each key."""
    ends = list(itertools.accumulate(padding + length for padding, length in parts))
    queries = tuple((end - length, end) for end, (_, length) in zip(ends, parts, strict=True))
    keys = tuple((start // 3, stop // 3) for start, stop in queries)
    if shuffle_keys:
        keys = keys[::-1]
    return SegmentSpans(queries=queries, keys=keys, num_queries=ends[-1] + 2, num_keys=ends[-1] // 3 + 1)


def with_more_keys(segments: SegmentSpans) -> SegmentSpans:
    """Return segments over twice as many keys, some of which have a second span among the new ones."""
    count, keys = segments.num_keys, segments.keys
    more = [(0, 0) if number % 2 else (count + start, count + stop) for number, (start, stop) in enumerate(keys)]
    return replace(segments, more_keys=(*more[1:], (count, count + 1)), num_keys=2 * count)


@st.composite
def segment_spans(draw: st.DrawFn, *, more: bool = True) -> SegmentSpans:
    lengths = st.sampled_from([1, 2, 3, 3, 6, 6, 9])
    parts = draw(st.lists(st.tuples(st.sampled_from([0, 0, 0, 3, 5]), lengths), min_size=1, max_size=7))
    segments = spans_of(parts, shuffle_keys=draw(st.booleans()))
    return with_more_keys(segments) if more and draw(st.booleans()) else segments


def tokens_for(segments: SegmentSpans, *, key_heads: int = HEADS, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(segments.num_queries, HEADS), (segments.num_keys, key_heads), (segments.num_keys, key_heads)]
    return [torch.randn(*s, HEAD_DIM, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def by_hand(query, key, value, segments: SegmentSpans, *, scale: float | None = None) -> torch.Tensor:
    """Compute a softmax per segment and head in plain arithmetic."""
    groups = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(groups, 1) for side in (key, value))
    out = torch.zeros_like(query)
    for queries, *spans in zip(segments.queries, *segments.key_sides, strict=True):
        q, (k, v) = (
            query[slice(*queries)],
            (torch.cat([side[slice(*keys)] for keys in spans]) for side in (key, value)),
        )
        if len(k):
            products = torch.einsum("qhd,khd->hqk", q, k) * (HEAD_DIM**-0.5 if scale is None else scale)
            out[slice(*queries)] = torch.einsum("hqk,khd->qhd", products.softmax(-1), v)
    return out


def gradients(out: torch.Tensor, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if not out.requires_grad:  # no segment has a key
        return tuple(map(torch.zeros_like, tokens))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), tokens, materialize_grads=True, allow_unused=True)


@pytest.mark.parametrize("backend", ["segments", "dense", "auto"])
@given(segment_spans(), st.sampled_from([1, 2, HEADS]), st.sampled_from([None, 0.3]))
@settings(max_examples=40)
def test_outputs_and_gradients_are_those_of_a_softmax_per_segment(backend, segments, key_heads, scale) -> None:
    tokens = tokens_for(segments, key_heads=key_heads)
    expected = by_hand(*tokens, segments, scale=scale)
    out = packed_attention(*tokens, segments, backend=backend, scale=scale, enable_gqa=key_heads < HEADS)
    assert torch.allclose(out, expected, atol=1e-12)
    for slope, other in zip(gradients(out, tokens), gradients(expected, tokens), strict=True):
        assert torch.allclose(slope, other, atol=1e-12)


@pytest.mark.parametrize("backend", ["segments", "dense"])
def test_rows_without_keys_are_zero_and_have_no_nan_in_their_gradients(backend) -> None:
    segments = SegmentSpans(queries=((1, 4), (4, 6)), keys=((0, 0), (0, 5)), num_queries=8, num_keys=5)
    tokens = tokens_for(segments)
    out = packed_attention(*tokens, segments, backend=backend)
    assert out[[0, 1, 2, 3, 6, 7]].count_nonzero() == 0
    assert out[4:6].count_nonzero() == out[4:6].numel()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(out, tokens))
    no_keys = SegmentSpans(queries=((0, 4),), keys=((0, 0),), num_queries=5, num_keys=0)
    tokens = tokens_for(no_keys)
    out = packed_attention(*tokens, no_keys, backend=backend)
    assert out.count_nonzero() == 0
    assert [gradient.count_nonzero() for gradient in torch.autograd.grad(out.sum(), tokens)] == [0, 0, 0]


@pytest.mark.parametrize("backend", ["segments", "dense"])
def test_dropout_drops_weights_and_keeps_their_mean(backend) -> None:
    segments = SegmentSpans(queries=((0, 4),), keys=((0, 400),), num_queries=4, num_keys=400)
    query, key, _ = tokens_for(segments)
    ones = torch.ones_like(key)
    torch.manual_seed(0)
    out = packed_attention(query, key, ones, segments, backend=backend, dropout=0.5)
    assert not torch.allclose(out, torch.ones_like(out), atol=1e-3)
    assert torch.allclose(out.mean(), torch.ones((), dtype=out.dtype), atol=0.2)


@given(segment_spans(more=False))
@settings(max_examples=60)
def test_runs_cover_each_segment_once_with_views_of_the_pack(segments: SegmentSpans) -> None:
    attended = []
    for run in torch_backends.find_runs(segments):
        for number in range(run.queries.times):
            spans = [(s.start + number * s.step, s.start + number * s.step + s.length) for s in run]
            attended.append(tuple(spans))
        assert run.queries.stop <= segments.num_queries
        assert run.keys.stop <= segments.num_keys
    assert attended == list(zip(segments.queries, segments.keys, strict=True))


def test_equal_samples_are_one_call_without_a_copy_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: calls.append(a) or attend(*a, **o))
    layout = PackedLayout(grids=((1, 2, 3), (1, 3, 2), (6, 1, 1)), text_lengths=(1,) * 3, strip_length=4)
    tokens = torch.randn(layout.num_tokens, 2, 4)
    packed_attention(tokens, tokens, tokens, layout.self_segments)
    assert [[side.shape for side in call] for call in calls] == [[(3, 2, 6, 4)] * 3]
    assert all(side.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr() for side in calls[0])


@given(segment_spans(more=False))
@settings(max_examples=40)
def test_segments_do_not_see_each_other_even_as_nan(segments: SegmentSpans) -> None:
    query, key, value = (side.detach() for side in tokens_for(segments))
    before = packed_attention(query, key, value, segments)
    for number, keys in enumerate(segments.keys):
        poisoned = [side.clone() for side in (key, value)]
        for side in poisoned:
            side[slice(*keys)] = torch.nan
        after = packed_attention(query, *poisoned, segments)
        changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= set(range(*segments.queries[number]))


def test_masks_above_two_gib_are_refused_with_the_backend_to_use() -> None:
    length = 46341  # its square is just above 2 GiB
    segments = SegmentSpans(queries=((0, length),), keys=((0, length),), num_queries=length, num_keys=length)
    tokens = torch.zeros(length, 1, 1)
    with pytest.raises(PackingError, match=r"2\.00 GiB; use 'varlen' on a CUDA device, or 'segments'"):
        packed_attention(tokens, tokens, tokens, segments, backend="dense")
    assert 46340**2 <= torch_backends.MASK_LIMIT < length**2


def test_what_a_backend_derives_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = spans_of([(0, 6), (3, 6), (0, 9)])
    tokens = tokens_for(segments)
    for backend in ("segments", "dense"):
        packed_attention(*tokens, segments, backend=backend)
    packed_attention(*tokens, segments, backend="segments")
    offsets, bounds = segments.varlen(CPU), segments.key_bounds(CPU)
    assert segments.varlen(CPU) is offsets
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(torch, "arange", None)
    for backend in ("segments", "dense"):
        packed_attention(*tokens, segments, backend=backend)
    assert segments.key_bounds(CPU) is bounds


def test_auto_picks_segments_on_the_cpu_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    segments = spans_of([(0, 6)])
    tokens = tokens_for(segments)
    dispatch.announce_anew()
    with caplog.at_level(logging.INFO, logger="hf_bucketing"):
        output = packed_attention(*tokens, segments, backend="auto")
        packed_attention(*tokens, segments, backend="auto")
    assert [record.getMessage() for record in caplog.records] == [
        "Packed attention on cpu in torch.float64 runs on the backend 'segments', as kernels of variable lengths "
        "run on CUDA devices in half precision."
    ]
    assert torch.equal(output, packed_attention(*tokens, segments))
    assert [*dispatch.choices()] == [record.getMessage() for record in caplog.records]


def test_explicit_choices_are_refused_not_replaced() -> None:
    segments = spans_of([(0, 6)])
    tokens = tokens_for(segments)
    cases = {
        "'varlen' needs a CUDA device": {"backend": "varlen"},
        "'varlen:fa4' needs a CUDA device": {"backend": "varlen:fa4"},
        "'flex' has no backward on the CPU": {"backend": "flex"},
        "'flex' has no dropout": {"backend": "flex", "dropout": 0.1},
        "'magic' is unknown": {"backend": "magic"},
        "dropout must be": {"dropout": 1.0},
    }
    for message, options in cases.items():
        with pytest.raises(PackingError, match=message):
            packed_attention(*tokens, segments, **options)
    with pytest.raises(PackingError, match="4 heads and keys 2"):
        packed_attention(*tokens_for(segments, key_heads=2), segments)
    with pytest.raises(PackingError, match="4 heads and keys 3"):
        packed_attention(*tokens_for(segments, key_heads=3), segments, enable_gqa=True)
    assert attention.resolve_backend("auto") == "auto"
    if not torch.cuda.is_available():
        for backend in ("varlen", "varlen:fa4", "varlen:torch", "varlen:fa2"):
            with pytest.raises(PackingError, match=f"{backend!r} needs a CUDA device, and there is none"):
                attention.resolve_backend(backend)


@pytest.mark.parametrize("backend", ["segments", "dense"])
def test_autocast_computes_in_half_precision(backend) -> None:
    segments = spans_of([(0, 6), (0, 3)])
    tokens = tokens_for(segments, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed_attention(*tokens, segments, backend=backend).dtype == torch.bfloat16
    assert packed_attention(*tokens, segments, backend=backend).dtype == torch.float32


def test_auto_gives_varlen_neither_more_segments_than_a_grid_has_blocks_nor_two_spans_of_keys() -> None:
    spans = tuple((100 * segment, 100 * segment + 100) for segment in range(65_536))
    many, most = (SegmentSpans.within(spans[first:], 100 * len(spans)) for first in (0, 1))
    both = replace(most, more_keys=most.keys[::-1])
    query = torch.empty(1, HEADS, 8, dtype=torch.bfloat16).expand(100 * len(spans), -1, -1)
    with flash_attention_4():
        chosen = [dispatch.choose_backend(query, segments=spans) for spans in (many, most, both)]
    assert chosen == ["segments", "varlen:fa4", "flex"]
    with pytest.raises(PackingError, match=r"'varlen' takes up to 65,535 segments, and this pack has 65,536.*'auto'"):
        many.varlen(CPU)


def test_attention_to_a_single_key_is_its_value_and_needs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = spans_of([(0, 3), (3, 3), (0, 3)])
    tokens = tokens_for(segments, key_heads=2)
    expected = by_hand(*tokens, segments)
    slopes = gradients(expected, tokens)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    out = packed_attention(*tokens, segments, enable_gqa=True)
    assert torch.allclose(out, expected, atol=1e-12)
    for slope, other in zip(gradients(out, tokens), slopes, strict=True):
        assert torch.allclose(slope, other, atol=1e-12)
