"""MiniMax-H3: one sequence of text, sound and video per forward, which is the pack; flow matching.

The stock forward takes the rows of one sample, each with a position, a modality and a timestep; its batch axis only
repeats them. So strips are joined again, and attention alone sees segments: of texts in the text refiner, of samples
in the blocks. Rows, positions and modalities of a sample are those that the pipeline's own block makes.

Sound is rows of the same sequence, between a sample's text and its video: those of the left channel, then those of the
right one. Samples without sound have none of them. Before it come the rows of what a sample is shown: of its first or
its last frame, which lie at the times of these, or of references, each of which moves the clock of the sample on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ...buckets.sizes import LatentSpec, Size, round_to_multiple
from ...conditions.audio import AudioRule
from ...conditions.condition import Condition
from ...conditions.names import KEYFRAMES, REFERENCE
from ...conditions.references import ReferenceRule
from ...conditions.shares import APPENDED, APPENDED_FIRST
from ...devices import to_device
from ...errors import BucketingError, PackingError
from ...packing.audio import Audio
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout, exact_timesteps
from ...packing.family import UNLIMITED, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import Tables
from ...packing.processors import PackedAttnProcessor, Rotary
from ...packing.segments import SegmentSpans
from ...packing.strips import by_strip
from ...packing.texts import TextTokens, pad_texts
from ...randomness import Purpose, integer_seed
from ..experts import TrainedComponent
from ..first_frame import pictures
from ..loading import read_config
from ..modular import ModularRecipe
from ..samples import KEYFRAME_PLACES, Samples
from ..texts import TextEmbeddings

VIDEO, TEXT, AUDIO = range(3)
"""Modalities of rows (`token_tags`)."""
AUDIO_CHANNELS = 2
CONDITION_TIMESTEP = 1.0
"""Timestep of what a sample is shown, of up to 1000 (`keyframe_noise_aug` of the pipeline is 0.999); or that of the
sample where it has less."""

PICTURE_TOKENS = "picture_tokens"
"""Conditioning `(n, length)`: 1 for the text tokens of a sample that the text encoder makes of a picture, which have
the modality of video; 0 for others, as for those behind the last."""
AT_END = "at_end"
"""Conditioning `(n, most)`: of each latent frame that a sample is shown, 1 if it is its last frame and 0 if it is its
first. Without it, what is shown are references."""
_PACKED_AT_END = "packed_at_end"
PICTURE_TEXT = 118
"""Tokens that a picture adds to the text beside its own: those of a label, of at most 16 bytes, of the two tokens
around it, and of one that is made larger for the text encoder, which sees no less than 256×256 pixels, in whole tokens
of 32×32."""

FEWEST_FRAMES = 124
"""Frames of the shortest video that the pipeline makes, of about five seconds."""
TRANSFORMER_REF: Final = "transformer_ref"
"""Name of the pipeline's transformer for samples with references."""
SHORT_SIDE = "reference_image_short_edge"
"""Setting of the pipeline: the shorter side in pixels to which it brings pictures that are references."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of pixels in [0, 1], by which those that the VAE encodes are normalised."""


