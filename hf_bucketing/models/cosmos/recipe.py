"""How Cosmos is trained: Predict 1 by EDM, Predict 2 by flow matching; text with zero padding; a clean first frame.

Anima is a Predict 2 of its own weights and text, whose pipeline diffusers has only as blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from diffusers.utils import is_torchvision_available

from ...buckets.sizes import Size
from ...devices import to_device
from ...errors import BucketingError
from ..first_frame import FirstFrameRecipe
from ..loading import read_config
from ..modular import ModularRecipe
from ..objectives import EDM, FlowMatching, Objective, Shift
from ..recipe import Recipe
from ..samples import ModelInputs, Samples
from ..shift import ShiftLaw, ShiftOfLatents, chosen_shift
from ..texts import TextEmbeddings
from .packing import FAMILY

CONDITION_SIGMA = 1e-4
"""The noise level that Predict 2's pipeline names for a conditioning frame by default."""


class CosmosModelRecipe(Recipe):
    """What all recipes of Cosmos' transformer share; see [`Recipe`]."""

    family = FAMILY
    default_sequence_length = 512

    def refusal(self, samples: Samples) -> str | None:
        """Refuse stacks of several frame rates, and models that need what is not installed."""
        if self.config.get("concat_padding_mask", True) and not is_torchvision_available():
            return "This Cosmos transformer resizes its padding mask with torchvision; install torchvision."
        rates = samples.fps.unique()
        if len(rates) == 1:
            return None
        return (
            f"Cosmos takes one frame rate per batch, and this one has {rates.tolist()}. Prepare the data set with a "
            "--target_fps that all its videos reach, or train packs, which have no such limit."
        )

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the frame rates."""
        return {"fps": samples.fps}


class CosmosImageRecipe(CosmosModelRecipe):
    """What the recipes of pipelines that render images share; see [`Recipe`]."""

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Refuse videos; see [`Recipe.model_inputs`].

        Raises:
            BucketingError: If there is one.
        """
        frames = max(latent.shape[1] for latent in samples.noised.latents)
        if frames > 1:
            raise BucketingError(
                f"A {self.pipeline_class} renders images, and a sample has {frames} latent frames; prepare the data "
                "set with --bucket_frames 1."
            )
        return super().model_inputs(samples)


class CosmosRecipe(CosmosModelRecipe):
    """What the recipes of NVIDIA's Cosmos share; see [`Recipe`].

    The pipelines' guardrail (`cosmos_guardrail`) is not needed to train: it is loaded for the first rendered sample,
    which its licence asks for. NVIDIA's training draws ln(σ) from a standard normal distribution, and multiplies the σ
    of a video by the square root of its latent frames.
    """

    @classmethod
    def load(cls, name_or_path: str, **options: Any) -> Recipe:
        """Load a pipeline without its guardrail, see [`Recipe.load`]."""
        recipe = super().load(name_or_path, **options)
        recipe.pipeline.register_modules(safety_checker=None)
        return recipe

    @classmethod
    def replaced_components(cls) -> dict[str, Any]:
        """Return a guardrail that does nothing: for None, the pipeline would load the guardrail's own models."""
        return {"safety_checker": _no_guardrail}

    def shift(self) -> float:
        """Return 1: the schedulers have levels of their own; see [`shift_of`] for what training draws."""
        return 1.0

    def shift_of(self, setting: float | str | ShiftLaw | None) -> Shift:
        """Return the factor of a sample's noise levels that a setting names; by default the root of its frames."""
        if setting is None:
            return _root_of_frames
        law = chosen_shift(setting, own=self.shift())
        return law if isinstance(law, (int, float)) else ShiftOfLatents(law, self.spec)

    def render(self, prompt: str, size: Size, **options: Any) -> np.ndarray:
        """Call the pipeline with its guardrail, see [`Recipe.render`].

        Raises:
            BucketingError: If the guardrail is not installed.
        """
        if self.pipeline.safety_checker is None:
            self.pipeline.register_modules(safety_checker=_load_guardrail(self.pipeline))
        return super().render(prompt, size, **options)


