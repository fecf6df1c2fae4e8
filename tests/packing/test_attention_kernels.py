"""What the backends `flex` and `varlen` hand to their kernels, and the kernels themselves where they run."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hf_bucketing.packing import SegmentSpans, packed_attention
from hf_bucketing.packing.attention import torch_backends
from hf_bucketing.packing.attention.dispatch import choose_backend
from hf_bucketing.packing.attention.kernels import installed
from tests.devices import CUDA
from tests.packing.test_attention import (
    CPU,
    HEADS,
    by_hand,
    segment_spans,
    spans_of,
    tokens_for,
    with_more_keys,
)

SHUFFLED = spans_of([(0, 300), (9, 300), (0, 3)], shuffle_keys=True)


def long_segments() -> SegmentSpans:
    """Return segments that fill blocks, share blocks, and leave padding; the keys of one are empty."""
    queries = ((0, 130), (130, 256), (256, 640), (700, 701), (710, 1000))
    keys = ((0, 300), (300, 300), (310, 700), (700, 720), (720, 725))
    return SegmentSpans(queries=queries, keys=keys, num_queries=1100, num_keys=800)


def by_mask_function(segments: SegmentSpans):
    sides = segments.key_bounds(CPU)

    def attends(batch, head, query, key):
        inside = [(key >= start[query]) & (key < stop[query]) for start, stop in sides]
        return functools.reduce(torch.logical_or, inside)

    return create_block_mask(attends, None, None, segments.num_queries, segments.num_keys, device="cpu")


@given(segment_spans())
@settings(max_examples=20)
def test_blocks_made_from_ends_are_those_that_a_mask_function_gives(segments: SegmentSpans) -> None:
    for case in (segments, long_segments()):
        made, expected = torch_backends.block_mask(case, CPU), by_mask_function(case)
        assert torch.equal(made.to_dense(), expected.to_dense())
        for part in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(made, part), getattr(expected, part)), part
        for part in ("kv", "full_kv", "q", "full_q"):
            ours, theirs = (getattr(mask, f"{part}_indices") for mask in (made, expected))
            valid = torch.arange(ours.shape[-1]) < getattr(made, f"{part}_num_blocks")[..., None]
            assert torch.equal(ours[valid], theirs[valid]), part
        assert made.seq_lengths == expected.seq_lengths


@pytest.mark.slow
@given(segment_spans())
@settings(max_examples=20)
def test_flex_attention_computes_the_same(segments: SegmentSpans) -> None:
    tokens = [side.detach() for side in tokens_for(segments, key_heads=2)]
    with pytest.MonkeyPatch.context() as patch:
        # All pairs, but without a compiler.
        patch.setattr(torch_backends, "compiled_flex_attention", lambda: flex_attention)
        out = packed_attention(*tokens, segments, backend="flex", enable_gqa=True, scale=0.3)
    assert torch.allclose(out, by_hand(*tokens, segments, scale=0.3), atol=1e-12)


@pytest.mark.every
@pytest.mark.slow
def test_flex_attention_compiled_on_the_cpu_skips_blocks_and_computes_the_same() -> None:
    for segments in (long_segments(), with_more_keys(long_segments())):
        tokens = [side.detach() for side in tokens_for(segments, dtype=torch.float32)]
        out = packed_attention(*tokens, segments, backend="flex")
        assert torch.allclose(out, by_hand(*tokens, segments), atol=1e-5)


def test_padding_forms_segments_of_its_own_so_that_offsets_cover_all_tokens() -> None:
    offsets = long_segments().varlen(CPU)
    assert offsets.cu_seqlens_q.tolist() == [0, 130, 256, 256, 640, 700, 701, 710, 1000, 1100, 1100]
    assert offsets.cu_seqlens_k.tolist() == [0, 300, 300, 310, 700, 700, 720, 720, 725, 725, 800]
    assert (offsets.longest.shape, offsets.key_index) == ((512, 512, 0), None)


def test_keys_that_segments_share_are_taken_once_for_each() -> None:
    segments = SegmentSpans(queries=((0, 2), (2, 5)), keys=((1, 3), (1, 3)), num_queries=5, num_keys=4)
    offsets = segments.varlen(CPU)
    assert offsets.key_index.tolist() == [1, 2, 1, 2]
    assert offsets.cu_seqlens_k.tolist() == [0, 2, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["varlen", "dense", "auto"])
def test_on_a_gpu_half_precision_errs_as_little_as_one_call_per_segment(backend, dtype) -> None:
    more = () if backend == "auto" else (with_more_keys(SHUFFLED),)  # which auto leaves to flex
    for segments in (long_segments(), SHUFFLED, *more):
        check_errors_on_gpu(segments, backend, dtype)


@pytest.mark.gpu
def test_on_a_gpu_flex_attention_errs_as_little_and_is_compiled_once_for_segments_of_one_kind() -> None:
    """Segments over as many tokens need no second graph, and one compilation takes most of the time of this test."""
    torch.compiler.reset()
    segments = with_more_keys(long_segments())
    others = replace(with_more_keys(SHUFFLED), num_queries=segments.num_queries, num_keys=segments.num_keys)
    check_errors_on_gpu(segments, "flex", torch.bfloat16)
    with torch.compiler.set_stance("fail_on_recompile"):
        check_errors_on_gpu(others, "flex", torch.bfloat16)


def check_errors_on_gpu(segments: SegmentSpans, backend, dtype: torch.dtype) -> None:
    """Compare a kernel in half precision with float64, as well as one call per segment compares."""
    exact = [side.detach().cuda().repeat(1, 1, 8).requires_grad_() for side in tokens_for(segments)]
    tokens = [side.detach().to(dtype).requires_grad_() for side in exact]
    reference = packed_attention(*exact, segments)
    plain, fast = (packed_attention(*tokens, segments, backend=name) for name in ("segments", backend))
    for expected, by_segment, by_kernel in zip(
        (reference, *gradients_on_gpu(reference, exact)),
        (plain, *gradients_on_gpu(plain, tokens)),
        (fast, *gradients_on_gpu(fast, tokens)),
        strict=True,
    ):
        assert torch.isfinite(by_kernel).all()
        assert (by_kernel - expected).abs().max() <= 2 * (by_segment - expected).abs().max() + 1e-3


def gradients_on_gpu(out: torch.Tensor, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return torch.autograd.grad((out * weights).sum(), tokens)


@pytest.mark.gpu
def test_on_a_gpu_auto_is_varlen_in_half_precision_and_segments_in_float32() -> None:
    tokens = torch.zeros(4, HEADS, 64, device="cuda")
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    expected = "varlen:fa4" if hopper and "fa4" in installed() else "segments" if hopper else "varlen:torch"
    assert choose_backend(tokens.bfloat16()) == expected
    assert choose_backend(tokens) == "segments"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["varlen", "segments"])
def test_on_a_gpu_no_layer_waits_for_the_device(backend) -> None:
    segments = long_segments()
    tokens = [side.detach().cuda().bfloat16().requires_grad_() for side in tokens_for(segments)]
    packed_attention(*tokens, segments, backend=backend)
    with CUDA.recording() as waits:
        packed_attention(*tokens, segments, backend=backend).sum().backward()
    waits.check(())
