"""Token drop: how many and which tokens stay, and that everything else follows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers import transformer_wan
from hypothesis import assume, given, strategies as st

from hf_bucketing import PackingError
from hf_bucketing.models import enable_packing
from hf_bucketing.packing import BetaRate, TokenDrop, packed_forward, packed_mse
from hf_bucketing.packing.token_drop import Mode
from tests.models.cases import Samples, gradients, largest_difference, make_model

MODES: tuple[Mode, ...] = ("random", "tube", "frames")
GRIDS = ((3, 2, 3), (1, 4, 2), (5, 3, 3), (1, 1, 1), (3, 2, 3), (1, 5, 3))  # of tests.models.cases, patch (1, 2, 2)
grids = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8)
modes = pytest.mark.parametrize("mode", MODES)


@given(grids, st.floats(0, 1), st.sampled_from(MODES))
def test_kept_tokens_are_sorted_in_the_grid_and_as_many_as_planned(some, rate: float, mode: Mode) -> None:
    drop, seeds = TokenDrop(rate=rate, mode=mode), range(len(some))
    kept = drop.kept(some, seeds=seeds)
    assert [len(tokens) for tokens in kept] == drop.num_kept(some, seeds=seeds)
    for tokens, (t, h, w) in zip(kept, some, strict=True):
        assert len(tokens) >= 1
        assert (np.diff(tokens) > 0).all()
        assert 0 <= tokens[0] <= tokens[-1] < t * h * w
        frames = [set(tokens[tokens // (h * w) == frame] % (h * w)) for frame in range(t)]
        if mode == "tube":
            assert all(frame == frames[0] for frame in frames)
        if mode == "frames":
            assert {len(frame) for frame in frames} <= {0, h * w}
        parts = {"random": t * h * w, "tube": h * w, "frames": t}[mode]
        assert abs(len(tokens) / (t * h * w) - (1 - rate)) <= 1 / parts


@modes
def test_a_sample_draws_from_its_own_seed_alone(mode: Mode) -> None:
    drop = TokenDrop(rate=BetaRate(alpha=2, beta=2), mode=mode)
    grid, seeds = (12, 5, 4), [(0, 3, index) for index in range(6)]
    together = drop.kept([grid] * 6, seeds=seeds)
    for tokens, seed in zip(together, seeds, strict=True):
        assert np.array_equal(drop.kept([(1, 2, 2), grid], seeds=[9, seed])[1], tokens)
    assert len({tuple(tokens) for tokens in together}) > 4
    assert len({len(tokens) for tokens in together}) > 1, "the rate is drawn per sample"


def test_rates_may_follow_the_size_or_a_distribution() -> None:
    drop = TokenDrop(rate=lambda grid: 0.75 if math.prod(grid) > 20 else 0.0)
    assert drop.num_kept([(4, 5, 5), (1, 4, 5)], seeds=[0, 1]) == [25, 20]
    counts = TokenDrop(rate=BetaRate(alpha=1, beta=3, max_rate=0.8)).num_kept([(10, 10, 10)] * 400, seeds=range(400))
    assert min(counts) >= 200
    assert np.mean(counts) == pytest.approx(1000 * (1 - 0.8 / 4), rel=0.05)


@given(grids, st.integers(1, 300), st.sampled_from(MODES))
def test_a_sample_above_its_capacity_drops_just_enough(some, capacity: int, mode: Mode) -> None:
    sizes = [{"random": 1, "tube": t, "frames": h * w}[mode] for t, h, w in some]
    assume(max(sizes) <= capacity)
    counts = TokenDrop(mode=mode, max_sample_tokens=capacity).num_kept(some, seeds=range(len(some)))
    for count, size, grid in zip(counts, sizes, some, strict=True):
        assert count == min(math.prod(grid), capacity // size * size)


@given(grids, st.integers(1, 400), st.sampled_from(MODES), st.sampled_from([0.0, 0.4]))
def test_a_pack_above_its_capacity_drops_just_enough_in_proportion(some, capacity: int, mode: Mode, rate) -> None:
    sizes = [{"random": 1, "tube": t, "frames": h * w}[mode] for t, h, w in some]
    assume(sum(sizes) <= capacity)
    seeds = range(len(some))
    alone = TokenDrop(rate=rate, mode=mode).num_kept(some, seeds=seeds)
    counts = TokenDrop(rate=rate, mode=mode, max_pack_tokens=capacity).num_kept(some, seeds=seeds)
    assert sum(counts) <= capacity
    if sum(alone) <= capacity:
        assert counts == alone
    for count, size, before in zip(counts, sizes, alone, strict=True):
        assert size <= count <= before
        assert count == before or sum(counts) + size > capacity, "another part would still fit"


def test_dropping_for_a_pack_is_in_proportion() -> None:
    drop = TokenDrop(max_pack_tokens=100)
    assert drop.num_kept([(1, 10, 10), (1, 10, 6), (1, 4, 10)], seeds=[0, 1, 2]) == [50, 30, 20]


def pack(model, packing, *, drop: TokenDrop | None, samples: Samples):
    model.train()
    seeds = None if drop is None else range(len(samples.latents))
    return packing.pack(samples.latents, timesteps=samples.timesteps, text=samples.text, token_drop=drop, seeds=seeds)


@modes
def test_tokens_keep_their_positions_targets_and_neighbours(mode: Mode) -> None:
    """A packed forward of some tokens is the stock model's, in which the others are masked out of attention."""
    model, samples = make_model(torch.float64), Samples(torch.float64)
    packing = enable_packing(model, strip_length=4)
    batch = pack(model, packing, drop=TokenDrop(rate=0.5, mode=mode), samples=samples)
    layout = batch.layout
    assert layout.lengths == tuple(map(len, layout.kept))
    assert (
        layout.num_tokens
        < packing.pack(samples.latents, timesteps=samples.timesteps, text=samples.text).layout.num_tokens
    )
    outputs = batch.unpack(packed_forward(model, batch))
    stock = stock_copy(model)
    for sample, (output, kept) in enumerate(zip(outputs, layout.kept, strict=True)):
        expected = masked_patches(stock, samples, sample, kept=kept)
        assert torch.allclose(patches(output)[kept], expected[kept], atol=1e-10)
        dropped = np.setdiff1d(range(math.prod(GRIDS[sample])), kept)
        assert patches(output)[dropped].count_nonzero() == 0
    target = batch.pack_like(samples.targets)
    values = packed_mse(torch.zeros_like(target), target, layout)
    by_hand = [
        patches(target)[kept].square().mean() for target, kept in zip(samples.targets, layout.kept, strict=True)
    ]
    assert torch.allclose(values, torch.stack(by_hand))


