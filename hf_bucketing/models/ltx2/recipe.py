"""How LTX-2 is trained on video, with its audio or without it: flow matching, shifted by size."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import LATENT_DOWNSAMPLE_FACTOR
from transformers.audio_utils import mel_filter_bank

from ...buckets.sizes import Size
from ...conditions.audio import AudioRule
from ...conditions.shares import APPENDED
from ...devices import to_device
from ...errors import BucketingError
from ...media.sample import frame_rates
from ...packing.family import UNLIMITED
from ..first_frame import FirstFrameRecipe
from ..loading import read_config
from ..ltx.packing import reference_factors
from ..ltx.recipe import LTXRecipe, keyframe_places
from ..recipe import Recipe
from ..samples import Samples
from ..texts import AUDIO_TEXT, TextEmbeddings
from .packing import FAMILY, modulates_text


class LTX2Recipe(LTXRecipe):
    """Recipe of `LTX2Pipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Where the data set has audio, it is trained at the noise level of its video, as in LTX-2's own trainer; else it is
    neither encoded nor predicted, and what belongs to it is not trained.
    """

    pipeline_class = "LTX2Pipeline"
    family = FAMILY
    max_references = 0
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
        """Encode captions, and pass them through the connectors, as the pipeline's call does."""
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
    max_references = UNLIMITED
    shown_as = MappingProxyType({"reference": "reference_conditions"})

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
        return {cls.shown_as["reference"]: conditions, "reference_downscale_factor": factor}


FFT_LENGTH = 1024
"""Samples of a spectrum, `filter_length` of the original checkpoints, which the audio VAE's settings do not hold."""


def log_mel_spectrum(waveform: torch.Tensor, *, rate: int, hop: int, bins: int) -> torch.Tensor:
    """Return the logarithm of the mel spectrum of sound `(channels, samples)`: `(channels, samples ÷ hop + 1, bins)`.

    Spectra are centred, of Hann windows of [`FFT_LENGTH`], and mel bands are Slaney's from 0 to half the rate, as in
    LTX-2's `AudioProcessor`.
    """
    window = torch.hann_window(FFT_LENGTH, device=waveform.device)
    spectrum = torch.stft(waveform, FFT_LENGTH, hop, window=window, pad_mode="reflect", return_complex=True).abs()
    filters = mel_filter_bank(FFT_LENGTH // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    bands = to_device(torch.from_numpy(filters), waveform.device, dtype=waveform.dtype)
    return (spectrum.transpose(1, 2) @ bands).clamp(min=1e-5).log()


RECIPES = (LTX2Recipe, LTX2ImageToVideoRecipe, LTX2InContextRecipe)
