"""LTX-2, 2.3 and 2.5: audio-video models, of which video is trained with its audio or alone; shifted by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import LATENT_DOWNSAMPLE_FACTOR
from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb, apply_split_rotary_emb

from ...buckets.sizes import Size
from ...conditions.audio import AudioRule
from ...conditions.condition import Condition
from ...conditions.references import ReferenceRule
from ...conditions.shares import APPENDED
from ...devices import to_device
from ...errors import BucketingError
from ...media.sample import frame_rates
from ...packing.audio import AudioLayout, cut_evenly, segments_of_audio
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Draw, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import Tables
from ...packing.processors import PackedAttnProcessor, Rotary, attend_if_any
from ...packing.segments import SegmentSpans
from ...packing.strip_positions import position_strips
from ...packing.texts import TextTokens
from ...packing.ulysses import all_tokens, local_heads, local_part, local_tokens
from ..first_frame import FirstFrameRecipe
from ..loading import read_config
from ..recipe import Recipe
from ..samples import Samples
from ..texts import AUDIO_TEXT, TextEmbeddings
from .ltx import LTXRecipe, first_frames, keyframe_places, numbers_of_grids, over_sample, reference_factors

_AUDIO_PARTS = {
    "audio_attn1": "within",
    "audio_attn2": "to_text",
    "audio_to_video_attn": "of_video",
    "video_to_audio_attn": "to_video",
}
"""Attention modules of a block that read or write audio, and the segments of [`AudioLayout`] in which they attend."""
_MODULATIONS = {
    "prompt_adaln": "text",
    "audio_prompt_adaln": "audio_text",
    "av_cross_attn_video_scale_shift": "strips",
    "av_cross_attn_video_a2v_gate": "strips",
    "av_cross_attn_audio_scale_shift": "audio",
    "av_cross_attn_audio_v2a_gate": "audio",
}
"""Modules that embed the noise level of each sample, and the rows whose tokens their output modulates."""
FFT_LENGTH = 1024
"""Samples of a spectrum, `filter_length` of the original checkpoints, which the audio VAE's settings do not hold."""


class PackedLTX2AttnProcessor(PackedAttnProcessor):
    """Attention of LTX-2, `LTX2Attention`, over the strips of a pack and the rows of its audio.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
        part (`str`, *optional*): Segments of [`AudioLayout`] in which the module attends, if it reads or writes audio.
            In a pack without audio, such a module computes nothing.
    """

    norms_whole_width = True

    def __init__(self, backend: Backend = "segments", *, part: str | None = None) -> None:
        super().__init__(backend)
        self.part = part

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of its part, none in packs without audio, or those of video and its text."""
        if self.part is None:
            return super().segments(layout)
        return segments_of_audio(layout, self.part)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Rotary | None = None,
        key_rotary_emb: Rotary | None = None,
        perturbation_mask: None = None,
        all_perturbed: bool | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample; the last two arguments are those of perturbed guidance."""
        if self.part is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb)
        if not (segments := self.segments(active_layout())):
            return torch.zeros_like(hidden_states)
        states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        key_rotary = query_rotary_emb if key_rotary_emb is None else key_rotary_emb
        rotary = [
            None if tables is None else tuple(local_part(table, self._parallel_config) for table in tables)
            for tables in (query_rotary_emb, key_rotary)
        ]
        return self._attend_in(segments[0], attn, hidden_states, states, rotary)

    def _attend_in(
        self,
        segments: SegmentSpans,
        attn: Any,
        hidden_states: torch.Tensor,
        states: torch.Tensor,
        rotary: Sequence[Rotary | None],
    ) -> torch.Tensor:
        """Attend from hidden states to states, each with its positions; exactly 0, without a bias, where no key is."""
        rows, config = len(hidden_states), self._parallel_config
        query = self.split_heads(attn, attn.to_q(hidden_states), attn.norm_q)
        key = self.split_heads(attn, attn.to_k(states), attn.norm_k)
        pairs = zip((query, key), rotary, strict=True)
        query, key = (side if table is None else self.rotate(side, table) for side, table in pairs)
        value = self.split_heads(attn, attn.to_v(states))
        if segments.queries:
            query = self._all_tokens_of(query, rows, segments.num_queries)
            if self.part == "to_text":
                key, value = (local_heads(side, config) for side in (key, value))
            else:
                key, value = (self._all_tokens_of(side, len(states), segments.num_keys) for side in (key, value))
        attended = attend_if_any(query, key, value, segments, backend=self.backend)
        if segments.queries:
            by_row = filled_up(attended.unflatten(0, (rows, -1)), config)
            attended = local_tokens(by_row, config, heads=attn.heads).flatten(0, 1)
        attended = self.gate(attn, attended, hidden_states)
        output = attn.to_out[1](attn.to_out[0](attended.flatten(1)))
        has_key = filled_up(segments.has_key(output.device).view(rows, -1, 1), config)
        return output.view_as(hidden_states) * local_part(has_key, config)

    def _all_tokens_of(self, heads: torch.Tensor, rows: int, count: int) -> torch.Tensor:
        """Return all `count` tokens of rows, with this process's heads, without those that fill up the rows."""
        strips = all_tokens(heads.unflatten(0, (rows, -1)), self._parallel_config)
        return strips[:, : count // rows].flatten(0, 1)

    def rotate(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Rotate `(N, H, D)` as the model does, by tables of strips: by head where it splits heads into halves."""
        turn = apply_split_rotary_emb if rotary[0].ndim == 4 else apply_interleaved_rotary_emb
        rotated: torch.Tensor = turn(tokens.flatten(1).unflatten(0, (len(rotary[0]), -1)), rotary)
        return rotated.reshape(tokens.shape)

    def gate(self, attn: Any, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scale each head by its gate, which the model computes from the tokens that attend."""
        if attn.to_gate_logits is None:
            return attended
        return attended * (2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))).flatten(0, 1).unsqueeze(-1)


