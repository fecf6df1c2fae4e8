"""HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage: rotary positions; refined text, also glyphs, in joint attention.

The pipelines mask the padding of a text: pass what the mask keeps. Text is refined before the blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from threading import local
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ...buckets.sizes import Size
from ...conditions.condition import Condition
from ...devices import to_device
from ...errors import BucketingError, PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout, bind_checkpoints
from ...packing.family import Draw, Transformer
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, shape_only
from ...packing.processors import Rotary
from ...packing.texts import TextTokens, apply_text_mask
from ..first_frame import ENDS, end_frames, pictures
from ..joint import JointFamily, order_by_sample, texts_by_sample
from ..objectives import Objective
from ..positions import rotary_tables
from ..recipe import Recipe
from ..samples import Conditions, Media, ModelInputs, Samples

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTokenRefiner
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TokenRefiner

GLYPHS, GLYPH_MASK, IMAGE = "encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds"
"""Arguments of the forward for the text that an image shall spell, its mask, and the tokens of a first frame."""
ORDER = "token_order"
"""Argument of the forward that a hook takes away: where each sample's own tokens lie, see [`order_by_sample`]."""
GLYPH_TOKENS, IMAGE_TOKENS = 256, 729
"""Tokens that the pipelines of HunyuanVideo 1.5 pass of the glyph text, padding included, and of an image."""
IMAGE_LATENTS = "image_latents"
"""Condition that holds the latents of the first frame, `(C, 1, h, w)`."""