@dataclass(frozen=True, kw_only=True)
class PackSequence:
    """A pack as one sequence: each sample's text, what it is shown, its audio, its tokens; padding comes last.

    Attributes:
        order (`torch.Tensor` of shape `(rows,)`): The index of each row among all text tokens, followed by all tokens,
            followed by those of audio.
        places (`torch.Tensor` of shape `(rows,)`): The inverse permutation: the row of each of these.
        timesteps (`torch.Tensor` of shape `(rows,)`): The index of each row's timestep among those of all samples,
            followed by those of their audio, if there is any, and those of what they are shown; 0 for padding.
        modalities (`torch.Tensor` of shape `(rows,)`): The modality of each row.
        segments ([`SegmentSpans`]): Attention of each sample's rows to each other.
        text_segments ([`SegmentSpans`]): Attention of each sample's text to itself, over all text tokens.
    """

    order: torch.Tensor
    places: torch.Tensor
    timesteps: torch.Tensor
    modalities: torch.Tensor
    segments: SegmentSpans
    text_segments: SegmentSpans

    @classmethod
    def of(cls, layout: PackedLayout) -> PackSequence:
        """Return the sequence of a pack, made once."""
        return layout.self_segments.made("sequence", partial(cls._make, layout))

    @classmethod
    def _make(cls, layout: PackedLayout) -> PackSequence:
        words, tokens = layout.num_text_tokens, layout.num_tokens
        lengths = layout.audio_lengths or (0,) * len(layout)
        rows = words + tokens + sum(lengths)
        audio = itertools.pairwise(itertools.accumulate(lengths, initial=words + tokens))
        references = [(video[1], full[1]) for video, full in zip(layout.own_spans, layout.spans, strict=True)]
        parts = [
            [torch.arange(*text), words + torch.arange(*seen), torch.arange(*sound), words + torch.arange(*video)]
            for text, seen, sound, video in zip(layout.text_spans, references, audio, layout.own_spans, strict=True)
        ]
        pieces = [torch.cat(sample) for sample in parts]
        real = torch.cat(pieces)
        is_padding = torch.ones(rows, dtype=torch.bool).index_fill(0, real, False)
        order = torch.cat([real, is_padding.nonzero()[:, 0]])
        spans = list(itertools.pairwise([0, *itertools.accumulate(map(len, pieces))]))
        of_audio = order >= words + tokens
        timesteps = torch.zeros(rows, dtype=torch.long)
        for sample, span in enumerate(spans):
            timesteps[slice(*span)] = sample
        timesteps[of_audio] += len(layout)
        is_reference = torch.zeros(rows, dtype=torch.bool)
        for seen in references:
            is_reference[words + seen[0] : words + seen[1]] = True
        timesteps[is_reference[order]] += len(layout) * (1 if layout.audio_lengths is None else 2)
        modalities = torch.where(order < words, TEXT, torch.where(of_audio, AUDIO, VIDEO))
        tensors = (to_device(index, layout.device) for index in (order, order.argsort(), timesteps, modalities))
        order, places, timesteps, modalities = tensors
        return cls(
            order=order,
            places=places,
            timesteps=timesteps,
            modalities=modalities,
            segments=SegmentSpans.within(spans, rows),
            text_segments=SegmentSpans.within(layout.text_spans, words),
        )


