"""Cosmos and Anima: rotary positions in seconds, and learned positions in every block; text with zero padding.

Anima is a Predict 2 of its own weights and text, whose pipeline diffusers has only as blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import local
from typing import Any

import numpy as np
import torch
from diffusers.utils import is_torchvision_available

from ...buckets.sizes import Size
from ...devices import to_device
from ...errors import BucketingError, PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Family, Transformer
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, over_grid, shape_only
from ...packing.strip_positions import position_strips
from ...packing.texts import TextTokens
from ..first_frame import FirstFrameRecipe
from ..loading import read_config
from ..modular import ModularRecipe
from ..objectives import EDM, FlowMatching, Objective, Shift
from ..recipe import Recipe
from ..samples import ModelInputs, Samples
from ..shift import ShiftLaw, ShiftOfLatents, chosen_shift
from ..texts import TextEmbeddings

CONDITION_SIGMA = 1e-4
"""The noise level that Predict 2's pipeline names for a conditioning frame by default."""


class CosmosFamily(Family):
    """Packing of `CosmosTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `fps`, `(n,)`, is the frame rate of each sample, 0 for images. A condition mask (video-to-world) is a channel of
    the latents. The padding mask is zero everywhere, as in the pipeline.
    """

    title = "Cosmos and Anima"
    transformer_class = "CosmosTransformer3DModel"
    tested_forwards = ("a451f9478991",)
    stock_processors = ("CosmosAttnProcessor2_0",)
    text = TextTokens(padding="keep_padding")
    cast_inputs = (*Family.cast_inputs, "padding_mask")
    interpolates = True
    timesteps_per = "frame"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models that attend to image contexts, and models that need what is not installed."""
        if transformer.config.get("img_context_dim_in"):
            raise PackingError("This Cosmos transformer also attends to image contexts, which packing does not carry.")
        if transformer.config.concat_padding_mask and not is_torchvision_available():
            raise PackingError(
                "This Cosmos transformer resizes its padding mask with torchvision; install torchvision."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the learned positions of each axis; else the longest axis of the rotary positions."""
        t, h, w = transformer.rope.max_size
        longest = max(t, h, w)
        return (longest, longest, longest) if transformer.learnable_pos_embed is None else (t, h, w)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding, before the projection that some models have."""
        config = transformer.config
        projected = config.get("use_crossattn_projection")
        return int(config.crossattn_proj_in_channels if projected else config.text_embed_dim)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the frame rate; drawn as 24 frames per second for all."""
        return {"fps": lambda grids: torch.full((len(grids),), 24.0)}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        learned = transformer.learnable_pos_embed
        if learned is not None and base_size is not None:
            raise PackingError("Learned positions cannot be stretched to a base size; use positions='native'.")
        handles = [
            transformer.rope.register_forward_pre_hook(_take_rates, with_kwargs=True),
            transformer.rope.register_forward_hook(partial(_rotate, base_size)),
        ]
        if learned is not None:
            handles += [learned.register_forward_pre_hook(_shorten), learned.register_forward_hook(_look_up)]
        return handles

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add a padding mask of zeros, and give timesteps of frames the shape that the model asks for."""
        inputs = {**super().inputs(rows), "padding_mask": rows.latents.new_zeros(1, 1, *rows.latents.shape[3:])}
        if rows.timesteps.ndim == 2:
            inputs["timestep"] = inputs["timestep"][:, None, :, None, None]
        return inputs

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the one frame rate of all rows; none for images."""
        rate = rows.conditioning["fps"][0]
        return {"fps": rate if rate else None}


class _Taken(local):
    """The frame rates of the forward that a thread computes, which `rope` cannot take by strip."""

    rates: torch.Tensor


_taken = _Taken()


def _take_rates(rope: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    _taken.rates = kwargs["fps"]
    return (_shorten(rope, args),), {**kwargs, "fps": None}


def _shorten(module: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a latent of one token: what the module makes of it is replaced, and a strip may exceed its positions."""
    return shape_only(args[0], (1, 1, 1), module.patch_size)


def _rotate(
    base_size: Grid | None, rope: Any, args: tuple[torch.Tensor, ...], output: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = _angles(rope, base_size, _taken.rates, device=args[0].device)
    return angles.cos(), angles.sin()


def _look_up(embed: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    # embed.forward instead of embed(…), which would call this hook again
    def table(grid: Grid) -> tuple[torch.Tensor, ...]:
        return tuple(embed.forward(shape_only(args[0], grid, embed.patch_size)))

    (positions,) = position_strips(active_layout(), table)
    return positions


def _angles(rope: Any, base_size: Grid | None, rates: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """Return the angle of each channel of a head, `(strips, strip_length, head_dim)`; frames count in 1/24 seconds."""

    def table(grid: Grid) -> tuple[torch.Tensor, ...]:
        return over_grid(axis_coordinates(grid, base_size, device=device))

    frames, rows, columns = position_strips(active_layout(), table)
    rates = torch.where(rates == 0, rope.base_fps, rates).to(device)  # as the model's own forward does without fps
    frames = frames / rates[:, None] * rope.base_fps
    axes = ((frames, rope.dim_t, rope.t_ntk_factor), (rows, rope.dim_h, rope.h_ntk_factor))
    parts = []
    for coordinates, dim, factor in (*axes, (columns, rope.dim_w, rope.w_ntk_factor)):
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32)[: dim // 2] / dim
        parts.append(coordinates[..., None] * (1.0 / (10000.0 * factor) ** exponents))
    return torch.cat([*parts, *parts], dim=-1)


FAMILY = CosmosFamily()


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
        law = chosen_shift(setting, model_shift=self.shift())
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
