"""Wan-Animate 2: Wan whose frames also attend to those of a driving video, which runs beside them.

The stock model runs a driving video first and keeps its keys and values; then the tokens of each frame of the sample
attend to the sample and to the driving video at that frame. Nothing in a driving video attends to its sample, so that
both run at once: a second half of the batch rows holds driving videos, with timestep 1 and with texts, image tokens
and positions of their own, each token where the one of its sample lies. The first frame of a sample is that of its
character, which the driving video lacks; its place there attends to nothing and nothing attends to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ...conditions.condition import Condition
from ...conditions.names import MASK
from ...devices import to_device
from ...errors import PackingError
from ...packing.attachment import ATTRIBUTE, attachment_of
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Family, Transformer
from ...packing.forward import packed_forward
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import PackTables, over_grid
from ...packing.processors import Keys, PackedAttnProcessor, Rotary, project
from ...packing.segments import SegmentSpans, Span
from ...packing.texts import TextTokens
from ..enable import disable_packing, enable_packing
from ..modular import ModularRecipe
from ..samples import Conditions, Media, ModelInputs, Samples
from ..texts import TextEmbeddings
from .wan import CLIP_TOKENS, IMAGE_TOKENS
from .wan_animate import CHARACTER, KNOWN, POSE, WanAnimateRecipe

DRIVING = "driving_latents"
"""Conditioning of a sample: its driving video as the model takes it, of the latent's size; its first frame is void."""
DRIVING_TEXT = "driving_text"
"""Conditioning of a sample: the text of its driving video."""
DRIVING_IMAGE = "driving_image"
"""Conditioning of a sample: the image tokens of its driving video."""

IMAGE_DIM = 1280
"""Channels of image tokens, for any configuration."""

_LONGEST = 512
"""Positions of the stock model on each axis."""
_NONE: Span = (0, 0)
DRIVING_PROMPT = "人物动作的参考视频"
"""Text of every driving video by default: "reference video of a person's motion"."""


@dataclass(frozen=True, kw_only=True)
class DrivingLayout:
    """Attention over the tokens of a pack's samples, followed by those of their driving videos.

    Attributes:
        tokens ([`SegmentSpans`]): Attention of each frame to its sample and its frame of the driving video, and of
            each driving video to itself.
        texts ([`SegmentSpans`]): Attention to the stored texts, followed by a text for each driving video.
    """

    tokens: SegmentSpans
    texts: SegmentSpans

    @classmethod
    def of(cls, layout: PackedLayout) -> DrivingLayout:
        """Return the attention of a pack, made once."""
        return layout.self_segments.made("beside", partial(cls._make, layout))

    @classmethod
    def _make(cls, layout: PackedLayout) -> DrivingLayout:
        length, stored = layout.text_lengths[0], _text_rows(layout)
        captions = range(len(layout)) if layout.caption_ids is None else layout.caption_ids
        rows = [*captions, *range(stored, stored + len(layout))]
        texts = _halves(layout, rows, num_keys=(stored + len(layout)) * length, length=length)
        return cls(tokens=_token_segments(layout), texts=texts)


def _token_segments(layout: PackedLayout) -> SegmentSpans:
    count, queries, keys, driving, driving_queries = layout.num_tokens, [], [], [], []
    for (start, stop), (_, h, w) in zip(layout.spans, layout.grids, strict=True):
        for first in range(start, stop, h * w):
            queries.append((first, first + h * w))
            keys.append((start, stop))
            driving.append(_NONE if first == start else (count + first, count + first + h * w))
        driving_queries.append((count + start + h * w, count + stop))
    return SegmentSpans(
        queries=(*queries, *driving_queries),
        keys=(*keys, *driving_queries),
        more_keys=(*driving, *[_NONE] * len(driving_queries)),
        num_queries=2 * count,
        num_keys=2 * count,
    )


def _halves(layout: PackedLayout, rows: Sequence[int], *, num_keys: int, length: int) -> SegmentSpans:
    """Return the attention of each sample, then of each driving video, to a row of keys, each of that length."""
    count, keys = layout.num_tokens, tuple((row * length, (row + 1) * length) for row in rows)
    driving_queries = [(count + start, count + stop) for start, stop in layout.spans]
    return SegmentSpans(queries=(*layout.spans, *driving_queries), keys=keys, num_queries=2 * count, num_keys=num_keys)


