"""How Wan-Animate 2 is trained: as Wan-Animate, shown a driving video in the place of a pose and a face."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image

from ...conditions.names import MASK, REFERENCE
from ...packing.attachment import ATTRIBUTE, attachment_of
from ...packing.forward import packed_forward
from ..enable import disable_packing, enable_packing
from ..modular import ModularRecipe
from ..samples import Conditions, ModelInputs, Samples, Shown
from ..texts import TextEmbeddings
from ..wan.packing import CLIP_TOKENS, IMAGE_TOKENS
from ..wan_animate.packing import POSE
from ..wan_animate.recipe import KNOWN, WanAnimateRecipe
from .packing import DRIVING, DRIVING_IMAGE, DRIVING_TEXT, FAMILY, IMAGE_DIM

DRIVING_PROMPT = "人物动作的参考视频"
"""Text of every driving video by default: "reference video of a person's motion"."""


class WanAnimate2Recipe(ModularRecipe, WanAnimateRecipe):
    """Recipe of `WanAnimate2ModularPipeline`, whose models move a character as a driving video moves; see [`Recipe`].

    Each sample has a `control`, the driving video, and a `reference`, a picture of the character, which becomes a
    latent frame in front of the sample, as for Wan-Animate. First frames that a run draws are known, as the pipeline
    shows the end of the segment before. A `mask` weighs the loss alone.

    A stack of samples runs as a pack too: the stock model runs driving videos in a forward of their own and attends by
    FlexAttention, which has no backward pass on a CPU.
    """

    pipeline_class = "WanAnimate2ModularPipeline"
    family = FAMILY
    output = "videos"
    read_with_lora = MappingProxyType({"image_dim": None})  # in diffusers 0.42.1, as of Wan's other transformers
    shown = ("control",)
    required = ("control", REFERENCE)
    shown_as = MappingProxyType({"control": "driving_video", REFERENCE: "image"})

    @property
    def media_rule(self) -> str:
        """What distinguishes entries of a cache from those of Wan's other pipelines, which have the same VAE."""
        return "driving videos, characters in front, what is known"

    @property
    def _image_processor(self) -> Any:
        return self.pipeline.image_processor

    def _image_tokens(self, characters: Sequence[Image.Image], letterboxed: torch.Tensor) -> torch.Tensor:
        from diffusers.modular_pipelines.wan_animate_2.encoders import clip_visual_encode

        encoder = self.pipeline.image_encoder
        tokens = [clip_visual_encode(encoder, image, encoder.device, encoder.dtype) for image in letterboxed]
        return torch.cat(tokens)

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
        """Return the latents and the image tokens of the driving video, and the mask and latents of what is known."""
        driving = torch.stack(list(shown["control"])).to(pixel_values)
        drawn = {name: values for name, values in shown.items() if name != MASK}
        return {
            POSE: self.encode_latents(driving),
            DRIVING_IMAGE: self._image_tokens((), driving[:, :, 0]),
            KNOWN: self._known(pixel_values, latents, drawn),
        }

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros of the shapes of what [`encode_media`] returns beside latents and their loss mask."""
        images = dict.fromkeys((IMAGE_TOKENS, DRIVING_IMAGE), latent.new_zeros(CLIP_TOKENS, IMAGE_DIM))
        known = latent.new_zeros(self.spec.temporal_stride + len(latent), *latent.shape[1:])
        return {POSE: torch.zeros_like(latent), KNOWN: known, **images}

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions with zeros behind them, and beside each the text of its driving video."""
        from diffusers.modular_pipelines.wan_animate_2.encoders import get_t5_prompt_embeds

        pipeline, length = self.pipeline, self.max_sequence_length
        encoder = pipeline.text_encoder
        texts = [*captions, DRIVING_PROMPT]
        values = get_t5_prompt_embeds(encoder, pipeline.tokenizer, texts, length, encoder.device)
        return TextEmbeddings(values[:-1], None, {DRIVING_TEXT: values[-1:].expand(len(captions), -1, -1)})

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the driving videos as the model takes them, their texts, and the image tokens of both."""
        latents, conditions, text = samples.noised.latents, samples.conditions, samples.text
        stride, taken = self.spec.temporal_stride, self.family.conditioning(self.transformer)
        driving = [pose.to(latent) for pose, latent in zip(conditions[POSE], latents, strict=True)]
        images = {
            name: torch.stack(list(conditions[name])).to(text.values)
            for name in (IMAGE_TOKENS, DRIVING_IMAGE)
            if name in taken
        }
        return {
            DRIVING: [
                torch.cat([pose, torch.ones_like(pose[:1]).expand(stride, -1, -1, -1), pose]) for pose in driving
            ],
            DRIVING_TEXT: text.others[DRIVING_TEXT],
            **images,
        }

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack as a pack, see [`Recipe.predict`].

        Where there may be a backward pass, which may compute blocks again, packing stays enabled after it.
        """
        enabled_here = ATTRIBUTE not in vars(self.transformer)
        if enabled_here:
            enable_packing(self.transformer)
        pack = attachment_of(self.transformer).packing.pack(
            inputs.latents,
            timesteps=inputs.timesteps,
            conditioning=inputs.conditioning,
            **samples.text.pack_kwargs(),
        )
        output = torch.stack(pack.unpack(packed_forward(transformer, pack)))
        if enabled_here and not torch.is_grad_enabled():
            disable_packing(self.transformer)
        return output


RECIPES = (WanAnimate2Recipe,)

REFUSED = MappingProxyType(
    {"WanAnimate2DistilledModularPipeline": "its transformer is distilled to few steps; train Wan-Animate 2"}
)
"""Why pipelines cannot be trained."""
