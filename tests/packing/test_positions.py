"""Where packing places tokens: as the model does in a sample alone, or stretched to a base size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.positions import axis_coordinates
from tests.packing.packing_cases import CASES, FamilyCase, Samples, largest_difference

ROTARY = ["allegro", "cosmos rotary only", "ltx", "wan"]
each_rotary = pytest.mark.parametrize("case", [CASES[name] for name in ROTARY], ids=ROTARY)
STRETCHED = [*ROTARY, "latte"]


def tables_at_first_attention(model: Any, run: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the rotary tables that the first self-attention is given, `(rows, tokens, channels)` each."""
    seen: list[Any] = []

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["image_rotary_emb"] if "image_rotary_emb" in kwargs else args[-1])

    first = next(module for name, module in model.named_modules() if name.endswith("attn1"))
    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    run()
    handle.remove()
    (rotary,) = seen
    if torch.long in (getattr(one, "dtype", None) for one in rotary[1]):
        frequencies, positions = rotary  # Allegro's own: a table per axis, and where each token looks it up
        rotary = [(cos[at], sin[at]) for (cos, sin), at in zip(frequencies, positions, strict=True)]
    flat = [table for pair in rotary for table in (pair if isinstance(pair, tuple) else (pair,))]
    return [table.reshape(-1, table.shape[-1]) for table in flat]


def packed_tables(model: Any, case: FamilyCase, size: tuple[int, int, int], **options: Any) -> list[torch.Tensor]:
    """Return the rotary tables of one sample of that latent size, packed."""
    samples = Samples(case=case, order=(0,))
    samples.latents = [torch.zeros(case.channels, *size)]
    packing = enable_packing(model, strip_length=7, **options)
    batch = samples.pack(packing)
    tables = tables_at_first_attention(model, lambda: packed_forward(model, batch))
    disable_packing(model)
    return [table[: batch.layout.lengths[0]] for table in tables]


@each_rotary
@torch.no_grad()
def test_native_rotary_positions_are_those_of_the_sample_alone_bit_for_bit(case: FamilyCase) -> None:
    model = case.model()
    for sample, size in enumerate(case.sizes[:3]):
        samples = Samples(case=case, order=(0,))
        samples.latents = [torch.zeros(case.channels, *size)]
        alone = tables_at_first_attention(model, lambda one=samples: one.alone(model))
        packed = packed_tables(model, case, size)
        assert len(alone) == len(packed), sample
        assert all(torch.equal(one, other) for one, other in zip(alone, packed, strict=True))


@pytest.mark.parametrize("name", ["latte", "pixart"])
@torch.no_grad()
def test_native_sincos_positions_are_those_of_the_sample_alone_bit_for_bit(name: str) -> None:
    case = CASES[name]
    model = case.model()
    model.pos_embed.proj.weight.zero_()
    model.pos_embed.proj.bias.zero_()  # what is left of the embedding is the position
    alone = copy.deepcopy(model.pos_embed)
    sizes = [*case.sizes, (1, 16, 16)]  # the last is the square that the module holds as a table
    samples = Samples(case=case, order=(0,) * len(sizes))
    samples.latents = [torch.zeros(case.channels, *size) for size in sizes]
    batch = samples.pack(enable_packing(model, strip_length=7))
    seen: list[torch.Tensor] = []
    model.pos_embed.register_forward_hook(lambda module, args, output: seen.append(output.flatten(0, 1)))
    packed_forward(model, batch)
    for latent, (start, stop) in zip(samples.latents, batch.layout.spans, strict=True):
        assert torch.equal(seen[0][start:stop], alone(latent.transpose(0, 1)).flatten(0, 1))


@torch.no_grad()
def test_learned_positions_of_cosmos_are_those_of_the_sample_alone_bit_for_bit() -> None:
    case = CASES["cosmos"]
    model, samples = case.model(), Samples(case=case)
    alone = [model.learnable_pos_embed(latent[None])[0] for latent in samples.latents]
    batch = samples.pack(enable_packing(model, strip_length=7))
    seen: list[torch.Tensor] = []
    model.learnable_pos_embed.register_forward_hook(lambda module, args, output: seen.append(output.flatten(0, 1)))
    packed_forward(model, batch)
    for expected, (start, stop) in zip(alone, batch.layout.spans, strict=True):
        assert torch.equal(seen[0][start:stop], expected)


def test_a_token_at_i_of_n_lies_at_i_times_base_over_n() -> None:
    frames, rows, columns = axis_coordinates((3, 4, 5), (6, 3, 5), device="cpu")
    assert frames.tolist() == [0.0, 2.0, 4.0]
    assert rows.tolist() == [0.0, 0.75, 1.5, 2.25]
    assert columns.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [axis.tolist() for axis in axis_coordinates((1, 2, 1), None, device="cpu")] == [[0.0], [0.0, 1.0], [0.0]]


