"""How MiniMax-H3 is packed: the model takes the whole pack as its one sequence, each sample's text before its tokens.

The stock forward takes the rows of one sample, each with a position, a modality and a timestep; its batch axis only
repeats them. So strips are joined again, and attention alone sees segments: of texts in the text refiner, of samples
in the blocks. Rows, positions and modalities of a sample are those that the pipeline's own block makes.

Sound is rows of the same sequence, between a sample's text and its video: those of the left channel, then those of the
right one. Samples without sound have none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...buckets.sizes import round_to_multiple
from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout, exact_timesteps
from ...packing.family import Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import Tables
from ...packing.processors import PackedAttnProcessor, Rotary
from ...packing.segments import SegmentSpans
from ...packing.strips import by_strip
from ...packing.texts import TextTokens

VIDEO, TEXT, AUDIO = range(3)
"""Modalities of rows (`token_tags`)."""
AUDIO_CHANNELS = 2


@dataclass(frozen=True, kw_only=True)
class PackSequence:
    """A pack as one sequence: each sample's text, then its audio, then its tokens; padding comes last.

    Attributes:
        order (`torch.Tensor` of shape `(rows,)`): The index of each row among all text tokens, followed by all tokens,
            followed by those of audio.
        places (`torch.Tensor` of shape `(rows,)`): The inverse permutation: the row of each of these.
        timesteps (`torch.Tensor` of shape `(rows,)`): The index of each row's timestep among those of all samples,
            followed by those of their audio; 0 for padding.
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
        parts = [
            [torch.arange(*text), torch.arange(*heard), words + torch.arange(*own)]
            for text, heard, own in zip(layout.text_spans, audio, layout.spans, strict=True)
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
    audio_parts = ("audio_proj",)
    cast_inputs = (*Family.cast_inputs, "audio_hidden_states")

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

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return the layers at both ends of the sound."""
        return self.audio_parts

    def processor(self, name: str, backend: Backend) -> PackedMiniMaxH3AttnProcessor:
        """Return the processor of the text refiner, or of the blocks."""
        return PackedMiniMaxH3AttnProcessor(backend, of_text=name.startswith("token_refiner"))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the rows of the pack, with their positions, modalities and samples."""
        describe = partial(_describe, Tables(_positions))
        return [transformer.register_forward_pre_hook(describe, with_kwargs=True)]

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Give each sample a text of its own, which is modulated by its timestep.

        Processes that share a pack need as many rows each, so that texts are padded to a multiple of their number.
        """
        length = layout.num_text_tokens if pad_text_to is None else pad_text_to
        pads = pad_text_to is not None or layout.processes > 1
        return replace(layout, caption_ids=None), round_to_multiple(length, layout.processes) if pads else None

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the strips with one timestep per sample, then one for the audio of each, if the pack has audio."""
        rows, audio = replace(super().rows(batch), timesteps=batch.timesteps), batch.audio
        if audio is None:
            return rows
        heard = to_device(exact_timesteps(audio.timesteps), batch.strips.device)
        return replace(
            rows,
            timesteps=torch.cat([batch.timesteps, heard]),
            conditioning={**rows.conditioning, "audio_hidden_states": torch.cat(list(audio.latents))[None]},
        )

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Join the strips of a pack into one sequence, as its texts are, and turn timesteps round."""
        arguments = super().inputs(rows)
        tokens = arguments["hidden_states"]
        return {
            **arguments,
            "hidden_states": tokens.reshape(len(rows.text), -1, tokens.shape[-1]),
            "timestep": 1 - rows.timesteps / 1000,
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Describe the rows of samples of one size as the pipeline does."""
        words, audio = rows.text.shape[1], rows.audio
        length = 0 if audio is None else audio.lengths[0]
        positions, modalities, video, heard, text = _stock_rows(transformer, rows.grid, words, length)
        of_audio = {"audio_hidden_states": _no_sound(transformer, rows.text)}
        indices = torch.zeros(len(positions), dtype=torch.long)
        if audio is not None:
            levels = to_device(exact_timesteps(audio.timesteps), rows.timesteps.device)
            indices[heard] = len(rows.timesteps)
            of_audio = {
                "audio_hidden_states": torch.stack(list(audio.latents)),
                "timestep": 1 - torch.cat([rows.timesteps, levels]) / 1000,
            }
        return {
            "timestep_indices": indices,
            "token_tags": modalities,
            "position_ids": positions,
            "video_indices": video,
            "text_indices": text,
            "audio_indices": heard,
            **of_audio,
        }

    def restored(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        """Cut the sequence into rows again."""
        return super().restored(output.flatten(0, 1).unflatten(0, (-1, math.prod(grid))), grid, patch)


def _stock_rows(transformer: Transformer, grid: Grid, words: int, audio: int) -> tuple[torch.Tensor, ...]:
    """Return what the pipeline's block makes of a sample: positions `(rows, 3)`, modalities, and indices of each.

    The indices are those of video, of audio and of text.
    """
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    _, p_h, p_w = transformer.config.patch_size
    made = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        text_token_tags=torch.full((words,), TEXT),
        num_latent_frames=grid[0],
        latent_height=grid[1] * p_h,
        latent_width=grid[2] * p_w,
        num_audio_latents=audio // AUDIO_CHANNELS,
        patch_size=transformer.config.patch_size,
        audio_channels=AUDIO_CHANNELS,
        audio_tag=AUDIO,
        video_tag=VIDEO,
    )
    rows: tuple[torch.Tensor, ...] = made[:5]
    return rows


def _positions(transformer: Any, sample: tuple[Grid, int, int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the positions of a sample's text, `(length, 3)`, of its tokens, `(t·h·w, 3)`, and of its audio."""
    grid, words, audio = sample
    positions = _stock_rows(transformer, grid, words, audio)[0].float()  # the model casts them so
    text, heard, tokens = to_device(positions, device).split([words, audio, len(positions) - words - audio])
    return text, tokens, heard


def _no_sound(transformer: Transformer, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(len(like), 0, FAMILY.audio_channels(transformer))


@torch.compiler.disable  # loops over the samples of the pack
def _describe(
    tables: Tables, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    layout, tokens = active_layout(), kwargs["hidden_states"]
    sequence, words, device = PackSequence.of(layout), layout.num_text_tokens, torch.device(layout.device)
    lengths = layout.audio_lengths or (0,) * len(layout)
    samples = zip(layout.grids, layout.text_lengths, lengths, strict=True)
    of_texts, of_tokens, of_audio = zip(*(tables(transformer, sample, device) for sample in samples), strict=True)
    padding = of_texts[0].new_zeros(layout.text_padding, 3)
    positions = torch.cat([*of_texts, padding, by_strip(of_tokens, layout).flatten(0, 1), *of_audio])
    rows = {
        "timestep_indices": sequence.timesteps,
        "token_tags": sequence.modalities,
        "position_ids": positions.index_select(0, sequence.order),
        "text_indices": sequence.places[:words],
        "video_indices": sequence.places[words : words + layout.num_tokens],
        "audio_indices": sequence.places[words + layout.num_tokens :],
        "audio_hidden_states": _no_sound(transformer, tokens),
    }
    return args, {**rows, **kwargs}


FAMILY = MiniMaxH3Family()
