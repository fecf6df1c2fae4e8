"""How CogVideoX is trained: denoising on its own schedule, mostly of velocities; text with its padding as encoded."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from ...buckets.sizes import LatentSpec
from ...errors import PackingError
from ...packing.strips import token_grid
from ..control import ControlRecipe
from ..first_frame import ENDS, shown_ends
from ..loading import read_config
from ..recipe import Recipe
from ..samples import SHOWN_FRAMES, Conditions, Samples, Shown
from .packing import FAMILY

OFFSET = 2.0
"""The `ofs` that the image-to-video pipeline always passes."""


class CogVideoXRecipe(Recipe):
    """Recipe of `CogVideoXPipeline`; see [`Recipe`].

    diffusers' training script weights the error of `x_0` by `1 / (1 − ᾱ_t)`, which for a model that predicts
    velocities is their mean squared error, at uniformly drawn timesteps; so does this recipe.

    CogVideoX 1.5, which has patches of two latent frames, sees the first latent frame twice: its pipeline renders one
    more, and drops it.
    """

    pipeline_class = "CogVideoXPipeline"
    family = FAMILY
    denoises = True
    default_sequence_length = 226
    native_sizes = ((480, 720), (768, 1360))
    """The sizes of 1.0 and 1.5."""

    @classmethod
    def read_sequence_length(cls, name_or_path: str) -> int:
        """Return the length of texts that the transformer names."""
        named = read_config(name_or_path, "transformer").get("max_text_seq_length")
        return named or cls.default_sequence_length

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer, and whether the first frame is repeated."""
        repeats_first = read_config(name_or_path, "transformer").get("patch_size_t") is not None
        return replace(super().read_spec(name_or_path), repeats_first=repeats_first)

    @property
    def media_rule(self) -> str:
        """How often the first latent frame is repeated, if it is."""
        return f"{self.spec.num_repeats} repeated latent frames" if self.spec.num_repeats else ""

    def latent_statistics(self) -> tuple[Any, Any]:
        """Return 0 and 1, because the pipeline does nothing but scale latents."""
        return [0.0], [1.0]

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode and scale `(B, 3, F, H, W)`; repeat the first latent frame where it fills a patch (1.5)."""
        latents = super().encode_latents(pixel_values)
        return torch.cat([latents[:, :, :1]] * self.spec.num_repeats + [latents], 2)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the `ofs` of models that take it."""
        if not self.config.get("ofs_embed_dim"):
            return {}
        return {"ofs": torch.full_like(samples.fps, OFFSET)}

    def refusal(self, samples: Samples) -> str | None:
        """Refuse sizes for which the model has no positions."""
        grid = token_grid(samples.noised.latents[0], self.family.patch(self.transformer.config), sample=0)
        try:
            self.family.check_grid(self.transformer, grid)
        except PackingError as error:
            return str(error)
        return None


class CogVideoXImageToVideoRecipe(CogVideoXRecipe):
    """Recipe of `CogVideoXImageToVideoPipeline`; see [`Recipe`].

    The latent of the first frame, encoded alone, and zeros for the other frames are further channels. The image is
    clean: this recipe does not have the noise that diffusers' training script puts on it; its dropout, of 5 %, is
    `--condition first_frame:0.95,none:0.05`. Images have nothing to continue; they get zeros, as samples whose image
    is dropped.
    """

    pipeline_class = "CogVideoXImageToVideoPipeline"
    takes_image = True
    shown = ENDS[:1]

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """The first frame."""
        return ENDS[:1]

    @property
    def media_rule(self) -> str:
        """Also that the first frame is encoded."""
        return f"{super().media_rule}, conditions of 1 frame"

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
        """Encode the first frame of videos, the data set's or their own: `image_latents`, zeros for images."""
        if pixel_values.shape[2] == 1:
            return {"image_latents": torch.zeros_like(latents[:, :, :1])}
        vae = self.pipeline.vae
        image = vae.encode(shown_ends(pixel_values, shown).to(vae.dtype)).latent_dist.mode()
        factor = vae.config.scaling_factor
        return {"image_latents": image / factor if vae.config.invert_scale_latents else image * factor}

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the latent of a blank first frame, `(C, 1, h, w)`."""
        return {"image_latents": torch.zeros_like(latent[:, :1])}

    def added_channels(self, samples: Samples) -> list[torch.Tensor]:
        """Return the first frame's latent, unless a run draws not to show it, and zeros for the other frames."""
        latents, images = samples.noised.latents, samples.conditions["image_latents"]
        frames = samples.conditions.get(SHOWN_FRAMES, [(True,)] * len(latents))
        shown = [image * bool(visible[0]) for image, visible in zip(images, frames, strict=True)]
        return [F.pad(image, (0, 0, 0, 0, 0, noisy.shape[1] - 1)) for noisy, image in zip(latents, shown, strict=True)]

    def clean_parts(self, samples: Samples) -> None:
        """Return no clean latents: the first frame is further channels."""


class CogVideoXFunControlRecipe(ControlRecipe, CogVideoXRecipe):
    """Recipe of `CogVideoXFunControlPipeline`; see [`ControlRecipe`].

    Unlike others of CogVideoX 1.5, it repeats no latent frame, so that videos have an even number of them.
    """

    pipeline_class = "CogVideoXFunControlPipeline"
    shown_as = MappingProxyType({"control": "control_video"})

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer."""
        return replace(super().read_spec(name_or_path), repeats_first=False)


RECIPES = (CogVideoXRecipe, CogVideoXImageToVideoRecipe, CogVideoXFunControlRecipe)
