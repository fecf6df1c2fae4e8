"""Where packing places the tokens of the joint families: as the model does in a sample alone, or stretched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.processors import joint
from tests.models.joint_cases import cogvideox_rotary, flux_ids
from tests.packing.packing_cases import CASES, Samples, largest_difference

Tables = tuple[torch.Tensor, ...]
ROTARY_ALONE: dict[str, Callable[[Any, torch.Tensor], Tables]] = {
    "cogvideox": cogvideox_rotary,
    "cogvideox-1.5": cogvideox_rotary,
    "hunyuan": lambda model, latent: model.rope(latent[None]),
    "flux": lambda model, latent: model.pos_embed(flux_ids(latent)),
}
ADDED = {"sd3": "pos_embed", "cogvideox-sincos": "patch_embed", "cogvideox-learned": "patch_embed"}
STRETCHED = [*ROTARY_ALONE, "sd3", "cogvideox-sincos"]


def added_alone(model: Any, latent: torch.Tensor) -> Tables:
    """Return what the patch embedding makes of a sample alone."""
    if hasattr(model, "pos_embed"):
        return (model.pos_embed(latent.transpose(0, 1))[0],)
    text = torch.zeros(1, model.config.max_text_seq_length, 16)
    return (model.patch_embed(text, latent.transpose(0, 1)[None])[0, text.shape[1] :],)


def packed_tables(name: str, model: Any, sizes: list[tuple[int, ...]], **options: Any) -> list[Tables]:
    """Return what places the tokens of zero latents of these sizes, packed."""
    case, seen = CASES[name], []
    samples = Samples(case=case, order=(0,) * len(sizes))
    samples.latents = [torch.zeros(case.channels, *size) for size in sizes]
    batch = samples.pack(enable_packing(model, strip_length=7, **options))
    with pytest.MonkeyPatch.context() as patch:
        if name in ADDED:
            handle = getattr(model, ADDED[name]).register_forward_hook(
                lambda m, args, out: seen.append((out[:, -7:],))
            )
        rotate = joint._rotate
        patch.setattr(joint, "_rotate", lambda tokens, rotary: seen.append(rotary) or rotate(tokens, rotary))
        packed_forward(model, batch)
    if name in ADDED:
        handle.remove()
    disable_packing(model)
    return [tuple(table.flatten(0, 1)[slice(*span)] for table in seen[0]) for span in batch.layout.spans]


@pytest.mark.parametrize("name", [*ROTARY_ALONE, *ADDED])
@torch.no_grad()
def test_native_positions_are_those_of_the_sample_alone_bit_for_bit(name: str) -> None:
    case = CASES[name]
    model = case.model()
    alone = ROTARY_ALONE.get(name, added_alone)
    expected = [alone(model, torch.zeros(case.channels, *size)) for size in case.sizes]
    for one, other in zip(expected, packed_tables(name, model, list(case.sizes)), strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("name", STRETCHED)
@torch.no_grad()
def test_stretched_positions_are_every_other_one_of_a_sample_twice_as_large(name: str) -> None:
    model = CASES[name].model()
    patch, grid = family_of(model).patch(model), (1, 2, 3)
    if name.startswith(("cogvideox", "hunyuan")):
        grid = (2, 2, 3)
    large = tuple(2 * side if axis or grid[0] > 1 else 1 for axis, side in enumerate(grid))
    (size, half) = (tuple(a * b for a, b in zip(one, patch, strict=True)) for one in (large, grid))
    (native,) = packed_tables(name, model, [size])
    (stretched,) = packed_tables(name, model, [half], positions="interpolate", base_size=large)
    for one, other in zip(native, stretched, strict=True):
        every_other = one.unflatten(0, large)[:: 2 if large[0] > 1 else 1, ::2, ::2].flatten(0, 2)
        assert not torch.equal(one[: len(other)], other)
        assert largest_difference([every_other], [other]) <= 1e-6


@pytest.mark.parametrize("name", STRETCHED)
@torch.no_grad()
def test_the_base_size_as_the_samples_own_grid_changes_nothing_and_another_does(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case, order=(0, 4))
    samples.latents[1] = samples.latents[0].flip(2)

    def run(**options: Any) -> list[torch.Tensor]:
        batch = samples.pack(enable_packing(model, strip_length=4, **options))
        outputs = batch.unpack(packed_forward(model, batch))
        disable_packing(model)
        return outputs

    native, own = run(), samples.pack(enable_packing(model)).layout.grids[0]
    disable_packing(model)
    assert largest_difference(native, run(positions="interpolate", base_size=own)) <= 1e-5
    other = run(positions="interpolate", base_size=(own[0], 2 * own[1], own[2]))
    assert largest_difference(native, other) > 1e-5


@torch.no_grad()
def test_between_two_entries_of_a_table_lies_their_weighted_mean() -> None:
    model = CASES["sd3"].model()
    model.pos_embed.proj.weight.zero_()
    model.pos_embed.proj.bias.zero_()
    ((table,),) = packed_tables("sd3", model, [(1, 4, 6)], positions="interpolate", base_size=(1, 3, 1))
    ((base,),) = packed_tables("sd3", model, [(1, 6, 2)])
    assert torch.allclose(table[[0, 3]], torch.stack([base[0], (base[1] + base[2]) / 2]), atol=1e-6)
    assert torch.equal(table[0], table[2]), "one column stretched to three: the table ends there"


def test_what_cannot_be_stretched_is_refused_with_the_reason() -> None:
    stretch = {"positions": "interpolate", "base_size": (1, 5, 6)}
    model = CASES["cogvideox-learned"].model()
    with pytest.raises(PackingError, match="Learned positions cannot be stretched"):
        enable_packing(model, **stretch)
    enable_packing(model)
    for name in ("sd3", "flux"):
        samples = Samples(case=CASES[name], order=(0,))
        samples.latents = [torch.zeros(4, 2, 4, 4)]
        packing = enable_packing(CASES[name].model(), **stretch)
        with pytest.raises(PackingError, match=r"2 latent frames, but .* takes images"):
            samples.pack(packing)
