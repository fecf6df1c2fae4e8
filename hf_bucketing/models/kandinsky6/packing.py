"""How Kandinsky 6 is packed: as Kandinsky 5, with its sound or without it.

The stock forward runs the video alone where it gets no sound. It numbers text, tokens and sound itself, by batch row:
hooks number the text in slots, and the others, by their samples. Positions are scaled as the transformer's
configuration says, the same for all sizes.

Sound has layers of its own, which meet those of video in attention alone. All that modulates it does so by batch row,
so that it lies in rows of the strips of its own sample. Both modalities have one timestep; where one of them is shown,
each embedding of the timestep takes its own of two columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from ...devices import to_device
from ...errors import PackingError
from ...packing.audio import AudioLayout, segments_of_audio
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout, exact_timesteps
from ...packing.family import Draw, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import Tables, position_strips
from ...packing.processors import attend_if_any
from ...packing.segments import SegmentSpans
from ..joint import JointFamily, embeddings_of_text
from ..kandinsky5.packing import CONDITION, SCALE, Kandinsky5Family, PackedKandinsky5AttnProcessor, rotated
from ..positions import one_table

_PARTS = {
    "audio_dec_block.self_attention": "within",
    "audio_dec_block.cross_attention": "to_text",
    "va_cross_attention": "of_video",
    "av_cross_attention": "to_video",
}
"""Ends of the names of attention modules that read or write sound, and the segments of [`AudioLayout`] in which they
attend."""


class PackedKandinsky6AttnProcessor(PackedKandinsky5AttnProcessor):
    """Attention of Kandinsky 6 over the strips of a pack and its sound, see [`PackedKandinsky5AttnProcessor`].

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
        scope (`"tokens"` or `"text"`): What attends.
        part (`str`, *optional*): Segments of [`AudioLayout`] in which the module attends, if it reads or writes sound.
    """

    def __init__(
        self, backend: Backend = "segments", *, scope: Literal["tokens", "text"] = "tokens", part: str | None = None
    ) -> None:
        super().__init__(backend, scope=scope)
        self.part = part

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of its part, none in packs without sound, or those of text or tokens."""
        if self.part is None:
            return super().segments(layout)
        return segments_of_audio(layout, self.part)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        rotary_emb_kv: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample, see [`PackedKandinsky5AttnProcessor`].

        Args:
            attn (`Kandinsky6Attention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, length, dim)`): Tokens of strips, or their text slots.
            encoder_hidden_states (`torch.Tensor` of shape `(strips, text_slots, dim)`, *optional*): The text slots, if
                tokens attend to these.
            rotary_emb (`torch.Tensor` of shape `(…, 1, D/2, 2, 2)`, *optional*): Rotations of the queries.
            rotary_emb_kv (`torch.Tensor`, *optional*): Those of the keys.
            attn_mask (`torch.Tensor`, *optional*): Unused; the layout takes its place.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        if self.part is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, rotary_emb)
        (segments,) = self.segments(active_layout())
        states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = self._heads(attn, attn.to_query(hidden_states), attn.query_norm, rotary_emb)
        key = self._heads(attn, attn.to_key(states), attn.key_norm, rotary_emb_kv)
        value = attn.to_value(states).flatten(0, 1).unflatten(-1, (attn.num_heads, -1))
        attended = attend_if_any(query, key, value, segments, backend=self.backend)
        # exactly 0, without a bias, where no key is
        output = attn.out_layer(attended.flatten(1)) * segments.has_key(attended.device)[:, None]
        return output.view_as(hidden_states)

    def _heads(self, attn: Any, states: torch.Tensor, norm: Any, rotary: torch.Tensor | None) -> torch.Tensor:
        """Turn `(strips, length, H·D)` into normalised `(N, H, D)`, rotated in float32 as by the stock processor."""
        normed: torch.Tensor = norm(states.flatten(0, 1).unflatten(-1, (attn.num_heads, -1)))
        return normed if rotary is None else rotated(normed, rotary).type_as(normed)