def _text_rows(layout: PackedLayout) -> int:
    """Return how many texts the stored ones make, the last of which may be padding."""
    return -(-layout.num_stored_text_tokens // layout.text_lengths[0])


class PackedAnimate2AttnProcessor(PackedAttnProcessor):
    """Self- and cross-attention of `WanAnimate2Attention` over the strips of samples and of their driving videos."""

    norms_whole_width = True

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        driving = DrivingLayout.of(layout)
        return driving.tokens, driving.texts

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_image: torch.Tensor | None = None,
        kv_cache: Rotary | None = None,
        **stock: Any,
    ) -> torch.Tensor:
        """Attend inside each sample and each driving video.

        Args:
            attn (`WanAnimate2Attention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(2·strips, strip_length, dim)`): The strips of samples, then those
                of their driving videos.
            encoder_hidden_states (`torch.Tensor` of shape `(texts, tokens, dim)`, *optional*): The texts.
            encoder_hidden_states_image (`torch.Tensor` of shape `(2·n, tokens, dim)`, *optional*): Image tokens.
            kv_cache (`tuple`, *optional*): In the place of the stock cache, cosines and sines of all strips.
            stock (any): What the stock processors take besides; the layout takes its place.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        if encoder_hidden_states is None:
            return super().__call__(attn, hidden_states, image_rotary_emb=kv_cache)
        text_and_image: Any = encoder_hidden_states, encoder_hidden_states_image
        return super().__call__(attn, hidden_states, text_and_image)

    def text_keys(self, attn: Any, text: Any, layout: PackedLayout) -> Sequence[Keys]:
        """Return the keys of the texts, and of the image tokens where the model takes some."""
        words, images = text
        key, value = project(attn, words, "to_k", "to_v")
        keys = [
            Keys(self.split_heads(attn, key, attn.norm_k), self.split_heads(attn, value), self.segments(layout)[1])
        ]
        if images is not None:
            key, value = project(attn, images, "add_k_proj", "add_v_proj")
            key, value = self.split_heads(attn, key, attn.norm_added_k), self.split_heads(attn, value)
            keys.append(Keys(key, value, _image_segments(layout, len(key))))
        return keys

    def rotate(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Rotate neighbouring channels of `(N, H, D)`; like the stock model, round those of float64 to float32."""
        dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
        cosine, sine = (table.flatten(0, 1)[:, None].to(dtype) for table in rotary)
        even, odd = tokens.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
        return rotated.flatten(-2).float().type_as(tokens)


