"""Wan and its kin: rotary positions over frames, rows and columns; text and image tokens in cross-attention.

The models attend to the zeros after a text (512 tokens): pass the embeddings with them, as the pipelines make them, or
with a text_mask. They are trained by flow matching, with a fixed shift.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ...buckets.sizes import Size
from ...conditions.condition import Condition
from ...conditions.names import REFERENCE
from ...conditions.references import ReferenceRule
from ...conditions.shares import BLACK, FRAMES, ConditionShares
from ...devices import to_device
from ...errors import BucketingError, PackingError, quoted
from ...packing.batch import PackedBatch, Rows
from ...packing.family import Draw, Family, TimestepsPer, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, shape_only
from ...packing.processors import Keys, PackedAttnProcessor, Rotary, project
from ...packing.texts import TextTokens
from ..first_frame import END_CONDITIONS, ENDS, FirstFrameRecipe, end_frames, pictures
from ..loss_mask import LOSS_MASK
from ..objectives import DiffusionForcing
from ..positions import rotary_tables
from ..recipe import Recipe
from ..samples import SHOWN_FRAMES, Conditions, Media, Samples

TEXT_LENGTH = 512
"""Text tokens that diffusers' image-to-video models expect behind the image tokens."""
IMAGE_TOKENS = "encoder_hidden_states_image"
"""Argument of the transformer's forward for the image encoder's output."""
CLIP_TOKENS = 257
"""Tokens that CLIP ViT-H, Wan's image encoder, makes of an image."""
IMAGE_LATENTS = "image_latents"
"""Condition of a sample: latents of the clip whose frames are grey but for the first (and the last)."""
SKYREELS_FPS = "fps"
"""Argument of the forward for the number of the frame rate, of models of SkyReels-V2 that embed it."""
VACE_CONTROL, VACE_SCALE = "control_hidden_states", "control_hidden_states_scale"
"""Arguments of the forward of VACE for the control channels, and their scale by layer."""


