"""LTX-Video: latents as sequences of tokens, positions in seconds and pixels; flow matching, shifted by size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ...conditions.condition import Condition
from ...conditions.references import ReferenceRule
from ...conditions.shares import APPENDED, BLACK, FRAMES
from ...devices import to_device
from ...media.sample import frame_rates
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Draw, Family, Transformer
from ...packing.names import Grid
from ...packing.positions import Tables, axis_coordinates, over_grid
from ...packing.processors import PackedAttnProcessor, rotate_channels
from ...packing.strip_positions import position_strips
from ...packing.texts import TextTokens
from ..first_frame import FirstFrameRecipe
from ..recipe import Recipe
from ..samples import KEYFRAME_PLACES, REFERENCES, Samples

SCALES = "rope_interpolation_scale"


class PackedLTXVideoAttnProcessor(PackedAttnProcessor):
    """Self- and cross-attention of LTX-Video's `LTXAttention` over the strips of a pack."""

    norms_whole_width = True

    def rotate(self, tokens: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Rotate neighbouring channels of `(N, H, D)` by tables `(strips, strip_length, H·D)`."""
        return rotate_channels(tokens, rotary)


class LTXFamily(Family):
    """Packing of `LTXVideoTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `rope_interpolation_scale`, `(n, 3)`, is computed by the pipeline from a sample's frame rate and the autoencoder:
    temporal stride ÷ frame rate, spatial stride, spatial stride. With a fourth number, the temporal stride, tokens lie
    where `LTXConditionPipeline` places them: the first latent frame of a causal autoencoder is one frame of pixels.
    Further numbers are the frames of pixels at which the sample's references begin, one after another, and 0 for one
    that lies over the sample: so the pipeline shows keyframes other than the first, as references of the sample's
    height and width, each encoded by itself.
    """

    title = "LTX-Video"
    transformer_class = "LTXVideoTransformer3DModel"
    tested_forwards = ("3a95e0c2f781",)
    processor_class = PackedLTXVideoAttnProcessor
    stock_processors = ("LTXVideoAttnProcessor",)
    interpolates = True
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    timesteps_per = "token"
    original_names = (("transformer_blocks.**", "transformer_blocks.**"),)
    text = TextTokens(rows="per_strip", mask="encoder_attention_mask")
    max_references = UNLIMITED

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return seconds per latent frame and pixels per latent row and column, drawn for 24 frames a second."""
        return {SCALES: lambda grids: torch.tensor([[8 / 24, 32.0, 32.0]]).repeat(len(grids), 1)}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        patch = self.patch(transformer.config)
        tables = Tables(partial(_locations, patch, base_size)), Tables(partial(_reference_locations, patch))
        locate = partial(_locate, *tables)
        return [transformer.rope.register_forward_pre_hook(locate)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        return {**super().inputs(rows), **dict(zip(("num_frames", "height", "width"), rows.grid, strict=True))}

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the coordinates of the tokens, so that each row may have its own frame rate."""
        patch, rope, device = self.patch(transformer.config), transformer.rope, rows.latents.device
        tokens, numbers = _locations(patch, None, rope, rows.grid, device)
        if rows.references:
            pairs = zip((tokens, numbers), _reference_locations(patch, rope, rows.grids, device), strict=True)
            tokens, numbers = map(torch.cat, pairs)
        count = len(rows.latents)
        scaled = _scaled(tokens.expand(count, -1, -1), numbers.expand(count, -1), rows.conditioning[SCALES])
        return {SCALES: None, "video_coords": scaled}


def _locations(
    patch: Grid, base_size: Grid | None, rope: torch.nn.Module, grid: Grid, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    axes = axis_coordinates(grid, base_size, device=device)
    tokens = torch.stack(over_grid([axis * side for axis, side in zip(axes, patch, strict=True)]), 1)
    return tokens, numbers_of_grids([grid], device=device)


def _reference_locations(
    patch: Grid, rope: torch.nn.Module, grids: tuple[Grid, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place references over their sample: tokens of one that is smaller by a factor cover as much more."""
    located = [_locations(patch, None, rope, grid, device)[0] for grid in grids[1:]]
    return over_sample(located, grids), numbers_of_grids(grids[1:], first=1, device=device)


def numbers_of_grids(grids: Sequence[Grid], *, first: int = 0, device: torch.device) -> torch.Tensor:
    """Return the number of the grid of each token, `(tokens,)`: 0 for a sample's own, from 1 for its references.

    Example:
        >>> numbers_of_grids([(1, 1, 2), (1, 1, 1)], first=1, device=torch.device("cpu")).tolist()
        [1, 1, 2]
    """
    pairs = enumerate(grids, first)
    return torch.cat([torch.full((math.prod(grid),), number, device=device) for number, grid in pairs])


def first_frames(numbers: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Return the frame of pixels at which the reference of each token begins, `(rows, tokens)`.

    Args:
        numbers (`torch.Tensor` of shape `(rows, tokens)`): What [`numbers_of_grids`] returns.
        begins (`torch.Tensor` of shape `(rows, references)`): Frames; of further references, as of samples, it is 0.
    """
    begins = F.pad(begins, (1, 1))
    return begins.gather(1, numbers.clamp(max=begins.shape[1] - 1))


def over_sample(references: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
    """Return coordinates of the tokens of references, `(tokens, 3, …)` each, in those of their sample, one by one."""
    pairs = zip(references, reference_factors(grids), strict=True)
    return torch.cat([torch.cat([tokens[:, :1], tokens[:, 1:] * factor], 1) for tokens, factor in pairs])


def reference_factors(grids: Sequence[Grid]) -> list[int]:
    """Return how many times a sample is as high and wide as each of its references, `reference_downscale_factor`.

    It is the smallest factor that gives the reference's height and width, rounded down. A reference that is no
    smaller copy of its sample has 1.

    Example:
        >>> reference_factors([(7, 23, 31), (7, 5, 7), (1, 23, 31), (1, 16, 16)])
        [4, 1, 1]
    """
    (_, height, width), *references = grids
    factors = [1 + max(height // (rows + 1), width // (columns + 1)) for _, rows, columns in references]
    return [
        factor if (height // factor, width // factor) == grid[1:] else 1
        for factor, grid in zip(factors, references, strict=True)
    ]


def _locate(tables: Tables, references: Tables, rope: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden_states, _, _, _, scales, _ = args
    device = hidden_states.device
    tokens, numbers = position_strips(
        active_layout(), lambda grid: tables(rope, grid, device), lambda grids: references(rope, grids, device)
    )
    return hidden_states, *[None] * 4, _scaled(tokens, numbers, scales)


def _scaled(tokens: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the coordinates of tokens, `(rows, tokens, 3)`, in seconds and pixels, `(rows, 3, tokens)`.

    `numbers`, `(rows, tokens)`, are those of [`numbers_of_grids`].

    The operations are those of the pipelines, in their order: the model multiplies seconds by some thousands.
    """
    scales = to_device(scales, tokens.device, dtype=tokens.dtype)[:, None]
    if scales.shape[-1] == 3:
        return (tokens * scales).transpose(1, 2)
    stride, begins = scales[..., 3:4], first_frames(numbers, scales[:, 0, 4:])
    frames = (tokens[..., :1] * stride + 1 - stride).clamp(min=0) + begins[..., None]
    return torch.cat([frames * (scales[..., :1] / stride), tokens[..., 1:] * scales[..., 1:3]], -1).transpose(1, 2)


class LTXRecipe(Recipe):
    """Recipe of `LTXPipeline`; see [`Recipe`].

    Samples with references train in-context adapters: references are clean, have timestep 0 and lie over their
    sample, at an equal or smaller size (`--reference_downscale_factor` when the data set is prepared). LTX-Video's own
    trainer trains these; the calls of diffusers' pipelines take no references.
    """

    pipeline_class = "LTXPipeline"
    family: ClassVar[Family] = LTXFamily()
    conditions: ClassVar[tuple[Condition, ...]] = (ReferenceRule(resample="bilinear"),)
    default_sequence_length = 128
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((512, 704), (480, 704), (768, 1216), (704, 1216))
    """The pipeline's default and the size of its example, and the two large ones of the model card."""

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """All: each token has a timestep."""
        return (*FRAMES, BLACK, *super().drawn_kinds)

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of the VAE, which those of the first versions give by their patch and their scaling."""
        halvings = sum(vae["spatio_temporal_scaling"])
        temporal, spatial = vae.get("temporal_compression_ratio"), vae.get("spatial_compression_ratio")
        return temporal or vae["patch_size_t"] * 2**halvings, spatial or vae["patch_size"] * 2**halvings

    def latent_statistics(self) -> tuple[Any, Any]:
        return self.pipeline.vae.latents_mean, self.pipeline.vae.latents_std

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        seconds = self.spec.temporal_stride / frame_rates(samples.fps).double()
        sides = torch.full_like(seconds, float(self.spec.spatial_stride))
        return {SCALES: torch.stack([seconds, sides, sides], 1)}


class LTXImageToVideoRecipe(FirstFrameRecipe, LTXRecipe):
    """Recipe of `LTXImageToVideoPipeline`; see [`FirstFrameRecipe`]."""

    pipeline_class = "LTXImageToVideoPipeline"


class LTXConditionRecipe(LTXRecipe):
    """Recipe of `LTXConditionPipeline` (LTX-Video 0.9.5 and later), called without images or videos.

    The pipeline places tokens in time as the causal VAE does, and has no shift by size.
    """

    pipeline_class = "LTXConditionPipeline"
    default_sequence_length = 256

    @classmethod
    def text_rule(cls) -> str:
        """Return a name of its own: this pipeline tells its text encoder where captions are padded."""
        return "LTXConditionRecipe"

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """All, and frames that are appended."""
        return (*super().drawn_kinds, *APPENDED)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Add the temporal stride, by which the first latent frame is shorter, and the places of appended frames."""
        scales = super().conditioning(samples)[SCALES]
        strides = torch.full_like(scales[:, :1], float(self.spec.temporal_stride))
        return {SCALES: torch.cat([scales, strides, keyframe_places(samples).to(scales)], 1)}


def keyframe_places(samples: Samples) -> torch.Tensor:
    """Return the frames of pixels at which the references of samples and then their keyframes begin, `(n, most)`.

    It is 0 for references, and for keyframes that a sample lacks; there is no column where no sample has keyframes.
    """
    places = samples.conditions.get(KEYFRAME_PLACES, [[]] * len(samples.fps))
    before = map(len, samples.conditions.get(REFERENCES, [[]] * len(places)))
    rows = [[0.0] * count + list(frames) if frames else [] for count, frames in zip(before, places, strict=True)]
    most = max(map(len, rows))
    return torch.tensor([row + [0.0] * (most - len(row)) for row in rows]).view(len(rows), most)


RECIPES = (
    LTXRecipe,
    LTXImageToVideoRecipe,
    LTXConditionRecipe,
)
