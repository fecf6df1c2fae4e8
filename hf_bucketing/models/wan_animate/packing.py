"""How Wan-Animate is packed: as Wan; poses are cut into strips, and the tokens of a frame attend to its own face.

The stock forward adds poses to all frames of a batch row but the first, so the tokens of a strip lie along frames,
behind one frame without a token, which is removed before the first block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.processors import Processor, attend, project
from ...packing.segments import SegmentSpans
from ...packing.strip_positions import position_strips
from ...packing.strips import patchify, unpatchify
from ..wan.packing import PackedWanAttnProcessor, WanFamily

POSE = "pose_hidden_states"
"""Argument of the transformer's forward for the latents of the pose."""
FACE = "face_pixel_values"
"""Argument of the transformer's forward for the pixels of the face."""

_STRIDE = 4
"""Frames of the face for each latent frame after the first: its encoder halves them twice."""


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
        """Return also the pose and the face."""
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
        """Attend to faces in the blocks that the model has for them."""
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


FAMILY = WanAnimateFamily()
