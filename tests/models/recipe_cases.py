"""The table of training recipes: a tiny pipeline each, and the loss of a sample by hand from its own components."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline

from hf_bucketing.conditions.references import ReferenceRule, RowReferences
from hf_bucketing.conditions.rows import RowConditions
from hf_bucketing.models.index import read_index
from hf_bucketing.models.objectives import Noised
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A sample, and the noise drawn for it.

    Attributes:
        pixels: `(3, F, H, W)` in [−1, 1].
        caption: Its caption.
        fps: Its frame rate; 1 for images.
        noise: `(C, f, h, w)`, of the latent's size.
        timestep: As the objective draws it: 1000 · σ for flow matching, else an index into the schedule; `(f,)` for
            models with one per frame.
        max_sequence_length: Text tokens.
        shown: What the data set holds of it beside pixels and caption, by name, as a collator returns it.
        guidance: Guidance scale that the model is given, if it embeds one, as the call of the pipeline takes it.
    """

    pixels: torch.Tensor
    caption: str
    fps: float
    noise: torch.Tensor
    timestep: torch.Tensor
    max_sequence_length: int
    shown: dict[str, torch.Tensor] = field(default_factory=dict)
    guidance: float = 1.0

    @property
    def first(self) -> torch.Tensor:
        """The frame that an image-to-video model is shown as the first, `(3, 1, H, W)`."""
        return self.shown.get("first_frame", self.pixels[:, :1])

    @property
    def last(self) -> torch.Tensor:
        """The frame that an image-to-video model is shown as the last, `(3, 1, H, W)`."""
        return self.shown.get("last_frame", self.pixels[:, -1:])


@dataclass(frozen=True, kw_only=True)
class RecipeCase:
    """A training recipe.

    Args:
        tiny: Name of its pipeline of small random weights.
        loss: Computes a sample's loss by hand, from the components of the stock pipeline alone: encodes as its call
            does, adds the noise, calls the transformer as its call does, and compares with the target.
        sizes: Frames, height and width in pixels of three samples; in buckets, only the first is taken, twice.
        render: Arguments of the pipeline's call for a render of few steps, but for the prompt, size and image.
        max_sequence_length: Text tokens.
        buckets: Heights and widths of a training run's buckets, in pixels.
        bucket_frames: Their numbers of frames, unless the model takes images.
        target_fps: Frames per second of a training run's videos, the longest of which have two seconds.
        max_tokens: Tokens of a training run's packs.
        images: Whether a training run's files contain images, beside videos.
        bucket_settings: Settings of a training run in buckets, beside those of all.
        captions: One per sample.
        components: Components with which diffusers loads the pipeline; None for those that it comes without.
        one_size: Whether the model runs a single height and width, which files in packs do not have.
        shown: Sets of conditions that samples are tried with, beside none; a training run's files have the last.
        needs_shown: Whether the model cannot do without.
        references: Frames, height and width of the references of each of the three samples, where they have some.
        tolerance: Largest difference of a loss by hand, relative and absolute.
    """

    tiny: str
    loss: Callable[[Any, Drawn], torch.Tensor]
    sizes: tuple[tuple[int, int, int], ...] = ((5, 32, 48), (1, 32, 32), (9, 48, 32))
    render: dict[str, Any]
    max_sequence_length: int = 64
    buckets: str = "32,48;48,32;32,32"
    bucket_frames: str = "1,5,9"
    target_fps: int = 4
    max_tokens: int = 256
    images: bool = True
    bucket_settings: dict[str, Any] = field(default_factory=dict)
    captions: tuple[str, str, str] = ('a square that says "red"', "x", "a large blue circle on grey")
    components: dict[str, Any] = field(default_factory=dict)
    one_size: bool = False
    shown: tuple[tuple[str, ...], ...] = ()
    needs_shown: bool = False
    references: tuple[tuple[tuple[int, int, int], ...], ...] = (((1, 20, 50), (1, 48, 16)),) * 3
    tolerance: float = 1e-6


BLOCKS_OF_32 = "32,64;64,32;32,32"
"""Buckets for models whose sides are multiples of 32 pixels."""

CONTROL = (("control",),)
"""What the data set shows a model of a control of each sample."""

FIRST_FRAME = (("first_frame",),)
"""What the data set shows an image-to-video model of a sample."""

REFERENCE = (("reference",),)
"""What the data set shows a model of other pictures and clips."""

IMAGES = ((1, 32, 48), (1, 32, 32), (1, 48, 32))
"""Sizes of samples for pipelines that make images."""


def draw_conditions(
    names: Sequence[str],
    size: Sequence[int],
    generator: torch.Generator,
    *,
    references: Sequence[tuple[int, int, int]] = (),
) -> dict[str, Any]:
    """Draw conditions for a sample of a size, of pixels that 8 bits hold, as decoded media have them."""
    frames, height, width = size
    sizes = {
        "control": (3, frames, height, width),
        "mask": (1, frames, height, width),
        "face": (3, frames, 20, 24),
    }

    def draw(name: str) -> Any:
        if name == "reference":
            return tuple(draw_levels((3, *reference)) * 2 - 1 for reference in references)
        levels = draw_levels(sizes.get(name, (3, 1, height, width)))
        return levels if name == "mask" else levels * 2 - 1

    def draw_levels(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator) / 255

    return {name: draw(name) for name in names}


def stock_pipeline(folder: Path, **components: Any) -> Any:
    """Load a whole pipeline as diffusers does; a modular one without the block that rewrites prompts."""
    if read_index(str(folder)).is_modular:
        blocks = ModularPipeline.from_pretrained(str(folder)).blocks
        blocks.sub_blocks.pop("prompt_upsampler", None)
        pipeline = blocks.init_pipeline(str(folder))
        pipeline.load_components()
        return pipeline
    return DiffusionPipeline.from_pretrained(folder, **components)


@torch.no_grad()
def clean_image(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode an image `(3, 1, H, W)` to `(1, C, h, w)`, so that the usual way of decoding images gives it back."""
    vae = pipeline.vae
    latent = vae.encode(pixels[None, :, 0]).latent_dist.mode()
    return (latent - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


@contextmanager
def encoding_to_the_mode(vae: Any) -> Iterator[None]:
    """Let a pipeline that samples the VAE's posterior take its mode inside a `with` block."""
    encode = vae.encode
    vae.encode = lambda pixels: SimpleNamespace(latents=encode(pixels).latent_dist.mode())
    try:
        yield
    finally:
        del vae.encode


def samples_of(
    recipe: Recipe,
    latents: torch.Tensor | None = None,
    *,
    fps: Sequence[float],
    timesteps: Sequence[float] | None = None,
    captions: Sequence[str] | None = None,
) -> Samples:
    """Make samples with latents that are their own targets."""
    count = len(fps)
    latents = torch.zeros(count, recipe.latent_channels, 1, 4, 4) if latents is None else latents
    steps = torch.tensor([7.0] * count if timesteps is None else list(timesteps))
    text = recipe.encode_text(list(captions or ["red"] * count))
    rows = list(latents)
    return Samples(noised=Noised(rows, rows, steps, rows), text=text, fps=torch.tensor(list(fps)))


def conditions_of(references: Sequence[Sequence[int]]) -> RowConditions:
    """Return the conditions of rows of which each has one reference, by its frames, height and width."""
    return RowConditions.of(RowReferences.of_lists([[*size] for size in references], rule=ReferenceRule()))