class Kandinsky6Family(Kandinsky5Family):
    """Packing of `Kandinsky6Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    Models with a visual condition take it as `visual_cond`, of the latents' sizes: its latent and its mask.
    """

    transformer_class = "Kandinsky6Transformer3DModel"
    tested_forwards = ("b7f016f119d3",)
    processor_class = PackedKandinsky6AttnProcessor
    stock_processors = ("Kandinsky6AttnProcessor",)
    original_names = None
    audio_parts = ("audio_", "va_cross_attention.", "av_cross_attention.", "va_modulation.", "av_modulation.")
    audio_by_sample = True
    audio_to_video = "va_cross_attention"
    cast_inputs = (*Kandinsky5Family.cast_inputs, "audio_hidden_states")

    def audio_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent of sound, which the configuration names as those of video."""
        return int(transformer.config.in_audio_dim)

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return all that is for sound, and the types of tokens, which no text-to-video model is given."""
        return *self.audio_parts, "visual_token_type_embeddings."

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse sound that is longer than the model has positions."""
        super().check_layout(transformer, layout, stretched=stretched)
        most = transformer.audio_rope_embeddings.max_pos
        for sample, length in enumerate(layout.audio_lengths or ()):
            if length > most:
                raise PackingError(
                    f"The audio of sample {sample} has {length} tokens; this model has {most} positions."
                )

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Attention is dense in all models."""
        Family.check(self, transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the pooled text embeddings, and any visual condition."""
        return {name: draw for name, draw in super().conditioning(transformer).items() if name != SCALE}

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the processor of a block of text, of tokens, or of sound."""
        part = next((part for end, part in _PARTS.items() if name.endswith(end)), None)
        return self.processor_class(
            backend, scope="text" if "_text_transformer_blocks." in name else "tokens", part=part
        )

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions of tokens, of texts and of sound, the modulation of text, and timesteps."""
        text_blocks = (*transformer.video_text_transformer_blocks, *transformer.audio_text_transformer_blocks)
        modulations = [block.text_modulation.register_forward_pre_hook(embeddings_of_text) for block in text_blocks]
        tables = Tables(partial(one_table, partial(_rotations, transformer.scale_factor)))
        texts = (transformer.video_text_rope_embeddings, transformer.audio_text_rope_embeddings)
        return [
            transformer.visual_rope_embeddings.register_forward_hook(partial(_locate, tables)),
            *(rope.register_forward_hook(_locate_texts) for rope in texts),
            transformer.audio_rope_embeddings.register_forward_hook(_locate_audio),
            *_hook_timesteps(transformer),
            *modulations,
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return latents with channels last, and the mask of the text."""
        inputs = JointFamily.inputs(self, rows)
        latents = [rows.latents, *([inputs.pop(CONDITION)] if CONDITION in inputs else [])]
        mask = None if rows.text_mask is None else rows.text_mask.bool()
        return {**inputs, "hidden_states": torch.cat(latents, 1).movedim(1, -1), "encoder_attention_mask": mask}

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the sound, if there is some: the model makes all positions."""
        audio = rows.audio
        if audio is None:
            return {}
        if not _takes_columns(transformer):
            _hook_timesteps(transformer)
        levels = to_device(exact_timesteps(audio.timesteps), rows.timesteps.device)
        return {
            "audio_hidden_states": torch.stack(list(audio.latents)),
            "timestep": torch.stack([exact_timesteps(rows.timesteps), levels], 1),
        }

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a pack as batch rows, with the sound of each strip's sample; hooks number texts and sound."""
        rows, layout, audio = JointFamily.rows(self, batch), AudioLayout.of(batch.layout), batch.audio
        if layout is None or audio is None:
            return rows
        levels = batch.per_strip(to_device(exact_timesteps(audio.timesteps), batch.strips.device))
        heard = layout.in_rows(torch.cat(list(audio.latents)))
        return replace(
            rows,
            timesteps=torch.stack([rows.timesteps, levels], 1),
            conditioning={**rows.conditioning, "audio_hidden_states": heard},
        )


def _rotations(scale: tuple[float, float, float], module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the rotations of a sample's tokens, `(t·h·w, 1, D/2, 2, 2)`."""
    axes = tuple(torch.arange(count, device=device) for count in grid)
    # module.forward instead of module(…), which would call the hook again
    rotations: torch.Tensor = module.forward(axes, scale).flatten(0, 2)
    return rotations


@torch.compiler.disable  # loops over the samples of the pack
def _locate(tables: Tables, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the rotations of each sample's own tokens, `(strips, 1, 1, strip_length, 1, D/2, 2, 2)`."""
    (rotations,) = position_strips(active_layout(), lambda grid: tables(module, grid, output.device))
    return rotations[:, None, None]


@torch.compiler.disable  # loops over the samples of the pack
def _locate_audio(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the rotations of each sample's own sound by row, `(rows, row_length, 1, D/2, 2, 2)`."""
    layout = active_layout()
    audio = AudioLayout.of(layout)
    if audio is None:
        return output
    positions = [torch.arange(length, device=output.device) for length in layout.audio_lengths or ()]
    rotations: torch.Tensor = module.forward(audio.in_rows(torch.cat(positions)))
    return rotations


def _hook_timesteps(transformer: Transformer) -> list[Any]:
    """Let the embeddings of timesteps take, of `(rows, 2)`, that of video and that of sound; return the handles."""
    embeddings = enumerate((transformer.video_time_embeddings, transformer.audio_time_embeddings))
    return [module.register_forward_pre_hook(partial(_column, column)) for column, module in embeddings]


def _takes_columns(transformer: Transformer) -> bool:
    """Return whether [`_hook_timesteps`] was called for an unpacked transformer before."""
    hooks = transformer.video_time_embeddings._forward_pre_hooks.values()
    return any(getattr(hook, "func", None) is _column for hook in hooks)


def _column(column: int, module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (timesteps,) = args
    return (timesteps[:, column] if timesteps.ndim == 2 else timesteps,)


@torch.compiler.disable  # loops over the texts of the pack
def _locate_texts(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the rotations of the text in slots, `(strips, text_slots, 1, D/2, 2, 2)`."""
    layout = active_layout()
    positions = torch.cat([torch.arange(length, device=output.device) for length in layout.text_lengths])
    rotations: torch.Tensor = module.forward(layout.joint.fill_slots(positions))
    return rotations


FAMILY = Kandinsky6Family()
