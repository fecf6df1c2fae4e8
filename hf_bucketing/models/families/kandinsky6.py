"""Kandinsky 6: video with sound or without, as Kandinsky 5; text refined by blocks of its own, then attended to.

The stock forward runs the video alone where it gets no sound. It numbers text, tokens and sound itself, by batch row:
hooks number the text in slots, and the others, by their samples. Positions are scaled as the transformer's
configuration says, the same for all sizes.

Sound has layers of its own, which meet those of video in attention alone. All that modulates it does so by batch row,
so that it lies in rows of the strips of its own sample. Both modalities have one timestep; where one of them is shown,
each embedding of the timestep takes its own of two columns.

A picture, the first frame of a sample, is a reference of the pack: it has the positions of the first frame, a mark
among the channels of the visual condition, and a type, which the tokens of its sample have too. The stock forward adds
types by frame, to all samples of a call or to none; a hook adds them by token, to the samples that have a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ...conditions.audio import AudioRule
from ...conditions.shares import APPENDED_FIRST
from ...devices import to_device
from ...errors import BucketingError, PackingError
from ...packing.audio import AudioLayout, segments_of_audio
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout, exact_timesteps
from ...packing.family import Draw, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import Tables
from ...packing.processors import attend_if_any
from ...packing.segments import SegmentSpans
from ...packing.strip_positions import position_strips
from ..index import read_index
from ..joint import JointFamily
from ..loading import read_config
from ..positions import one_table
from ..recipe import Recipe
from ..texts import TextEmbeddings
from .kandinsky5 import CONDITION, SCALE, Kandinsky5Family, KandinskyRecipe, PackedKandinsky5AttnProcessor, rotated

_PARTS = {
    "audio_dec_block.self_attention": "within",
    "audio_dec_block.cross_attention": "to_text",
    "va_cross_attention": "of_video",
    "av_cross_attention": "to_video",
}
"""Ends of the names of attention modules that read or write sound, and the segments of [`AudioLayout`] in which they
attend."""
_TYPES = "visual_token_type_embeddings"


def takes_picture(config: Mapping[str, Any]) -> bool:
    """Return whether the pipeline would show a transformer of this configuration a picture to begin with."""
    return bool(config.get("visual_cond", True)) and (config.get("visual_token_type_num_embeddings") or 0) >= 2


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

    title = "Kandinsky 6"
    transformer_class = "Kandinsky6Transformer3DModel"
    tested_forwards = ("b7f016f119d3",)
    processor_class = PackedKandinsky6AttnProcessor
    stock_processors = ("Kandinsky6AttnProcessor",)
    original_names = None
    audio_parts = ("audio_", "va_cross_attention.", "av_cross_attention.", "va_modulation.", "av_modulation.")
    audio_by_sample = True
    audio_to_video = "va_cross_attention"
    max_references = 1
    references_as_frames = True
    reference_parts = (f"{_TYPES}.",)
    cast_inputs = (*Kandinsky5Family.cast_inputs, "audio_hidden_states")
    text_modulations = (
        "video_text_transformer_blocks.*.text_modulation",
        "audio_text_transformer_blocks.*.text_modulation",
    )

    def audio_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent of sound, which the configuration names as those of video."""
        return int(transformer.config.in_audio_dim)

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse sound that is longer than the model has positions, and pictures that are no frame of their sample."""
        super().check_layout(transformer, layout, stretched=stretched)
        for sample, (grid, *references) in enumerate(layout.sample_grids):
            if references and not takes_picture(transformer.config):
                raise PackingError(
                    f"Sample {sample} has a picture, for which this {type(transformer).__name__} lacks a visual "
                    "condition (`visual_cond`) or two types of tokens (`visual_token_type_num_embeddings`)."
                )
            if references and references != [(1, *grid[1:])]:
                raise PackingError(
                    f"The picture of sample {sample} has a token grid of {references[0]}; as its first frame, it must "
                    f"have {(1, *grid[1:])}."
                )
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

    def trial_references(self, transformer: Transformer, grid: Grid) -> tuple[Grid, ...]:
        """Return a first frame, if the model can be shown one."""
        return ((1, *grid[1:]),) if takes_picture(transformer.config) else ()

    def processor(self, name: str, backend: Backend) -> Any:
        part = next((part for end, part in _PARTS.items() if name.endswith(end)), None)
        return self.processor_class(
            backend, scope="text" if "_text_transformer_blocks." in name else "tokens", part=part
        )

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions of tokens, texts and sound, types of tokens, the modulation of text, and timesteps."""
        tables = Tables(partial(one_table, partial(_rotations, transformer.scale_factor)))
        texts = (transformer.video_text_rope_embeddings, transformer.audio_text_rope_embeddings)
        return [
            transformer.visual_rope_embeddings.register_forward_hook(partial(_locate, tables)),
            *(rope.register_forward_hook(_locate_texts) for rope in texts),
            transformer.audio_rope_embeddings.register_forward_hook(_locate_audio),
            *_hook_timesteps(transformer),
            *_hook_types(transformer, _add_types),
            *self.hook_norms(transformer),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return latents with channels last, a picture as their last frame, and the mask of the text."""
        inputs = JointFamily.inputs(self, replace(rows, references=()))
        latents = [torch.cat([rows.latents, *rows.references], 2)]
        if CONDITION in inputs:
            marked = [F.pad(torch.zeros_like(picture), (*[0] * 7, 1), value=1) for picture in rows.references]
            latents.append(torch.cat([inputs.pop(CONDITION), *marked], 2))
        mask = None if rows.text_mask is None else rows.text_mask.bool()
        return {**inputs, "hidden_states": torch.cat(latents, 1).movedim(1, -1), "encoder_attention_mask": mask}

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the sound and the types and positions of pictures, if there are some: the model makes all others."""
        if not _is_hooked(transformer.visual_embeddings._forward_hooks, _reach_types):
            _hook_types(transformer, _reach_types)
        audio, pictures = rows.audio, _with_picture(rows) if rows.references else {}
        if audio is None:
            return pictures
        if not _is_hooked(transformer.video_time_embeddings._forward_pre_hooks, _column):
            _hook_timesteps(transformer)
        levels = to_device(exact_timesteps(audio.timesteps), rows.timesteps.device)
        return {
            **pictures,
            "audio_hidden_states": torch.stack(list(audio.latents)),
            "timestep": torch.stack([exact_timesteps(rows.timesteps), levels], 1),
        }

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a pack as batch rows, with pictures marked and each strip's sound; hooks number texts and sound."""
        rows, layout, audio = JointFamily.rows(self, batch), AudioLayout.of(batch.layout), batch.audio
        if batch.layout.shown is not None:
            marked = _marked(rows.conditioning[CONDITION], _token_types(batch.layout) == 1)
            rows = replace(rows, conditioning={**rows.conditioning, CONDITION: marked})
        if layout is None or audio is None:
            return rows
        levels = batch.per_strip(to_device(exact_timesteps(audio.timesteps), batch.strips.device))
        audio_rows = layout.in_rows(torch.cat(list(audio.latents)))
        return replace(
            rows,
            timesteps=torch.stack([rows.timesteps, levels], 1),
            conditioning={**rows.conditioning, "audio_hidden_states": audio_rows},
        )

    def own_output(self, output: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the output of frames without that of a picture behind them, `(rows, frames, height, width, C)`."""
        return output[:, : grid[0]]


def _rotations(scale: tuple[float, float, float], module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the rotations of a sample's tokens, `(t·h·w, 1, D/2, 2, 2)`."""
    axes = tuple(torch.arange(count, device=device) for count in grid)
    # module.forward instead of module(…), which would call the hook again
    rotations: torch.Tensor = module.forward(axes, scale).flatten(0, 2)
    return rotations


@torch.compiler.disable  # loops over the samples of the pack
def _locate(tables: Tables, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the rotations of each sample and its picture, `(strips, 1, 1, strip_length, 1, D/2, 2, 2)`."""
    table = partial(tables, module, device=output.device)
    (rotations,) = position_strips(active_layout(), table, lambda grids: table(grids[1]))  # that of the first frame
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


def _is_hooked(hooks: Mapping[int, Any], function: Callable[..., Any]) -> bool:
    """Return whether a `partial` of a function is among hooks of an unpacked transformer, which stay."""
    return any(getattr(hook, "func", None) is function for hook in hooks.values())


def _hook_types(transformer: Transformer, hook: Callable[..., torch.Tensor | None]) -> list[Any]:
    """Hook the embedding of patches by a function that also gets that of types; return the handles."""
    types = getattr(transformer, _TYPES, None)
    return [] if types is None else [transformer.visual_embeddings.register_forward_hook(partial(hook, types))]


def _reach_types(types: Any, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
    """Give types that are trained a gradient of 0 where no sample has one, as other processes may wait for it."""
    return output + 0 * types.weight.sum() if types.weight.requires_grad else None


@torch.compiler.disable  # the types follow the composition of the pack
def _add_types(types: Any, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
    """Add the types of the tokens of samples that have a picture to embeddings `(strips, 1, 1, strip_length, D)`."""
    layout = active_layout()
    if layout.shown is None:
        return _reach_types(types, module, args, output)
    of_tokens = _token_types(layout)
    added = types(of_tokens.clamp(min=0)) * (of_tokens >= 0)[..., None]
    return output + added[:, None, None]


def _token_types(layout: PackedLayout) -> torch.Tensor:
    """Return the types of tokens, `(strips, strip_length)`: 1 in pictures, 0 in their samples, −1 elsewhere."""

    def make() -> torch.Tensor:
        types = torch.full((layout.num_tokens,), -1)
        for (start, first), (_, last) in zip(layout.own_spans, layout.spans, strict=True):
            if last > first:
                types[start:first], types[first:last] = 0, 1
        return to_device(types.view(-1, layout.strip_length), layout.device)

    return layout.self_segments.made("token_types", make)


def _marked(strips: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return strips `(strips, C, p_t, p_h, strip_length·p_w)` with a last channel of 1 in some tokens."""
    side = strips.shape[-1] // tokens.shape[1]
    columns = tokens[..., None].expand(*tokens.shape, side).flatten(1)[:, None, None, None]
    return torch.cat([strips[:, :-1], strips[:, -1:].masked_fill(columns, 1)], 1)


def _with_picture(rows: Rows) -> dict[str, Any]:
    """Return the types and the positions of frames, of which the last is a picture, as the pipeline passes them."""
    (frames, height, width), device = rows.grid, rows.latents.device
    places = torch.arange(frames, device=device)
    return {
        "visual_token_type_ids": F.pad(places.new_zeros(len(rows.latents), frames), (0, 1), value=1),
        "visual_rope_pos": (F.pad(places, (0, 1)), *(torch.arange(side, device=device) for side in (height, width))),
    }


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


class Kandinsky6Recipe(KandinskyRecipe):
    """Recipe of `Kandinsky6TI2VAPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Where the data set has audio, it is trained at the noise level of its video; else what belongs to it is not
    trained. Renders have sound where it is trained, or asked for.

    A run can show samples their first frame, as the pipeline is called with an `image`: encoded by itself, as a clean
    frame behind the others, with a type that then the others have too. Only such runs train types.
    """

    pipeline_class = "Kandinsky6TI2VAPipeline"
    family = FAMILY
    default_sequence_length = 1024
    trims_text = True
    native_sizes = ((512, 768),)
    call_defaults = MappingProxyType({"sample_audio": False})
    sound_rate = "audio_sample_rate"

    @classmethod
    def load(cls, name_or_path: str, **options: Any) -> Recipe:
        """Load a pipeline, see [`Recipe.load`][hf_bucketing.models.recipe.Recipe.load]; refuse distilled ones."""
        if read_index(name_or_path).components["scheduler"].class_name == "PiflowScheduler":
            raise BucketingError(
                f"The model of {name_or_path} is distilled: it predicts a velocity for each step of a "
                "PiflowScheduler, where flow matching has one. Train the model that it was distilled from."
            )
        return super().load(name_or_path, **options)

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """The first frame, of models that take one, and what the base class takes."""
        return (*([APPENDED_FIRST] if takes_picture(self.config) else []), *super().drawn_kinds)

    @classmethod
    def read_audio_rule(cls, name_or_path: str) -> AudioRule | None:
        """Read the rate and the stretch of a latent of the audio VAE; None for pipelines that come without one."""
        if "audio_vae" not in read_index(name_or_path).components:
            return None
        config = read_config(name_or_path, "audio_vae")
        return AudioRule(rate=config["sample_rate"], samples_per_token=2 * config["hop_length"], rounds_up=True)

    @torch.no_grad()
    def encode_audio(self, waveform: torch.Tensor) -> torch.Tensor:
        """Encode sound `(2, samples)` in [−1, 1], mixed to one channel, to scaled latents `(tokens, channels)`.

        They are the posterior's mode.
        """
        vae = self.pipeline.audio_vae
        if not waveform.shape[1]:
            return waveform.new_zeros(0, vae.config.latent_channels)
        vae.mel_converter.float()  # it makes spectra in float32 alone, whatever the VAE was loaded in
        latents = vae.encode(waveform.float().mean(0, keepdim=True)).latent_dist.mode()
        return latents[0].T * vae.config.scaling_factor

    @classmethod
    def sound_arguments(cls, fps: float) -> dict[str, Any]:
        """Return the frame rate, and that sound is made."""
        return {**super().sound_arguments(fps), "sample_audio": True}

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        values, pooled, mask, *_ = self._encode_prompt(captions)
        text = TextEmbeddings(values, None if mask is None else mask.long(), {"pooled_projections": pooled})
        return text.padded(self.max_sequence_length)


RECIPES = (Kandinsky6Recipe,)