def patches(latent: torch.Tensor) -> torch.Tensor:
    blocks = latent.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return blocks.permute(1, 2, 4, 0, 3, 5).flatten(0, 2)


def stock_copy(model: WanTransformer3DModel) -> WanTransformer3DModel:
    stock = WanTransformer3DModel.from_config(model.config).to(torch.float64)
    stock.load_state_dict(model.state_dict())
    return stock


def masked_patches(stock: WanTransformer3DModel, samples: Samples, sample: int, *, kept: torch.Tensor) -> torch.Tensor:
    """Run the stock processors on a sample with keys of dropped tokens masked; return the patches of the output."""
    mask = torch.zeros(math.prod(GRIDS[sample]), dtype=torch.bool)
    mask[kept] = True
    attend = transformer_wan.dispatch_attention_fn

    def masked(query, key, value, **options):
        options["attn_mask"] = mask[None] if key.shape[1] == len(mask) else None
        return attend(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_wan, "dispatch_attention_fn", masked)
        text = torch.cat([samples.text[sample], samples.text[sample]])  # never as long as a grid here
        assert len(text) != len(mask)
        args = samples.latents[sample][None], samples.timesteps[sample][None], text[None]
        return patches(stock(*args).sample[0])


@pytest.mark.parametrize("drop", [TokenDrop(), TokenDrop(max_sample_tokens=10_000, max_pack_tokens=10_000)], ids=str)
def test_rate_zero_is_off_exactly(drop: TokenDrop) -> None:
    model, samples = make_model(), Samples()
    packing = enable_packing(model, strip_length=4)
    off, zero = (pack(model, packing, drop=which, samples=samples) for which in (None, drop))
    assert zero.layout == off.layout
    assert zero.layout.kept is None
    assert torch.equal(packed_forward(model, off), packed_forward(model, zero))


