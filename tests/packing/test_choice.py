"""The backend that `auto` stands for, and the kernels of variable lengths that are there to be chosen from."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings

from hf_bucketing import PackingError
from hf_bucketing.packing import SegmentSpans, packed_attention
from hf_bucketing.packing.attention import dispatch, kernels
from hf_bucketing.packing.attention.dispatch import Segments, choose
from hf_bucketing.packing.attention.kernels import KERNELS, Device
from hf_bucketing.packing.segments import AttentionOptions
from tests.packing.flash_attention import clear, flash_attention_4
from tests.packing.test_attention import gradients, segment_spans, tokens_for

AMPERE, HOPPER, BLACKWELL, CPU = Device("cuda", (8, 0)), Device("cuda", (9, 0)), Device("cuda", (10, 0)), Device("cpu")
HALF, FULL = torch.bfloat16, torch.float32
ALL, TORCH = ("fa4", "torch", "fa2"), ("torch",)
LONG, SHORT = (11776, 8192, 6464, 4032, 2240, 64), tuple(range(256, 1024, 12))
WIDTH = 12 * 128


def kind(lengths: tuple[int, ...], *, text: int = 0, width: int = WIDTH, spans: int = 1) -> Segments:
    """Return what a choice reads of segments of these lengths, with a text of so many tokens each or themselves."""
    stops = list(itertools.accumulate(lengths, initial=0))
    keys = list(itertools.accumulate((text or length for length in lengths), initial=0))
    segments = SegmentSpans(
        queries=tuple(itertools.pairwise(stops)),
        keys=tuple(itertools.pairwise(keys)),
        num_queries=stops[-1],
        num_keys=keys[-1],
        more_keys=tuple(itertools.pairwise(keys)) if spans == 2 else None,
    )
    return Segments.of(segments, width=width)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "dropout", "segments", "installed", "expected"),
    [
        # as measured on an H100, see docs/benchmarks/h100.md
        (HOPPER, HALF, 128, False, kind(LONG), ALL, "varlen:fa4"),
        (HOPPER, HALF, 64, False, kind(SHORT), ALL, "varlen:fa4"),
        (HOPPER, HALF, 128, False, kind(LONG, text=512), ALL, "varlen:fa4"),
        (HOPPER, HALF, 128, False, kind(LONG), TORCH, "segments"),
        (HOPPER, HALF, 128, False, kind((32768,)), TORCH, "segments"),
        (HOPPER, HALF, 128, False, kind((1024,) * 16 + (512,) * 32), TORCH, "segments"),
        (HOPPER, HALF, 128, False, kind(tuple(range(1024, 4096, 256))), TORCH, "segments"),
        (HOPPER, HALF, 128, False, kind(SHORT), TORCH, "varlen:torch"),
        (HOPPER, HALF, 128, False, kind(SHORT, width=2 * WIDTH), TORCH, "varlen:torch"),
        (HOPPER, HALF, 128, False, kind(tuple(range(512, 2048, 64))), TORCH, "varlen:torch"),
        (HOPPER, HALF, 128, False, kind(LONG, text=512), TORCH, "varlen:torch"),
        (HOPPER, HALF, 128, False, kind(SHORT, text=512), TORCH, "varlen:torch"),
        # what kernels need
        (HOPPER, HALF, 256, False, kind(LONG), ALL, "varlen:fa4"),
        (BLACKWELL, HALF, 128, False, kind(LONG), ALL, "varlen:fa4"),
        (BLACKWELL, HALF, 192, False, kind(SHORT), ALL, "varlen:torch"),
        (HOPPER, HALF, 132, False, kind(LONG), ALL, "segments"),
        (HOPPER, HALF, 512, False, kind(LONG), ALL, "segments"),
        (HOPPER, HALF, 128, True, kind(SHORT), ALL, "varlen:torch"),
        (AMPERE, HALF, 128, False, kind(LONG), ALL, "varlen:torch"),
        (AMPERE, HALF, 128, False, kind(LONG), ("fa2",), "varlen:fa2"),
        (AMPERE, HALF, 128, False, kind(LONG), ("fa4",), "segments"),
        (Device("cuda", (7, 5)), HALF, 128, False, kind(LONG), ALL, "segments"),
        (HOPPER, HALF, 128, False, kind(LONG), (), "segments"),
        (HOPPER, FULL, 128, False, kind(LONG), ALL, "segments"),
        (CPU, HALF, 128, False, kind(LONG), ALL, "segments"),
        (Device("mps"), HALF, 128, False, kind(LONG), ALL, "segments"),
        # what segments need
        (HOPPER, HALF, 128, False, kind((8,) * 4096), ALL, "segments"),
        (HOPPER, HALF, 128, False, kind(LONG, spans=2), ALL, "flex"),
        (HOPPER, HALF, 128, True, kind(SHORT, spans=2), ALL, "varlen:torch"),
        (CPU, FULL, 128, False, kind(LONG, spans=2), ALL, "segments"),
    ],
)
def test_auto_chooses(device, dtype, head_dim, dropout, segments, installed, expected) -> None:
    chosen = choose(device, dtype, head_dim=head_dim, dropout=dropout, segments=segments, kernels=installed)
    assert chosen.backend == expected
    assert chosen.reason


def test_an_environment_with_flash_attention_4_alone_has_that_kernel_and_no_other() -> None:
    with flash_attention_4():
        assert kernels.missing("fa4") is None
        assert "flash_attn_varlen_func" in str(kernels.missing("fa2")), "the package can be found, its function cannot"
        assert kernels.installed()[0] == "fa4"
        assert "fa2" not in kernels.LOADED
        fa4, _, fa2 = kernels.describe_kernels()
        assert fa4 == "varlen:fa4: FlashAttention 4"
        assert fa2.startswith("varlen:fa2: none, cannot import name")


def test_flash_attention_2_is_given_all_tokens_as_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda *args, **settings: calls.append((args, settings))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    clear()
    try:
        assert kernels.missing("fa2") is None
        spans = ((0, 3), (4, 5))
        segments = SegmentSpans(queries=spans, keys=spans, num_queries=8, num_keys=8)
        tokens = [torch.zeros(8, 2, 4) for _ in range(3)]
        kernels.LOADED["fa2"](tuple(tokens), segments.varlen(torch.device("cpu")), AttentionOptions(0.3, 0.1))
    finally:
        clear()
    ((*given, cu_q, cu_k, max_q, max_k), settings) = calls[0]
    assert all(one is other for one, other in zip(given, tokens, strict=True))
    assert (cu_q.tolist(), cu_k.tolist()) == ([0, 3, 4, 4, 5, 8, 8], [0, 3, 3, 4, 5, 5, 8])
    assert (max_q, max_k) == (4, 4)
    assert settings == {"dropout_p": 0.1, "softmax_scale": 0.3}


def test_the_kernel_of_torch_is_the_one_that_is_named_whatever_varlen_attn_takes(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    operator = lambda *args, **more: calls.append((args, more)) or args  # noqa: E731
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    call = KERNELS["torch"].load()
    segments = SegmentSpans.within(((0, 3), (3, 8)), 8)
    tokens = [torch.zeros(8, 2, 4) for _ in range(3)]
    assert call(tuple(tokens), segments.varlen(torch.device("cpu")), AttentionOptions(0.3, 0.1)) is tokens[0]
    ((query, key, value, cu_q, cu_k, *rest), more) = calls[0]
    assert (query, key, value) == tuple(tokens)
    assert (cu_q.tolist(), cu_k.tolist(), rest) == ([0, 3, 8], [0, 3, 8], [8, 8, 0.1, False, False])
    assert more == {"scale": 0.3}


@given(segment_spans())
@hypothesis_settings(max_examples=40)
def test_flash_attention_4_computes_what_segments_compute(segments: SegmentSpans) -> None:
    tokens = tokens_for(segments, key_heads=2)
    with flash_attention_4():
        out = packed_attention(*tokens, segments, backend="varlen", scale=0.3, enable_gqa=True)
    expected = packed_attention(*tokens, segments, backend="segments", scale=0.3, enable_gqa=True)
    assert torch.allclose(out, expected, atol=1e-12)
    for slope, other in zip(gradients(out, tokens), gradients(expected, tokens), strict=True):
        assert torch.allclose(slope, other, atol=1e-12)


def test_kernels_are_refused_by_name() -> None:
    segments = SegmentSpans.within(((0, 8),), 8)
    tokens = [torch.zeros(8, 2, 8) for _ in range(3)]
    with flash_attention_4():
        for backend, dropout, message in (
            ("varlen:fa4", 0.1, "'varlen:fa4' has no kernel for this: FlashAttention 4: has no dropout; use 'auto'"),
            ("varlen:fa2", 0.0, "'varlen:fa2' has no kernel for this: FlashAttention 2: cannot import name"),
            ("varlen:fa5", 0.0, "'varlen:fa5' is unknown; there are"),
        ):
            with pytest.raises(PackingError, match=message):
                packed_attention(*tokens, segments, backend=backend, dropout=dropout)


def test_a_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(4, 2, 8)
    before = dispatch.choose_backend(query)
    monkeypatch.setattr(dispatch, "choose", None)
    monkeypatch.setattr(dispatch, "installed", None)
    assert dispatch.choose_backend(query) == before


def test_graphs_hold_attention_where_auto_takes_flash_attention_4_and_nowhere_else() -> None:
    tokens = torch.zeros(2, 3, 4)
    assert [dispatch.breaks_graphs(name, tokens) for name in ("segments", "varlen", "dense")] == [True, False, False]
    assert dispatch.breaks_graphs("auto", tokens)
    with flash_attention_4(), pytest.MonkeyPatch.context() as patch:  # which computes in float32 too, here
        assert not dispatch.breaks_graphs("auto", tokens)
        patch.setattr(dispatch, "HALF", kernels.HALF)
        assert dispatch.breaks_graphs("auto", tokens)
        with torch.autocast("cpu", torch.bfloat16):
            assert not dispatch.breaks_graphs("auto", tokens)
        patch.setattr(dispatch, "device_of", lambda device: AMPERE)
        assert dispatch.breaks_graphs("auto", tokens.bfloat16())