class CosmosTextToWorldRecipe(CosmosRecipe):
    """Recipe of `CosmosTextToWorldPipeline` (Predict 1); see [`Recipe`]."""

    pipeline_class = "CosmosTextToWorldPipeline"
    native_sizes = ((704, 1280),)

    def objective(self, *, seed: int, shift: float | str | ShiftLaw | None = None, **others: Any) -> Objective:
        """Return EDM's objective with the deviation and the sign of the pipeline's scheduler.

        Raises:
            BucketingError: If a setting is given that does not apply to EDM.
        """
        for name, value in others.items():
            if value is not None:
                raise BucketingError(
                    f"A {self.pipeline_class} is trained by EDM, which fixes noise levels and weights; omit `{name}`."
                )
        config = self.pipeline.scheduler.config
        return EDM(
            sigma_data=config.sigma_data,
            prediction_type=config.prediction_type,
            shift=self.shift_of(shift),
            seed=seed,
        )

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode `(B, 3, F, H, W)`; the VAE has statistics for each channel of each latent frame.

        Raises:
            BucketingError: If it has none for so many frames.
        """
        vae = self.pipeline.vae
        latents: torch.Tensor = vae.encode(pixel_values.to(vae.dtype)).latent_dist.mode()
        if vae.config.latents_mean is None:
            return latents
        statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std])
        statistics = to_device(statistics, latents.device, dtype=latents.dtype)
        mean, std = statistics.view(2, vae.config.latent_channels, -1, 1, 1).unbind()
        if latents.shape[2] > mean.shape[1]:
            raise BucketingError(
                f"This VAE has statistics for {mean.shape[1]} latent frames, and a sample has {latents.shape[2]}; "
                "--max_frames of hf_bucketing prepare cuts samples that are too long."
            )
        return (latents - mean[:, : latents.shape[2]]) / std[:, : latents.shape[2]]


class CosmosVideoToWorldRecipe(FirstFrameRecipe, CosmosTextToWorldRecipe):
    """Recipe of `CosmosVideoToWorldPipeline` (Predict 1) with an image to begin with; see [`Recipe`].

    The first latent frame is clean, marked by a further channel, and not part of the loss; images are not conditioned.
    The pipeline adds noise of σ = 0.001 to the frame, which is omitted here.
    """

    pipeline_class = "CosmosVideoToWorldPipeline"

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return False: the clean frame has the timestep of its sample."""
        return False

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Put the clean first frame into the noisy latents, marked by a channel."""
        return replace(_mark_first_frame(super().model_inputs(samples)), timesteps=samples.noised.timesteps)


class Cosmos2Recipe(CosmosRecipe):
    """What the recipes of Cosmos Predict 2 share: the VAE of Wan, and timesteps σ/(1 + σ) of flow matching."""

    def objective(self, *, shift: float | str | ShiftLaw | None = None, **options: Any) -> Objective:
        """Return flow matching with timesteps from 0 to 1; see [`Recipe.objective`]."""
        objective = super().objective(**options)
        assert isinstance(objective, FlowMatching)
        return replace(objective, num_train_timesteps=1, shift=self.shift_of(shift))


class Cosmos2TextToImageRecipe(CosmosImageRecipe, Cosmos2Recipe):
    """Recipe of `Cosmos2TextToImagePipeline`; see [`Recipe`]."""

    pipeline_class = "Cosmos2TextToImagePipeline"
    native_sizes = ((768, 1360),)


class Cosmos2VideoToWorldRecipe(FirstFrameRecipe, Cosmos2Recipe):
    """Recipe of `Cosmos2VideoToWorldPipeline` with an image to begin with; see [`Recipe`].

    The first latent frame is clean, with a timestep of its own, marked by a further channel, and not part of the loss;
    images are not conditioned.
    """

    pipeline_class = "Cosmos2VideoToWorldPipeline"
    native_sizes = ((704, 1280), (480, 832))

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Put the clean first frame into the noisy latents, at its own timestep, marked by a channel."""
        inputs = _mark_first_frame(super().model_inputs(samples))
        conditioned = CONDITION_SIGMA / (CONDITION_SIGMA + 1)
        pairs = zip(inputs.timesteps, inputs.weights or (), strict=True)
        timesteps = [torch.where(weight[0, :, 0, 0] > 0, timestep, conditioned) for timestep, weight in pairs]
        return replace(inputs, timesteps=timesteps)


