"""A pack as a value: its strips, timesteps, texts and conditioning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import PackingError
from .audio import Audio, cut_evenly
from .layout import PackedLayout
from .names import Grid
from .strips import from_strips, to_strips, token_grid
from .texts import TextRows, apply_text_mask, pad_texts


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The batch rows of one forward: samples of one size, or the strips of a pack, which look like such samples.

    Attributes:
        latents (`torch.Tensor` of shape `(rows, channels, frames, height, width)`): The samples or strips.
        timesteps (`torch.Tensor` of shape `(rows,)` or `(rows, tokens)`): One per row, or one per token of each row.
        text (`torch.Tensor` of shape `(rows, length, text_dim)`): One per row; in packs as the model family asks.
        patch (`tuple` of three `int`): Latent frames, rows and columns per token.
        text_mask (`torch.Tensor` of shape `(rows, length)`, *optional*): Zero for padding; None where there is none.
        conditioning (mapping of `str` to any): Further inputs of the model, `torch.Tensor` of shape `(rows, …)` except
            for what a family adds to a pack; like the mask, of unpacked samples they may lie on the CPU.
        references (sequence of `torch.Tensor` of shape `(rows, channels, f, h, w)`): References of unpacked samples,
            one tensor for the first reference of each row, and so on.
        audio ([`Audio`], *optional*): Audio of unpacked samples, with as many tokens in each row that the model runs
            together.
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    text: torch.Tensor
    patch: Grid
    text_mask: torch.Tensor | None = None
    conditioning: Mapping[str, Any] = field(default_factory=dict)
    references: Sequence[torch.Tensor] = ()
    audio: Audio | None = None

    @property
    def grid(self) -> Grid:
        """The token grid `(t, h, w)` of a row."""
        return self.grids[0]

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The token grid of a row, and those of its references."""
        return tuple(token_grid(stack[0], self.patch, sample=0) for stack in (self.latents, *self.references))

    @property
    def frame_timesteps(self) -> torch.Tensor:
        """The timesteps of the frames of each row, `(rows, frames)`, or of the rows, `(rows,)`, where they have one.

        Raises:
            PackingError: If the tokens of a frame have several.
        """
        if self.timesteps.ndim == 1:
            return self.timesteps
        by_frame = self.timesteps.unflatten(1, (self.grid[0], -1))
        known = not by_frame.is_meta  # without values, those of a frame are the same
        if known and by_frame.shape[2] > 1 and not torch.equal(by_frame, by_frame[:, :, :1].expand_as(by_frame)):
            raise PackingError("This model takes a timestep per frame; those of a frame's tokens differ.")
        return by_frame[:, :, 0]

    @property
    def texts(self) -> list[torch.Tensor]:
        """The text of each row, `(length, text_dim)`, without what the mask leaves out."""
        known = self.text_mask is not None and not self.text_mask.is_meta  # without values, all are kept
        return apply_text_mask("masked", self.text, mask=self.text_mask if known else None)

    def one_by_one(self) -> list[Rows]:
        """Return each row by itself, with its own text."""
        return [
            Rows(
                latents=self.latents[row : row + 1],
                timesteps=self.timesteps[row : row + 1],
                text=text[None],
                patch=self.patch,
                conditioning={name: values[row : row + 1] for name, values in self.conditioning.items()},
                references=[reference[row : row + 1] for reference in self.references],
                audio=None if self.audio is None else self.audio.select(row),
            )
            for row, text in enumerate(self.texts)
        ]

    @property
    def known_mask(self) -> torch.Tensor:
        """The mask of the text, `(rows, length)`; ones where there is none."""
        return torch.ones_like(self.text[..., 0]) if self.text_mask is None else self.text_mask


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A pack: what one process runs as one sequence.

    Attributes:
        strips (`torch.Tensor` of shape `(num_strips, channels, p_t, p_h, strip_length·p_w)`): The latents.
        timesteps (`torch.Tensor` of shape `(n,)` or `(num_strips, strip_length)`): One per sample, or one per token.
        text (`torch.Tensor` of shape `(num_stored_text_tokens, text_dim)`): All texts, one after another. A text that
            several samples share is stored once (`layout.text_index`).
        layout ([`PackedLayout`]): Where each sample lies.
        patch (`tuple` of three `int`): Latent frames, rows and columns per token.
        conditioning (mapping of `str` to `torch.Tensor`): Further inputs of the model: one row per sample, `(n, …)`,
            for those of a latent's size strips like the latents, or the frames of all samples in one row.
        audio ([`Audio`], *optional*): Audio of the samples, its texts without what their mask leaves out.
    """

    strips: torch.Tensor
    timesteps: torch.Tensor
    text: torch.Tensor
    layout: PackedLayout
    patch: Grid
    conditioning: Mapping[str, torch.Tensor] = field(default_factory=dict)
    audio: Audio | None = None

    def per_strip(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat per-sample values `(n, …)` for each strip, `(num_strips, …)`; padding gets the last sample's."""
        return values[self.layout.strip_segments]

    def timesteps_by_strip(self) -> torch.Tensor:
        """Return the timestep of each strip, `(num_strips,)`, or of its tokens, `(num_strips, strip_length)`."""
        return self.per_strip(self.timesteps) if self.timesteps.ndim == 1 else self.timesteps

    def text_rows(self, rows: TextRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the texts in batch rows, `(rows, length, text_dim)`, and the mask of rows per sample."""
        if rows in ("one", "sequence"):
            return self.text[None], None
        if rows == "per_strip":
            return self.text_by_strip(), None
        if rows == "slots":
            return self.layout.joint.text_by_strip(self.text), None
        index = self.layout.text_index
        texts = self.text if index is None else self.text.index_select(0, index)
        return pad_texts(texts.split(self.layout.text_lengths))

    def text_by_strip(self) -> torch.Tensor:
        """Cut the texts evenly into one row per strip, padded at the end: `(num_strips, tokens, text_dim)`.

        For models that view their text by the number of batch rows. Attention reads the rows in order again.
        """
        return cut_evenly(self.text, self.layout.num_strips)

    def unpack(self, prediction: torch.Tensor) -> list[torch.Tensor]:
        """Return one `(channels, frames, height, width)` tensor per sample, zero where a token was dropped.

        What was predicted of references is left away.

        Raises:
            PackingError: If the prediction does not have this pack's shape.
        """
        return from_strips(prediction, self.layout)

    def pack_like(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack targets, noise or masks like the latents: `(num_strips, channels, p_t, p_h, strip_length·p_w)`.

        The same tokens are dropped, and zeros take the places of references.

        Args:
            tensors (sequence of `(channels, frames, height, width)`): One per sample, of its latent's size; any number
                of channels.

        Raises:
            PackingError: If their number or a size differs.
        """
        grids = tuple(token_grid(tensor, self.patch, sample=sample) for sample, tensor in enumerate(tensors))
        if grids != self.layout.grids:
            raise PackingError(f"Expected tensors with the token grids {self.layout.grids}, got {grids}.")
        return to_strips(tensors, self.patch, layout=self.layout)


def has_latent_size(values: Any) -> bool:
    """Return whether conditioning has the size of the latents: a tensor for each sample in a list, or their stack."""
    return not isinstance(values, torch.Tensor) or values.ndim == 5


def token_timesteps(timesteps: torch.Tensor, *grids: Grid, sample: int) -> torch.Tensor:
    """Return the timestep of each token of a sample's grids, `(tokens,)`: those of its references are 0.

    Args:
        timesteps (`torch.Tensor`): Timestep of the sample, or one per token or one per frame of its own grid.
        grids (`(t, h, w)`): Its own token grid, then those of its references.
        sample (`int`): Number of the sample, for messages.

    Raises:
        PackingError: If there are as many as neither; names the sample.
    """
    sample_grid, *others = grids
    levels = _sample_timesteps(timesteps, sample_grid, sample=sample)
    return F.pad(levels, (0, sum(map(math.prod, others))))


def _sample_timesteps(timesteps: torch.Tensor, grid: Grid, *, sample: int) -> torch.Tensor:
    frames, rows, columns = grid
    if timesteps.ndim == 0:
        return timesteps.expand(frames * rows * columns)
    if tuple(timesteps.shape) == (frames * rows * columns,):
        return timesteps
    if tuple(timesteps.shape) == (frames,):
        return timesteps.repeat_interleave(rows * columns)
    raise PackingError(
        f"Sample {sample} has timesteps of shape {tuple(timesteps.shape)} for a token grid of {grid}; expected one "
        f"per token, ({frames * rows * columns},), or one per frame of tokens, ({frames},)."
    )
