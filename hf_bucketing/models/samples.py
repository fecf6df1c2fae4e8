"""The samples of a batch, and what the model is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from ..packing.audio import Audio
from ..packing.family import TimestepsPer
from .objectives import Noised, NoisedAudio
from .texts import TextEmbeddings


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a batch, before the model is called.

    Attributes:
        noised ([`Noised`][hf_bucketing.models.objectives.Noised]): Noisy latents, targets and timesteps.
        text ([`TextEmbeddings`]): One per sample.
        fps (`torch.Tensor` of shape `(n,)`): Frames per second of each sample, as `frame_rates` returns them; on the
            CPU, so that reading a rate waits for no device.
        conditions (mapping of `str` to a sequence): What `Recipe.encode_media` made of each sample
            beside its latents: a tensor, or of its [`REFERENCES`] a tuple of them.
        audio ([`NoisedAudio`][hf_bucketing.models.objectives.NoisedAudio], *optional*): Noisy audio and its targets;
            None where none is trained.
        keys (sequence of tuples of `int`): Key of the noise of each sample, for models that add some to what they are
            shown.
    """

    noised: Noised
    text: TextEmbeddings
    fps: torch.Tensor
    conditions: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    audio: NoisedAudio | None = None
    keys: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What the model is called with, but for the text, and what its predictions count for.

    Attributes:
        latents (sequence of `(C_in, f, h, w)`): Latents as the model takes them, such as with those of a condition as
            further channels, or with a clean first frame.
        timesteps (`torch.Tensor` of shape `(n,)`, or sequence of `torch.Tensor`): One per sample; or per sample one
            per token or per frame of tokens, see `Packing.pack`.
        conditioning (mapping of `str` to `torch.Tensor` of shape `(n, …)`): Further arguments of the model's forward.
        weights (sequence of `(1, f, h, w)` or `(C, f, h, w)`, *optional*): Weights of the loss, such as 0 for a clean
            frame.
        references (sequence of sequences of `(C_in, f, h, w)`, *optional*): Clean latents of each sample's references,
            see `Packing.pack`.
        audio ([`Audio`][hf_bucketing.packing.Audio], *optional*): Audio of the samples; None where none is trained.
    """

    latents: Sequence[torch.Tensor]
    timesteps: torch.Tensor | Sequence[torch.Tensor]
    conditioning: Mapping[str, Any] = field(default_factory=dict)
    weights: Sequence[torch.Tensor] | None = None
    references: Sequence[Sequence[torch.Tensor]] | None = None
    audio: Audio | None = None

    def showing(
        self,
        parts: Sequence[torch.Tensor],
        *,
        clean: Sequence[torch.Tensor],
        patch: tuple[int, int, int],
        per: TimestepsPer = "token",
    ) -> ModelInputs:
        """Return inputs in which a part of each sample has no noise, timestep 0 and no weight in the loss.

        Args:
            parts (sequence of `torch.Tensor` of `bool`): What is shown, `(1, f, 1, 1)`, or `(1, f, h, w)` where it is
                not whole frames, which needs a model with a timestep per token.
            clean (sequence of `(C, f, h, w)`): Latents without noise.
            patch (`tuple` of three `int`): Latent frames, rows and columns per token.
            per (`"row"`, `"frame"` or `"token"`): What has a timestep, see
                [`Family`][hf_bucketing.packing.family.Family]; samples that have one are shown as a whole or not.
        """
        latents, timesteps, weights = [], [], []
        for noisy, clean_latent, part, level in zip(self.latents, clean, parts, self.timesteps, strict=True):
            latents.append(torch.where(part, clean_latent.to(noisy), noisy))
            tokens = part[0, :: patch[0], :: patch[1], :: patch[2]]
            timesteps.append(torch.where(tokens, 0, level.view(-1, 1, 1)).flatten())
            weights.append((~part).to(noisy).expand_as(noisy[:1]))
        levels = torch.stack([steps.amin() for steps in timesteps]) if per == "row" else timesteps
        return replace(self, latents=latents, timesteps=levels, weights=weights)


Media: TypeAlias = Mapping[str, Sequence[Any]]
"""What a data set holds of each sample beside its pixels and text, by name: one tensor per sample, `float32`.

`first_frame` and `last_frame` are `(3, 1, H, W)` and `control` is `(3, F, H, W)`, in [−1, 1]; `mask` is `(1, F, H, W)`
in [0, 1], where 1 is learned; `face` is `(3, F, h, w)` in [−1, 1] at its own size; `reference` is a tuple of any
number of `(3, f, h, w)`, each at its own size; `audio` is `(2, samples)` in [−1, 1], with no samples where a file has
no sound. A collator returns it as `shown`.
"""

KEYFRAME_PLACES = "keyframe_places"
"""Frames of pixels at which they lie, a list of numbers per sample."""

REFERENCES = "references"
"""Encoded references among the conditions of a sample: a tuple of `(C, f, h, w)`."""

Conditions: TypeAlias = Mapping[str, torch.Tensor | Sequence[Any]]
"""Encoded conditions of a stack, `(B, …)` each, or a list with one tensor per sample where their sizes differ.

Of [`REFERENCES`] there is a tuple of tensors per sample.
"""

SHOWN_FRAMES = "shown_frames"
"""Which frames of a sample a run draws to show, `(F,)` of `bool` on the CPU; `encode_conditions` gets it too, beside
what the data set shows."""
SHOWN_LATENTS = "shown_latents"
"""Which latents of a sample these are, `(1, f, 1, 1)`, or `(1, f, h, w)` where it is shown parts of frames."""
