"""How MiniMax-H3 is trained, with sound or without: flow matching, with the shifts of both schedulers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...buckets.sizes import LatentSpec, Size
from ...devices import to_device
from ...media.row_audio import AudioRule
from ...packing.texts import pad_texts
from ..loading import read_config
from ..modular import ModularRecipe
from ..texts import TextEmbeddings
from .packing import AUDIO_CHANNELS, FAMILY

FEWEST_FRAMES = 124
"""Frames of the shortest video that the pipeline makes, of about five seconds."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of pixels in [0, 1], by which those that the VAE encodes are normalised."""


class MiniMaxH3Recipe(ModularRecipe):
    """Recipe of `MiniMaxH3ModularPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Videos have 17·n + 5 frames, which the VAE encodes to 5·n + 2, at 24 frames per second; an image is one latent
    frame. A render has at least the 124 frames of the shortest video that the pipeline makes.

    Where the data set has audio, each sample's is trained at the level that the scheduler of audio has in the step in
    which the other one has the level of its video; else it is neither encoded nor predicted, what belongs to it is not
    trained, and renders have the sound that the model makes up.

    The pipeline has no empty prompt, as its model is distilled to guided predictions: a dropped caption is a space.
    """

    pipeline_class = "MiniMaxH3ModularPipeline"
    workflow = "t2va"
    output = "videos"
    family = FAMILY
    default_sequence_length = 512
    native_sizes = ((768, 1344), (768, 768), (1344, 768))
    sound_rate = "audio_sampling_rate"
    sound_fps = 24

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the product of the factors of the VAE's levels."""
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
        mean, std = (to_device(torch.tensor(values), pixel_values.device).view(1, -1, 1, 1, 1) for values in IMAGENET)
        return super().encode_latents(((pixel_values + 1) / 2 - mean) / std)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode each caption alone, without a template, and pad them to `max_sequence_length`, with a mask."""
        from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

        pipeline, length = self.pipeline, self.max_sequence_length
        encoder = pipeline.text_encoder
        texts = [
            get_qwen3vl_prompt_embeds(
                encoder,
                pipeline.processor,
                pipeline.tokenizer(caption or " ", add_special_tokens=False)["input_ids"][:length],
                text_encoder_layer=pipeline.text_encoder_layer,
                device=encoder.device,
                dtype=encoder.dtype,
            )[0]
            for caption in captions
        ]
        values, mask = pad_texts(texts)
        return TextEmbeddings(values, mask.long()).padded(length)

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, int]:
        """Return the size with as many frames as the pipeline makes at least."""
        return super().size_arguments(size._replace(frames=max(size.frames, FEWEST_FRAMES)))


RECIPES = (MiniMaxH3Recipe,)
