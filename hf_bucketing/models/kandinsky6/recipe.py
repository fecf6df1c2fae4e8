"""How Kandinsky 6 is trained: flow matching with a fixed shift, with sound or without; CLIP also pools captions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from ...conditions.audio import AudioRule
from ...conditions.shares import APPENDED_FIRST
from ...errors import BucketingError
from ..index import read_index
from ..kandinsky5.recipe import KandinskyRecipe
from ..loading import read_config
from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY, takes_picture


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
        """Encode captions inside the pipeline's prompt template, whose own tokens it crops; pooled ones by CLIP."""
        values, pooled, mask, *_ = self._encode_prompt(captions)
        text = TextEmbeddings(values, None if mask is None else mask.long(), {"pooled_projections": pooled})
        return text.padded(self.max_sequence_length)


RECIPES = (Kandinsky6Recipe,)