class PackedWanAttnProcessor(PackedAttnProcessor):
    """Self- and cross-attention of Wan's `WanAttention` over the strips of a pack.

    In image-to-video models, the image tokens of all samples precede the texts, in one batch row.
    """

    norms_whole_width = True

    def text_keys(self, attn: Any, text: torch.Tensor, layout: PackedLayout) -> Sequence[Keys]:
        """Return the keys of the texts, and of image-to-video models those of the image tokens."""
        if attn.add_k_proj is None:
            return super().text_keys(attn, text, layout)
        stored = layout.num_stored_text_tokens
        image, text = text.split([text.shape[1] - stored, stored], 1)
        key, value = project(attn, image, "add_k_proj", "add_v_proj")
        key, value = self.split_heads(attn, key, attn.norm_added_k), self.split_heads(attn, value)
        return [*super().text_keys(attn, text, layout), Keys(key, value, layout.even_segments(image.shape[1]))]

    def rotate(self, tokens: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Rotate neighbouring channels of `(N, H, D)` as Wan does, which does not round float64 tokens to float32."""
        cosines, sines = (table.flatten(0, 1)[:, None] for table in rotary)
        even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
        cosine, sine = cosines[..., 0::2], sines[..., 1::2]
        rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
        return rotated.flatten(-2).type_as(tokens)


class WanFamily(Family):
    """Wan 2.1 and 2.2: rotary positions over frames, rows and columns; flow matching with a fixed shift.

    Families of models that grew out of Wan derive from it.

    Wan 2.2's pipelines may give each token a timestep (`expand_timesteps`), such as 0 for a clean first frame.

    Image-to-video models that attend to the first frame (and the last) take `encoder_hidden_states_image`, `(n, image
    tokens, image_dim)`: the image encoder's output for the frame, or for both frames one after the other.
    """

    title = "Wan 2.1 and 2.2"
    transformer_class = "WanTransformer3DModel"
    tested_forwards: ClassVar[tuple[str, ...]] = ("cbdc8a11aa2f", "96f65c99f94a")
    processor_class = PackedWanAttnProcessor
    stock_processors: ClassVar[tuple[str, ...]] = ("WanAttnProcessor",)
    processors_read_fusion = True
    text = TextTokens(channels="text_dim", padding="keep_padding")
    cast_inputs: ClassVar[tuple[str, ...]] = (*Family.cast_inputs, IMAGE_TOKENS)
    interpolates = True
    position_module = "rope"
    timesteps_per: ClassVar[TimestepsPer] = "token"
    attention_kwargs = "attention_kwargs"
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = (
        ("blocks.*.attn1.to_q", "blocks.*.self_attn.q"),
        ("blocks.*.attn1.to_k", "blocks.*.self_attn.k"),
        ("blocks.*.attn1.to_v", "blocks.*.self_attn.v"),
        ("blocks.*.attn1.to_out.0", "blocks.*.self_attn.o"),
        ("blocks.*.attn2.to_q", "blocks.*.cross_attn.q"),
        ("blocks.*.attn2.to_k", "blocks.*.cross_attn.k"),
        ("blocks.*.attn2.to_v", "blocks.*.cross_attn.v"),
        ("blocks.*.attn2.to_out.0", "blocks.*.cross_attn.o"),
        ("blocks.*.attn2.add_k_proj", "blocks.*.cross_attn.k_img"),
        ("blocks.*.attn2.add_v_proj", "blocks.*.cross_attn.v_img"),
        ("blocks.*.ffn.net.0.proj", "blocks.*.ffn.0"),
        ("blocks.*.ffn.net.2", "blocks.*.ffn.2"),
    )

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse also models that embed image tokens without layers for them, which would read them as text."""
        super().check(transformer, strip_length=strip_length)
        config = transformer.config
        if config.get("image_dim") is not None and config.get("added_kv_proj_dim") is None:
            raise PackingError(
                f"This {type(transformer).__name__} has `image_dim`, but no `added_kv_proj_dim`: its tokens attend to "
                "image and text tokens as one text, which packs hold apart. Set both or neither."
            )

    def limits(self, transformer: Transformer) -> Grid:
        longest = int(transformer.rope.max_seq_len)
        return longest, longest, longest

    def text_length(self, config: Mapping[str, Any]) -> int | None:
        """Return the length at which image-to-video models divide text from image tokens."""
        return None if config.get("image_dim") is None else TEXT_LENGTH

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        if transformer.condition_embedder.image_embedder is None:
            return {}
        shape = transformer.config.pos_embed_seq_len or CLIP_TOKENS, transformer.config.image_dim
        return {IMAGE_TOKENS: lambda grids: torch.randn(len(grids), *shape)}

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables of `rope`, or such tables of stretched coordinates."""
        if base_size is None:
            # module.forward instead of module(…), which would call the hook again
            like = torch.empty((), device=device)
            return tuple(table[0, :, 0] for table in module.forward(shape_only(like, grid, module.patch_size)))
        axes = axis_coordinates(grid, base_size, device=module.freqs_cos.device, dtype=torch.float64)
        return rotary_tables((module.t_dim, module.h_dim, module.w_dim), axes, dtype=torch.float64)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the embedding of image tokens, which takes a row per sample; attention takes one row."""
        handles = super().hook_positions(transformer, base_size)
        images = transformer.condition_embedder.image_embedder
        if images is not None:
            handles += [
                images.register_forward_pre_hook(_row_per_frame),
                images.register_forward_hook(_one_row),
            ]
        return handles

    def breaks_graphs(self, config: Mapping[str, Any]) -> bool:
        """Return whether tokens attend to image tokens, whose number a pack's layout does not know."""
        return config.get("image_dim") is not None

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a row per strip; image tokens keep a row per sample, as attention takes them."""
        others = dict(batch.conditioning)
        images = others.pop(IMAGE_TOKENS, None)
        rows = super().rows(replace(batch, conditioning=others))
        if images is None:
            return rows
        return replace(rows, conditioning={**rows.conditioning, IMAGE_TOKENS: to_device(images, batch.strips.device)})

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the image tokens, a row per frame."""
        if IMAGE_TOKENS not in rows.conditioning:
            return {}
        embedder = transformer.condition_embedder.image_embedder
        return {IMAGE_TOKENS: _frames(embedder, rows.conditioning[IMAGE_TOKENS])}


def _row_per_frame(embedder: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return _frames(embedder, args[0])


def _one_row(embedder: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output.flatten(0, 1)[None]


def _frames(embedder: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return image tokens `(n, tokens, dim)`, split into a row per frame for models of a first and a last frame."""
    return tokens if embedder.pos_embed is None else tokens.unflatten(1, (2, -1)).flatten(0, 1)


class WanRecipe(Recipe):
    """Recipe of `WanPipeline`; see [`Recipe`].

    Pipelines with two transformers (Wan 2.2 A14B) call `transformer` at high noise and `transformer_2` at low noise,
    on either side of their `boundary_ratio`; each is trained at its own noise levels.
    """

    pipeline_class = "WanPipeline"
    family: ClassVar[Family] = WanFamily()
    default_sequence_length = 512
    native_sizes = ((480, 832), (720, 1280))
    """480p and 720p; Wan 2.2 5B, whose sides are multiples of 32, rounds the latter down to its own 704×1280."""

    shifts_by_resolution = ((480, 832, 3.0), (720, 1280, 5.0))
    """Those of the examples of diffusers' Wan pipelines; for training at 480p, the model's authors advise 2
    (Wan-Video/Wan2.1, issue 291)."""

    def sigmas(self) -> tuple[float, float]:
        """Return the trained transformer's side of the boundary."""
        boundary = self.pipeline.config.get("boundary_ratio")
        if boundary is None:
            return 0.0, 1.0
        return (boundary, 1.0) if self.trained == "transformer" else (0.0, boundary)

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """All, where the pipeline gives each token a timestep."""
        return (*FRAMES, BLACK) if self.keeps_first_frame else ()

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return whether tokens have timesteps, where the pipeline gives them some."""
        return bool(settings.get("expand_timesteps")) and super().has_clean_parts(settings, draws=draws)

    @property
    def keeps_first_frame(self) -> bool:
        """Whether the pipeline gives each token a timestep, such as 0 for a clean first frame (TI2V-5B)."""
        return bool(self.pipeline.config.get("expand_timesteps"))


class WanImageToVideoRecipe(FirstFrameRecipe, WanRecipe):
    """Recipe of `WanImageToVideoPipeline`, whose models continue the first frame of a sample; see [`Recipe`].

    That frame (and the last) is the sample's own, or the `first_frame` (and the `last_frame`) of the data set.

    The pipeline's configuration decides how the model is shown that frame:

    - Wan 2.1 and Wan 2.2 A14B take its latents, those of an otherwise grey clip, and a mask of the given frames as
      further channels. Those with an `image_dim` (2.1) also attend to its CLIP embedding; those with a
      `pos_embed_seq_len` (FLF2V) are shown the last frame as well. An image leaves them nothing to predict and is
      refused.
    - With `expand_timesteps` (TI2V-5B), the first latent frame stays clean: its tokens have timestep 0, and it does
      not enter the loss. An image has no frame after it, and is trained as text-to-image.
    """

    pipeline_class = "WanImageToVideoPipeline"
    conditions: ClassVar[tuple[Condition, ...]] = END_CONDITIONS

    @classmethod
    def num_images(cls, config: Mapping[str, Any]) -> int:
        """Return 2 for models of a first and a last frame, else 1."""
        return 1 if config.get("pos_embed_seq_len") is None else 2

    def name_faults(self, names: Collection[str]) -> Iterator[str]:
        """Refuse also last frames, where the model is shown the first alone."""
        yield from super().name_faults(names)
        if ENDS[1] in names and self.num_images(self.config) == 1:
            yield (
                f"This {self.pipeline_class} begins with an image and ends with none, but the data set has a column "
                f"{ENDS[1]!r}; prepare it again without --{ENDS[1]}_column, or train a model of first and last frames."
            )

    @property
    def encodes_drawn(self) -> bool:
        """Whether the shown frames are encoded apart, as further channels."""
        return not self.keeps_first_frame

    def drawn_faults(self, shares: ConditionShares, names: Collection[str], *, cached: bool) -> Iterator[str]:
        """Refuse also what lacks a frame whose embedding the model attends to."""
        yield from super().drawn_faults(shares, names, cached=cached)
        if not self._embeds_images:
            return
        for kinds in ({"first_frame", "prefix"}, {"last_frame", "suffix"})[: self.num_images(self.config)]:
            if not all(kinds.intersection(part.kind for part in condition) for condition in shares.conditions):
                yield (
                    f"This {self.pipeline_class} always attends to the image encoder's output for the frames that it "
                    f"is shown, so that each `condition` must have one of {quoted(sorted(kinds))}; combine them by +."
                )

    @property
    def media_rule(self) -> str:
        """The frames that conditions are made of."""
        return f"conditions of {self.num_images(self.config)} frames"

    @property
    def fewest_frames(self) -> int:
        """Two for models that are shown frames as further channels, three with the last one."""
        return 1 if self.keeps_first_frame else 1 + self.num_images(self.config)

    @property
    def _embeds_images(self) -> bool:
        return self.config.get("image_dim") is not None

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Encode the frames that the model is shown, as its pipeline does; nothing where they are latents' own.

        Raises:
            BucketingError: If samples have too few frames.
        """
        if self.keeps_first_frame:
            return super().encode_conditions(pixel_values, latents, conditions)
        if pixel_values.shape[2] < self.fewest_frames:
            raise BucketingError(
                f"A sample of {pixel_values.shape[2]} frames leaves an image-to-video model nothing to predict, which "
                f"needs {self.fewest_frames} or more: prepare the data set without images."
            )
        count = self.num_images(self.config)
        frames, clips = end_frames(pixel_values, conditions, ENDS[:count]), pixel_values.clone()
        clips[:, :, [0, -1][:count]] = frames
        drawn = conditions.get(SHOWN_FRAMES, [self._ends(clips.shape[2])] * len(clips))
        visible = to_device(torch.stack(list(drawn)), clips.device)
        clips = torch.where(visible[:, None, :, None, None], clips, 0)
        encoded = {IMAGE_LATENTS: self.encode_latents(clips)}
        if self._embeds_images:
            encoded[IMAGE_TOKENS] = self._image_tokens(frames)
        return encoded

    def _image_tokens(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the image encoder's output for frames `(B, 3, n, H, W)`, those of a sample one after the other."""
        images, encoder = pictures(frames.transpose(1, 2).flatten(0, 1)), self.pipeline.image_encoder
        tokens: torch.Tensor = self.pipeline.encode_image(images, encoder.device)
        return tokens.unflatten(0, frames.shape[:3:2]).flatten(1, 2)

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.keeps_first_frame:
            return {}
        conditions = {IMAGE_LATENTS: torch.zeros_like(latent)}
        if self._embeds_images:
            shape = self.config["pos_embed_seq_len"] or CLIP_TOKENS, self.config["image_dim"]
            conditions[IMAGE_TOKENS] = latent.new_zeros(shape)
        return conditions

    def clean_parts(self, samples: Samples) -> Sequence[torch.Tensor] | None:
        """Return no clean latents, where the model is shown frames as further channels."""
        return super().clean_parts(samples) if self.keeps_first_frame else None

    def added_channels(self, samples: Samples) -> Sequence[torch.Tensor]:
        """Return the mask of the frames that are shown, and their latents, unless the latents themselves have them."""
        if self.keeps_first_frame:
            return ()
        latents, stride = samples.noised.latents, self.spec.temporal_stride
        ends = [self._ends((latent.shape[1] - 1) * stride + 1) for latent in latents]
        visible = zip(samples.conditions.get(SHOWN_FRAMES, ends), samples.conditions[IMAGE_LATENTS], strict=True)
        pairs = zip(latents, visible, strict=True)
        return [torch.cat([self._mask(frames, latent), image.to(latent)]) for latent, (frames, image) in pairs]

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        if not self._embeds_images:
            return {}
        return {IMAGE_TOKENS: torch.stack(list(samples.conditions[IMAGE_TOKENS])).to(samples.text.values)}

    def _ends(self, frames: int) -> torch.Tensor:
        """Return which of a sample's frames the pipeline shows, `(F,)` of `bool`: the first (and the last)."""
        ends = torch.zeros(frames, dtype=torch.bool)
        ends[[0, -1][: self.num_images(self.config)]] = True
        return ends

    def _mask(self, frames: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Return which frames `(F,)` of each latent frame are shown, `(temporal_stride, f, h, w)`.

        The first latent frame holds one frame, which fills all channels.
        """
        stride = self.spec.temporal_stride
        by_latent = torch.cat([frames[:1].expand(stride), frames[1:]]).view(-1, stride).T
        return to_device(by_latent, latent.device, dtype=latent.dtype)[:, :, None, None].expand(-1, *latent.shape[1:])


def in_front(first: torch.Tensor, values: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Put latent frames `(B, C, k, h, w)`, with zeros for further channels, in front of each sample's values."""
    stack = torch.stack(list(values))
    return torch.cat([F.pad(first, (0,) * 7 + (stack.shape[1] - first.shape[1],)), stack], 2)


class SkyReelsV2Family(WanFamily):
    """SkyReels-V2: Wan's transformer with diffusion forcing, a timestep per latent frame.

    The stock model takes timesteps per frame of a row (`enable_diffusion_forcing`).

    Models with `inject_sample_info` take `fps`, `(n,)`: 0 for 16 frames per second and 1 for others, as the pipeline
    numbers them.
    """

    title = "SkyReels-V2"
    transformer_class = "SkyReelsV2Transformer3DModel"
    tested_forwards = ("5641354bc875",)
    stock_processors = ("SkyReelsV2AttnProcessor",)
    timesteps_per = "frame"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse attention to earlier blocks of frames alone, which a pack does not have."""
        if transformer.config.num_frame_per_block > 1:
            raise PackingError(
                f"This model attends by blocks of num_frame_per_block={transformer.config.num_frame_per_block} frames "
                "to earlier blocks alone; a pack attends to whole samples. Set it to 1, or train buckets."
            )
        super().check(transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return also the number of the frame rate, for models that embed it."""
        draws = super().conditioning(transformer)
        if not transformer.config.inject_sample_info:
            return draws
        return {**draws, SKYREELS_FPS: lambda grids: torch.arange(len(grids)) % 2}

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the numbers of the frame rates where they were given, for a list of them."""
        rows, layout = super().rows(batch), batch.layout
        if SKYREELS_FPS not in batch.conditioning:
            return rows
        rates = batch.conditioning[SKYREELS_FPS].tolist()
        counts = [*layout.strips_per_sample, layout.padding_strips]
        by_strip = [rate for rate, count in zip([*rates, rates[-1]], counts, strict=True) for _ in range(count)]
        return replace(rows, conditioning={**rows.conditioning, SKYREELS_FPS: torch.tensor(by_strip)})

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the arguments of the forward, with diffusion forcing where there are timesteps of tokens.

        Raises:
            PackingError: If the model embeds the frame rate, and there are such timesteps for several rates.
        """
        kwargs, forces = super().inputs(rows), rows.timesteps.ndim == 2
        if SKYREELS_FPS in kwargs:
            rates = kwargs[SKYREELS_FPS].tolist()
            if forces:
                # the stock forward adds the embedding of a single rate to all rows, but fails for a rate of each
                rates = list(set(rates))
                if len(rates) > 1:
                    raise PackingError(
                        "A SkyReels-V2 that embeds the frame rate (inject_sample_info) takes timesteps of single "
                        "frames for samples of one rate at a time, as diffusers adds the two. Train samples of 16 "
                        "frames per second apart from others and from images, or pass one timestep per sample."
                    )
            kwargs[SKYREELS_FPS] = rates
        return {**kwargs, "enable_diffusion_forcing": True} if forces else kwargs


SKYREELS_V2 = SkyReelsV2Family()


class SkyReelsV2Recipe(WanRecipe):
    """Recipe of `SkyReelsV2Pipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "SkyReelsV2Pipeline"
    family = SKYREELS_V2
    native_sizes = ((544, 960), (720, 1280))


class SkyReelsV2ImageToVideoRecipe(WanImageToVideoRecipe):
    """Recipe of `SkyReelsV2ImageToVideoPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "SkyReelsV2ImageToVideoPipeline"
    family = SKYREELS_V2
    native_sizes = ((544, 960), (720, 1280))


class SkyReelsV2DiffusionForcingRecipe(SkyReelsV2Recipe):
    """Recipe of `SkyReelsV2DiffusionForcingPipeline`: each latent frame has a noise level of its own; see [`Recipe`].

    Models that embed the frame rate (`inject_sample_info`) tell 16 frames per second from others, which include
    images, and do not run both in one batch or pack: train them apart.
    """

    pipeline_class = "SkyReelsV2DiffusionForcingPipeline"
    flow = DiffusionForcing

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """Whole frames, each of which has a timestep."""
        return FRAMES

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return True: every latent frame has a timestep."""
        return True

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the number of each sample's frame rate, for models that embed it."""
        return {SKYREELS_FPS: (samples.fps != 16).long()} if self.config["inject_sample_info"] else {}


class ChronoEditFamily(WanFamily):
    """ChronoEdit: Wan's image-to-video transformer, for which a clip of two latent frames is an image and its edit.

    A sample of two latent frames, an image and its edit, has the temporal positions 0 and `rope_temporal_skip_len - 1`
    of the model's own table, so that positions cannot be stretched.
    """

    title = "ChronoEdit"
    transformer_class = "ChronoEditTransformer3DModel"
    tested_forwards = ("053735e369e9",)
    interpolates = False


class ChronoEditRecipe(WanImageToVideoRecipe):
    """Recipe of `ChronoEditPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    A clip of five frames, two latent ones, is an image and its edit; longer clips lead from one to the other.
    """

    pipeline_class = "ChronoEditPipeline"
    family = ChronoEditFamily()
    conditions = END_CONDITIONS[:1]

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """None: a clip is the edit of its first frame."""
        return ()

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, int]:
        """Return the sides alone: by default the pipeline renders an image and its edit, five frames."""
        return {"height": size.height, "width": size.width}


class WanVACEFamily(WanFamily):
    """Wan VACE: Wan with a branch of blocks that reads a control video.

    Beside what Wan takes, it takes `control_hidden_states`, a sequence of `(vace_in_channels, frames, height, width)`
    of the latents' sizes, and `control_hidden_states_scale`, `(n, control layers)`, which is 1 in training. Its
    pipeline adds latent frames for reference images in front of both.
    """

    title = "Wan VACE"
    transformer_class = "WanVACETransformer3DModel"
    tested_forwards = ("760359164852",)
    timesteps_per = "row"
    original_names = None  # diffusers reads no adapters of its control blocks from other names
    cast_inputs = (*WanFamily.cast_inputs, VACE_CONTROL, VACE_SCALE)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        channels, layers = transformer.config.vace_in_channels, len(transformer.config.vace_layers)
        return {
            **super().conditioning(transformer),
            VACE_CONTROL: lambda grids: self.draw_latents(transformer, grids, channels=channels),
            VACE_SCALE: lambda grids: 0.5 + torch.rand(len(grids), layers),
        }

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the arguments of the forward; the scale comes as a factor of each row's tokens, by layer."""
        kwargs = super().inputs(rows)
        # The stock forward unbinds the first dimension, and multiplies (rows, tokens, dim) by each part.
        return {**kwargs, VACE_SCALE: kwargs[VACE_SCALE].T[:, :, None, None].to(rows.latents)}


class WanVACERecipe(WanRecipe):
    """Recipe of `WanVACEPipeline`, whose models are shown control videos, masks and reference images; see [`Recipe`].

    Whatever a sample has of these becomes the control channels that the pipeline makes of it:

    - `control` is a video of the sample's size, such as its depth, pose or edges; without one, all is grey.
    - `mask` is white where the video is generated, and black where the control's own pixels stay. The loss counts
      where it is white. Without a mask, all is generated. A mask without a control is for inpainting: the control is
      the sample itself, grey where the mask is white.
    - `reference` is one or more images of any size, each fitted onto white and encoded as a latent frame in front of
      the video. The noisy latents have it too, as the pipeline generates it again and drops it; it does not enter the
      loss.
      (DiffSynth-Studio and VideoX-Fun count it as any frame.)
    """

    pipeline_class = "WanVACEPipeline"
    family = WanVACEFamily()
    conditions = (
        Condition(name="control", enters="channels", argument="video"),
        Condition(name="mask", enters="channels", argument="mask"),
        ReferenceRule(enters="latent frames", as_stored=True, resample="lanczos", argument="reference_images"),
    )

    @property
    def media_rule(self) -> str:
        return "control channels, loss masks of references"

    def encode_media(self, pixel_values: torch.Tensor, conditions: Media = MappingProxyType({})) -> Conditions:
        """Encode a stack of samples, see [`Recipe.encode_media`].

        Returns:
            `dict`: `latents`, the control channels and, where the data set has masks or references, `loss_mask`,
            `(B, …, f, h, w)`; each reference adds a latent frame in front of its sample.
        """
        encoded, references = super().encode_media(pixel_values, conditions), conditions.get(REFERENCE)
        if references is None:
            return encoded
        latents = torch.stack(list(encoded["latents"]))
        frames = self._frames_of(pixel_values, references) if references[0] else latents[:, :, :0]
        weights = encoded.get(LOSS_MASK, torch.ones_like(latents[:, :1]))
        return {
            "latents": in_front(frames, latents),
            VACE_CONTROL: in_front(frames, encoded[VACE_CONTROL]),
            LOSS_MASK: in_front(frames[:, :0], weights),
        }

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Return the control channels: latents of what stays and of what is generated, and the mask's own pixels."""
        masks, controls = conditions.get("mask"), conditions.get("control")
        mask = torch.ones_like(pixel_values[:, :1]) if masks is None else torch.stack(list(masks)).to(pixel_values)
        generated = (mask > 0.5).to(pixel_values)
        video = pixel_values * (1 - generated) if controls is None else torch.stack(list(controls)).to(pixel_values)
        parts = [self.encode_latents(video * share) for share in (1 - generated, generated)]
        return {VACE_CONTROL: torch.cat([*parts, self._mask_channels(mask, latents)], 1)}

    def _mask_channels(self, mask: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Return the mask's pixels of each latent pixel, `(B, stride², f, h, w)`, of the frame nearest to it."""
        stride = self.spec.spatial_stride
        pixels = mask[:, 0].unflatten(3, (-1, stride)).unflatten(2, (-1, stride))  # (B, F, h, stride, w, stride)
        channels = pixels.permute(0, 3, 5, 1, 2, 4).flatten(1, 2)
        return F.interpolate(channels, size=latents.shape[2:], mode="nearest-exact")

    @torch.no_grad()
    def _frames_of(self, pixel_values: torch.Tensor, references: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the latents of each sample's k references `(3, 1, h, w)` on white, `(B, C, k, h, w)`."""
        images = [
            [image for reference in of_sample for image in pictures(reference.transpose(0, 1))]
            for of_sample in references
        ]
        (height, width), device = pixel_values.shape[-2:], pixel_values.device
        *_, canvases = self.pipeline.preprocess_conditions(
            reference_images=images, batch_size=len(images), height=height, width=width, num_frames=1, device=device
        )
        stacks = [torch.stack(canvas)[:, :, None].to(pixel_values) for canvas in zip(*canvases, strict=True)]
        return torch.cat([self.encode_latents(stack) for stack in reversed(stacks)], 2)  # the pipeline's order

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        return {VACE_CONTROL: latent.new_zeros(self.config["vace_in_channels"], *latent.shape[1:])}

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the control channels, and their scale, which is 1 in training."""
        latents = samples.noised.latents
        controls = zip(samples.conditions[VACE_CONTROL], latents, strict=True)
        return {
            VACE_CONTROL: [control.to(latent) for control, latent in controls],
            VACE_SCALE: latents[0].new_ones(len(latents), len(self.config["vace_layers"])),
        }


RECIPES = (
    WanRecipe,
    WanImageToVideoRecipe,
    SkyReelsV2Recipe,
    SkyReelsV2ImageToVideoRecipe,
    SkyReelsV2DiffusionForcingRecipe,
    ChronoEditRecipe,
    WanVACERecipe,
)
