"""CogVideoX and EasyAnimate: video, with the text in front of it in one attention sequence.

Both attend to the padding of a text as encoded: pass the embeddings as the pipelines make them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid, get_3d_rotary_pos_embed

from ...buckets.sizes import LatentSpec
from ...conditions.condition import Condition
from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Draw, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import Tables, axis_coordinates, over_grid, shape_only
from ...packing.processors import Rotary
from ...packing.strip_positions import position_strips
from ...packing.strips import token_grid
from ...packing.texts import TextTokens
from ..control import ControlRecipe, control_as
from ..first_frame import ENDS, end_frames
from ..joint import JointFamily
from ..loading import read_config
from ..positions import one_table, rotary_tables
from ..recipe import Recipe
from ..samples import SHOWN_FRAMES, Conditions, Media, Samples
from ..shift import ShiftLaw

if TYPE_CHECKING:
    from diffusers.models.embeddings import CogVideoXPatchEmbed

OFFSET = 2.0
"""The `ofs` that CogVideoX' image-to-video pipeline always passes."""
EASYANIMATE_TEXT = 256
"""Tokens of a text of EasyAnimate, with its padding, in every call of the pipeline."""


class CogVideoXFamily(JointFamily):
    """CogVideoX 2B, 5B and 1.5: sincos, rotary or learned positions; text before the video in one sequence."""

    title = "CogVideoX 2B, 5B and 1.5"
    transformer_class = "CogVideoXTransformer3DModel"
    tested_forwards = ("1d9ec921fa79",)
    stock_processors = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
    text = TextTokens(rows="slots", channels="text_embed_dim", padding="encoded_padding")
    interpolates = True
    strips_have_positions = False
    latents_as = "frames_first"
    attention_kwargs = "attention_kwargs"
    joint_norms = ("transformer_blocks.*.norm1", "transformer_blocks.*.norm2")
    text_outputs = (1, 3)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse a table of positions with patches of several frames, which the model itself cannot run."""
        if has_table(transformer.config) and transformer.config.get("patch_size_t") is not None:
            raise PackingError(
                "This CogVideoX transformer has a table of positions and patch_size_t, which do not go together."
            )
        super().check(transformer, strip_length=strip_length)

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also samples that do not have the size of learned positions."""
        super().check_layout(transformer, layout, stretched=stretched)
        height, width = base_grid(transformer)
        for sample, grid in enumerate(layout.grids):
            if transformer.config.use_learned_positional_embeddings and grid[1:] != (height, width):
                raise PackingError(
                    f"Sample {sample} has a token grid of {grid}, but the learned positions of this model are for "
                    f"{height}×{width} tokens per frame (sample_height, sample_width); it cannot run other sizes."
                )

    def limits(self, transformer: Transformer) -> Grid:
        """Return the sides of the sample size for CogVideoX 1.5, whose positions are cut from it."""
        if transformer.config.get("patch_size_t") is None:
            return UNLIMITED, UNLIMITED, UNLIMITED
        return UNLIMITED, *base_grid(transformer)

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return grids of the one size of learned positions, where the model has these."""
        grids = super().trial_grids(transformer)
        if not transformer.config.use_learned_positional_embeddings:
            return grids
        return [(frames, *base_grid(transformer)) for frames, _, _ in grids]

    def text_length(self, config: Mapping[str, Any]) -> int | None:
        """Return the length of the table of positions, where text is part of it."""
        return int(config.get("max_text_seq_length", 226)) if has_table(config) else None

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return `ofs`, `(n,)`, for the image-to-video model of 1.5."""
        return {"ofs": lambda grids: torch.full((len(grids),), 2.0)} if transformer.config.ofs_embed_dim else {}

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables that its pipeline would pass."""
        dim, base = module.config.attention_head_dim, base_grid(module)
        if base_size is not None:
            axes = list(axis_coordinates(grid, base_size, device=device))
            if module.config.get("patch_size_t") is None:
                corners = zip(*centred(*base_size[1:], base=base), strict=True)
                for axis, (start, stop) in enumerate(corners, start=1):
                    last = max(base_size[axis] - 1, 1)  # the base size's tokens span start to stop·last/(last + 1)
                    axes[axis] = start + axes[axis] * (stop * last / (last + 1) - start) / last
            return rotary_tables((dim // 4, dim // 8 * 3, dim // 8 * 3), axes)
        frames, height, width = grid
        crop: dict[str, Any] = {"crops_coords": centred(height, width, base=base)}
        if module.config.get("patch_size_t") is not None:
            crop = {"crops_coords": None, "grid_type": "slice", "max_size": base}
        cosines, sines = get_3d_rotary_pos_embed(
            embed_dim=dim, grid_size=(height, width), temporal_size=frames, device=device, **crop
        )
        return cosines, sines

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass each sample's own rotary positions, and add each sample's own table instead of the module's."""
        embed = transformer.patch_embed
        if base_size is not None and transformer.config.use_learned_positional_embeddings:
            raise PackingError("Learned positions cannot be stretched to a base size; use positions='native'.")
        rotates = transformer.config.use_rotary_positional_embeddings
        handles = super().hook_positions(transformer, base_size) if rotates else self.hook_norms(transformer)
        if has_table(transformer.config):
            tables = Tables(partial(one_table, partial(sincos_table, base_size=base_size)))
            handles += [_WithoutTable(embed), embed.register_forward_hook(partial(_add_table, tables))]
        return handles

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        if not transformer.config.use_rotary_positional_embeddings:
            return {}
        return {"image_rotary_emb": self.positions(transformer, rows.grid, None, device=rows.latents.device)}