class HunyuanVideoFamily(JointFamily):
    """HunyuanVideo: rotary positions over frames, rows and columns; text refined by itself, then in joint attention.

    The pipeline masks the padding of a text: pass what the mask keeps. Text is refined before the blocks, by attention
    over a whole text and by its mean. That runs once per sample, and the result fills the text slots of its strips.
    """

    title = "HunyuanVideo"
    transformer_class = "HunyuanVideoTransformer3DModel"
    tested_forwards = ("a1b9ec91c058",)
    stock_processors = ("HunyuanVideoAttnProcessor2_0",)
    stock_attention = ("context_embedder.",)
    text = TextTokens(
        rows="slots", channels="text_embed_dim", mask="encoder_attention_mask", needs_mask=True, shortest=1
    )
    interpolates = True
    position_module = "rope"
    attention_kwargs = "attention_kwargs"
    guidance = 6000.0  # a thousandfold, as its pipeline scales it
    without_lora = ("context_embedder.",)  # the text refiner, whose adapters diffusers misreads from other names
    original_names = (
        ("transformer_blocks.*.attn.to_q", "double_blocks.*.img_attn_qkv"),
        ("transformer_blocks.*.attn.to_k", "double_blocks.*.img_attn_qkv"),
        ("transformer_blocks.*.attn.to_v", "double_blocks.*.img_attn_qkv"),
        ("transformer_blocks.*.attn.add_q_proj", "double_blocks.*.txt_attn_qkv"),
        ("transformer_blocks.*.attn.add_k_proj", "double_blocks.*.txt_attn_qkv"),
        ("transformer_blocks.*.attn.add_v_proj", "double_blocks.*.txt_attn_qkv"),
        ("transformer_blocks.*.attn.to_out.0", "double_blocks.*.img_attn_proj"),
        ("transformer_blocks.*.attn.to_add_out", "double_blocks.*.txt_attn_proj"),
        ("transformer_blocks.*.ff.net.0.proj", "double_blocks.*.img_mlp.fc1"),
        ("transformer_blocks.*.ff.net.2", "double_blocks.*.img_mlp.fc2"),
        ("transformer_blocks.*.ff_context.net.0.proj", "double_blocks.*.txt_mlp.fc1"),
        ("transformer_blocks.*.ff_context.net.2", "double_blocks.*.txt_mlp.fc2"),
        ("single_transformer_blocks.*.attn.to_q", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.attn.to_k", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.attn.to_v", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.proj_mlp", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.proj_out", "single_blocks.*.linear2"),
    )
    text_norms = ("transformer_blocks.*.norm1_context",)
    row_norms: ClassVar[tuple[str, ...]] = ("single_transformer_blocks.*.norm",)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models that modulate the first frame differently from the other frames of a batch row."""
        if transformer.config.image_condition_type == "token_replace":
            raise PackingError(
                "This HunyuanVideo transformer modulates the tokens of the first frame differently from the others "
                "(image_condition_type='token_replace'), and packing cannot tell them apart in a strip; use a "
                "text-to-video or 'latent_concat' model."
            )
        super().check(transformer, strip_length=strip_length)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        axes = axis_coordinates(grid, base_size, device=device)
        return rotary_tables(module.rope_dim, axes, theta=module.theta)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the input and output of the text refiner."""
        refiner = transformer.context_embedder
        return [
            *super().hook_positions(transformer, base_size),
            refiner.register_forward_pre_hook(_gather_texts),
            refiner.register_forward_hook(_fill_with_text),
        ]


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _gather_texts(refiner: HunyuanVideoTokenRefiner, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Turn text slots `(strips, text_slots, dim)`, timesteps and mask by strip into one row per sample."""
    slots, timesteps, _ = args
    texts, mask = texts_by_sample(slots)
    return texts, timesteps[active_layout().joint.first_strips], mask


@torch.compiler.disable
def _fill_with_text(
    refiner: HunyuanVideoTokenRefiner, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    """Put the refined texts `(n, length, dim)` into the text slots of the samples' strips."""
    layout = active_layout()
    texts = [text[:length] for text, length in zip(output, layout.text_lengths, strict=True)]
    return layout.joint.fill_slots(torch.cat(texts))


class HunyuanVideoRecipe(Recipe):
    """Recipe of `HunyuanVideoPipeline`; see [`Recipe`]."""

    pipeline_class = "HunyuanVideoPipeline"
    family = HunyuanVideoFamily()
    default_sequence_length = 256
    guidance_factor = 1000.0
    prompt_outputs = ("values", "pooled_projections", "mask")
    native_sizes = ((544, 960), (624, 832), (720, 720), (720, 1280), (832, 1104), (960, 960))
    """The sizes of 540p and 720p on the model card; it also names their portrait counterparts."""


class HunyuanVideo15Family(HunyuanVideoFamily):
    """HunyuanVideo 1.5: two texts and image tokens in joint attention; a first frame as channels of the latent.

    The latents have the channels of the condition and of its mask behind their own. The stock forward embeds the image
    tokens, the glyph text (ByT5) and the text (Qwen2.5-VL) of each sample, and joins the three by their masks, at
    which the CPU waits for the device a dozen times per sample. In a pack, hooks embed image tokens and glyphs without
    their padding and join them with the refined text in an order that the CPU knows; the stock forward gets all of it
    as one text, with masks that keep everything. A hook on the first block fills the text slots of the samples'
    strips.

    Whether there is an image is decided for each sample: embeddings that are all zero, as the text-to-video pipeline
    passes them, are none. Where there are image embeddings, that is read from the device, once per pack.

    It takes `encoder_hidden_states_2` of shape `(n, tokens, text_embed_2_dim)` with the mask
    `encoder_attention_mask_2`, and `image_embeds` of shape `(n, tokens, image_embed_dim)`, zeros for samples without
    an image.
    """

    title = "HunyuanVideo 1.5"
    transformer_class = "HunyuanVideo15Transformer3DModel"
    tested_forwards = ("2ae84770e72f",)
    stock_processors = ("HunyuanVideo15AttnProcessor2_0",)
    text = replace(HunyuanVideoFamily.text, rows="per_sample")
    cast_inputs = (*HunyuanVideoFamily.cast_inputs, GLYPHS, GLYPH_MASK, IMAGE)
    unused_at_end = ("attn.to_add_out", "ff_context")
    row_norms = ()

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models distilled by MeanFlow, which embed a second timestep."""
        if transformer.config.use_meanflow:
            raise PackingError(
                "This HunyuanVideo 1.5 transformer embeds a second timestep (use_meanflow=True), as distilled models "
                "do, for which there is no training objective here; use a model without it."
            )
        JointFamily.check(self, transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the glyph text with its mask, and the image tokens; drawn with an image for every other sample."""
        config = transformer.config

        def image(count: int) -> torch.Tensor:
            return torch.randn(count, IMAGE_TOKENS, config.image_embed_dim) * (torch.arange(count) % 2).view(-1, 1, 1)

        return {
            GLYPHS: lambda grids: torch.randn(len(grids), GLYPH_TOKENS, config.text_embed_2_dim),
            GLYPH_MASK: lambda grids: (torch.arange(GLYPH_TOKENS) < torch.arange(len(grids))[:, None] * 5).float(),
            IMAGE: lambda grids: image(len(grids)),
        }

    def added_lengths(self, conditioning: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the tokens of each sample's glyph text, and those of its image if it has one."""
        glyphs = conditioning[GLYPH_MASK].bool().cpu().sum(1).tolist()
        return tuple(map(sum, zip(glyphs, _image_lengths(conditioning[IMAGE]), strict=True)))

    def rows(self, batch: PackedBatch) -> Rows:
        """Return also the image tokens and glyphs of all samples without their padding, with their order."""
        layout = batch.layout
        tokens, images = (to_device(batch.conditioning[name], batch.text.device) for name in (GLYPHS, IMAGE))
        glyphs = apply_text_mask("masked", tokens, mask=batch.conditioning[GLYPH_MASK])
        counts = list(map(len, glyphs))
        of_image = [added - count for added, count in zip(layout.added_lengths or (), counts, strict=True)]
        valid = [image[:length] for image, length in zip(images, of_image, strict=True)]
        added = {
            GLYPHS: torch.cat(glyphs)[None],
            IMAGE: torch.cat(valid)[None],
            ORDER: order_by_sample(layout, of_image, counts),
        }
        return replace(super().rows(replace(batch, conditioning={})), conditioning=added)

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return timesteps in the model's dtype, as its pipelines pass them: it embeds them in their own dtype."""
        return {"timestep": rows.timesteps.to(transformer.dtype)}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also what embeds timesteps, the text refiner and the first block."""
        return [
            *JointFamily.hook_positions(self, transformer, base_size),
            transformer.time_embed.register_forward_pre_hook(_in_its_dtype),
            transformer.register_forward_pre_hook(_embed_added, with_kwargs=True),
            transformer.image_embedder.register_forward_pre_hook(_on_its_device),
            transformer.context_embedder.register_forward_pre_hook(_timestep_per_sample),
            transformer.context_embedder.register_forward_hook(_join_texts),
            transformer.cond_type_embed.register_forward_pre_hook(_kinds),
            transformer.transformer_blocks[0].register_forward_pre_hook(_fill_with_joined),
        ]


def _in_its_dtype(time_embed: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (timesteps,) = args
    return (timesteps.to(time_embed.timestep_embedder.linear_1.weight.dtype),)


def _timestep_per_sample(refiner: HunyuanVideo15TokenRefiner, args: tuple[Any, ...]) -> tuple[Any, ...]:
    texts, timesteps, masks = args
    return texts, timesteps[active_layout().joint.first_strips], masks.of_texts


def _image_lengths(images: torch.Tensor) -> list[int]:
    """Return how many tokens `(n, tokens, dim)` each sample has of an image; one of zeros is none."""
    if not images.shape[1]:
        return [0] * len(images)
    return ((images != 0).flatten(1).any(1) * images.shape[1]).tolist()


class _Added(local):
    """Embedded tokens until they join the texts, and the order and kinds of all, in the forward of a thread."""

    added: tuple[torch.Tensor, ...] = ()
    order: torch.Tensor
    kinds: torch.Tensor


_added = _Added()


@torch.compiler.disable  # the tokens of each pack are as many as they are
def _embed_added(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Embed image tokens and glyphs here, and leave the stock forward none of them to sort by masks."""
    active_layout()  # says what is wrong where there is none
    rest = dict(kwargs)
    _added.order, images, glyphs = rest.pop(ORDER), rest.pop(IMAGE), rest.pop(GLYPHS)
    _added.added = transformer.image_embedder(images)[0], transformer.context_embedder_2(glyphs)[0]
    first_text = images.shape[1] + glyphs.shape[1]
    _added.kinds = (_added.order < first_text).long() + (_added.order < images.shape[1]).long()
    masks = _KeepAll(rest["encoder_attention_mask"])
    none = {
        IMAGE: images[:, :0].detach().cpu(),  # where the stock forward asks whether all of them are zero
        GLYPHS: glyphs[:, :0],
        "encoder_attention_mask": masks,
        GLYPH_MASK: masks,
    }
    return args, {**rest, **none}


def _on_its_device(embedder: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (images,) = args
    return (images.to(active_layout().device),)


@torch.compiler.disable
def _join_texts(refiner: Any, args: tuple[Any, ...], texts: torch.Tensor) -> torch.Tensor:
    """Return the samples' image tokens, glyphs and refined text one after another, in one row."""
    tokens = torch.cat([*_added.added, texts.flatten(0, 1)])
    _added.added = ()
    return tokens.index_select(0, _added.order)[None]


def _kinds(embedder: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the kind of each token of the row that [`_join_texts`] makes: 2 of an image, 1 of glyphs, 0 of text."""
    (kinds,) = args
    return (_added.kinds[None],) if kinds.shape[1] else args  # the stock forward gets no image tokens and glyphs


class _KeepAll:
    """Stands for the masks of the row that [`_join_texts`] makes, and for the real one of the texts before it.

    The stock forward indexes by masks, for which it would wait for the device; here, by slices.
    """

    dtype = torch.bool
    device = torch.device("cpu")

    def __init__(self, of_texts: torch.Tensor) -> None:
        self.of_texts = of_texts

    def bool(self) -> _KeepAll:
        return self

    def __iter__(self) -> Iterator[_All]:
        return iter([_All((slice(None),))])


class _All(tuple[slice, ...]):
    """An index of all tokens of a row, in the place of a mask."""

    def __invert__(self) -> tuple[slice, ...]:
        return (slice(0),)

    def __getitem__(self, index: Any) -> Any:
        """Return a mask by a mask; what the blocks get of it is not used in a pack."""
        return torch.ones(0, dtype=torch.bool)


def _fill_with_joined(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the joined tokens, a row of all samples, into the text slots of the samples' strips."""
    strips, joined, *rest = args
    return strips, active_layout().joint.fill_slots(joined[0]), *rest


class GuiderRecipe(Recipe):
    """Recipe of pipelines with a guider, whose models are shown parts of a clip as channels; see [`Recipe`]."""

    def added_channels(self, samples: Samples) -> list[torch.Tensor]:
        """Return what the model is shown of each sample and a mask of it, `(C + 1, f, h, w)`: here nothing."""
        return [latent.new_zeros(len(latent) + 1, *latent.shape[1:]) for latent in samples.noised.latents]

    def render(self, prompt: str, size: Size, *, guidance_scale: float | None = None, **options: Any) -> np.ndarray:
        """Call the pipeline, whose guider holds the scale of guidance; see [`Recipe.render`]."""
        if guidance_scale is not None:
            self.pipeline.guider.guidance_scale = guidance_scale
        return super().render(prompt, size, **options)


class HunyuanVideo15Recipe(GuiderRecipe):
    """Recipe of `HunyuanVideo15Pipeline`; see [`Recipe`].

    The words that a caption quotes are encoded once more, by their letters (ByT5).
    """

    pipeline_class = "HunyuanVideo15Pipeline"
    family = HunyuanVideo15Family()
    default_sequence_length = 1000
    added_text_tokens = 256 + 729
    """Those of glyphs, and of an image: where there is none, the pipeline passes as many zeros."""
    prompt_outputs = ("values", "mask", GLYPHS, GLYPH_MASK)
    native_sizes = ((480, 848), (720, 1280))
    constructor_reads = ("vae",)

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode sample by sample: the attention mask of diffusers' VAE fits one sample only."""
        encode = super().encode_latents
        return torch.cat([encode(sample) for sample in pixel_values.split(1)])

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        return {**super().conditioning(samples), IMAGE: self.image_tokens(samples)}

    def image_tokens(self, samples: Samples) -> torch.Tensor:
        """Return the image tokens of the samples, here none, which equals the pipeline's masked zeros."""
        text = samples.text.values
        return text.new_zeros(len(text), 0, self.transformer.config.image_embed_dim)

    def render(self, prompt: str, size: Size, **options: Any) -> np.ndarray:
        """Call the pipeline, which has the length of texts as an attribute; see [`Recipe.render`]."""
        self.pipeline.tokenizer_max_length = self.max_sequence_length
        return super().render(prompt, size, **options)


class HunyuanVideo15ImageToVideoRecipe(HunyuanVideo15Recipe):
    """Recipe of `HunyuanVideo15ImageToVideoPipeline`, whose models continue a sample's first frame; see [`Recipe`].

    The model gets the frame's latents and a mask as further channels, and attends to its SigLIP embedding.
    """

    pipeline_class = "HunyuanVideo15ImageToVideoPipeline"
    takes_image = True
    conditions = (Condition(name=ENDS[0], enters="channels", pictures_only=True),)

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Encode the first frame, the sample's own or the data set's, by the VAE and by the image encoder."""
        first, encoder = end_frames(pixel_values, conditions), self.pipeline.image_encoder
        images = pictures(first[:, :, 0])
        tokens = self.pipeline.encode_image(images, batch_size=1, device=encoder.device, dtype=encoder.dtype)
        return {IMAGE_LATENTS: self.encode_latents(first), IMAGE: tokens}

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        shape = self.pipeline.vision_num_semantic_tokens, self.pipeline.vision_states_dim
        return {IMAGE_LATENTS: torch.zeros_like(latent[:, :1]), IMAGE: latent.new_zeros(shape)}

    def added_channels(self, samples: Samples) -> list[torch.Tensor]:
        """Return the latents of the first frame, zeros for the others, and a mask that is 1 at the first."""
        conditions = super().added_channels(samples)
        for condition, first in zip(conditions, samples.conditions[IMAGE_LATENTS], strict=True):
            condition[:, :1] = torch.cat([first, torch.ones_like(first[:1])])
        return conditions

    def image_tokens(self, samples: Samples) -> torch.Tensor:
        return torch.stack(list(samples.conditions[IMAGE])).to(samples.text.values)

    def render(self, prompt: str, size: Size, **options: Any) -> np.ndarray:
        """Call the pipeline with a size, where it would choose one by the image's ratio, rounded to five digits."""
        processor = self.pipeline.video_processor
        sized = copy.copy(processor)  # calls of other sizes, which may run side by side, share the pipeline's own
        sized.calculate_default_height_width = lambda **image_size: (size.height, size.width)
        self.pipeline.video_processor = sized
        try:
            return super().render(prompt, size, **options)
        finally:
            self.pipeline.video_processor = processor


class HunyuanImageFamily(JointFamily):
    """HunyuanImage 2.1: rotary positions over rows and columns; refined text, and glyphs, in joint attention.

    The pipeline masks the padding of a text: pass what the mask keeps. What an image shall spell has an embedding of
    its own, byte by byte (`encoder_hidden_states_2`, with a mask). The stock forward refines the text, embeds the
    glyphs, and puts both into one row by their masks, at which the CPU waits for the device several times per sample.
    In a pack, hooks embed the glyphs without their padding and fill the text slots of the strips, in an order that the
    CPU knows.

    `encoder_hidden_states_2`, `(n, length, text_embed_2_dim)`, and `encoder_attention_mask_2`, `(n, length)`, are the
    glyphs; `timestep_r`, `(n,)`, of a mean-flow model is the timestep to which its prediction leads.
    """

    title = "HunyuanImage 2.1"
    transformer_class = "HunyuanImageTransformer2DModel"
    tested_forwards = ("d8631d951c7a",)
    stock_processors = ("HunyuanImageAttnProcessor",)
    stock_attention = ("context_embedder.",)
    text = replace(HunyuanVideoFamily.text, rows="per_sample")
    cast_inputs = (*JointFamily.cast_inputs, GLYPHS, GLYPH_MASK, "timestep")
    images_only = True
    latents_as = "images"
    position_module = "rope"
    attention_kwargs = "attention_kwargs"
    guidance = 3250.0  # a thousandfold, as its pipeline scales it
    text_norms = ("transformer_blocks.*.norm1_context",)
    row_norms = ("single_transformer_blocks.*.norm",)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse the refiner, which takes an image as further channels of a clip."""
        if len(transformer.config.patch_size) != 2:
            raise PackingError(
                f"This HunyuanImage transformer has patches of {tuple(transformer.config.patch_size)}: it is the "
                "refiner of finished images. Packs are for the model that makes images from text."
            )
        super().check(transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return glyphs and their mask, any distilled guidance, and the end of a mean flow's step."""
        config, length = transformer.config, 4
        draws = dict(super().conditioning(transformer))
        if config.text_embed_2_dim is not None:
            draws[GLYPHS] = lambda grids: torch.randn(len(grids), length, config.text_embed_2_dim)
            draws[GLYPH_MASK] = lambda grids: (
                torch.arange(length) < torch.randint(length + 1, (len(grids), 1))
            ).long()
        if config.use_meanflow:
            draws["timestep_r"] = lambda grids: torch.zeros(len(grids))
        return draws

    def added_lengths(self, conditioning: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the tokens of each sample's glyphs, where the model has them."""
        mask = conditioning.get(GLYPH_MASK)
        return None if mask is None else tuple(mask.bool().cpu().sum(1).tolist())

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        latent = shape_only(torch.empty((), device=device), grid, (1, *module.patch_size))
        return tuple(module.forward(latent[:, :, 0]))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the transformer and the text refiner."""
        return [
            *super().hook_positions(transformer, base_size),
            transformer.register_forward_pre_hook(_embed_glyphs, with_kwargs=True),
            transformer.context_embedder.register_forward_pre_hook(_by_sample),
            transformer.context_embedder.register_forward_hook(_fill_with_glyphs),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return timesteps in the dtype of the latents, as its pipeline does."""
        return {**super().inputs(rows), "timestep": rows.timesteps.to(rows.latents.dtype)}

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the glyphs of all samples in one row, without their padding."""
        others = dict(batch.conditioning)
        glyphs, mask = others.pop(GLYPHS, None), others.pop(GLYPH_MASK, None)
        rows = super().rows(replace(batch, conditioning=others))
        if glyphs is None:
            return rows
        real = apply_text_mask("masked", to_device(glyphs, batch.text.device), mask=mask)
        return replace(rows, conditioning={**rows.conditioning, GLYPHS: torch.cat(real)[None]})


def _by_sample(refiner: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Turn the timesteps of the strips into those of the samples, whose texts come in a row each."""
    texts, timesteps, mask = args
    return texts, timesteps[active_layout().joint.first_strips], mask


@torch.compiler.disable  # the glyphs of each pack are as many as they are
def _embed_glyphs(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Embed the glyphs here, so that the stock forward finds none to sort by masks."""
    rest = dict(kwargs)
    glyphs = rest.pop(GLYPHS, None)
    _added.added = () if glyphs is None else (transformer.context_embedder_2(glyphs)[0],)
    return args, rest


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _fill_with_glyphs(refiner: torch.nn.Module, args: tuple[torch.Tensor, ...], texts: torch.Tensor) -> torch.Tensor:
    """Put each sample's glyphs and its refined text into the text slots of strips."""
    layout, glyphs = active_layout(), _added.added
    _added.added = ()
    order = order_by_sample(layout, *([layout.added_lengths] if layout.added_lengths else []))
    return layout.joint.fill_slots(torch.cat([*glyphs, texts.flatten(0, 1)]).index_select(0, order))


class HunyuanImageRecipe(Recipe):
    """Recipe of `HunyuanImagePipeline`; see [`Recipe`]. The pipeline cannot load LoRA weights."""

    pipeline_class = "HunyuanImagePipeline"
    family = HunyuanImageFamily()
    image_vae = True
    default_sequence_length = 1000
    trims_text = True
    added_text_tokens = 128
    """Those of glyphs."""
    guidance_factor = 1000.0
    prompt_outputs = ("values", "mask", GLYPHS, GLYPH_MASK)
    native_sizes = ((2048, 2048), (1536, 2560), (2560, 1536), (1792, 2304), (2304, 1792))

    def objective(self, **settings: Any) -> Objective:
        """Return the training objective; see [`Recipe.objective`].

        Raises:
            BucketingError: Also if the model is distilled to steps of a mean flow, which flow matching would undo.
        """
        if self.transformer.config.use_meanflow:
            raise BucketingError(
                "This HunyuanImage transformer predicts whole steps of a mean flow (use_meanflow), for which there is "
                "no objective; train the model that it was distilled from."
            )
        return super().objective(**settings)

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack, with gradient checkpoints that take the keywords which the model passes to them."""
        bind_checkpoints(self.transformer)
        return super().predict(transformer, samples, inputs)


RECIPES = (
    HunyuanVideoRecipe,
    HunyuanVideo15Recipe,
    HunyuanVideo15ImageToVideoRecipe,
    HunyuanImageRecipe,
)
