"""Wan-Animate: Wan with poses added to its tokens, and blocks that attend to a face frame by frame.

The stock forward adds poses to all frames of a batch row but the first, so the tokens of a strip lie along frames,
behind one frame without a token, which is removed before the first block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from ...buckets.sizes import Size
from ...conditions.condition import Condition
from ...conditions.names import FACE as FACE_CONDITION, MASK, REFERENCE
from ...conditions.references import ReferenceRule
from ...devices import to_device
from ...errors import BucketingError, PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.processors import Processor, attend, project
from ...packing.segments import SegmentSpans
from ...packing.strip_positions import position_strips
from ...packing.strips import patchify, unpatchify
from ..first_frame import pictures
from ..loss_mask import LOSS_MASK
from ..samples import SHOWN_FRAMES, Conditions, Media, Samples
from .wan import CLIP_TOKENS, IMAGE_TOKENS, PackedWanAttnProcessor, WanFamily, WanRecipe, in_front

POSE = "pose_hidden_states"
"""Argument of the transformer's forward for the latents of the pose."""
FACE = "face_pixel_values"
"""Argument of the transformer's forward for the pixels of the face."""

_STRIDE = 4
"""Frames of the face for each latent frame after the first: its encoder halves them twice."""
KNOWN = "known_channels"
"""Condition of a sample: a mask of what stays and its latents, `(temporal_stride + C, f, h, w)`."""
CHARACTER = ReferenceRule(
    enters="latent frames", least=1, most=1, as_stored=True, resample="lanczos", argument="image"
)
"""The picture of the character that a sample shows."""

BACKGROUND = "background"
"""What a call of the pipeline is shown beside a mask, in the place of a sample's own pixels."""


def face_frames(latent_frames: int) -> int:
    """Return the frames of the face of a sample, of whose latent frames the first one is that of the character.

    Example:
        >>> [face_frames(count) for count in (2, 3, 21)]
        [1, 5, 77]
    """
    return max(1, _STRIDE * (latent_frames - 2) + 1)