class AnimaRecipe(ModularRecipe, CosmosImageRecipe):
    """Recipe of `AnimaModularPipeline`; see [`Recipe`].

    A conditioner, which is not trained, makes the text of a caption of its states in Qwen3 and its tokens for T5, and
    pads it with zeros to one length, to which the model attends: `max_sequence_length` cuts captions, and shortens no
    text.
    """

    pipeline_class = "AnimaModularPipeline"
    workflow = "text2image"
    output = "images"
    native_sizes = ((1024, 1024),)

    @classmethod
    def load(cls, name_or_path: str, *, max_sequence_length: int | None = None, **options: Any) -> Recipe:
        """Load a pipeline, see [`Recipe.load`].

        Raises:
            BucketingError: If captions may be longer than what the conditioner pads them to.
        """
        longest = read_config(name_or_path, "text_conditioner")["min_sequence_length"]
        if (max_sequence_length or cls.default_sequence_length) > longest:
            raise BucketingError(
                f"The text_conditioner of {name_or_path} pads captions to {longest} tokens, and longer ones to none; "
                f"give a `max_sequence_length` of at most {longest}."
            )
        return super().load(name_or_path, max_sequence_length=max_sequence_length, **options)

    @classmethod
    def text_length(cls, max_sequence_length: int | None = None) -> int:
        """Return the length of the conditioner, whatever captions are cut to."""
        return cls.default_sequence_length

    def objective(self, **options: Any) -> Objective:
        """Return flow matching with timesteps from 0 to 1; see [`Recipe.objective`]."""
        objective = super().objective(**options)
        assert isinstance(objective, FlowMatching)
        return replace(objective, num_train_timesteps=1)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions as the pipeline does, each padded to the length of the conditioner."""
        from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep

        step: Any = AnimaTextEncoderStep
        encoder, conditioner = self.pipeline.text_encoder, self.pipeline.text_conditioner
        options = {"max_sequence_length": self.max_sequence_length, "device": encoder.device}
        states, mask = step._get_qwen_prompt_embeds(self.pipeline, captions, dtype=conditioner.dtype, **options)
        tokens, token_mask = step._get_t5_prompt_ids(self.pipeline, captions, **options)
        return TextEmbeddings(
            conditioner(states, tokens, target_attention_mask=token_mask, source_attention_mask=mask)
        )


def _mark_first_frame(inputs: ModelInputs) -> ModelInputs:
    """Add a channel that is 1 at the clean first frames of videos, which have no weight in the loss, else 0."""
    pairs = zip(inputs.latents, inputs.weights or (), strict=True)
    return replace(inputs, latents=[torch.cat([latent, 1 - weight]) for latent, weight in pairs])


def _root_of_frames(size: Sequence[int]) -> float:
    return math.sqrt(size[0])


def _no_guardrail(*args: Any, **options: Any) -> None:
    """Do nothing."""


def _load_guardrail(pipeline: Any) -> Any:
    """Return the guardrail that the pipeline makes by default."""
    names: Mapping[str, Any] = vars(sys.modules[type(pipeline).__module__])
    try:
        return names["CosmosSafetyChecker"]()
    except ImportError as error:
        raise BucketingError(f"A {type(pipeline).__name__} renders nothing without its guardrail: {error}") from error


RECIPES = (
    CosmosTextToWorldRecipe,
    CosmosVideoToWorldRecipe,
    Cosmos2TextToImageRecipe,
    Cosmos2VideoToWorldRecipe,
    AnimaRecipe,
)
