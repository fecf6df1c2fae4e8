"""Attention by kernel, with packs of ever new lengths."""

import functools
import statistics
from collections.abc import Sequence

import torch

from hf_bucketing.packing import SegmentSpans, packed_attention
from hf_bucketing.packing.attention.dispatch import choose_backend

from .measuring import BACKENDS, Cases, Figures, Run, attempt, relative
from .scale import AttentionCase


def cases(run: Run) -> Cases:
    """Yield kinds of packs: seconds and TFLOP/s of each backend, and errors in bf16 against float32."""
    for name, case in run.scale.attention_cases.items():
        yield name, functools.partial(compare, run, case)


def compare(run: Run, case: AttentionCase) -> Figures:
    return {backend: attempt(functools.partial(figures_of, run, case, backend)) for backend in BACKENDS}


def figures_of(run: Run, case: AttentionCase, backend: str) -> Figures:
    first, *others = [
        timed(run, case, segments, backend) for segments in case.packs(run.runs + 1, device=run.scale.device)
    ]
    medians = {name: statistics.median(pack[name] for pack in others) for name in others[0]}
    segments = next(case.packs(1, device=run.scale.device))
    tokens = random_tokens(case, segments, device=run.scale.device)
    exact = with_gradients(case, [side.detach().float().requires_grad_() for side in tokens], segments, "segments")
    found = with_gradients(case, tokens, segments, backend)
    return {
        **medians,
        "first_call_s": first["new_pack_s"],
        "output_relative_error": relative(found[:1], exact[:1]),
        "gradients_relative_error": relative(found[1:], exact[1:]),
        "backend": choose_backend(tokens[0], segments=segments) if backend == "auto" else backend,
    }


def timed(run: Run, case: AttentionCase, segments: SegmentSpans, backend: str) -> dict[str, float]:
    """Time a pack that the backend has not seen: forward and backward once, then forward alone, then both again."""
    tokens = random_tokens(case, segments, device=run.scale.device)

    def both() -> object:
        return with_gradients(case, tokens, segments, backend)

    @torch.no_grad()
    def forward() -> object:
        return attend(case, tokens, segments, backend)

    new, alone, again, tflop = run.once(both), run.once(forward), run.once(both), case.flops(segments) / 1e12
    return {
        "new_pack_s": new,
        "forward_s": alone,
        "forward_backward_s": again,
        "forward_tflops": tflop / alone,
        "forward_backward_tflops": 3.5 * tflop / again,
    }


def with_gradients(
    case: AttentionCase, tokens: Sequence[torch.Tensor], segments: SegmentSpans, backend: str
) -> tuple[torch.Tensor, ...]:
    out = attend(case, tokens, segments, backend)
    weights = torch.linspace(-1, 1, case.head_dim, device=out.device, dtype=out.dtype).expand_as(out)
    return out.detach(), *torch.autograd.grad(out, tokens, weights)


def random_tokens(case: AttentionCase, segments: SegmentSpans, *, device: str) -> list[torch.Tensor]:
    """Draw queries, keys and values in bf16, of which gradients are computed."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(segments.num_queries, case.heads), *[(segments.num_keys, case.key_heads)] * 2]
    drawn = [torch.randn(*shape, case.head_dim, generator=generator) for shape in shapes]
    return [side.to(device, torch.bfloat16).requires_grad_() for side in drawn]


def attend(case: AttentionCase, tokens: Sequence[torch.Tensor], segments: SegmentSpans, backend: str) -> torch.Tensor:
    fewer = case.heads != case.key_heads
    return packed_attention(*tokens, segments, backend=backend, enable_gqa=fewer)  # type: ignore[arg-type]
