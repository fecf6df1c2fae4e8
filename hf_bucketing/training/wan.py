"""The Wan 2.1 and 2.2 recipe: how its pipeline's own components make latents and text embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanTransformer3DModel

from ..errors import BucketingError
from ..geometry import LatentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WanRecipe:
    """A loaded `WanPipeline`, of which only the transformer is trained.

    Args:
        pipeline (`WanPipeline`): From [`load`][WanRecipe.load].
        max_sequence_length (`int`): Text tokens per caption; the model attends to the zeros after a shorter one.
    """

    pipeline: Any
    max_sequence_length: int = 512

    @classmethod
    def load(cls, name_or_path: str, *, max_sequence_length: int = 512) -> WanRecipe:
        """Load a text-to-video pipeline from the hub or a folder, in float32.

        Raises:
            BucketingError: If it is not a Wan pipeline with one transformer.
        """
        pipeline = DiffusionPipeline.from_pretrained(name_or_path)
        transformer = getattr(pipeline, "transformer", None)
        if not isinstance(transformer, WanTransformer3DModel) or pipeline.transformer_2 is not None:
            raise BucketingError(
                f"{name_or_path} is a {type(pipeline).__name__} with a {type(transformer).__name__}; this script "
                "trains a WanPipeline with one transformer, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers."
            )
        for name in ("vae", "text_encoder", "transformer"):
            getattr(pipeline, name).requires_grad_(name == "transformer")
        return cls(pipeline=pipeline, max_sequence_length=max_sequence_length)

    @staticmethod
    def read_spec(name_or_path: str) -> LatentSpec:
        """Read strides and patch from the configurations alone, without loading weights.

        Raises:
            BucketingError: If there is no such pipeline.
        """
        try:
            vae = AutoencoderKLWan.load_config(name_or_path, subfolder="vae")
            transformer = WanTransformer3DModel.load_config(name_or_path, subfolder="transformer")
        except OSError as error:
            raise BucketingError(f"{name_or_path} is no pipeline with a VAE and a transformer: {error}") from error
        return LatentSpec(
            temporal_stride=vae.get("scale_factor_temporal", 4),
            spatial_stride=vae.get("scale_factor_spatial", 8),
            patch=tuple(transformer["patch_size"]),
        )

    @property
    def transformer(self) -> Any:
        """The model that is trained."""
        return self.pipeline.transformer

    @property
    def num_train_timesteps(self) -> int:
        """The timestep of pure noise."""
        return int(self.pipeline.scheduler.config.num_train_timesteps)

    @property
    def shift(self) -> float:
        """The flow shift that the pipeline samples with."""
        config = self.pipeline.scheduler.config
        return float(config.get("flow_shift") or config.get("shift") or 1.0)

    def to(self, device: torch.device, *, dtype: torch.dtype) -> None:
        """Move the frozen components: the text encoder in `dtype`, the VAE in float32, which it needs."""
        self.pipeline.text_encoder.to(device, dtype=dtype)
        self.pipeline.vae.to(device)

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode `(B, 3, F, H, W)` in [−1, 1] to normalised latents `(B, C, f, h, w)`, the mode of the posterior."""
        vae = self.pipeline.vae
        latents = vae.encode(pixel_values.to(vae.dtype)).latent_dist.mode()
        mean, std = (
            torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (latents - mean) / std

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> torch.Tensor:
        """Encode captions to `(n, max_sequence_length, text_dim)`, as the pipeline does."""
        embeddings, _ = self.pipeline.encode_prompt(
            captions,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.pipeline.text_encoder.device,
        )
        return embeddings