def _image_segments(layout: PackedLayout, num_keys: int) -> SegmentSpans:
    def make() -> SegmentSpans:
        rows = range(2 * len(layout))
        return _halves(layout, rows, num_keys=num_keys, length=num_keys // len(rows))

    return layout.self_segments.made(("beside images", num_keys), make)  # kept for the next layer


class WanAnimate2Family(Family):
    """Packing of `WanAnimate2Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    The first latent frame of a sample is that of its character. Latents are noisy ones, followed by the channels that
    the stock forward takes as `condition_latents`. Beside its text, a sample has `encoder_hidden_states_image`,
    `(n, tokens, 1280)`, where the model takes image tokens, and its driving video: `driving_latents`, of the latent's
    size and channels, whose first frame is not read; `driving_text`, `(n, text_len, text_dim)`; and `driving_image`,
    its image tokens.
    """

    title = "Wan-Animate 2"
    transformer_class = "WanAnimate2Transformer3DModel"
    tested_forwards = ("db902905e60e",)
    processor_class = PackedAnimate2AttnProcessor
    stock_processors = ("WanAnimate2AttnProcessor", "WanAnimate2CrossAttnProcessor")
    processors_read_fusion = True
    text = TextTokens(channels="text_dim", padding="keep_padding")
    channels = "in_dim"
    width_settings = ("dim",)
    strips_have_positions = False
    untraceable = "its attention makes segments of its own for each pack, which torch cannot trace"
    cast_inputs = ("hidden_states", "condition_latents", "encoder_hidden_states", IMAGE_TOKENS)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse patches of several frames, for which a driving video has no frames beside those of its sample."""
        if transformer.config.patch_size[0] != 1:
            raise PackingError(
                f"Wan-Animate 2 attends frame by frame; this model has patches of {transformer.config.patch_size}."
            )
        super().check(transformer, strip_length=strip_length)

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also samples without some of their tokens, which attend to driving videos frame by frame."""
        super().check_layout(transformer, layout, stretched=stretched)
        if layout.kept is not None:
            name = type(transformer).__name__
            raise PackingError(f"{name} attends to a driving video frame by frame; pack it without token_drop.")

    def limits(self, transformer: Transformer) -> Grid:
        """Return the length of the rotary tables, which driving videos may read with a stride."""
        return _LONGEST // max(1, transformer.config.refer_stride), _LONGEST, _LONGEST

    def text_length(self, config: Mapping[str, Any]) -> int | None:
        """Return the length to which the model itself fills up texts with zeros."""
        return int(config["text_len"])

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        config = transformer.config
        images = (IMAGE_TOKENS, DRIVING_IMAGE) if config.use_img_emb else ()
        return {
            DRIVING: lambda grids: self.draw_latents(transformer, grids, channels=config.in_dim),
            DRIVING_TEXT: lambda grids: torch.randn(len(grids), config.text_len, config.text_dim),
            **{name: lambda grids: torch.randn(len(grids), CLIP_TOKENS, IMAGE_DIM) for name in images},
        }

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return grids of two or more frames, the first of which is the character's."""
        return [(max(2, t), h, w) for t, h, w in super().trial_grids(transformer)]

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables of a sample, followed by those of its driving video, whose first frame has none."""
        t, h, w = grid
        driving, config = (t - 1, h, w), module.config
        asked = (config.refer_offset_t, config.refer_offset_h, config.refer_offset_w)
        offsets = [side if offset < 0 else offset for offset, side in zip(asked, driving, strict=True)]
        sample_tables = _rotary(config, grid, offsets=(0, 0, 0), stride=1)
        driving_tables = _rotary(config, driving, offsets=offsets, stride=config.refer_stride)
        padded = (F.pad(table, (0, 0, h * w, 0)) for table in driving_tables)
        return tuple(to_device(table, device) for table in (*sample_tables, *padded))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the tables of positions where the stock forward has a cache of keys and values."""
        describe = partial(_describe, self.pack_tables(base_size))
        return [transformer.register_forward_pre_hook(describe, with_kwargs=True)]

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a row per strip, and the texts, image tokens and driving videos of samples as they are.

        Raises:
            PackingError: If a sample has no frame but that of its character.
        """
        layout = batch.layout
        if min(t for t, _, _ in layout.grids) < 2:
            raise PackingError("A sample of Wan-Animate 2 has a latent frame of its character, followed by its own.")
        rows, length = super().rows(replace(batch, conditioning={})), layout.text_lengths[0]
        words = F.pad(batch.text, (0, 0, 0, _text_rows(layout) * length - len(batch.text)))
        return replace(rows, text=words.unflatten(0, (-1, length)), conditioning=batch.conditioning)

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return lists, as the stock forward takes them, with the channels of conditions among those of latents.

        Rows of samples are followed by those of their driving videos, where they have some, and so are texts.
        """
        conditioning, latents = dict(rows.conditioning), rows.latents
        text, timesteps = rows.text, rows.timesteps
        if DRIVING in conditioning:
            latents = torch.cat([latents, conditioning.pop(DRIVING)])
            timesteps = torch.cat([timesteps, torch.ones_like(timesteps)])
            text = torch.cat([text, to_device(conditioning.pop(DRIVING_TEXT), text.device, dtype=text.dtype)])
        if DRIVING_IMAGE in conditioning:
            images = (conditioning[IMAGE_TOKENS], conditioning.pop(DRIVING_IMAGE))
            conditioning[IMAGE_TOKENS] = torch.cat(
                [to_device(tokens, text.device, dtype=text.dtype) for tokens in images]
            )
        return {
            "hidden_states": list(latents),
            "condition_latents": [row[:0] for row in latents],
            "timestep": timesteps,
            "encoder_hidden_states": list(text),
            **conditioning,
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return what is missing where both run in one forward of the stock model, as planners trace it.

        Its first pass, in which each row attends to itself, takes what a pack takes, but for a frame's few keys more.
        """
        if DRIVING not in rows.conditioning:
            return {}
        grid = np.array([rows.grid])
        options = {"kv_cache": _Entry(_Forgotten()), "kv_cache_mode": "extract", "offset_grid_sizes": grid}
        return {**options, "seq_len": math.prod(rows.grid)}

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the strips of samples alone."""
        return super().output_strips(batch, output[: batch.layout.num_strips])

    def _run(self, transformer: Transformer, rows: Rows, wrapped: Any) -> tuple[torch.Tensor, Any]:
        """Run the pass over driving videos, then the one that reads the keys and values that it keeps."""
        from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

        conditioning, cache = dict(rows.conditioning), WanAnimate2KVCache(transformer.config.num_layers)
        latents, text = conditioning.pop(DRIVING)[:, :, 1:], conditioning.pop(DRIVING_TEXT)
        images = {IMAGE_TOKENS: conditioning.pop(DRIVING_IMAGE)} if DRIVING_IMAGE in conditioning else {}
        driving = replace(rows, latents=latents, text=text, text_mask=None, conditioning=images)
        grid, (_, _, frames, *sides) = np.array([driving.grid] * len(latents)), latents.shape
        options = {"kv_cache_mode": "extract", "offset_grid_sizes": grid}
        super()._run(transformer, _passed(driving, kv_cache=cache, **options), wrapped)
        options = {"kv_cache_mode": "cached", "reference_grid_sizes": grid}
        options |= {"origin_len": 4 * (frames - 1), "origin_area": [8 * side for side in sides]}
        return super()._run(
            transformer, _passed(replace(rows, conditioning=conditioning), kv_cache=cache, **options), wrapped
        )


def _passed(rows: Rows, **options: Any) -> Rows:
    """Return rows with further arguments of the stock forward, which counts the tokens of a row."""
    return replace(rows, conditioning={**rows.conditioning, **options, "seq_len": math.prod(rows.grid)})


def _rotary(config: Any, grid: Grid, *, offsets: Sequence[int], stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines `(t·h·w, head_dim / 2)` of a grid whose axes begin at offsets, as stock ones."""
    from diffusers.models.transformers.transformer_wan_animate_2 import rope_params

    channels = config.dim // config.num_heads
    side = 2 * (channels // 6)
    sizes, strides = (channels - 2 * side, side, side), (stride, 1, 1)
    axes = [
        rope_params(count * step, size, offset=offset)[::step]
        for count, step, size, offset in zip(grid, strides, sizes, offsets, strict=True)
    ]
    turns = torch.cat(over_grid(axes), -1)
    return turns.real.contiguous(), turns.imag.contiguous()


class _Entry:
    """One entry for all layers in the place of the stock cache."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def get(self, layer: int) -> Any:
        return self.entry


class _Forgotten:
    """An entry of a cache that keeps nothing."""

    def store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        pass


@torch.compiler.disable  # loops over the samples of the pack
def _describe(
    tables: PackTables, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Add what the stock forward needs of a pass that reads keys and values, of sizes that make no mask."""
    cosines, sines, *driving = tables(transformer)
    rotary = torch.cat([cosines, driving[0]]), torch.cat([sines, driving[1]])
    transformer.block_masks.setdefault((0, 0), None)  # the stock forward would make a mask of a size it does not know
    conditioning = {}
    if IMAGE_TOKENS in kwargs:  # cast as the pipeline does, as norms take no other precision on a CPU
        conditioning[IMAGE_TOKENS] = kwargs[IMAGE_TOKENS].to(transformer.img_emb.proj[0].weight.dtype)
    return args, {
        **kwargs,
        **conditioning,
        "kv_cache": _Entry(rotary),
        "kv_cache_mode": "cached",
        "seq_len": active_layout().strip_length,
        "reference_grid_sizes": np.zeros((1, 3), int),
        "origin_len": -1,
        "origin_area": (0, 0),
    }


class WanAnimate2Recipe(ModularRecipe, WanAnimateRecipe):
    """Recipe of `WanAnimate2ModularPipeline`, whose models move a character as a driving video moves; see [`Recipe`].

    Each sample has a `control`, the driving video, and a `reference`, a picture of the character, which becomes a
    latent frame in front of the sample, as for Wan-Animate. First frames that a run draws are known, as the pipeline
    shows the end of the segment before. A `mask` weighs the loss alone.

    A stack of samples runs as a pack too: the stock model runs driving videos in a forward of their own and attends by
    FlexAttention, which has no backward pass on a CPU.
    """

    pipeline_class = "WanAnimate2ModularPipeline"
    family = WanAnimate2Family()
    output = "videos"
    read_with_lora = MappingProxyType({"image_dim": None})  # in diffusers 0.42.1, as of Wan's other transformers
    conditions = (Condition(name="control", enters="attention", least=1, argument="driving_video"), CHARACTER)

    @property
    def media_rule(self) -> str:
        return "driving videos, characters in front, what is known"

    @property
    def _image_processor(self) -> Any:
        return self.pipeline.image_processor

    def _image_tokens(self, characters: Sequence[Image.Image], letterboxed: torch.Tensor) -> torch.Tensor:
        from diffusers.modular_pipelines.wan_animate_2.encoders import clip_visual_encode

        encoder = self.pipeline.image_encoder
        tokens = [clip_visual_encode(encoder, image, encoder.device, encoder.dtype) for image in letterboxed]
        return torch.cat(tokens)

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Return the latents and the image tokens of the driving video, and the mask and latents of what is known."""
        driving = torch.stack(list(conditions["control"])).to(pixel_values)
        drawn = {name: values for name, values in conditions.items() if name != MASK}
        return {
            POSE: self.encode_latents(driving),
            DRIVING_IMAGE: self._image_tokens((), driving[:, :, 0]),
            KNOWN: self._known(pixel_values, latents, drawn),
        }

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        images = dict.fromkeys((IMAGE_TOKENS, DRIVING_IMAGE), latent.new_zeros(CLIP_TOKENS, IMAGE_DIM))
        known = latent.new_zeros(self.spec.temporal_stride + len(latent), *latent.shape[1:])
        return {POSE: torch.zeros_like(latent), KNOWN: known, **images}

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions with zeros behind them, and beside each the text of its driving video."""
        from diffusers.modular_pipelines.wan_animate_2.encoders import get_t5_prompt_embeds

        pipeline, length = self.pipeline, self.max_sequence_length
        encoder = pipeline.text_encoder
        texts = [*captions, DRIVING_PROMPT]
        values = get_t5_prompt_embeds(encoder, pipeline.tokenizer, texts, length, encoder.device)
        return TextEmbeddings(values[:-1], None, {DRIVING_TEXT: values[-1:].expand(len(captions), -1, -1)})

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        latents, conditions, text = samples.noised.latents, samples.conditions, samples.text
        stride, taken = self.spec.temporal_stride, self.family.conditioning(self.transformer)
        driving = [pose.to(latent) for pose, latent in zip(conditions[POSE], latents, strict=True)]
        images = {
            name: torch.stack(list(conditions[name])).to(text.values)
            for name in (IMAGE_TOKENS, DRIVING_IMAGE)
            if name in taken
        }
        return {
            DRIVING: [
                torch.cat([pose, torch.ones_like(pose[:1]).expand(stride, -1, -1, -1), pose]) for pose in driving
            ],
            DRIVING_TEXT: text.others[DRIVING_TEXT],
            **images,
        }

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack as a pack, see [`Recipe.predict`].

        Where there may be a backward pass, which may compute blocks again, packing stays enabled after it.
        """
        enabled_here = ATTRIBUTE not in vars(self.transformer)
        if enabled_here:
            enable_packing(self.transformer)
        pack = attachment_of(self.transformer).packing.pack(
            inputs.latents,
            timesteps=inputs.timesteps,
            conditioning=inputs.conditioning,
            **samples.text.pack_kwargs(),
        )
        output = torch.stack(pack.unpack(packed_forward(transformer, pack)))
        if enabled_here and not torch.is_grad_enabled():
            disable_packing(self.transformer)
        return output


REFUSED = MappingProxyType(
    {"WanAnimate2DistilledModularPipeline": "its transformer is distilled to few steps; train Wan-Animate 2"}
)
"""Why pipelines cannot be trained."""


RECIPES = (WanAnimate2Recipe,)
