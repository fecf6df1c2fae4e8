"""Where packing places tokens: as the model does in a sample alone, or stretched to a base size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from tests.models.cases import CASES, FamilyCase, Samples, each_case, largest_difference, packed_outputs

pytestmark = pytest.mark.usefixtures("hooks_that_look")

Size = tuple[int, int, int]
NAMES = ("cosmos rotary only", "ltx", "wan", "cogvideox", "cogvideox-1.5", "hunyuan", "flux")
ROTARY = {name: CASES[name] for name in NAMES}
ADDED = {"latte": "pos_embed", "pixart": "pos_embed", "sd3": "pos_embed"}
ADDED |= {"cogvideox-sincos": "patch_embed", "cogvideox-learned": "patch_embed"}
STRETCHED = {**ROTARY, **{name: CASES[name] for name in ("latte", "sd3", "cogvideox-sincos")}}


def zeros(case: FamilyCase, *sizes: Size) -> Samples:
    """Return samples of zero latents of these sizes."""
    samples = Samples(case=case, order=(0,) * len(sizes))
    samples.latents = [torch.zeros(case.channels, *size) for size in sizes]
    return samples


def rotary_tables(model: Any, run: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the rotary tables that the first self-attention is given, `(tokens, channels)` each."""
    seen: list[Any] = []

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["image_rotary_emb"] if "image_rotary_emb" in kwargs else args[-1])

    attentions = ((name, module) for name, module in model.named_modules() if hasattr(module, "set_processor"))
    first = next(module for name, module in attentions if not name.startswith("context_embedder"))
    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    run()
    handle.remove()
    (rotary,) = seen
    flat = [table for pair in rotary for table in (pair if isinstance(pair, tuple) else (pair,))]
    return [table.reshape(-1, table.shape[-1]) for table in flat]


def packed_rotary_tables(model: Any, case: FamilyCase, size: Size, **options: Any) -> list[torch.Tensor]:
    """Return the rotary tables of one sample of that latent size, packed."""
    batch = zeros(case, size).pack(enable_packing(model, strip_length=7, **options))
    tables = rotary_tables(model, lambda: packed_forward(model, batch))
    disable_packing(model)
    if getattr(family_of(model), "rotates_text", False):
        tables = tables[:2]  # those of the text follow
    return [table[: batch.layout.lengths[0]] for table in tables]


def packed_embeddings(name: str, model: Any, *sizes: Size, **options: Any) -> list[torch.Tensor]:
    """Return what the patch embedding makes of each of the zero latents, packed: positions, and the same bias."""
    seen: list[torch.Tensor] = []
    batch = zeros(CASES[name], *sizes).pack(enable_packing(model, strip_length=7, **options))
    embedding = getattr(model, ADDED[name])
    handle = embedding.register_forward_hook(lambda module, args, output: seen.append(output[:, -7:]))
    packed_forward(model, batch)
    handle.remove()
    disable_packing(model)
    return [seen[0].flatten(0, 1)[slice(*span)] for span in batch.layout.spans]


def embedding_alone(name: str, model: Any, latent: torch.Tensor) -> torch.Tensor:
    """Return what the patch embedding makes of a sample alone."""
    if ADDED[name] == "pos_embed":
        return model.pos_embed(latent.transpose(0, 1)).flatten(0, 1)
    text = torch.zeros(1, model.config.max_text_seq_length, 16)
    return model.patch_embed(text, latent.transpose(0, 1)[None])[0, text.shape[1] :]


@each_case(ROTARY)
@torch.no_grad()
def test_native_rotary_positions_are_those_of_the_sample_alone_bit_for_bit(case: FamilyCase) -> None:
    model = case.model()
    for size in case.sizes[:3]:
        alone = rotary_tables(model, lambda size=size: zeros(case, size).alone(model))
        packed = packed_rotary_tables(model, case, size)
        assert len(alone) == len(packed)
        for table, other in zip(alone, packed, strict=True):
            assert torch.equal(table[-len(other) :], other)  # Flux rotates its text, which comes first, by nothing


@pytest.mark.parametrize("name", ADDED)
@torch.no_grad()
def test_native_added_positions_are_those_of_the_sample_alone_bit_for_bit(name: str) -> None:
    model, sizes = CASES[name].model(), list(CASES[name].sizes)
    if name in ("latte", "pixart"):
        sizes.append((1, 16, 16))  # the square that the module holds as a table
    alone = [embedding_alone(name, model, latent) for latent in zeros(CASES[name], *sizes).latents]
    for embedding, other in zip(alone, packed_embeddings(name, model, *sizes), strict=True):
        assert torch.equal(embedding, other)


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