class PackedFaceAttnProcessor(Processor):
    """Cross-attention of the tokens of each frame to the face at that frame, over the strips of a pack."""

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return none: how many keys a frame has is known when they come."""
        return ()

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each frame.

        Args:
            attn (`WanAnimateFaceBlockCrossAttention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, strip_length, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(1, frames, keys, dim)`): The faces at the latent frames of
                all samples, one sample after another.
            attention_mask (`None`): Unused; the layout takes its place.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        faces = attn.pre_norm_kv(encoder_hidden_states).flatten(1, 2)
        states = attn.to_q(attn.pre_norm_q(hidden_states)), *project(attn, faces, "to_k", "to_v")
        query, key, value = (part.flatten(0, 1).unflatten(1, (attn.heads, -1)) for part in states)
        query, key = attn.norm_q(query), attn.norm_k(key)
        attended = attend(query, key, value, _segments_of_faces(len(key)), backend=self.backend)
        output: torch.Tensor = attn.to_out(attended.flatten(1).unflatten(0, hidden_states.shape[:2]))
        return output


def _segments_of_faces(num_keys: int) -> SegmentSpans:
    """Return the attention of the tokens of each frame of the active pack to an equal share of the keys."""
    layout = active_layout()

    def make() -> SegmentSpans:
        queries = layout.by_frame.frames.queries
        share = num_keys // len(queries)
        keys = tuple((frame * share, (frame + 1) * share) for frame in range(len(queries)))
        return SegmentSpans(queries=queries, keys=keys, num_queries=layout.num_tokens, num_keys=num_keys)

    return layout.self_segments.made(("faces", num_keys), make)  # kept for the next layer


class WanAnimateFamily(WanFamily):
    """Packing of `WanAnimateTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    The first latent frame of a sample is that of its character. Beside what Wan takes, a sample has
    `pose_hidden_states`, `(latent channels, frames, height, width)` of the latent's size, whose first frame is not
    read, and `face_pixel_values`, `(3, face frames, side, side)`, of as many frames as [`face_frames`] says.
    """

    title = "Wan-Animate"
    transformer_class = "WanAnimateTransformer3DModel"
    tested_forwards = ("fad491d99309",)
    stock_processors = (*WanFamily.stock_processors, "WanAnimateFaceBlockAttnProcessor")
    timesteps_per = "row"
    original_names = None  # diffusers reads no adapters of its face blocks from other names
    cast_inputs = (*WanFamily.cast_inputs, POSE, FACE)
    joined_frames = (FACE,)

    def longest_strip(self, transformer: Transformer) -> int:
        """Return the longest strip that leaves a place for the frame without a token."""
        return super().longest_strip(transformer) - 1

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also samples without some of their tokens: the stock model divides them by the frames of the face."""
        super().check_layout(transformer, layout, stretched=stretched)
        if layout.kept is not None:
            name = type(transformer).__name__
            raise PackingError(f"{name} attends to a face frame by frame; pack it without token_drop.")

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        channels, side = transformer.pose_patch_embedding.in_channels, transformer.config.motion_encoder_size
        frames = self.patch(transformer.config)[0]

        def faces(grids: Sequence[Grid]) -> list[torch.Tensor]:
            counts = (face_frames(t * frames) for t, _, _ in grids)
            return [torch.randn(3, count, 1, 1).expand(-1, -1, side, side) for count in counts]

        return {
            **super().conditioning(transformer),
            POSE: lambda grids: self.draw_latents(transformer, grids, channels=channels),
            FACE: faces,
        }

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return grids of two or more frames, the first of which is the character's."""
        return [(max(2, t), h, w) for t, h, w in super().trial_grids(transformer)]

    def processor(self, name: str, backend: Backend) -> Processor:
        return PackedFaceAttnProcessor(backend) if name.startswith("face_adapter") else PackedWanAttnProcessor(backend)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also what the stock forward does by the frames of a batch row."""
        return [
            *super().hook_positions(transformer, base_size),
            transformer.pose_patch_embedding.register_forward_hook(_without_character),
            transformer.face_encoder.register_forward_pre_hook(_row_per_sample),
            transformer.face_encoder.register_forward_hook(_frames_in_order),
            transformer.blocks[0].register_forward_pre_hook(_without_first),
            transformer.norm_out.register_forward_hook(_with_first),
        ]

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a row per strip, its tokens along frames behind one that holds none, and the faces in one row.

        Raises:
            PackingError: If the faces of the samples have other numbers of frames.
        """
        rows, expected = super().rows(batch), sum(_counts(batch.layout))
        frames = rows.conditioning[FACE].shape[2]
        if frames != expected or min(t for t, _, _ in batch.layout.grids) < 2:
            raise PackingError(
                f"The faces of this pack have {frames} frames, but its samples need {expected}: a sample has a latent "
                f"frame of its character, one of its first frame, and one for each {_STRIDE} further frames."
            )
        pose = unpatchify(patchify(rows.conditioning[POSE], batch.patch), self._grid_of_strips(batch))
        return replace(
            rows,
            latents=F.pad(rows.latents, (0, 0, 0, 0, 1, 0)),
            conditioning={**rows.conditioning, POSE: pose},
        )

    def _grid_of_strips(self, batch: PackedBatch) -> Grid:
        return batch.layout.strip_length, 1, 1

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the output as strips: the stock forward takes the number of its rows from the faces, which have one.

        It reads all strips as one row with the channels of each behind the other, in the order of memory.
        """
        values = output.movedim(1, -1)  # (1, frames, p_h, p_w, strips·channels)
        by_strip = values.reshape(batch.layout.num_strips, *values.shape[1:4], -1).movedim(-1, 1)
        return super().output_strips(batch, by_strip[:, :, 1:])

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return also the pose without the frame of the character."""
        return {**super().unpacked_inputs(transformer, rows), POSE: rows.conditioning[POSE][:, :, 1:]}


def _counts(layout: PackedLayout) -> list[int]:
    """Return the frames of each sample's face."""
    return [face_frames(t) for t, _, _ in layout.grids]


def _without_character(embedding: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the embedding of the poses `(strips, dim, strip_length, 1, 1)`, zero at the frames of characters."""

    def follows(grid: Grid) -> tuple[torch.Tensor, ...]:
        t, h, w = grid
        return ((torch.arange(t, device=output.device) > 0).repeat_interleave(h * w, output_size=t * h * w),)

    (kept,) = position_strips(active_layout(), follows)
    return torch.where(kept[:, None, :, None, None], output, 0)


def _row_per_sample(encoder: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the motion of faces `(1, frames, dim)`, a row per sample; its convolutions do not look ahead."""
    return pad_sequence(args[0][0].split(_counts(active_layout())), batch_first=True)


def _frames_in_order(encoder: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the faces `(n, frames, keys, dim)` at all latent frames in one row, without the first one.

    Those of each sample begin with zeros for its character; the stock forward puts those of the first one in front.
    """
    counts = [t for t, _, _ in active_layout().grids]
    faces = zip(F.pad(output, (0, 0, 0, 0, 1, 0)), counts, strict=True)
    return torch.cat([frames[:count] for frames, count in faces])[None, 1:]


def _without_first(block: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    hidden_states, *rest = args
    return hidden_states[:, 1:], *rest


def _with_first(norm: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return F.pad(output, (0, 0, 1, 0))


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
    family: ClassVar[Family] = WanAnimateFamily()
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(name="control", enters="in place", least=1, argument="pose_video"),
        Condition(name=FACE_CONDITION, enters="in place", least=1, as_stored=True, argument="face_video"),
        CHARACTER,
        Condition(name=MASK, enters="channels", argument="mask_video"),
        Condition(name=BACKGROUND, enters="in place", most=0, argument="background_video"),  # of renders alone
    )
    renders_prompts = False

    @property
    def media_rule(self) -> str:
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
    def encode_media(self, pixel_values: torch.Tensor, conditions: Media = MappingProxyType({})) -> Conditions:
        """Encode a stack of samples, see [`Recipe.encode_media`].

        Returns:
            `dict`: `latents`, the pose, what is known and the loss mask, `(B, …, 1 + f, h, w)`, the character first;
            its image tokens; and the face, `(B, 3, F, side, side)` of `uint8`.
        """
        encoded = super().encode_media(pixel_values, conditions)
        characters = [pictures(references[0].transpose(0, 1))[0] for references in conditions[REFERENCE]]
        height, width = pixel_values.shape[-2:]
        processor = self._image_processor
        fitted = [processor.preprocess(image, height, width, resize_mode="fill") for image in characters]
        letterboxed = torch.cat(fitted).to(pixel_values)
        latents = self.encode_latents(letterboxed[:, :, None])
        marks = torch.ones_like(latents[:, :1]).expand(-1, self.spec.temporal_stride, -1, -1, -1)
        sample_latents = torch.stack(list(encoded["latents"]))
        return {
            **encoded,
            "latents": in_front(latents, sample_latents),
            POSE: in_front(latents[:, :0], encoded[POSE]),
            KNOWN: in_front(torch.cat([marks, latents], 1), encoded[KNOWN]),
            IMAGE_TOKENS: self._image_tokens(characters, letterboxed),
            LOSS_MASK: in_front(latents[:, :0], encoded.get(LOSS_MASK, torch.ones_like(sample_latents[:, :1]))),
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
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Return the latents of the pose, the mask and the latents of what is known, and the face."""
        return {
            POSE: self.encode_latents(torch.stack(list(conditions["control"])).to(pixel_values)),
            KNOWN: self._known(pixel_values, latents, conditions),
            FACE: torch.stack([self._levels(face) for face in conditions[FACE_CONDITION]]),
        }

    def _known(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> torch.Tensor:
        """Return the mask and the latents of what is known of a stack, `(B, temporal_stride + C, f, h, w)`."""
        count, _, frames, *_ = pixel_values.shape
        masks = conditions.get(MASK)
        mask = torch.ones_like(pixel_values[:, :1]) if masks is None else torch.stack(list(masks)).to(pixel_values)
        kept = mask <= 0.5
        replaces = kept.flatten(1).any(1).view(-1, 1, 1, 1, 1)  # without it, nothing is known, and all is grey
        known, video = (1 - mask) * replaces, torch.where(replaces, torch.where(kept, pixel_values, -1), 0)
        drawn = conditions.get(SHOWN_FRAMES, [torch.zeros(frames, dtype=torch.bool)] * count)
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
        return samples.conditions[KNOWN]

    def conditioning(self, samples: Samples) -> dict[str, Any]:
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
        return {cls.call_arguments()[REFERENCE]: image}

    @classmethod
    def shown_arguments(cls, conditions: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return pose, face, and for the mode "replace" the mask and the background, black where the mask is white.

        Raises:
            BucketingError: If there is a mask without a background, or the other way round.
        """
        arguments = super().shown_arguments(conditions)
        if (MASK in conditions) != (BACKGROUND in conditions):
            raise BucketingError("A mask says what stays of the background: give both, or neither.")
        if MASK in conditions:
            pairs = zip(conditions[BACKGROUND], conditions[MASK], strict=True)
            arguments[cls.call_arguments()[BACKGROUND]] = [_blackened(frame, mask) for frame, mask in pairs]
            arguments["mode"] = "replace"
        return arguments


def _blackened(frame: Image.Image, mask: Image.Image) -> Image.Image:
    white = mask.convert("L").point(lambda level: 255 * (level > 127))
    return Image.composite(Image.new("RGB", frame.size), frame, white)


RECIPES = (WanAnimateRecipe,)
