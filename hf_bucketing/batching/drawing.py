"""What each sample of a batch is shown: which condition it gets, and what is kept, appended, noised and weighed.

A run draws conditions from its shares (`conditions/shares.py`), for each sample from its own key. Frames and masked
parts are kept on the grid of the latents: they have no noise and no weight in the loss. Frames can be appended as
further tokens, references can be omitted, and of video and audio one can be shown while the other is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..buckets.sizes import LatentSpec
from ..conditions.audio import AUDIO
from ..conditions.names import REFERENCE
from ..conditions.shares import Drawn, SourceConditions
from ..devices import to_device
from ..media.rows import SOURCE
from ..models.loss_mask import LOSS_MASK
from ..models.objectives import Noised, NoisedAudio, Objective
from ..models.recipe import Recipe
from ..models.samples import REFERENCES, SHOWN_FRAMES, SHOWN_LATENTS, ModelInputs, Samples
from .encoded import latent_frames_of, media_of


def draw_conditions(
    conditions: SourceConditions,
    batch: Mapping[str, Any],
    keys: Sequence[tuple[int, ...]],
    *,
    spec: LatentSpec,
    stacks: bool,
) -> list[Drawn]:
    """Draw what each sample of a batch is shown, by its key and its source.

    Samples with references or audio cannot be stacked with others, so that the first sample of a stack decides for all
    of them whether they are shown their references, whether their audio is absent, and how many frames are appended.

    Args:
        conditions ([`SourceConditions`][hf_bucketing.conditions.shares.SourceConditions]): Shares of each source.
        batch (mapping): Batch of any collator.
        keys (sequence of tuples of `int`): Key of the draws of each sample.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch.
        stacks (`bool`): Whether its samples are stacked.
    """
    drawn: list[Drawn] = []
    counts, sources = latent_frames_of(batch, spec), batch.get(SOURCE, [None] * len(keys))
    for key, count, source in zip(keys, counts, sources, strict=True):
        alike: dict[str, Any] = {}
        if drawn and stacks:
            first = drawn[0]
            alike = {"references": first.references, "no_audio": first.no_audio, "appended": first.appended}
        drawn.append(conditions.of(source).draw(*key, latent_frames=count, stride=spec.temporal_stride, **alike))
    return drawn


def without_references(batch: Mapping[str, Any], drawn: Sequence[Drawn]) -> Mapping[str, Any]:
    """Return a batch of any collator in which samples are shown their references if that is drawn."""
    if all(sample.references for sample in drawn):
        return batch
    changed = dict(batch)
    for part, name in (("shown", REFERENCE), ("conditions", REFERENCES)):
        if name in batch.get(part, {}):
            pairs = zip(batch[part][name], drawn, strict=True)
            changed[part] = {**batch[part], name: [kept if sample.references else () for kept, sample in pairs]}
    return changed


def drawn_media(recipe: Recipe, batch: Mapping[str, Any], drawn: Sequence[Drawn]) -> dict[str, list[Any]]:
    """Return [`media_of`] a batch with what is drawn of each sample, and without audio that is drawn to be absent."""
    frames = [torch.from_numpy(sample.frames) for sample in drawn]
    shows = {**batch.get("shown", {}), SHOWN_FRAMES: frames}
    media = media_of(recipe, {**batch, "shown": shows}, appended=[sample.appended for sample in drawn])
    weights = media.get(LOSS_MASK, [None] * len(drawn))
    parts = zip(drawn, media["latents"], weights, strict=True)
    media[SHOWN_FRAMES] = shows[SHOWN_FRAMES]
    media[SHOWN_LATENTS] = [clean_latents(sample, latent, mask, recipe.spec) for sample, latent, mask in parts]
    if AUDIO in media:
        pairs = list(zip(drawn, media[AUDIO], strict=True))
        media[AUDIO] = [latent[:0] if sample.no_audio else latent for sample, latent in pairs]
        for row, (sample, latent) in enumerate(pairs):
            if sample.video and len(latent) > 0:
                media[SHOWN_LATENTS][row] = torch.ones_like(media[SHOWN_LATENTS][row])
    return media


def noised_audio(
    objective: Objective,
    latents: Sequence[torch.Tensor],
    noised: Noised,
    drawn: Sequence[Drawn],
    *,
    keys: Sequence[tuple[int, ...]],
) -> NoisedAudio:
    """Add noise to the audio of samples `(tokens, channels)`, but for what is shown."""
    latents = [latent.to(noised.latents[0]) for latent in latents]
    return objective.audio(
        latents,
        timesteps=noised.timesteps,
        keys=keys,
        shown=[sample.audio for sample in drawn],
        video_shown=[sample.video and len(latent) > 0 for sample, latent in zip(drawn, latents, strict=True)],
    )


def clean_latents(drawn: Drawn, latent: torch.Tensor, mask: torch.Tensor | None, spec: LatentSpec) -> torch.Tensor:
    """Return which latents of a sample are shown: those of its shown frames, and what its mask leaves out.

    A latent frame is shown if its last frame is. A sample whose frames are all shown would have none to predict, such
    as an image, and is shown none.

    Args:
        drawn ([`Drawn`][hf_bucketing.conditions.shares.Drawn]): Frames that are shown, and whether a mask counts.
        latent (`torch.Tensor` of shape `(C, f, h, w)`): Latent of the sample.
        mask (`torch.Tensor` of shape `(1, f, h, w)`, *optional*): Weights of its loss; needed where the mask counts.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch.

    Returns:
        `torch.Tensor` of `bool`, shape `(1, f, 1, 1)`, or `(1, f, h, w)` where a mask counts.
    """
    frames = drawn.frames[:: spec.temporal_stride]
    frames = np.pad(frames & ~frames.all(), (spec.num_repeats, 0), mode="edge")
    part = to_device(torch.from_numpy(frames), latent.device).view(1, -1, 1, 1)
    if not drawn.masked:
        return part
    assert mask is not None, "check_conditions asks for masks"
    return part | black_tokens(mask, spec.patch)


def black_tokens(mask: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """Return which latents `(1, f, h, w)` lie in tokens that are black throughout, of which nothing is learned.

    Example:
        >>> black_tokens(torch.tensor([0.0, 0, 0, 0.5]).view(1, 1, 1, 4), (1, 1, 2)).flatten().tolist()
        [True, True, False, False]
    """
    brightest = F.max_pool3d(mask[None], patch, patch)[0]
    for axis, side in enumerate(patch, 1):
        brightest = brightest.repeat_interleave(side, axis)
    return brightest == 0


def loss_weights(inputs: ModelInputs, samples: Samples) -> Sequence[torch.Tensor] | None:
    """Return the weights of the loss of each sample, `(1, f, h, w)` or `(C, f, h, w)`: the model's own × its mask.

    The loss of a sample is the weighted mean over its latents, so that a mask which is white everywhere changes
    nothing, and neither does its area: samples weigh the same however little of them is learned. Where nothing is
    white, such as after a crop, the loss of the sample is 0.
    """
    masks = samples.conditions.get(LOSS_MASK)
    if masks is None or inputs.weights is None:
        return masks if inputs.weights is None else inputs.weights
    return [weights * mask.to(weights) for weights, mask in zip(inputs.weights, masks, strict=True)]