@pytest.mark.parametrize("name", [*ROTARY, "latte", "sd3", "cogvideox-sincos"])
@torch.no_grad()
def test_stretched_positions_are_every_other_one_of_a_sample_twice_as_large(name: str) -> None:
    case = CASES[name]
    model = case.model()
    family = family_of(model)
    frames = 1 if family.limits(model)[0] == 1 else 2
    small, large = (frames, 2, 3), (frames * frames, 4, 6)
    half, size = (
        tuple(a * b for a, b in zip(grid, family.patch(model.config), strict=True)) for grid in (small, large)
    )
    stretch = {"positions": "interpolate", "base_size": large}
    if name in ADDED:
        native, stretched = packed_embeddings(name, model, size), packed_embeddings(name, model, half, **stretch)
    else:
        native = packed_rotary_tables(model, case, size)
        stretched = packed_rotary_tables(model, case, half, **stretch)
    for table, other in zip(native, stretched, strict=True):
        every_other = table.unflatten(0, large)[::frames, ::2, ::2].flatten(0, 2)
        assert not torch.equal(table[: len(other)], other)
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
    batch = zeros(case, (2, 4, 6), (1, 4, 4)).pack(packing)
    packed_forward(model, batch)
    added = (after[0] - before[0])[:, 0]
    (start, stop), (image, _) = batch.layout.spans
    table = model.temp_pos_embed[0]
    assert largest_difference([added[start:stop]], [table[[0, 2]].repeat_interleave(6, 0)]) <= 1e-5
    assert not added[image:].any()


@torch.no_grad()
def test_sd3_interpolates_linearly_between_the_entries_of_its_table() -> None:
    model = CASES["sd3"].model()
    model.pos_embed.proj.weight.zero_()
    model.pos_embed.proj.bias.zero_()
    (table,) = packed_embeddings("sd3", model, (1, 4, 6), positions="interpolate", base_size=(1, 3, 1))
    (base,) = packed_embeddings("sd3", model, (1, 6, 2))
    assert torch.allclose(table[[0, 3]], torch.stack([base[0], (base[1] + base[2]) / 2]), atol=1e-6)
    assert torch.equal(table[0], table[2]), "one column stretched to three: the table ends there"


@each_case(STRETCHED)
@torch.no_grad()
def test_the_base_size_as_the_samples_own_grid_changes_nothing_and_another_does(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case, order=(0, 4))
    samples.latents[1] = samples.latents[0].flip(2)
    native, grid = packed_outputs(model, samples), samples.pack(enable_packing(model)).layout.grids[0]
    disable_packing(model)
    same = packed_outputs(model, samples, positions="interpolate", base_size=grid)
    assert largest_difference(native, same) <= 1e-5
    frames = grid[0] + 1 if family_of(model).limits(model)[0] > 1 else 1
    other = packed_outputs(model, samples, positions="interpolate", base_size=(frames, 2 * grid[1], grid[2]))
    assert largest_difference(native, other) > 1e-5


def test_samples_beyond_the_positions_are_refused_unless_stretched() -> None:
    sizes = {"latte": (6, 4, 4), "wan": (1, 2, 130), "cosmos rotary only": (1, 2, 258)}
    for name, size in sizes.items():
        model, samples = CASES[name].model(), zeros(CASES[name], size)
        packing = enable_packing(model)
        with pytest.raises(PackingError, match=r"Sample 0 has a token grid of .* but this model has \d+ positions"):
            samples.pack(packing)
        disable_packing(model)
        packing = enable_packing(model, positions="interpolate", base_size=(3, 4, 4))
        assert torch.isfinite(packed_forward(model, samples.pack(packing))).all()


def test_image_models_refuse_videos_also_where_positions_are_stretched() -> None:
    for name in ("sd3", "flux"):
        packing = enable_packing(CASES[name].model(), positions="interpolate", base_size=(1, 5, 6))
        with pytest.raises(PackingError, match=r"2 latent frames, but .* takes images"):
            zeros(CASES[name], (2, 4, 4)).pack(packing)


def test_wrong_choices_are_errors_that_say_what_to_use() -> None:
    stretch = {"positions": "interpolate", "base_size": (1, 4, 4)}
    cases = [
        ("pixart", stretch, "PixArtTransformer2DModel has no positions to stretch"),
        ("cosmos", stretch, "Learned positions cannot be stretched"),
        ("cogvideox-learned", {**stretch, "base_size": (1, 5, 6)}, "Learned positions cannot be stretched"),
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