class PackedMiniMaxH3AttnProcessor(PackedAttnProcessor):
    """Attention of `MiniMaxH3Attention` over the sequence of a pack.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
        of_text (`bool`): Whether the module refines text alone.
    """

    def __init__(self, backend: Backend = "segments", *, of_text: bool = False) -> None:
        super().__init__(backend)
        self.of_text = of_text

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of texts, or of samples with their texts; the model has no cross-attention."""
        sequence = PackSequence.of(layout)
        segments = sequence.text_segments if self.of_text else sequence.segments
        return segments, segments

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: Rotary | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample: `(1, rows, dim)`, with cosines and sines `(rows, channels)` unless of text."""
        return super().__call__(attn, hidden_states, image_rotary_emb=rotary_emb)

    def rotate(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Rotate the first channels of each head as the model does, by tables that have as many."""
        from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb

        rotated: torch.Tensor = _apply_rotary_emb(tokens[None], *rotary)[0]
        return rotated


class MiniMaxH3Family(Family):
    """Packing of `MiniMaxH3Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    Timesteps are as for the other families, up to 1000 for noise; the model gets 1 − t / 1000.
    """

    title = "MiniMax-H3"
    transformer_class = "MiniMaxH3Transformer3DModel"
    tested_forwards = ("f1d277059cf4",)
    processor_class = PackedMiniMaxH3AttnProcessor
    stock_processors = ("MiniMaxH3AttnProcessor",)
    processors_read_fusion = True
    text = TextTokens(rows="sequence", channels="text_dim", shortest=1)
    latents_as = "tokens"
    negates = True
    strips_have_positions = False
    attention_kwargs = "attention_kwargs"
    width_settings = ("hidden_size",)
    runs_alone = True
    max_references = UNLIMITED
    optional_conditioning = (PICTURE_TOKENS, AT_END)
    audio_parts = ("audio_proj",)
    audio_in_sequence = True
    cast_inputs = (*Family.cast_inputs, "audio_hidden_states")
    timestep_unit = 1000
    turns_timesteps = True

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse patches of several frames, of which the pipeline has no positions."""
        if transformer.config.patch_size[0] != 1:
            raise PackingError(
                f"MiniMax-H3's pipeline places patches of one frame; this model has {transformer.config.patch_size}."
            )
        super().check(transformer, strip_length=strip_length)

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent, which the configuration counts without the patch."""
        return int(transformer.config.in_channels)

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse audio that is not as long on the left as on the right."""
        super().check_layout(transformer, layout, stretched=stretched)
        for sample, length in enumerate(layout.audio_lengths or ()):
            if length % AUDIO_CHANNELS:
                raise PackingError(
                    f"The audio of sample {sample} has {length} tokens; those of the left channel are followed by as "
                    "many of the right one."
                )

    def processor(self, name: str, backend: Backend) -> PackedMiniMaxH3AttnProcessor:
        return PackedMiniMaxH3AttnProcessor(backend, of_text=name.startswith("token_refiner"))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the rows of the pack, with their positions, modalities and samples."""
        describe = partial(_describe, Tables(_positions))
        return [transformer.register_forward_pre_hook(describe, with_kwargs=True)]

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Give each sample a text of its own, which is modulated by its timestep.

        Processes that share a pack need as many rows each, so that texts are padded until their number divides all
        rows but those of strips, which it divides already.
        """
        length = layout.num_text_tokens if pad_text_to is None else pad_text_to
        pads, audio = pad_text_to is not None or layout.processes > 1, sum(layout.audio_lengths or ())
        padded = round_to_multiple(length + audio, layout.processes) - audio
        return replace(layout, caption_ids=None), padded if pads else None

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the strips with timesteps of samples, of their audio and of what they are shown, where there is some.

        Pictures in texts are given as the modality of each row of the pack.
        """
        rows, layout = super().rows(replace(batch, conditioning={})), batch.layout
        device, sequence = batch.strips.device, PackSequence.of(layout)
        arguments = {name: to_device(values, device) for name, values in batch.conditioning.items()}
        if (pictures := arguments.pop(PICTURE_TOKENS, None)) is not None:
            by_text = [_marks(row, length) for row, length in zip(pictures, layout.text_lengths, strict=True)]
            others = layout.text_padding + layout.num_tokens + sum(layout.audio_lengths or ())
            marks = F.pad(torch.cat(by_text), (0, others)).index_select(0, sequence.order)
            arguments["token_tags"] = sequence.modalities.masked_fill(marks, VIDEO)
        if AT_END in arguments:
            arguments[_PACKED_AT_END] = arguments.pop(AT_END)
        if (audio := batch.audio) is not None:
            arguments["audio_hidden_states"] = torch.cat(list(audio.latents))[None]
        timesteps = _levels(batch.timesteps, audio, has_references=layout.shown is not None)
        return replace(rows, timesteps=timesteps, conditioning=arguments)

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Join the strips of a pack into one sequence, as its texts are."""
        others = {name: values for name, values in rows.conditioning.items() if name not in self.optional_conditioning}
        arguments = super().inputs(replace(rows, conditioning=others))
        tokens = arguments["hidden_states"]
        return {
            **arguments,
            "hidden_states": tokens.reshape(len(rows.text), -1, tokens.shape[-1]),
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Describe the rows of samples of one size as the pipeline does, each with its own text."""
        words, audio, device = rows.text.shape[1], rows.audio, rows.latents.device
        length = 0 if audio is None else audio.lengths[0]
        at_end = to_device(rows.conditioning[AT_END], device)[0] if AT_END in rows.conditioning else None
        sample = _Rows(rows.grids, words, length, keyframes=bool(rows.references) and at_end is not None)
        positions = _placed(_positions(transformer, sample, device=device), sample, at_end)
        counts = list(map(len, positions))
        of_text, of_references, of_audio, of_video = torch.arange(sum(counts)).split(counts)
        modalities = torch.full((sum(counts),), VIDEO)
        modalities[of_text], modalities[of_audio] = TEXT, AUDIO
        if PICTURE_TOKENS in rows.conditioning:
            (marks,) = to_device(rows.conditioning[PICTURE_TOKENS], device)
            modalities = to_device(modalities, device)
            modalities[:words] = modalities[:words].masked_fill(_marks(marks, words), VIDEO)
        indices = torch.zeros(sum(counts), dtype=torch.long)
        indices[of_audio], indices[of_references] = 1, 1 if audio is None else 2
        return {
            "timestep": 1 - _levels(rows.timesteps, audio, has_references=bool(counts[1])) / 1000,
            "timestep_indices": indices,
            "token_tags": modalities,
            "position_ids": torch.cat(positions),
            "video_indices": torch.cat([of_video, of_references]),
            "text_indices": of_text,
            "audio_indices": of_audio,
            "audio_hidden_states": (
                _no_sound(transformer, rows.text) if audio is None else torch.stack(list(audio.latents))
            ),
        }

    def restored(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        """Cut the sequence into rows again."""
        return super().restored(output.flatten(0, 1).unflatten(0, (-1, math.prod(grid))), grid, patch)


class _Rows(NamedTuple):
    """What the positions of a sample's rows follow from.

    Attributes:
        grids (tuple of `(t, h, w)`): Its own token grid, then those of what it is shown.
        words (`int`): Text tokens.
        audio (`int`): Tokens of audio.
        keyframes (`bool`): Whether it is shown its first or its last frame; else references.
    """

    grids: tuple[Grid, ...]
    words: int
    audio: int
    keyframes: bool


def _positions(transformer: Any, sample: _Rows, *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the positions `(rows, 3)` of a sample's text, of what it is shown, of its audio and of its tokens.

    They are those that the pipeline's blocks make. A keyframe is placed at the first frame; behind all others is then
    the position of each row of a keyframe at the last one.
    """
    from diffusers.modular_pipelines.minimax_h3.before_denoise import (
        MiniMaxH3PrepareLayoutStep,
        MiniMaxH3Ref2VAPrepareLayoutStep,
    )
    from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference, MiniMaxH3VideoReference

    video_grid, *reference_grids = sample.grids
    if sample.keyframes and any(grid != (1, *video_grid[1:]) for grid in reference_grids):
        raise PackingError(
            f"Keyframes have the height and the width of their sample, {video_grid[1:]}; got {reference_grids}."
        )
    arguments, latents = _layout_arguments(transformer, sample)
    if reference_grids and not sample.keyframes:
        positions, *_ = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            **arguments,
            references=[
                MiniMaxH3ImageReference(image=None) if latent.shape[2] == 1 else MiniMaxH3VideoReference(frames=[])
                for latent in latents
            ],
            condition_latents=latents,
            audio_condition_latents=[],
        )
        counts = [sum(map(math.prod, reference_grids)), 0]
    else:
        ends = ("first", "last") if sample.keyframes else ()
        positions, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(**arguments, keyframe_anchors=ends)
        counts = [math.prod(video_grid[1:])] * 2 if sample.keyframes else [0, 0]
    positions = to_device(positions.float(), device)  # the model casts them so
    text, first, last, sound, tokens = positions.split([sample.words, *counts, sample.audio, math.prod(video_grid)])
    return text, first, sound, tokens, last


def _layout_arguments(transformer: Any, sample: _Rows) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a sample as the pipeline's blocks take it, and latents without values of what it is shown."""
    patch = transformer.config.patch_size
    video_size, *reference_sizes = (
        tuple(count * side for count, side in zip(grid, patch, strict=True)) for grid in sample.grids
    )
    arguments = {
        "text_token_tags": torch.full((sample.words,), TEXT),
        **dict(zip(("num_latent_frames", "latent_height", "latent_width"), video_size, strict=True)),
        "num_audio_latents": sample.audio // AUDIO_CHANNELS,
        "patch_size": patch,
        "audio_channels": AUDIO_CHANNELS,
        "audio_tag": AUDIO,
        "video_tag": VIDEO,
    }
    return arguments, [torch.empty(1, 1, *size, device="meta") for size in reference_sizes]


def _placed(tables: tuple[torch.Tensor, ...], sample: _Rows, at_end: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return [`_positions`] of a sample with each keyframe at its end, as a row of [`AT_END`] says."""
    text, references, sound, tokens, last = tables
    if sample.keyframes:
        assert at_end is not None, "else these are references"
        ends = at_end[: len(sample.grids) - 1]
        # A device is not asked which end it is.
        references = torch.cat([torch.where(end > 0, last, references) for end in ends])
    return text, references, sound, tokens


def _marks(row: torch.Tensor, length: int) -> torch.Tensor:
    """Return which tokens of a text are those of pictures, `(length,)`, by a row of [`PICTURE_TOKENS`]."""
    return F.pad(row[:length] > 0, (0, max(0, length - len(row))))


def _levels(timesteps: torch.Tensor, audio: Audio | None, *, has_references: bool) -> torch.Tensor:
    """Return the timesteps of samples, then of their audio, then of what they are shown, as far as there is some."""
    levels = [timesteps]
    if audio is not None:
        levels.append(to_device(exact_timesteps(audio.timesteps), timesteps.device))
    if has_references:
        levels.append(timesteps.clamp(max=CONDITION_TIMESTEP))
    return torch.cat(levels)


def _no_sound(transformer: Transformer, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(len(like), 0, FAMILY.audio_channels(transformer))


@torch.compiler.disable  # loops over the samples of the pack
def _describe(
    tables: Tables, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    layout, tokens = active_layout(), kwargs["hidden_states"]
    sequence, device = PackSequence.of(layout), torch.device(layout.device)
    lengths, at_end = layout.audio_lengths or (0,) * len(layout), kwargs.get(_PACKED_AT_END)
    described = [
        _Rows(grids, words, audio, keyframes=len(grids) > 1 and at_end is not None)
        for grids, words, audio in zip(layout.sample_grids, layout.text_lengths, lengths, strict=True)
    ]
    pairs = zip(described, [None] * len(layout) if at_end is None else at_end, strict=True)
    placed = [_placed(tables(transformer, sample, device), sample, ends) for sample, ends in pairs]
    of_texts, of_references, of_audio, of_tokens = zip(*placed, strict=True)
    padding = of_texts[0].new_zeros(layout.text_padding, 3)
    by_sample = [torch.cat(parts) for parts in zip(of_tokens, of_references, strict=True)]
    positions = torch.cat([*of_texts, padding, by_strip(by_sample, layout).flatten(0, 1), *of_audio])
    of_text, of_video, of_sound = sequence.places.tensor_split(
        (layout.num_text_tokens, layout.num_text_tokens + layout.num_tokens)
    )
    rows = {
        "timestep_indices": sequence.timesteps,
        "token_tags": sequence.modalities,
        "position_ids": positions.index_select(0, sequence.order),
        "text_indices": of_text,
        "video_indices": of_video,
        "audio_indices": of_sound,
        "audio_hidden_states": _no_sound(transformer, tokens),
    }
    return args, {**rows, **{name: values for name, values in kwargs.items() if name != _PACKED_AT_END}}


FAMILY = MiniMaxH3Family()


class MiniMaxH3Recipe(ModularRecipe):
    """Recipe of `MiniMaxH3ModularPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Videos have 17·n + 5 frames, which the VAE encodes to 5·n + 2, at 24 frames per second; an image is one latent
    frame. A render has at least the 124 frames of the shortest video that the pipeline makes.

    Where the data set has audio, each sample's is trained at the level that the scheduler of audio has in the step in
    which the other one has the level of its video; else it is neither encoded nor predicted, what belongs to it is not
    trained, and renders have the sound that the model makes up.

    A run can show samples their first and their last frame, as the pipeline is called with `image` and `last_image`:
    as further tokens, each encoded by itself, with a little noise, and in front of the caption as pictures that the
    text encoder sees.

    The pipeline has a transformer of its own for samples with references, `transformer_ref`. A run that trains it
    shows each sample its pictures, as the pipeline is called with `references`; a run of the other one shows none.

    The pipeline has no empty prompt, as its model is distilled to guided predictions: a dropped caption is a space.
    """

    pipeline_class = "MiniMaxH3ModularPipeline"
    output = "videos"
    family = FAMILY
    default_sequence_length = 512
    native_sizes = ((768, 1344), (768, 768), (1344, 768))
    sound_rate = "audio_sampling_rate"
    sound_fps = 24
    conditions = (
        ReferenceRule(
            most=9,
            max_ratio=4.0,
            pictures_only=True,
            in_text=True,
            text_tokens=PICTURE_TEXT,
            text_factor=1,
            argument="references",
        ),
        Condition(name=KEYFRAMES, enters="tokens", own_frames=True, in_text=True, text_tokens=PICTURE_TEXT),
    )
    reference_code = (
        "from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference",
        '[MiniMaxH3ImageReference.from_file("reference.png")]',
    )

    @classmethod
    def blocks(cls, trained: str = "transformer") -> Any:
        """Return the blocks of references, which call `transformer_ref`, or all others."""
        from diffusers import MiniMaxH3Blocks

        blocks = MiniMaxH3Blocks()
        if trained == TRANSFORMER_REF:
            return blocks.get_workflow("ref2va")
        for block in blocks.sub_blocks.values():
            block.sub_blocks.pop("ref2va", None)
        return blocks

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        return math.prod(vae["temporal_downsample_factors"]), math.prod(vae["spatial_downsample_factors"])

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read also the length of the chunks in which the VAE encodes videos."""
        chunk = read_config(name_or_path, "vae")["clip_length"]
        return replace(super().read_spec(name_or_path), chunk_frames=chunk)

    @classmethod
    def read_audio_rule(cls, name_or_path: str) -> AudioRule:
        """Read the rate and the hop of the audio VAE, which encodes left and right each by itself."""
        config = read_config(name_or_path, "audio_vae")
        return AudioRule(
            rate=config["sampling_rate"],
            samples_per_token=math.prod(config["encoder_rates"]),
            tokens_at_once=AUDIO_CHANNELS,
        )

    @torch.no_grad()
    def encode_audio(self, waveform: torch.Tensor) -> torch.Tensor:
        """Encode sound `(2, samples)` in [−1, 1] to normalised latents `(tokens, channels)`, the posterior's mode.

        Those of the left channel precede those of the right one.
        """
        vae = self.pipeline.audio_vae
        config = vae.config
        if not waveform.shape[1]:
            return waveform.new_zeros(0, config.latent_channels)
        latents = vae.encode(waveform[:, None]).latent_dist.mode().transpose(1, 2)
        mean, std = (
            to_device(torch.tensor(values), latents.device) for values in (config.latents_mean, config.latents_std)
        )
        return ((latents - mean) / std).flatten(0, 1)

    def audio_shift(self) -> float:
        """Return the shift of the scheduler of audio over that of the scheduler of videos."""
        pipeline = self.pipeline
        return float(pipeline.audio_scheduler.config.shift / pipeline.scheduler.config.shift)

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode `(B, 3, F, H, W)` in [−1, 1], normalised by ImageNet's statistics as the VAE expects."""
        return super().encode_latents(_normalised((pixel_values + 1) / 2, IMAGENET))

    @classmethod
    def reference_rule(
        cls, settings: Mapping[str, Any] = MappingProxyType({}), trained: str | None = None
    ) -> ReferenceRule:
        """Return the rule with the shorter side that the pipeline's settings or its blocks name."""
        configs = cls.blocks(TRANSFORMER_REF).expected_configs
        short_side = next(settings.get(SHORT_SIDE, config.default) for config in configs if config.name == SHORT_SIDE)
        rule = replace(super().reference_rule(settings), short_side=int(short_side), resample="lanczos")
        if trained is None:
            return rule
        return replace(rule, least=1) if trained == TRANSFORMER_REF else replace(rule, most=0)

    @classmethod
    def transformer_for(cls, conditions: Collection[str]) -> TrainedComponent:
        """Return the transformer of references where samples have some."""
        return TRANSFORMER_REF if REFERENCE in conditions else "transformer"

    @property
    def shows_references(self) -> bool:
        """Whether the trained transformer is that of samples with references."""
        return self.trained == TRANSFORMER_REF

    def name_faults(self, names: Collection[str]) -> Iterator[str]:
        """Refuse references for the transformer that takes none, and data without them for that which needs some."""
        yield from super().name_faults(names)
        if REFERENCE in names and not self.shows_references:
            yield (
                f"The {self.trained} of a {self.pipeline_class} is shown no references, which the data set has. Train "
                f"the transformer that the pipeline has for them (--trained_component {TRANSFORMER_REF}), or prepare "
                "the data set without --reference_column."
            )
        if self.shows_references and REFERENCE not in names:
            yield (
                f"The {self.trained} of a {self.pipeline_class} is shown references, which the data set lacks; "
                "prepare it again with --reference_column, or train another `trained_component`."
            )

    @classmethod
    def check_renders(cls, *, references: int, trained: str) -> None:
        """Refuse references for the transformer that takes none, and a call without any of the other one."""
        if bool(references) != (trained == TRANSFORMER_REF):
            raise BucketingError(
                f"The {trained} of a {cls.pipeline_class} is shown {'no' if references else 'at least one'} reference "
                f"in a render, got {references or 'none'}; `trained_component` {TRANSFORMER_REF} is the one that is "
                "shown some."
            )

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return references as the pipeline's call takes them: pictures of a class of its own."""
        from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference

        arguments = super().reference_arguments(references, size)
        return {name: [MiniMaxH3ImageReference(frame) for frame in frames] for name, frames in arguments.items()}

    @classmethod
    def encoder_pictures(cls, references: Sequence[Size]) -> int:
        """Return what references add to the text: a token for each 32×32 pixels of them, and those around it."""
        return super().encoder_pictures(references) + sum(size.height * size.width // 32**2 for size in references)

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """The first and the last frame, unless samples have references, and what the base class takes."""
        return (*(() if self.shows_references else (APPENDED_FIRST, APPENDED[0])), *super().drawn_kinds)

    def keyframe_of(self, latent_frame: int) -> int:
        """Return the last frame that a latent frame holds, in the chunks of the VAE."""
        return self.spec.size_of(latent_frame + 1, 1, 1).frames - 1

    @torch.no_grad()
    def encode_reference(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode a picture `(3, 1, H, W)` as the pipeline does: a draw from the posterior, always the same, rounded.

        The pipeline takes pictures of 8 bits.
        """
        vae = self.pipeline.vae
        levels = ((pixels[None].float() + 1) * 127.5).round() / 255
        posterior = vae.encode(_normalised(levels, IMAGENET).to(vae.dtype)).latent_dist
        draw = posterior.sample(generator=torch.Generator().manual_seed(self.pipeline.keyframe_encode_seed))
        return _normalised(draw.half().float(), self.latent_statistics())[0]

    def references(self, samples: Samples) -> Sequence[Sequence[torch.Tensor]] | None:
        """Return what each sample is shown with the noise that the pipeline adds to it."""
        if (references := super().references(samples)) is None:
            return None
        return [_noised(latents, key) for latents, key in zip(references, samples.keys, strict=True)]

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return which tokens of texts are those of pictures, and which keyframe is the last frame.

        Raises:
            BucketingError: If another frame is appended, as to a stack with samples of a source that appends none.
        """
        pictures = samples.text.others.get(PICTURE_TOKENS)
        conditioning: dict[str, Any] = {} if pictures is None else {PICTURE_TOKENS: pictures}
        if (places := samples.conditions.get(KEYFRAME_PLACES)) is not None:
            for latent, frames in zip(samples.noised.latents, places, strict=True):
                if {*frames} - {0, self.keyframe_of(latent.shape[1] - 1)}:
                    raise BucketingError(
                        f"A {self.pipeline_class} is shown first and last frames alone, and the samples of a stack as "
                        'many as its first; train packs (`batching="pack"`), or let all sources append as many.'
                    )
            ends = [[min(1, place) for place in frames] for frames in places]
            conditioning[AT_END] = torch.tensor([[*at_end, 0, 0][:2] for at_end in ends])
        return conditioning

    @torch.no_grad()
    def encode_text(
        self, captions: list[str], references: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> TextEmbeddings:
        """Encode each caption behind the pictures of its sample, without a template, padded, with a mask.

        Args:
            captions (list of `str`): Captions, of which `max_sequence_length` tokens are read.
            references (sequence of sequences of `(3, 1, h, w)`, *optional*): Pictures that are seen before each
                caption, in [−1, 1]; by default none.

        Returns:
            [`TextEmbeddings`]: With pictures, they say which tokens are theirs, `(n, length)`.
        """
        by_caption = references or [()] * len(captions)
        texts, marks = zip(*map(self._encode_caption, captions, by_caption), strict=True)
        values, mask = pad_texts(texts)
        length = max(values.shape[1], self.max_sequence_length)
        others = {} if references is None else {PICTURE_TOKENS: pad_sequence([*marks], batch_first=True)}
        return TextEmbeddings(values, mask.long(), others).padded(length)

    def _encode_caption(self, caption: str, references: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text of a caption and the pictures before it, `(length, dim)`, and which tokens are theirs."""
        from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

        pipeline, tokenizer = self.pipeline, self.pipeline.tokenizer
        encoder, processor = pipeline.text_encoder, pipeline.processor
        tokens: list[int] = []
        marks: list[int] = []
        inputs = None
        if references:
            frames = [frame for pixels in references for frame in pictures(pixels.transpose(0, 1))]
            inputs = dict(processor.image_processor(images=frames, return_tensors="pt"))
            counts = inputs["image_grid_thw"].prod(1) // processor.image_processor.merge_size**2
            start, pad, end = map(
                tokenizer.convert_tokens_to_ids, ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
            )
            for number, count in enumerate(counts.tolist(), 1):
                label = tokenizer(f"<Picture {number}>: ", add_special_tokens=False)["input_ids"]
                tokens += [*label, start, *[pad] * count, end]
                marks += [0] * len(label) + [1] * (count + 2)
        words = tokenizer(caption or " ", add_special_tokens=False)["input_ids"][: self.max_sequence_length]
        values = get_qwen3vl_prompt_embeds(
            encoder,
            processor,
            [*tokens, *words],
            inputs,
            text_encoder_layer=pipeline.text_encoder_layer,
            device=encoder.device,
            dtype=encoder.dtype,
        )
        return values[0], torch.tensor([*marks, *[0] * len(words)])

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, int]:
        """Return the size with as many frames as the pipeline makes at least."""
        return super().size_arguments(size._replace(frames=max(size.frames, FEWEST_FRAMES)))


def _normalised(values: torch.Tensor, statistics: tuple[Any, Any]) -> torch.Tensor:
    """Return values `(n, C, F, H, W)` less the mean of each channel, over its deviation."""
    mean, std = (to_device(torch.tensor(numbers), values.device).view(1, -1, 1, 1, 1) for numbers in statistics)
    return (values - mean) / std


def _noised(latents: Sequence[torch.Tensor], key: tuple[int, ...]) -> list[torch.Tensor]:
    """Return what a sample is shown, with the noise of its timestep."""
    generator = torch.Generator().manual_seed(integer_seed(Purpose.CONDITION_NOISE, *key))
    share = CONDITION_TIMESTEP / 1000
    noises = [torch.randn(latent.shape, generator=generator) for latent in latents]
    pairs = zip(latents, noises, strict=True)
    return [
        (1 - share) * latent + share * to_device(noise, latent.device, dtype=latent.dtype) for latent, noise in pairs
    ]


RECIPES = (MiniMaxH3Recipe,)