@each_rotary
@torch.no_grad()
def test_stretched_rotary_positions_are_every_other_one_of_a_sample_twice_as_large(case: FamilyCase) -> None:
    model = case.model()
    p_t, p_h, p_w = family_of(model).patch(model)
    t, h, w = 2, 3, 5
    large = packed_tables(model, case, (2 * t * p_t, 2 * h * p_h, 2 * w * p_w))
    small = packed_tables(
        model, case, (t * p_t, h * p_h, w * p_w), positions="interpolate", base_size=(2 * t, 2 * h, 2 * w)
    )
    for one, other in zip(large, small, strict=True):
        every_other = one.unflatten(0, (2 * t, 2 * h, 2 * w))[::2, ::2, ::2].flatten(0, 2)
        assert not torch.equal(one[: len(other)], other)
        assert largest_difference([every_other], [other]) <= 1e-6


@torch.no_grad()
def test_latte_stretches_the_frames_and_adds_none_to_images() -> None:
    case = CASES["latte"]
    model = case.model()
    before, after = [], []
    first = model.temporal_transformer_blocks[0]
    first.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    packing = enable_packing(model, strip_length=4, positions="interpolate", base_size=(4, 1, 1))
    first.register_forward_pre_hook(lambda module, args: after.append(args[0]))
    samples = Samples(case=case, order=(0, 1))
    samples.latents = [torch.zeros(4, 2, 4, 6), torch.zeros(4, 1, 4, 4)]
    batch = samples.pack(packing)
    packed_forward(model, batch)
    added = (after[0] - before[0])[:, 0]
    (start, stop), (image, _) = batch.layout.spans
    table = model.temp_pos_embed[0]
    assert largest_difference([added[start:stop]], [table[[0, 2]].repeat_interleave(6, 0)]) <= 1e-5
    assert not added[image:].any()


@pytest.mark.parametrize("name", STRETCHED)
@torch.no_grad()
def test_the_base_size_as_the_samples_own_grid_changes_nothing_and_another_does(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case, order=(0, 4))
    samples.latents[1] = samples.latents[0].flip(1)

    def run(**options: Any) -> list[torch.Tensor]:
        batch = samples.pack(enable_packing(model, strip_length=4, **options))
        outputs = batch.unpack(packed_forward(model, batch))
        disable_packing(model)
        return outputs

    t, h, w = case.sizes[0]
    p_t, p_h, p_w = family_of(model).patch(model)
    native, own = run(), (t // p_t, h // p_h, w // p_w)
    assert largest_difference(native, run(positions="interpolate", base_size=own)) <= 1e-5
    other = run(positions="interpolate", base_size=(own[0] + 1, own[1] + 3, own[2] + 5))
    assert largest_difference(native, other) > 1e-4


def test_samples_beyond_the_positions_are_refused_unless_stretched() -> None:
    cases = {"latte": (6, 4, 4), "wan": (1, 2, 130), "cosmos rotary only": (1, 2, 258)}
    for name, size in cases.items():
        case = CASES[name]
        model, samples = case.model(), Samples(case=case, order=(0,))
        samples.latents = [torch.zeros(case.channels, *size)]
        packing = enable_packing(model)
        with pytest.raises(PackingError, match=r"Sample 0 has a token grid of .* but this model has \d+ positions"):
            samples.pack(packing)
        disable_packing(model)
        packing = enable_packing(model, positions="interpolate", base_size=(3, 4, 4))
        assert torch.isfinite(packed_forward(model, samples.pack(packing))).all()


def test_wrong_choices_are_errors_that_say_what_to_use() -> None:
    stretch = {"positions": "interpolate", "base_size": (3, 4, 4)}
    cases = [
        ("pixart", stretch, "PixArtTransformer2DModel has no positions to stretch"),
        ("cosmos", stretch, "Learned positions cannot be stretched"),
        ("wan", {"positions": "interpolate"}, "with base_size"),
        ("wan", {"base_size": (3, 4, 4)}, "with base_size"),
        ("wan", {"positions": "nearest"}, "'nearest'"),
        ("wan", {**stretch, "base_size": (0, 4, 4)}, "three positive counts"),
        ("wan", {**stretch, "base_size": (4, 4)}, "three positive counts"),
        ("wan", {**stretch, "base_size": (3, 4, 65)}, "64 positions for columns"),
    ]  # fmt: skip
    for name, options, message in cases:
        model = CASES[name].model()
        with pytest.raises(PackingError, match=message):
            enable_packing(model, **options)
        Samples(case=CASES[name], order=(0,)).alone(model)  # nothing was left behind