def filled_up(rows: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    """Return rows `(rows, tokens, …)` with zeros behind, so that the processes that share them have equal parts."""
    if parallel_config is None:
        return rows
    missing = -rows.shape[1] % parallel_config.context_parallel_config.ulysses_degree
    return F.pad(rows, (*[0, 0] * (rows.ndim - 2), 0, missing))


class LTX2Family(Family):
    """Packing of `LTX2VideoTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    In a pack with audio, the video of each sample attends to its own audio, and audio to its own video; the video of
    samples that have no audio is isolated. In a pack without, attention between video and audio is switched off
    (`isolate_modalities`), which is how LTX-2's own trainer trains video without audio. The stock forward needs some
    audio all the same: each row gets one token of zeros.

    `fps`, `(n,)`, are frames per second; or `(n, 1 + references)`, then the frames of pixels at which the sample's
    references begin, and 0 for one that lies over the sample: so `LTX2ConditionPipeline` shows keyframes other than
    the first, each of one frame, of the sample's height and width and encoded by itself. Models that modulate their
    text by the noise level (LTX-2.3) also take `sigma`, `(n,)`: the sample's timestep, while its tokens may have
    others, such as 0 for a clean first frame.
    """

    title = "LTX-2, 2.3 and 2.5"
    transformer_class = "LTX2VideoTransformer3DModel"
    tested_forwards = ("7fd2cf36be02",)
    processor_class = PackedLTX2AttnProcessor
    stock_processors = ("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor")
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    original_names = (("transformer_blocks.**", "transformer_blocks.**"),)
    timesteps_per = "token"
    max_references = UNLIMITED
    text = TextTokens(rows="per_strip", mask="encoder_attention_mask")
    audio_parts = ("audio", "av_cross_attn", "video_a2v")
    unused_parts = ("keyframes",)
    audio_to_video = "audio_to_video_attn"
    shared_audio = tuple(_AUDIO_PARTS)
    cast_inputs = (
        *Family.cast_inputs,
        "audio_hidden_states",
        "audio_encoder_hidden_states",
        "audio_encoder_attention_mask",
    )

    def audio_text_dim(self, transformer: Transformer) -> int:
        config = transformer.config
        return int(config.caption_channels if config.use_prompt_embeddings else config.audio_cross_attention_dim)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding, which the model or the connectors before it project."""
        config = transformer.config
        return int(config.caption_channels if config.use_prompt_embeddings else config.cross_attention_dim)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return frames per second, drawn as 24, and the noise level of models that modulate their text by it."""
        draws: dict[str, Draw] = {"fps": lambda grids: torch.full((len(grids),), 24.0)}
        if modulates_text(transformer):
            draws["sigma"] = lambda grids: 1000 * torch.rand(len(grids))
        return draws

    def processor(self, name: str, backend: Backend) -> Any:
        return PackedLTX2AttnProcessor(backend, part=_AUDIO_PARTS.get(name.split(".")[-1]))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass each token's own coordinates and the audio, and modulate tokens by the noise level of their sample."""
        tables = Tables(_coordinates), Tables(_reference_coordinates), Tables(_audio_coordinates)
        complete = partial(_complete, *tables)
        handles = [transformer.register_forward_pre_hook(complete, with_kwargs=True)]
        for name, rows in _MODULATIONS.items():
            if hasattr(transformer, name):
                levels = partial(_levels_of, transformer, rows)
                handles.append(getattr(transformer, name).register_forward_pre_hook(levels))
        return handles

    def parallel_plan(self, transformer: Transformer) -> dict[str, Any]:
        """Split the tables of models that rotate by head, `(rows, H, tokens, channels)`, by tokens."""
        plan = transformer._cp_plan
        if transformer.config.rope_type != "split":
            return dict(plan)
        tables = {table: replace(rule, split_dim=2, expected_dims=4) for table, rule in plan["rope"].items()}
        return {**plan, "rope": tables}

    def parallel_plan_of_audio(self, transformer: Transformer) -> dict[str, Any]:
        """Split the rows of audio as strips are, and their timesteps."""
        rows = {
            "audio_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3),
            "audio_timestep": ContextParallelInput(split_dim=1, expected_dims=2),
        }
        return {"": rows, "audio_proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3)}

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Give each sample a text of its own, since the model may modulate it by the sample's noise level."""
        return replace(layout, caption_ids=None), pad_text_to

    def rows(self, batch: PackedBatch) -> Rows:
        """Return noise levels by sample, of which hooks give each token its own, and the audio of the pack."""
        rows = super().rows(batch)
        none = torch.zeros(len(batch.layout), device=batch.strips.device)
        level = to_device(batch.conditioning.get("sigma", none), none.device)
        levels = {"sigma": level, "audio_sigma": none, **_packed_audio(batch)}
        return replace(rows, conditioning={**rows.conditioning, **levels})

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Isolate the video of rows without audio, and add the noise level of the audio."""
        clean = torch.zeros(len(rows.latents), device=rows.latents.device)
        return {
            "sigma": clean,
            "audio_timestep": clean,
            "audio_sigma": clean,
            "audio_num_frames": 1,
            "isolate_modalities": True,
            **super().inputs(rows),
            "use_cross_timestep": True,
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the coordinates of the tokens, which each row has by its own frame rate, and the audio."""
        device = rows.latents.device
        pixels, numbers = _coordinates(transformer, rows.grid, device=device)
        if rows.references:
            pairs = zip((pixels, numbers), _reference_coordinates(transformer, rows.grids, device=device), strict=True)
            pixels, numbers = map(torch.cat, pairs)
        count = len(rows.latents)
        coordinates = _in_seconds(
            pixels.expand(count, -1, -1, -1), numbers.expand(count, -1), rows.conditioning["fps"]
        )
        audio_inputs = _no_audio(transformer, rows.latents) if rows.audio is None else _stacked_audio(rows)
        return {"video_coords": coordinates, **audio_inputs}


def modulates_text(transformer: Transformer) -> bool:
    """Return whether a transformer modulates its text by the noise level."""
    return bool(transformer.prompt_modulation and transformer.config.use_prompt_adaln_single)


def _coordinates(transformer: Any, grid: Grid, *, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last frame, row and column of pixels of each token of a grid, `(t·h·w, 3, 2)`.

    With them come the numbers of the tokens' grids, see `numbers_of_grids`.
    """
    rope = transformer.rope
    frames, height, width = grid[0] * rope.patch_size_t, grid[1] * rope.patch_size, grid[2] * rope.patch_size
    coordinates = rope.prepare_video_coords(1, frames, height, width, device, fps=1.0)[0].transpose(0, 1)
    return coordinates, numbers_of_grids([grid], device=device)


def _reference_coordinates(
    transformer: Any, grids: tuple[Grid, ...], *, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place references over their sample: tokens of one that is smaller by a factor cover as much more."""
    located = [_coordinates(transformer, grid, device=device)[0] for grid in grids[1:]]
    return over_sample(located, grids), numbers_of_grids(grids[1:], first=1, device=device)


def _in_seconds(pixels: torch.Tensor, numbers: torch.Tensor, fps: torch.Tensor) -> torch.Tensor:
    """Return the coordinates of the tokens of rows, `(rows, tokens, 3, 2)`, as the model takes them: time first."""
    frames, sides = pixels.transpose(1, 2).split([1, 2], 1)
    rates = to_device(fps, frames.device, dtype=frames.dtype).view(len(fps), -1)
    frames = frames + first_frames(numbers, rates[:, 1:])[:, None, :, None]
    return torch.cat([frames / rates[:, :1, None, None], sides], 1)


def _no_audio(transformer: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an audio of one token for each row, and a text of one token for it."""
    shape = (len(rows), 1)
    return {
        "audio_hidden_states": rows.new_zeros(*shape, FAMILY.audio_channels(transformer)),
        "audio_encoder_hidden_states": rows.new_zeros(*shape, FAMILY.audio_text_dim(transformer)),
    }


def _stacked_audio(rows: Rows) -> dict[str, Any]:
    """Return the arguments of the forward that the audio of a stack makes, of which each row has as many tokens."""
    audio = rows.audio
    assert audio is not None, "the caller checks it"
    assert audio.text is not None, "the recipe gives it"
    tokens = torch.stack(list(audio.latents))
    return {
        "audio_hidden_states": tokens,
        "audio_encoder_hidden_states": torch.stack(list(audio.text)),
        "audio_encoder_attention_mask": rows.text_mask,
        "audio_timestep": audio.timesteps,
        "audio_sigma": audio.timesteps,
        "sigma": audio.video_timesteps,
        "audio_num_frames": tokens.shape[1],
        "isolate_modalities": False,
    }


def _packed_audio(batch: PackedBatch) -> dict[str, Any]:
    """Return the arguments of the forward that the audio of a pack makes; noise levels lie by sample."""
    layout = AudioLayout.of(batch.layout)
    if layout is None or batch.audio is None:
        return {}
    audio, device = batch.audio, batch.strips.device
    assert audio.text is not None, "Audio.check asks for it"
    timesteps, levels = (
        to_device(values, device, dtype=torch.float32) for values in (audio.timesteps, audio.video_timesteps)
    )
    return {
        "audio_hidden_states": layout.in_rows(torch.cat(list(audio.latents))),
        "audio_encoder_hidden_states": cut_evenly(torch.cat(list(audio.text)), layout.rows),
        "audio_timestep": timesteps[layout.samples].view(layout.rows, -1),
        "audio_sigma": timesteps,
        "sigma": levels,
        "isolate_modalities": False,
    }


def _levels_of(transformer: Any, rows: str, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give each token, of noise levels by sample, its own: tokens of strips, of text or of audio, or of its text.

    In packs without audio, whose rows have one token of zeros for it, these have the level of the strip.
    """
    layout = active_layout()
    audio = AudioLayout.of(layout)
    if rows == "text" or (rows == "audio_text" and audio is not None):
        samples = cut_evenly(layout.text_segment_ids, layout.num_strips).flatten()
    elif rows == "audio" and audio is not None:
        config = transformer._parallel_config
        samples = local_part(filled_up(audio.samples.view(audio.rows, -1, 1), config), config).flatten()
    else:
        samples = layout.strip_segments
    return args[0][samples], *args[1:]


def _complete(
    tables: Tables,
    references: Tables,
    audio_tables: Tables,
    transformer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    layout, rows = active_layout(), kwargs["hidden_states"]
    pixels, numbers = position_strips(
        layout,
        lambda grid: tables(transformer, grid, rows.device),
        lambda grids: references(transformer, grids, rows.device),
    )
    audio = AudioLayout.of(layout)
    if audio is None:
        audio_inputs = _no_audio(transformer, rows)
    else:
        seconds = [audio_tables(transformer, length, rows.device)[0] for length in layout.audio_lengths or ()]
        audio_inputs = {"audio_coords": audio.in_rows(torch.cat(seconds))[:, None]}
    completed = {**kwargs, **audio_inputs, "video_coords": _in_seconds(pixels, numbers, kwargs["fps"])}
    return args, _filled_up_audio(completed, transformer._parallel_config)


def _filled_up_audio(kwargs: dict[str, Any], parallel_config: Any) -> dict[str, Any]:
    """Return arguments of the forward with rows of audio that the processes which share them divide."""
    if parallel_config is None:
        return kwargs
    timesteps, coordinates = kwargs["audio_timestep"], kwargs.get("audio_coords")
    timesteps = timesteps[:, None] if timesteps.ndim == 1 else timesteps
    filled = {"audio_hidden_states": kwargs["audio_hidden_states"], "audio_timestep": timesteps}
    filled = {name: filled_up(rows, parallel_config) for name, rows in filled.items()}
    if coordinates is not None:
        filled["audio_coords"] = filled_up(coordinates[:, 0], parallel_config)[:, None]
    return {**kwargs, **filled}


def _audio_coordinates(transformer: Any, length: int, *, device: torch.device) -> tuple[torch.Tensor]:
    """Return the first and the last second of each token of an audio, `(length, 2)`."""
    return (transformer.audio_rope.prepare_audio_coords(1, length, device)[0, 0],)


FAMILY = LTX2Family()


class LTX2Recipe(LTXRecipe):
    """Recipe of `LTX2Pipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Where the data set has audio, it is trained at the noise level of its video, as in LTX-2's own trainer; else it is
    neither encoded nor predicted, and what belongs to it is not trained.
    """

    pipeline_class = "LTX2Pipeline"
    family = FAMILY
    conditions: ClassVar[tuple[Condition, ...]] = ()
    default_sequence_length = 1024
    native_sizes = ((512, 768), (1024, 1536))
    """The pipeline's default, and twice that, the second stage of the model's own pipelines."""

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """All, and frames that are appended."""
        return (*super().drawn_kinds, *APPENDED)

    def keyframe_of(self, latent_frame: int) -> int:
        """Return the first frame of a latent frame, at which the pipeline shows a picture."""
        return (latent_frame - 1) * self.spec.temporal_stride + 1

    @classmethod
    def load(cls, name_or_path: str, **options: Any) -> Recipe:
        """Load a pipeline, see [`Recipe.load`]; refuse a length of texts that its connectors cannot fill up."""
        recipe = super().load(name_or_path, **options)
        connectors, length = recipe.pipeline.connectors, recipe.max_sequence_length
        registers = None if connectors is None else connectors.config.video_connector_num_learnable_registers
        if registers and length % registers:
            raise BucketingError(
                f"`max_sequence_length` must be a multiple of {registers}, the number of registers with which this "
                f"model's connectors fill up a text, got {length}."
            )
        return recipe

    @classmethod
    def read_audio_rule(cls, name_or_path: str) -> AudioRule:
        """Read the rate at which the audio VAE hears, and the samples of a token by its strides, from its settings."""
        config = read_config(name_or_path, "audio_vae")
        return AudioRule(
            rate=config["sample_rate"], samples_per_token=LATENT_DOWNSAMPLE_FACTOR * config["mel_hop_length"]
        )

    @torch.no_grad()
    def encode_audio(self, waveform: torch.Tensor) -> torch.Tensor:
        """Encode sound `(2, samples)` in [−1, 1] to normalised latents `(tokens, channels)`, the posterior's mode.

        The VAE is causal and makes a first latent of the first spectrum alone, so that there is one more than the
        pipeline makes for as many seconds: the last is left away.
        """
        vae = self.pipeline.audio_vae
        hop, mean, std = vae.config.mel_hop_length, vae.latents_mean, vae.latents_std
        tokens = waveform.shape[1] // (LATENT_DOWNSAMPLE_FACTOR * hop)
        if not tokens:
            return waveform.new_zeros(0, len(mean), dtype=vae.dtype)
        spectrum = log_mel_spectrum(
            waveform.float(), rate=vae.config.sample_rate, hop=hop, bins=vae.config.mel_bins
        ).to(vae.dtype)
        latents = vae.encode(spectrum[None]).latent_dist.mode()
        return (self.pipeline._pack_audio_latents(latents)[0, :tokens] - mean) / std

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        states, mask, _, _ = self._encode_prompt(captions)
        side = self.pipeline.tokenizer.padding_side
        values, audio, mask = self.pipeline.connectors(states, mask, padding_side=side)
        return TextEmbeddings(values, mask, {AUDIO_TEXT: audio} if self.audio else {})

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return frame rates, with the places of appended frames, and noise levels where text is modulated by them."""
        rates, places = {"fps": frame_rates(samples.fps)}, keyframe_places(samples)
        if places.shape[1]:
            rates = {"fps": torch.cat([rates["fps"][:, None], places.to(rates["fps"])], 1)}
        return {**rates, "sigma": samples.noised.timesteps} if modulates_text(self.transformer) else rates


class LTX2ImageToVideoRecipe(FirstFrameRecipe, LTX2Recipe):
    """Recipe of `LTX2ImageToVideoPipeline`; see [`FirstFrameRecipe`]."""

    pipeline_class = "LTX2ImageToVideoPipeline"


class LTX2InContextRecipe(LTX2Recipe):
    """Recipe of `LTX2InContextPipeline`, whose samples have references that lie over them, of any smaller size.

    References are clean and have timestep 0; prepare them with `--reference_downscale_factor`. The pipeline counts
    their tokens when it shifts its noise levels, and training does not, as for other pipelines with references.
    """

    pipeline_class = "LTX2InContextPipeline"
    conditions = (ReferenceRule(resample="bilinear", argument="reference_conditions"),)

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return references with their `reference_downscale_factor`, which must be the same for all of them.

        Raises:
            BucketingError: If the sizes of references are no equal fractions of the sample's.
        """
        from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

        sizes = [(1, frames[0].height, frames[0].width) for frames in references]
        factor, *others = set(reference_factors([(1, size.height, size.width), *sizes]))
        if others:
            raise BucketingError(
                f"The call of a {cls.pipeline_class} takes references of one size, got {sorted(set(sizes))}."
            )
        conditions = [LTX2ReferenceCondition(frames=list(frames)) for frames in references]
        return {cls.call_arguments()["reference"]: conditions, "reference_downscale_factor": factor}


def log_mel_spectrum(waveform: torch.Tensor, *, rate: int, hop: int, bins: int) -> torch.Tensor:
    """Return the logarithm of the mel spectrum of sound `(channels, samples)`: `(channels, samples ÷ hop + 1, bins)`.

    Spectra are centred, of Hann windows of [`FFT_LENGTH`], and mel bands are Slaney's from 0 to half the rate, as in
    LTX-2's `AudioProcessor`.
    """
    from transformers.audio_utils import mel_filter_bank  # of the extra `train`, which packing does without

    window = torch.hann_window(FFT_LENGTH, device=waveform.device)
    spectrum = torch.stft(waveform, FFT_LENGTH, hop, window=window, pad_mode="reflect", return_complex=True).abs()
    filters = mel_filter_bank(FFT_LENGTH // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    bands = to_device(torch.from_numpy(filters), waveform.device, dtype=waveform.dtype)
    return (spectrum.transpose(1, 2) @ bands).clamp(min=1e-5).log()


RECIPES = (
    LTX2Recipe,
    LTX2ImageToVideoRecipe,
    LTX2InContextRecipe,
)
