"""What a batch of any collator holds of each sample, and which parts a model is shown.

A batch holds latents, conditions and text, from a cache or encoded. A run draws conditions from its shares
(`conditions/shares.py`), for each sample from its own key. Frames and masked parts are kept on the grid of the
latents: they have no noise and no weight in the loss. Frames can be appended as further tokens, references can be
omitted, and of video and audio one can be shown while the other is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..buckets.sizes import LatentSpec
from ..conditions.audio import AUDIO
from ..conditions.names import KEYFRAMES, REFERENCE
from ..conditions.shares import Drawn, SourceConditions
from ..devices import to_device
from ..media.rows import SOURCE
from ..models.loss_mask import LOSS_MASK
from ..models.objectives import Noised, NoisedAudio, Objective
from ..models.recipe import Recipe
from ..models.samples import KEYFRAME_PLACES, REFERENCES, SHOWN_FRAMES, SHOWN_LATENTS, ModelInputs, Samples
from ..models.texts import TextEmbeddings


def media_of(
    recipe: Recipe, batch: Mapping[str, Any], *, appended: Sequence[Sequence[int]] = ()
) -> dict[str, list[Any]]:
    """Return `latents`, `(C, f, h, w)` of each sample of a batch of any collator, and its conditions.

    They are read from its cache or encoded. A condition of a sample is a tensor; its references are a tuple of them,
    and so are the frames that are appended at these latent frames of each sample.
    """
    keyframes = recipe.keyframes_at(appended) if any(appended) else {}
    if "latents" in batch:
        media = {"latents": list(batch["latents"]), **batch.get("conditions", {})}
        held = media.pop(KEYFRAMES, ())  # those of all latent frames up to the last one, or of the last or the first
        if keyframes:
            of_samples = zip(held, appended, latent_frames_of(batch, recipe.spec), strict=True)
            media[KEYFRAMES] = [
                tuple(frames[place - count if place else 0] for place in places)
                for frames, places, count in of_samples
            ]
    else:
        media = _encoded_media(recipe, batch["pixel_values"], {**batch.get("shown", {}), **keyframes})
    return {**media, KEYFRAME_PLACES: list(keyframes[KEYFRAMES])} if keyframes else media


def _encoded_media(
    recipe: Recipe, pixels: torch.Tensor | Sequence[torch.Tensor], conditions: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    """Return what the recipe makes of a stack of samples, or of samples one by one."""
    if isinstance(pixels, torch.Tensor):
        return {name: list(values) for name, values in recipe.encode_media(pixels, conditions).items()}
    encoded = [
        recipe.encode_media(sample[None], {name: tensors[row : row + 1] for name, tensors in conditions.items()})
        for row, sample in enumerate(pixels)
    ]
    return {name: [sample[name][0] for sample in encoded] for name in encoded[0]}


def latent_frames_of(batch: Mapping[str, Any], spec: LatentSpec) -> list[int]:
    """Return the latent frames of each sample of a batch of any collator, without those that repeat the first."""
    if "latents" in batch:
        return [latent.shape[1] - spec.num_repeats for latent in batch["latents"]]
    grids = [spec.grid_of(*pixels.shape[1:]) for pixels in batch["pixel_values"]]
    return [spec.patch[0] * frames - spec.num_repeats for frames, _, _ in grids]


def text_of(
    recipe: Recipe,
    batch: Mapping[str, Any],
    *,
    captions: Sequence[str | None] | None = None,
    texts: Mapping[str, TextEmbeddings] | None = None,
    keyframes: Sequence[Sequence[int]] = (),
) -> TextEmbeddings:
    """Return the text of each sample of a batch of any collator, from its cache or encoded.

    Args:
        recipe ([`Recipe`]): Recipe that encodes captions which are not cached.
        batch (mapping): Batch of a collator.
        captions (sequence of `str` or None, *optional*): Captions that replace those of samples, `""` for the null
            text; None where a sample keeps its caption, as all do by default.
        texts (mapping of `str` to [`TextEmbeddings`], *optional*): These captions, `(1, length, dim)` each, for
            batches from a cache.
        keyframes (sequence of sequences of `int`): Frames of each sample that are appended, for text encoders that
            see them; by default none.
    """
    sample_captions = batch["caption"]
    captions = [None] * len(sample_captions) if captions is None else captions
    if "text_values" not in batch:
        pictures = {"references": pictures_in_text(recipe, batch, keyframes)} if recipe.text_sees_pictures else {}
        if not recipe.null_as_long:
            pairs = zip(sample_captions, captions, strict=True)
            return recipe.encode_text([caption if other is None else other for caption, other in pairs], **pictures)
        text = recipe.encode_text(
            [other or caption for caption, other in zip(sample_captions, captions, strict=True)], **pictures
        )
        null = [other == "" for other in captions]
        return text.replaced(null, recipe.encode_null()) if any(null) else text
    text = TextEmbeddings.of_batch(batch)
    for chosen in dict.fromkeys(captions):
        if chosen is not None:
            other_text = None if chosen or "null_text" not in batch else TextEmbeddings.of_batch(batch["null_text"])
            if other_text is None:
                assert texts is not None, "make_data reads them from the cache"
                other_text = texts[chosen]
            text = text.replaced([other == chosen for other in captions], other_text)
    return text


def pictures_in_text(
    recipe: Recipe, batch: Mapping[str, Any], keyframes: Sequence[Sequence[int]]
) -> Sequence[Sequence[torch.Tensor]] | None:
    """Return what the text encoder sees of each sample of a batch that is not cached: its references, its keyframes.

    None where no sample has any.
    """
    conditions, by_kind = batch.get("shown", {}), []
    if recipe.text_sees_references and REFERENCE in conditions:
        by_kind.append(conditions[REFERENCE])
    if recipe.text_sees_keyframes and any(keyframes):
        pairs = zip(batch["pixel_values"], keyframes, strict=True)
        by_kind.append([[clip[:, frame : frame + 1] for frame in frames] for clip, frames in pairs])
    return [[picture for parts in sample for picture in parts] for sample in zip(*by_kind, strict=True)] or None


def finite_samples(latents: Sequence[torch.Tensor], media: Mapping[str, Sequence[Any]]) -> torch.Tensor:
    """Return on their device which samples have finite latents `(C, f, h, w)` and conditions, `(n,)`.

    Nothing waits for the device.
    """
    device, of_samples = latents[0].device, zip(latents, *media.values(), strict=True)
    parts = [
        [part for value in values for part in (value if isinstance(value, tuple) else [value])]
        for values in of_samples
    ]
    tensors = [
        [part for part in sample if isinstance(part, torch.Tensor) and part.device == device] for sample in parts
    ]
    return torch.stack([torch.stack([tensor.isfinite().all() for tensor in sample]).all() for sample in tensors])


def finite(values: Any) -> Any:
    """Return tensors, however they are listed, with zeros in place of NaN and infinite numbers."""
    if isinstance(values, torch.Tensor):
        return values.nan_to_num(0.0, 0.0, 0.0) if values.is_floating_point() else values
    return type(values)(map(finite, values)) if isinstance(values, list | tuple) else values


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
