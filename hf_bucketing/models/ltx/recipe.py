"""How LTX-Video is trained: flow matching, shifted by size; text masked; positions in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...buckets.sizes import LatentSpec
from ...errors import BucketingError
from ...media.sample import frame_rates
from ..objectives import Objective, Shift, WeightingScheme
from ..recipe import Recipe, TextEmbeddings, read_configs
from ..shift import shift_for_tokens


class LTXRecipe(Recipe):
    """Recipe of `LTXPipeline`; see [`Recipe`]."""

    pipeline_class: ClassVar[str] = "LTXPipeline"
    default_sequence_length: ClassVar[int] = 128
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((512, 704), (480, 704), (768, 1216), (704, 1216))
    """The pipeline's default and the size of its example, and the two large ones of the model card."""

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer."""
        vae, transformer = read_configs(name_or_path)
        halvings = sum(vae["spatio_temporal_scaling"])
        spatial, temporal = vae.get("spatial_compression_ratio"), vae.get("temporal_compression_ratio")
        side = transformer["patch_size"]
        return LatentSpec(
            temporal_stride=temporal or vae["patch_size_t"] * 2**halvings,
            spatial_stride=spatial or vae["patch_size"] * 2**halvings,
            patch=(transformer["patch_size_t"], side, side),
        )

    def objective(self, *, weighting_scheme: WeightingScheme | None, snr_gamma: float | None, seed: int) -> Objective:
        """Return flow matching with the scheduler's shift for the number of tokens of each sample."""
        config = self.pipeline.scheduler.config
        dynamic = config.get("use_dynamic_shifting", False)
        shift = _shift_by_size(config) if dynamic else float(config.get("shift", 1.0))
        return self.flow_matching(shift, weighting_scheme=weighting_scheme, snr_gamma=snr_gamma, seed=seed)

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode, and normalise each channel by the VAE's own mean and standard deviation."""
        vae = self.pipeline.vae
        latents = vae.encode(pixel_values.to(vae.dtype)).latent_dist.mode()
        mean, std = (buffer.view(1, -1, 1, 1, 1).to(latents) for buffer in (vae.latents_mean, vae.latents_std))
        return (latents - mean) * vae.config.scaling_factor / std

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions; a mask keeps the model from attending to padding."""
        values, mask, _, _ = self.pipeline.encode_prompt(
            captions,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.pipeline.text_encoder.device,
        )
        return TextEmbeddings(values, mask)

    def predict(
        self,
        transformer: torch.nn.Module,
        latents: torch.Tensor,
        *,
        timesteps: torch.Tensor,
        text: TextEmbeddings,
        fps: torch.Tensor,
    ) -> torch.Tensor:
        """Run the transformer on a sequence of tokens.

        Raises:
            BucketingError: If the frame rates of the stack differ, because the model takes one for all.
        """
        rates = fps.unique()
        if len(rates) > 1:
            raise BucketingError(
                f"LTX takes one frame rate per batch, and this one has {rates.tolist()}. Prepare the data set with a "
                "--target_fps that all its videos reach, or train packs, which have no such limit."
            )
        pipeline, config = self.pipeline, self.transformer.config
        sides = (config.patch_size, config.patch_size_t)
        _, _, frames, height, width = latents.shape
        output: torch.Tensor = transformer(
            pipeline._pack_latents(latents, *sides),
            text.values,
            timesteps,
            encoder_attention_mask=text.mask,
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=tuple(self._interpolation_scale(fps)[0].tolist()),
            return_dict=False,
        )[0]
        return pipeline._unpack_latents(output, frames, height, width, *sides)

    def conditioning(self, *, fps: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the seconds and pixels that a latent covers, as the pipeline computes them."""
        return {"rope_interpolation_scale": self._interpolation_scale(fps)}

    def _interpolation_scale(self, fps: torch.Tensor) -> torch.Tensor:
        side = float(self.pipeline.vae_spatial_compression_ratio)
        seconds = self.pipeline.vae_temporal_compression_ratio / frame_rates(fps).double()
        return torch.stack([seconds, torch.full_like(seconds, side), torch.full_like(seconds, side)], 1)


def _shift_by_size(config: Mapping[str, Any]) -> Shift:
    """Return the scheduler's shift as a function of a latent's `(F, H, W)`."""
    if config.get("time_shift_type", "exponential") != "exponential":
        raise BucketingError(
            f"The scheduler shifts by time_shift_type={config['time_shift_type']!r}; only 'exponential' is known."
        )
    limits = {
        "base_tokens": config.get("base_image_seq_len", 256),
        "max_tokens": config.get("max_image_seq_len", 4096),
        "base_shift": config.get("base_shift", 0.5),
        "max_shift": config.get("max_shift", 1.15),
    }
    return lambda size: shift_for_tokens(math.prod(size), **limits)


RECIPE = LTXRecipe
