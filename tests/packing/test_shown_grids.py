"""Samples of several grids: references follow a sample's own tokens, and count in no loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given, settings, strategies as st
from torch.nn.functional import scaled_dot_product_attention

from hf_bucketing import PackingError
from hf_bucketing.losses.variational import GaussianPosterior
from hf_bucketing.packing import PackedLayout, TokenDrop, packed_mse, packed_vlb
from hf_bucketing.packing.attention import packed_attention, torch_backends
from hf_bucketing.packing.names import Backend
from hf_bucketing.packing.strips import from_strips, strips_to_tokens, to_strips

grids = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
samples = st.lists(st.tuples(grids, st.lists(grids, max_size=3).map(tuple)), min_size=1, max_size=5)
LITERAL = PackedLayout(
    grids=((1, 2, 3), (1, 1, 2), (1, 1, 5)),
    shown=(((1, 1, 2), (1, 1, 1)), (), ((1, 1, 4),)),
    text_lengths=(1, 1, 1),
    strip_length=4,
    padding_strips=1,
)


def layout_of(drawn, strip_length: int, **options) -> PackedLayout:
    own, shown = zip(*drawn, strict=True)
    return PackedLayout(grids=own, shown=shown, text_lengths=(1,) * len(own), strip_length=strip_length, **options)


def test_references_follow_a_sample_in_its_strips() -> None:
    assert LITERAL.own_lengths == (6, 2, 5)
    assert LITERAL.shown_lengths == (3, 0, 4)
    assert LITERAL.lengths == (9, 2, 9)
    assert LITERAL.strips_per_sample == (3, 1, 3)
    assert LITERAL.spans == ((0, 9), (12, 14), (16, 25))
    assert LITERAL.own_spans == ((0, 6), (12, 14), (16, 21))
    assert LITERAL.own_tokens_by_strip == (4, 2, 0, 2, 4, 1, 0, 0)
    assert LITERAL.segment_ids.tolist() == [*[0] * 9, *[-1] * 3, 1, 1, -1, -1, *[2] * 9, *[-1] * 7]
    assert LITERAL.own_ids.tolist() == [*[0] * 6, *[-1] * 6, 1, 1, -1, -1, *[2] * 5, *[-1] * 11]
    assert LITERAL.self_segments.queries == LITERAL.spans, "a sample and its references attend to each other"


@pytest.mark.parametrize("backend", ["segments", "dense", "flex"])
def test_references_apart_attend_to_themselves_alone(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backends, "compiled_flex_attention", lambda: torch_backends.flex_attention)
    layout = replace(LITERAL, references_apart=True, text_lengths=(2, 0, 3), text_slots=1)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(layout.num_tokens, 2, 16, generator=draw) for _ in range(3))
    own, samples_of = layout.own_ids >= 0, layout.segment_ids
    mask = (samples_of[:, None] == samples_of) & (samples_of >= 0) & (own[:, None] | ~own)
    assert torch.equal(layout.self_attention_mask(), mask)
    sides = (side.transpose(0, 1) for side in (query, key, value))
    expected = scaled_dot_product_attention(*sides, attn_mask=mask).transpose(0, 1)[samples_of >= 0]
    attended = packed_attention(query, key, value, layout.self_segments, backend=backend)
    assert torch.allclose(attended[samples_of >= 0], expected, atol=1e-6)
    assert not attended[samples_of < 0].any()
    joint = layout.joint.segments
    assert joint.queries == ((0, 6), (6, 9), (9, 11), (11, 13), (13, 18), (18, 22), (22, 25))
    assert joint.keys == ((0, 11), (6, 9), (0, 11), (11, 13), (13, 25), (18, 22), (13, 25))


@given(samples, st.integers(1, 9), st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)))
@settings(max_examples=25)
def test_strips_hold_the_tokens_of_all_grids_and_give_back_the_samples_own(drawn, strip_length: int, patch) -> None:
    layout = layout_of(drawn, strip_length)

    def draw(grid) -> torch.Tensor:
        return 1 + torch.rand(2, *(side * part for side, part in zip(grid, patch, strict=True)))

    latents, references = [draw(own) for own, _ in drawn], [[draw(grid) for grid in shown] for _, shown in drawn]
    strips = to_strips(latents, patch, layout=layout, references=references)
    tokens = strips_to_tokens(strips, layout).flatten(0, 1)
    assert all(map(torch.equal, from_strips(strips, layout), latents))
    assert torch.equal(tokens.flatten(1).any(1), layout.segment_ids >= 0)
    targets = strips_to_tokens(to_strips(latents, patch, layout=layout), layout).flatten(0, 1)
    own = layout.own_ids >= 0
    assert torch.equal(targets[own], tokens[own])
    assert not targets[~own].any(), "targets are zero where references and padding lie"
    counts = [int(mask.sum()) for mask in own.view(-1, strip_length)]
    assert counts == list(layout.own_tokens_by_strip)
    (alone,) = (layout_of([sample], strip_length) for sample in drawn[:1])
    first = to_strips(latents[:1], patch, layout=alone, references=references[:1])
    assert torch.equal(first, strips[: len(first)])


@given(st.lists(grids, min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=20)
def test_without_references_layouts_and_strips_are_those_of_one_grid(own, strip_length: int) -> None:
    latents, patch = [torch.rand(2, *grid) for grid in own], (1, 1, 1)
    plain = PackedLayout(grids=tuple(own), text_lengths=(1,) * len(own), strip_length=strip_length)
    empty = layout_of([(grid, ()) for grid in own], strip_length)
    for name in ("lengths", "own_lengths", "spans", "own_spans", "num_tokens", "own_tokens_by_strip"):
        assert getattr(plain, name) == getattr(empty, name), name
    assert torch.equal(plain.segment_ids, plain.own_ids)
    strips = to_strips(latents, patch, layout=empty, references=[()] * len(own))
    assert torch.equal(to_strips(latents, patch, layout=plain), strips)


def test_losses_are_means_over_a_samples_own_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    shape = (LITERAL.num_strips, 3, 1, 1, 4)
    prediction, target, weights = (torch.rand(shape, generator=draw) for _ in range(3))
    weights = weights[:, :1]
    own = (LITERAL.own_ids >= 0).view(-1, 1, 1, 1, 4)
    poisoned = torch.where(own, prediction, torch.nan).requires_grad_()
    losses = packed_mse(poisoned, target, LITERAL)
    weighted = packed_mse(poisoned, target, LITERAL, torch.where(own, weights, torch.nan))
    for sample, (start, stop) in enumerate(LITERAL.own_spans):
        error, weight = ((prediction - target) ** 2).movedim(4, 1), weights.movedim(4, 1)
        error, weight = (values.flatten(0, 1).flatten(1)[start:stop] for values in (error, weight))
        assert float(losses[sample]) == pytest.approx(float(error.mean()), rel=1e-6)
        expected = (error * weight).sum() / (3 * weight.sum())
        assert float(weighted[sample]) == pytest.approx(float(expected), rel=1e-6)
    losses.sum().backward()
    assert torch.equal(poisoned.grad != 0, own.expand(shape)), "nothing flows back to references"


def test_the_bound_is_a_mean_over_a_samples_own_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    posterior = GaussianPosterior.from_scheduler(DDPMScheduler())
    patch, timesteps = (1, 1, 1), torch.tensor([0, 500, 999])
    own = LITERAL.own_ids.view(-1, 1, 1, 1, 4) >= 0
    prediction, noised, clean = (
        torch.rand(LITERAL.num_strips, channels, 1, 1, 4, generator=draw) for channels in (6, 3, 3)
    )

    def bound(layout: PackedLayout, *strips: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        predicted, noisy, image = strips
        return packed_vlb(predicted, layout, noised=noisy, clean=image, timesteps=steps, posterior=posterior)

    poisoned = (torch.where(own, values, torch.nan) for values in (prediction, noised, clean))
    together = bound(LITERAL, *poisoned, steps=timesteps)
    for sample, grid in enumerate(LITERAL.grids):
        alone = PackedLayout(grids=(grid,), text_lengths=(1,), strip_length=4)
        strips = [
            to_strips([from_strips(values, LITERAL)[sample]], patch, layout=alone)
            for values in (prediction, noised, clean)
        ]
        expected = bound(alone, *strips, steps=timesteps[sample : sample + 1])
        assert float(together[sample]) == pytest.approx(float(expected), rel=1e-5)


@given(samples, st.sampled_from(["random", "tube", "frames"]), st.floats(0, 1))
@settings(max_examples=25)
def test_token_drop_keeps_every_token_of_a_reference(drawn, mode, rate: float) -> None:
    own, shown = zip(*drawn, strict=True)
    kept = tuple(map(torch.from_numpy, TokenDrop(rate=rate, mode=mode).kept(own, seeds=range(len(own)))))
    layout = layout_of(drawn, 4, kept=kept)
    assert layout.own_lengths == tuple(map(len, kept))
    assert layout.shown_lengths == tuple(sum(map(math.prod, others)) for others in shown)
    latents, references = (
        [torch.ones(1, *grid) for grid in own],
        [[torch.full((1, *g), 2.0) for g in o] for o in shown],
    )
    tokens = to_strips(latents, (1, 1, 1), layout=layout, references=references).flatten()
    assert int((tokens == 1).sum()) == sum(layout.own_lengths)
    assert int((tokens == 2).sum()) == sum(layout.shown_lengths)
    assert [int(latent.sum()) for latent in from_strips(tokens.view(-1, 1, 1, 1, 4), layout)] == [*layout.own_lengths]


def test_limits_of_token_drop_count_references() -> None:
    some, shown = [(1, 4, 5), (1, 2, 5)], [12, 0]
    assert TokenDrop(max_sample_tokens=20).num_kept(some, seeds=[0, 1], shown_tokens=shown) == [8, 10]
    kept = TokenDrop(max_pack_tokens=27).num_kept(some, seeds=[0, 1], shown_tokens=shown)
    assert kept == [10, 5], "of 30 own tokens, 15 remain beside the 12 of references"
    alone = TokenDrop(max_pack_tokens=15).kept(some, seeds=[0, 1])
    beside = TokenDrop(max_pack_tokens=27).kept(some, seeds=[0, 1], shown_tokens=shown)
    assert all(map(np.array_equal, alone, beside))
    with pytest.raises(PackingError, match="beside the 12 of its references"):
        TokenDrop(max_sample_tokens=12).num_kept(some, seeds=[0, 1], shown_tokens=shown)


def test_impossible_grids_of_references_are_errors() -> None:
    one = {"grids": ((1, 1, 2),), "text_lengths": (1,), "strip_length": 4}
    with pytest.raises(PackingError, match="1 samples needs as many shown"):
        PackedLayout(**one, shown=((), ()))
    with pytest.raises(PackingError, match=r"Grids must be at least 1 .*\(1, 0, 2\)"):
        PackedLayout(**one, shown=(((1, 0, 2),),))