def test_training_on_some_tokens_has_the_gradients_of_attention_with_the_others_masked() -> None:
    model, samples = make_model(torch.float64), Samples(torch.float64)
    packing = enable_packing(model, strip_length=4)
    batch = pack(model, packing, drop=TokenDrop(rate=0.5), samples=samples)
    losses = packed_mse(packed_forward(model, batch), batch.pack_like(samples.targets), batch.layout)
    stock = stock_copy(model)
    errors = [
        masked_patches(stock, samples, sample, kept=kept)[kept] - patches(target)[kept]
        for sample, (target, kept) in enumerate(zip(samples.targets, batch.layout.kept, strict=True))
    ]
    by_hand = torch.stack([error.square().mean() for error in errors])
    assert torch.allclose(losses, by_hand)
    expected = gradients(stock, by_hand.mean())
    assert sum(bool(gradient.any()) for gradient in expected.values()) > len(expected) / 2
    for name, gradient in gradients(model, losses.mean()).items():
        assert torch.allclose(gradient, expected[name], atol=1e-10), name


def test_impossible_drops_are_errors() -> None:
    for message, call in {
        "rate of token drop must be from 0 to 1, got 1.5": lambda: TokenDrop(rate=1.5),
        "rate of token drop must be from 0 to 1, got -1": lambda: TokenDrop(rate=lambda _: -1).kept(
            GRIDS, seeds=range(6)
        ),
        "mode must be one of": lambda: TokenDrop(mode="rows"),
        "max_pack_tokens must be at least 1": lambda: TokenDrop(max_pack_tokens=0),
        "alpha and beta": lambda: BetaRate(alpha=0, beta=1),
        "one seed per sample, got 2": lambda: TokenDrop(rate=0.5).kept(GRIDS, seeds=[0, 1]),
        "at least 9 tokens of sample 2": lambda: TokenDrop(mode="frames", max_sample_tokens=8).kept(
            GRIDS, seeds=range(6)
        ),
        "at least 6 tokens, more than max_pack_tokens": lambda: TokenDrop(max_pack_tokens=5).kept(
            GRIDS, seeds=range(6)
        ),
    }.items():
        with pytest.raises(PackingError, match=message):
            call()
    model, samples = make_model().eval(), Samples()
    packing = enable_packing(model, strip_length=4)
    inputs = {"timesteps": samples.timesteps, "text": samples.text, "token_drop": TokenDrop(rate=0.5)}
    with pytest.raises(PackingError, match="in training only"):
        packing.pack(samples.latents, **inputs, seeds=range(6))
    model.train()
    with pytest.raises(PackingError, match="pass seeds="):
        packing.pack(samples.latents, **inputs)


def test_dropped_tokens_come_back_as_zeros() -> None:
    model, samples = make_model(), Samples()
    packing = enable_packing(model, strip_length=4)
    batch = pack(model, packing, drop=TokenDrop(rate=0.5), samples=samples)
    for back, latent, kept in zip(batch.unpack(batch.strips), samples.latents, batch.layout.kept, strict=True):
        expected = torch.zeros_like(patches(latent))
        expected[kept] = patches(latent)[kept]
        assert largest_difference([patches(back)], [expected]) == 0
