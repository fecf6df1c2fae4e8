"""What a batch of any collator holds of each sample, from a cache or encoded: latents, conditions and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..buckets.sizes import LatentSpec
from ..conditions.names import KEYFRAMES, REFERENCE
from ..models.recipe import Recipe
from ..models.samples import KEYFRAME_PLACES
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