def _add_table(
    tables: Tables, embed: CogVideoXPatchEmbed, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    layout = active_layout()
    (table,) = position_strips(layout, lambda grid: tables(embed, grid, output.device))
    return output + F.pad(table.to(output.dtype), (0, 0, output.shape[1] - table.shape[1], 0))  # not to text


class _WithoutTable:
    """Keep a patch embedding from adding positions until removed: the table does not fit a strip's text slots."""

    def __init__(self, embed: CogVideoXPatchEmbed) -> None:
        self.embed = embed
        self.flags = embed.use_positional_embeddings, embed.use_learned_positional_embeddings
        embed.use_positional_embeddings = embed.use_learned_positional_embeddings = False

    def remove(self) -> None:
        """Let the patch embedding add its positions again."""
        self.embed.use_positional_embeddings, self.embed.use_learned_positional_embeddings = self.flags


def has_table(config: Mapping[str, Any]) -> bool:
    """Return whether a transformer adds positions to its tokens, beside or instead of rotating queries and keys."""
    rotates = config.get("use_rotary_positional_embeddings", False)
    return not rotates or bool(config.get("use_learned_positional_embeddings", False))


def base_grid(transformer: Transformer) -> tuple[int, int]:
    """Return rows and columns of tokens of the model's configured size."""
    config = transformer.config
    return config.sample_height // config.patch_size, config.sample_width // config.patch_size


def centred(height: int, width: int, *, base: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the corners of a grid scaled to fit into the middle of the whole, as in CogVideoX 1.0."""
    scale = min(base[0] / height, base[1] / width)
    fitted = round(scale * height), round(scale * width)
    top, left = (round((side - part) / 2.0) for side, part in zip(base, fitted, strict=True))
    return (top, left), (top + fitted[0], left + fitted[1])


def sincos_table(embed: CogVideoXPatchEmbed, grid: Grid, base_size: Grid | None, device: torch.device) -> torch.Tensor:
    """Return the positions that the patch embedding adds to the tokens of a sample, `(t·h·w, dim)`."""
    if base_size is not None:
        scales = (embed.temporal_interpolation_scale, *[embed.spatial_interpolation_scale] * 2)
        dims = (embed.embed_dim // 4, *[3 * embed.embed_dim // 8] * 2)
        axes = axis_coordinates(grid, base_size, device=device)
        frame_part, row_part, column_part = over_grid(
            [
                get_1d_sincos_pos_embed_from_grid(dim, axis / scale, output_type="pt")
                for dim, axis, scale in zip(dims, axes, scales, strict=True)
            ]
        )
        return torch.cat([frame_part, column_part, row_part], -1)
    height, width = grid[1] * embed.patch_size, grid[2] * embed.patch_size
    frames = (grid[0] - 1) * embed.temporal_compression_ratio + 1
    joint: torch.Tensor = embed.pos_embedding
    if (height, width, frames) != (embed.sample_height, embed.sample_width, embed.sample_frames):
        joint = embed._get_positional_embeddings(height, width, frames, device=device)
    return joint[0, embed.max_text_seq_length :]


class CogVideoXRecipe(Recipe):
    """Recipe of `CogVideoXPipeline`; see [`Recipe`].

    diffusers' training script weights the error of `x_0` by `1 / (1 − ᾱ_t)`, which for a model that predicts
    velocities is their mean squared error, at uniformly drawn timesteps; so does this recipe.

    CogVideoX 1.5, which has patches of two latent frames, sees the first latent frame twice: its pipeline renders one
    more, and drops it.
    """

    pipeline_class = "CogVideoXPipeline"
    family = CogVideoXFamily()
    denoises = True
    default_sequence_length = 226
    native_sizes = ((480, 720), (768, 1360))
    """The sizes of 1.0 and 1.5."""

    @classmethod
    def read_sequence_length(cls, name_or_path: str) -> int:
        named = read_config(name_or_path, "transformer").get("max_text_seq_length")
        return named or cls.default_sequence_length

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer, and whether the first frame is repeated."""
        repeats_first = read_config(name_or_path, "transformer").get("patch_size_t") is not None
        return replace(super().read_spec(name_or_path), repeats_first=repeats_first)

    @property
    def media_rule(self) -> str:
        """How often the first latent frame is repeated, if it is."""
        return f"{self.spec.num_repeats} repeated latent frames" if self.spec.num_repeats else ""

    def latent_statistics(self) -> tuple[Any, Any]:
        """Return 0 and 1, because the pipeline does nothing but scale latents."""
        return [0.0], [1.0]

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode and scale `(B, 3, F, H, W)`; repeat the first latent frame where it fills a patch (1.5)."""
        latents = super().encode_latents(pixel_values)
        return torch.cat([latents[:, :, :1]] * self.spec.num_repeats + [latents], 2)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        if not self.config.get("ofs_embed_dim"):
            return {}
        return {"ofs": torch.full_like(samples.fps, OFFSET)}

    def refusal(self, samples: Samples) -> str | None:
        """Refuse sizes for which the model has no positions."""
        grid = token_grid(samples.noised.latents[0], self.family.patch(self.transformer.config), sample=0)
        try:
            self.family.check_grid(self.transformer, grid)
        except PackingError as error:
            return str(error)
        return None


class CogVideoXImageToVideoRecipe(CogVideoXRecipe):
    """Recipe of `CogVideoXImageToVideoPipeline`; see [`Recipe`].

    The latent of the first frame, encoded alone, and zeros for the other frames are further channels. The image is
    clean: this recipe does not have the noise that diffusers' training script puts on it; its dropout, of 5 %, is
    `--condition first_frame:0.95,none:0.05`. Images have nothing to continue; they get zeros, as samples whose image
    is dropped.
    """

    pipeline_class = "CogVideoXImageToVideoPipeline"
    takes_image = True
    conditions = (Condition(name=ENDS[0], enters="channels", pictures_only=True),)

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """The first frame."""
        return ENDS[:1]

    @property
    def media_rule(self) -> str:
        """Also that the first frame is encoded."""
        return f"{super().media_rule}, conditions of 1 frame"

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Encode the first frame of videos, the data set's or their own: `image_latents`, zeros for images."""
        if pixel_values.shape[2] == 1:
            return {"image_latents": torch.zeros_like(latents[:, :, :1])}
        vae = self.pipeline.vae
        image = vae.encode(end_frames(pixel_values, conditions).to(vae.dtype)).latent_dist.mode()
        factor = vae.config.scaling_factor
        return {"image_latents": image / factor if vae.config.invert_scale_latents else image * factor}

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the latent of a blank first frame, `(C, 1, h, w)`."""
        return {"image_latents": torch.zeros_like(latent[:, :1])}

    def added_channels(self, samples: Samples) -> list[torch.Tensor]:
        """Return the first frame's latent, unless a run draws not to show it, and zeros for the other frames."""
        latents, images = samples.noised.latents, samples.conditions["image_latents"]
        frames = samples.conditions.get(SHOWN_FRAMES, [(True,)] * len(latents))
        visible_images = [image * bool(visible[0]) for image, visible in zip(images, frames, strict=True)]
        return [
            F.pad(image, (0, 0, 0, 0, 0, noisy.shape[1] - 1))
            for noisy, image in zip(latents, visible_images, strict=True)
        ]

    def clean_parts(self, samples: Samples) -> None:
        """Return no clean latents: the first frame is further channels."""


class CogVideoXFunControlRecipe(ControlRecipe, CogVideoXRecipe):
    """Recipe of `CogVideoXFunControlPipeline`; see [`ControlRecipe`].

    Unlike others of CogVideoX 1.5, it repeats no latent frame, so that videos have an even number of them.
    """

    pipeline_class = "CogVideoXFunControlPipeline"
    conditions = (control_as("control_video"),)

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        return replace(super().read_spec(name_or_path), repeats_first=False)


class EasyAnimateFamily(JointFamily):
    """EasyAnimate 5.1: video, at positions stretched over those of 480p; text in joint attention."""

    title = "EasyAnimate 5.1"
    transformer_class = "EasyAnimateTransformer3DModel"
    tested_forwards = ("7422f85b7474",)
    stock_processors = ("EasyAnimateAttnProcessor2_0",)
    text = TextTokens(rows="slots", channels="text_embed_dim", padding="encoded_padding", length=EASYANIMATE_TEXT)
    strips_have_positions = False
    position_module = "rope_embedding"
    unused_at_end = ("attn1.to_add_out", "txt_ff")
    joint_norms = ("transformer_blocks.*.norm1", "transformer_blocks.*.norm2")
    text_outputs = (1, 3)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse blocks in which tokens and text share projections, texts of two encoders, and further channels."""
        config = transformer.config
        if config.mmdit_layers < config.num_layers or config.text_embed_dim_t5 is not None:
            raise PackingError(
                "Packing knows EasyAnimate transformers whose blocks all have projections of their own for text "
                f"(mmdit_layers of at least num_layers) and that read one text (no text_embed_dim_t5); this one has "
                f"mmdit_layers={config.mmdit_layers}, num_layers={config.num_layers} and "
                f"text_embed_dim_t5={config.text_embed_dim_t5}. Train it with bucketed batches."
            )
        if config.in_channels != config.out_channels:
            raise PackingError(
                f"The forward of EasyAnimate makes as many channels as its latents have, {config.out_channels}, and "
                f"this transformer takes {config.in_channels}: it is for inpainting or controls, whose latents come "
                "in an argument of their own. Use the text-to-video model, or train this one with bucketed batches."
            )
        super().check(transformer, strip_length=strip_length)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        latent = shape_only(torch.empty(()), grid, (1, module.patch_size, module.patch_size))
        # module.forward instead of module(…), which would call the hook again
        return tuple(to_device(table, device) for table in module.forward(latent))


class EasyAnimateRecipe(Recipe):
    """Recipe of `EasyAnimatePipeline`; see [`Recipe`]."""

    pipeline_class = "EasyAnimatePipeline"
    family = EasyAnimateFamily()
    default_sequence_length = EASYANIMATE_TEXT
    prompt_outputs = ("values",)
    native_sizes = ((512, 512),)
    call_defaults = MappingProxyType({"negative_prompt": ""})
    """Without any, the pipeline does not guide."""

    def shift(self) -> float | ShiftLaw:
        """Return the scheduler's shift, or what one that shifts by size makes of the 1 that the pipeline passes."""
        config = self.pipeline.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return super().shift()
        return math.e if config.get("time_shift_type", "exponential") == "exponential" else 1.0


RECIPES = (
    CogVideoXRecipe,
    CogVideoXImageToVideoRecipe,
    CogVideoXFunControlRecipe,
    EasyAnimateRecipe,
)
