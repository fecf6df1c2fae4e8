"""How Wan-Animate is trained: as Wan, with a pose, a face, a picture of the character, and what is known of frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from PIL import Image

from ...buckets.sizes import Size
from ...conditions.names import FACE as SHOWN_FACE, MASK, REFERENCE
from ...devices import to_device
from ...errors import BucketingError
from ...packing.family import Family
from ..first_frame import pictures
from ..loss_mask import LOSS_MASK
from ..samples import SHOWN_FRAMES, Conditions, Samples, Shown
from ..wan.packing import CLIP_TOKENS, IMAGE_TOKENS
from ..wan.recipe import WanRecipe, in_front
from .packing import FACE, FAMILY, POSE, face_frames

KNOWN = "known_channels"
"""Condition of a sample: a mask of what stays and its latents, `(temporal_stride + C, f, h, w)`."""

BACKGROUND = "background"
"""What a call of the pipeline is shown beside a mask, in the place of a sample's own pixels."""


class WanAnimateRecipe(WanRecipe):
    """Recipe of `WanAnimatePipeline`, whose models move a character as a person moves; see [`Recipe`].

    Each sample has a `control`, the pose of the person in each frame; a `face`, the person's face cut out of each
    frame at a size of its own; and a `reference`, a picture of the character. The reference becomes a latent frame in
    front of the sample, which the pipeline generates again and drops; it does not enter the loss.

    A sample without a `mask`, or with one that is white throughout, trains the mode "animate": nothing of its frames
    is known. Others train "replace": what is black is known, and what is white is generated and counts in the loss.
    First frames that a run draws are known too, as the pipeline shows the end of the segment before.
    """

    pipeline_class = "WanAnimatePipeline"
    family: ClassVar[Family] = FAMILY
    shown: ClassVar[tuple[str, ...]] = ("control", SHOWN_FACE)
    required: ClassVar[tuple[str, ...]] = ("control", SHOWN_FACE, REFERENCE)
    max_references = 1
    references_in_front = True
    reference_sizes = MappingProxyType({"as_stored": True, "resample": "lanczos"})
    renders_prompts = False
    shown_as = MappingProxyType(
        {
            "control": "pose_video",
            SHOWN_FACE: "face_video",
            MASK: "mask_video",
            BACKGROUND: "background_video",
            REFERENCE: "image",
        }
    )

    @property
    def media_rule(self) -> str:
        """What distinguishes entries of a cache from those of Wan's other pipelines, which have the same VAE."""
        return f"poses, faces of {self._side} pixels, characters in front, what is known"

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """Those that stand for the end of the segment before."""
        return ("first_frame", "prefix")

    @property
    def encodes_drawn(self) -> bool:
        """Whether the shown frames are encoded apart: they are further channels."""
        return True

    @property
    def _side(self) -> int:
        """Height and width of a face in pixels."""
        return int(self.config["motion_encoder_size"])

    @torch.no_grad()
    def encode_media(self, pixel_values: torch.Tensor, shown: Shown = MappingProxyType({})) -> Conditions:
        """Encode a stack of samples, see [`Recipe.encode_media`].

        Returns:
            `dict`: `latents`, the pose, what is known and the loss mask, `(B, …, 1 + f, h, w)`, the character first;
            its image tokens; and the face, `(B, 3, F, side, side)` of `uint8`.
        """
        encoded = super().encode_media(pixel_values, shown)
        characters = [pictures(own[0].transpose(0, 1))[0] for own in shown[REFERENCE]]
        height, width = pixel_values.shape[-2:]
        processor = self._image_processor
        fitted = [processor.preprocess(image, height, width, resize_mode="fill") for image in characters]
        letterboxed = torch.cat(fitted).to(pixel_values)
        latents = self.encode_latents(letterboxed[:, :, None])
        marks = torch.ones_like(latents[:, :1]).expand(-1, self.spec.temporal_stride, -1, -1, -1)
        own = torch.stack(list(encoded["latents"]))
        return {
            **encoded,
            "latents": in_front(latents, own),
            POSE: in_front(latents[:, :0], encoded[POSE]),
            KNOWN: in_front(torch.cat([marks, latents], 1), encoded[KNOWN]),
            IMAGE_TOKENS: self._image_tokens(characters, letterboxed),
            LOSS_MASK: in_front(latents[:, :0], encoded.get(LOSS_MASK, torch.ones_like(own[:, :1]))),
        }

    @property
    def _image_processor(self) -> Any:
        """What fits the character into the size of a sample."""
        return self.pipeline.vae_image_processor

    def _image_tokens(self, characters: Sequence[Image.Image], letterboxed: torch.Tensor) -> torch.Tensor:
        """Return the image tokens `(B, tokens, dim)` of characters, which are also given letterboxed."""
        tokens: torch.Tensor = self.pipeline.encode_image(characters, self.pipeline.image_encoder.device)
        return tokens

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
        """Return the latents of the pose, the mask and the latents of what is known, and the face."""
        return {
            POSE: self.encode_latents(torch.stack(list(shown["control"])).to(pixel_values)),
            KNOWN: self._known(pixel_values, latents, shown),
            FACE: torch.stack([self._levels(face) for face in shown[SHOWN_FACE]]),
        }

    def _known(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> torch.Tensor:
        """Return the mask and the latents of what is known of a stack, `(B, temporal_stride + C, f, h, w)`."""
        count, _, frames, *_ = pixel_values.shape
        masks = shown.get(MASK)
        mask = torch.ones_like(pixel_values[:, :1]) if masks is None else torch.stack(list(masks)).to(pixel_values)
        kept = mask <= 0.5
        replaces = kept.flatten(1).any(1).view(-1, 1, 1, 1, 1)  # without it, nothing is known, and all is grey
        known, video = (1 - mask) * replaces, torch.where(replaces, torch.where(kept, pixel_values, -1), 0)
        drawn = shown.get(SHOWN_FRAMES, [torch.zeros(frames, dtype=torch.bool)] * count)
        visible = to_device(torch.stack(list(drawn)), pixel_values.device)[:, None, :, None, None]
        video = torch.where(visible, pixel_values, video)
        channels = F.interpolate(known[:, 0], latents.shape[-2:], mode="nearest")[:, None].masked_fill(visible, 1)
        stride = self.spec.temporal_stride
        by_latent = torch.cat([channels[:, :, :1].expand(-1, -1, stride, -1, -1), channels[:, :, 1:]], 2)
        by_latent = by_latent.unflatten(2, (-1, stride))[:, 0].transpose(1, 2)
        encoded = self.encode_latents(video)
        return torch.cat([by_latent.to(encoded), encoded], 1)

    def _levels(self, face: torch.Tensor) -> torch.Tensor:
        """Return a face `(3, F, h, w)` in [−1, 1] as levels of 8 bits, resized as the pipeline does."""
        if face.shape[-2:] != (self._side, self._side):
            frames = pictures(face.transpose(0, 1))
            resized = self.pipeline.video_processor.preprocess_video(frames, height=self._side, width=self._side)
            face = resized[0].to(face.device)
        return ((face.float() + 1) * 127.5).round().to(torch.uint8)

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros of the shapes of what [`encode_media`] returns beside latents and their loss mask."""
        side, (frames, *sides) = self._side, latent.shape[1:]
        return {
            POSE: torch.zeros_like(latent),
            KNOWN: latent.new_zeros(self.spec.temporal_stride + len(latent), frames, *sides),
            FACE: torch.zeros(3, face_frames(frames), side, side, dtype=torch.uint8, device=latent.device),
            IMAGE_TOKENS: latent.new_zeros(CLIP_TOKENS, self.config["image_dim"]),
        }

    def clean_parts(self, samples: Samples) -> Sequence[torch.Tensor] | None:
        """Return no clean latents: what is known are further channels."""
        return None

    def added_channels(self, samples: Samples) -> Sequence[torch.Tensor]:
        """Return the mask and the latents of what is known."""
        return samples.conditions[KNOWN]

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the image tokens of the characters, the poses and the faces."""
        latents = samples.noised.latents
        poses, faces = (zip(samples.conditions[name], latents, strict=True) for name in (POSE, FACE))
        return {
            IMAGE_TOKENS: torch.stack(list(samples.conditions[IMAGE_TOKENS])).to(samples.text.values),
            POSE: [pose.to(latent) for pose, latent in poses],
            FACE: [face.to(latent) / 127.5 - 1 for face, latent in faces],
        }

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return the picture of the character, see [`Recipe.reference_arguments`]."""
        ((image,),) = super().reference_arguments(references, size).values()
        return {cls.shown_as[REFERENCE]: image}

    @classmethod
    def shown_arguments(cls, shown: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return pose, face, and for the mode "replace" the mask and the background, black where the mask is white.

        Raises:
            BucketingError: If there is a mask without a background, or the other way round.
        """
        arguments = super().shown_arguments(shown)
        if (MASK in shown) != (BACKGROUND in shown):
            raise BucketingError("A mask says what stays of the background: give both, or neither.")
        if MASK in shown:
            pairs = zip(shown[BACKGROUND], shown[MASK], strict=True)
            arguments[cls.shown_as[BACKGROUND]] = [_blackened(frame, mask) for frame, mask in pairs]
            arguments["mode"] = "replace"
        return arguments


def _blackened(frame: Image.Image, mask: Image.Image) -> Image.Image:
    white = mask.convert("L").point(lambda level: 255 * (level > 127))
    return Image.composite(Image.new("RGB", frame.size), frame, white)


RECIPES = (WanAnimateRecipe,)
