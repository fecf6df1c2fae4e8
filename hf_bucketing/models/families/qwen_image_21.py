"""Qwen-Image 2.1: text that sees only what precedes it, at noise level 0, then the tokens of an image.

The pipeline masks the padding of a text: pass what the mask keeps. Timesteps are the scheduler's, up to 1000; the
model gets a thousandth of them. Text is modulated by timestep 0, so that it depends on nothing but itself. The model
makes room for tokens in fours, one for each token of the text encoder that an image would take: a strip is a multiple
of four tokens. The positions of an image follow its text, whose padding therefore has to be cut off.

References stand within the text, where the mask of the text has them follow (`REFERENCE_FOLLOWS`), or before it where
it has none do. They too are modulated by timestep 0, and attend to themselves and to what precedes them; so does text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ...buckets.sizes import Size
from ...conditions.references import ReferenceRule
from ...devices import to_device
from ...errors import BucketingError, PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Transformer
from ...packing.layout import PackedLayout, permute
from ...packing.names import Grid
from ...packing.positions import Tables
from ...packing.processors import PackedRowAttnProcessor, attend
from ...packing.segments import SegmentSpans, Span
from ...packing.texts import REFERENCE_FOLLOWS, TextTokens, marked_places, pad_texts
from ..first_frame import pictures
from ..joint import JointFamily, joint_tables
from ..recipe import Recipe
from ..samples import REFERENCES, ModelInputs, Samples
from ..texts import TextEmbeddings

SLOT = 4
"""Tokens that stand in the place of one token of the text encoder."""
POSITIONS = 1024
"""Rows or columns on either side of the middle of an image that the model has positions for."""


def sequence_parts(images: Sequence[int], length: int, places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the parts of a sample's sequence: the text tokens before each image, and the tokens of that image.

    `images` are the tokens of its references and then its own; `places` the text tokens, of `length`, before each
    reference.

    Example:
        >>> sequence_parts([16, 4, 64], 9, [2, 5])
        [(2, 16), (3, 4), (4, 64)]
    """
    texts = [stop - start for start, stop in itertools.pairwise([0, *places, length])]
    return list(zip(texts, images, strict=True))


@dataclass(frozen=True, kw_only=True)
class ReferencedSequence:
    """A pack with references as the model orders each sample: text, a reference, text, and so on, its own tokens last.

    Attributes:
        order (`torch.Tensor` of shape `(entries,)`): For each entry, its index among the tokens of all strips followed
            by their text slots. Padding comes last.
        inverse (`torch.Tensor` of shape `(entries,)`): The inverse permutation of `order`.
        images ([`SegmentSpans`]): Attention of the tokens of each image to themselves and to what precedes them.
        texts (tuple of pairs): Each span of text, and where its sample begins.
        text_rows (`torch.Tensor`): The entries in these spans.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    images: SegmentSpans
    texts: tuple[tuple[Span, int], ...]
    text_rows: torch.Tensor

    @classmethod
    def of(cls, layout: PackedLayout) -> ReferencedSequence:
        """Return that of a layout, made once."""
        made: ReferencedSequence = layout.joint.segments.made("with references", lambda: cls._of(layout))
        return made

    @classmethod
    def _of(cls, layout: PackedLayout) -> ReferencedSequence:
        pieces, queries, keys, texts, stop = list[Any](), list[Span](), list[Span](), list[tuple[Span, int]](), 0
        word_spans = layout.joint.token_to_text.keys
        for (token, _), (word, _), num_tokens, sample in zip(
            layout.spans, word_spans, layout.own_lengths, _samples(layout), strict=True
        ):
            (_, *others), length, places = sample
            reference_counts, word, first = [*map(math.prod, others)], word + layout.num_tokens, stop
            ends = itertools.accumulate(reference_counts, initial=token + num_tokens)
            starts = [*ends][:-1]  # of references, behind the sample's own tokens
            for (words, count), start in zip(
                sequence_parts([*reference_counts, num_tokens], length, places), [*starts, token], strict=True
            ):
                pieces += [np.arange(word, word + words), np.arange(start, start + count)]
                texts += [((stop, stop + words), first)] if words else []
                word, stop = word + words, stop + words + count
                queries.append((stop - count, stop))
                keys.append((first, stop))
        real, entries = np.concatenate(pieces), len(layout.joint.order)
        order = np.concatenate([real, np.setdiff1d(np.arange(entries), real)])
        rows = [np.arange(*span) for span, _ in texts]
        index = (order, np.argsort(order), np.concatenate(rows))
        on_device = [to_device(torch.from_numpy(values), layout.device) for values in index]
        images = SegmentSpans(queries=tuple(queries), keys=tuple(keys), num_queries=entries, num_keys=entries)
        return cls(order=on_device[0], inverse=on_device[1], images=images, texts=tuple(texts), text_rows=on_device[2])


def _samples(layout: PackedLayout) -> list[tuple[tuple[Grid, ...], int, tuple[int, ...]]]:
    """Return the token grids of each sample, the length of its text, and the places of its references."""
    places = layout.reference_places or ((),) * len(layout)
    return list(zip(layout.sample_grids, layout.text_lengths, places, strict=True))


class PackedQwenImage21AttnProcessor(PackedRowAttnProcessor):
    """Attention of Qwen-Image 2.1 over the strips of a pack, causal in the text."""

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of images where a pack has references."""
        return super().segments(layout) if layout.shown is None else [ReferencedSequence.of(layout).images]

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        layer_cache: None = None,
        kv_cache_mode: None = None,
        cache_write_slice: None = None,
        segments: Any = None,
        key_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample; the layout takes the place of masks and segments, and caches are not used."""
        assert rotary_emb is not None, "the model rotates all rows"
        layout = active_layout()
        sizes = [*layout.row_sizes]
        sides = zip(hidden_states.split(sizes, 1), rotary_emb.split(sizes, 1), strict=True)
        text, tokens = (self.heads(attn, states, [table]) for states, table in sides)
        if layout.shown is None:
            query, key, value = (layout.joint.gather(*pair) for pair in zip(tokens, text, strict=True))
            of_tokens, _ = layout.joint.scatter(attend(query, key, value, layout.joint.segments, backend=self.backend))
            attended = torch.cat([_attend_causally(layout, *text), of_tokens], 1)
        else:
            attended = self._attend_with_references(layout, tokens, text)
        projected: torch.Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(2)))
        return projected

    def _attend_with_references(self, layout: PackedLayout, *sides: Sequence[torch.Tensor]) -> torch.Tensor:
        """Attend in the order of the model; sides are query, key and value of tokens and of text, `(strips, …)`."""
        sequence = ReferencedSequence.of(layout)
        joined = (torch.cat([part.flatten(0, 1) for part in parts]) for parts in zip(*sides, strict=True))
        query, key, value = (permute(heads, sequence.order, sequence.inverse) for heads in joined)
        attended = attend(query, key, value, sequence.images, backend=self.backend)
        attended = attended.index_copy(0, sequence.text_rows, _attend_within_text(sequence, query, key, value))
        attended = permute(attended, sequence.inverse, sequence.order)
        tokens, text = attended.split([layout.num_tokens, len(attended) - layout.num_tokens])
        return torch.cat([side.unflatten(0, (layout.num_strips, -1)) for side in (text, tokens)], 1)


@torch.compiler.disable  # loops over the texts of the pack
def _attend_within_text(
    sequence: ReferencedSequence, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Let each token of text attend to itself and to all of its sample before it; `(text tokens, H, D)`."""
    attended = []
    for (start, stop), first in sequence.texts:
        mask = torch.ones(stop - start, stop - first, dtype=torch.bool, device=query.device).tril(start - first)
        words, keys, values = (
            side[span].transpose(0, 1)[None]
            for side, span in zip((query, key, value), (slice(start, stop), *[slice(first, stop)] * 2), strict=True)
        )
        heads = F.scaled_dot_product_attention(words, keys, values, attn_mask=mask)
        attended.append(heads[0].transpose(0, 1))
    return torch.cat(attended).type_as(query)


@torch.compiler.disable  # splits the texts of the pack
def _attend_causally(layout: PackedLayout, *heads: torch.Tensor) -> torch.Tensor:
    """Let each token of a text attend to itself and those before it; heads are `(strips, text_slots, H, D)`."""
    lengths = layout.text_lengths
    query, key, value = (pad_texts(layout.joint.read_slots(part).split(lengths))[0].transpose(1, 2) for part in heads)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    return layout.joint.fill_slots(torch.cat([row[:length] for row, length in zip(attended, lengths, strict=True)]))


class QwenImage21Family(JointFamily):
    """Packing of `QwenImage21Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "Qwen-Image 2.1"
    transformer_class = "QwenImage21Transformer2DModel"
    tested_forwards = ("4fc520b59176",)
    processor_class = PackedQwenImage21AttnProcessor
    stock_processors = ("QwenImage21AttnProcessor", "QwenImage21FlexAttnProcessor")
    text = TextTokens(rows="slots", channels="context_in_dim", shortest=1)
    images_only = True
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    max_references = UNLIMITED
    original_names = (  # ComfyUI fuses the other layers of the feed-forward
        ("transformer_blocks.*.attn.**", "transformer_blocks.*.attn.**"),
        ("transformer_blocks.*.img_mlp.out", "transformer_blocks.*.img_mlp.out"),
    )
    timestep_unit = 1000

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse other patches than the pipeline's, text modulated by a sample's timestep, and odd strips."""
        config = transformer.config
        if config.patch_size != 1 or not config.causal_condition:
            raise PackingError(
                "Qwen-Image 2.1 packs with patch_size=1 and causal_condition=True, as its pipeline runs it; got "
                f"{config.patch_size} and {config.causal_condition}."
            )
        if strip_length % SLOT:
            raise PackingError(
                f"Qwen-Image 2.1 makes room for tokens in groups of {SLOT}: use a strip_length of at least {SLOT} "
                f"that is a multiple of it, got {strip_length}."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the sides for which there are positions, counted from the middle in both directions."""
        return 1, 2 * POSITIONS, 2 * POSITIONS

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return grids of even sides, for which the stock model makes room."""
        return [(frames, 2 * rows, 2 * columns) for frames, rows, columns in super().trial_grids(transformer)]

    def reference_places(
        self, references: Sequence[Sequence[Grid]], text_mask: torch.Tensor | None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the places that the mask marks; without any, references precede the text."""
        known = text_mask is not None and not text_mask.is_meta
        marked = marked_places(text_mask) if known else [()] * len(references)  # type: ignore[arg-type]
        for sample, (grids, places) in enumerate(zip(references, marked, strict=True)):
            if places and len(places) != len(grids):
                raise PackingError(
                    f"The text of sample {sample} was made with {len(places)} references, and the sample has "
                    f"{len(grids)}."
                )
        return tuple(places or (0,) * len(grids) for grids, places in zip(references, marked, strict=True))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the rotary tables of rows, and let references have the modulation of text."""
        hooks = [transformer.pos_embed.register_forward_hook(partial(_locate, Tables(_positions)))]
        modulated = [*((block, 4) for block in transformer.transformer_blocks), (transformer.norm_out, 2)]
        return hooks + [
            module.register_forward_pre_hook(partial(_mark_sample_tokens, argument), with_kwargs=True)
            for module, argument in modulated
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return also the token grids and where they stand: within the text, the sample's own behind it."""
        count, device = len(rows.latents), (rows.latents if rows.text_mask is None else rows.text_mask).device
        slots = [
            torch.full((length,), is_image, device=device)
            for words, tokens in self._parts(rows)
            for length, is_image in ((words, False), (tokens // SLOT, True))
        ]
        grid, *references = rows.grids
        return {
            **super().inputs(rows),
            "hidden_states": self.arranged((*rows.references, rows.latents), rows.patch),
            "encoder_hidden_states": self._with_room(rows, rows.text),
            "img_shapes": [[*references, grid]] * count,
            "img_mask": torch.cat(slots).expand(count, -1),
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        mask = None if rows.text_mask is None else self._with_room(rows, rows.text_mask.bool())
        return {"encoder_hidden_states_mask": mask}

    def _parts(self, rows: Rows) -> list[tuple[int, int]]:
        """Return the parts of the sequence of samples of one size, which have references in the same places."""
        grid, *references = rows.grids
        (places,) = self.reference_places([references], None if rows.text_mask is None else rows.text_mask[:1])
        return sequence_parts([*map(math.prod, references), math.prod(grid)], rows.text.shape[1], places)

    def _with_room(self, rows: Rows, values: torch.Tensor) -> torch.Tensor:
        """Return what samples have of each text token, `(rows, length, …)`, with room for their references."""
        *parts, _ = self._parts(rows)
        words = [count for count, _ in parts]
        *texts, last = values.split([*words, values.shape[1] - sum(words)], 1)
        rooms = [values.new_ones(len(values), tokens // SLOT, *values.shape[2:]) for _, tokens in parts]
        return torch.cat([*itertools.chain.from_iterable(zip(texts, rooms, strict=True)), last], 1)

    def own_output(self, output: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return all output, of which the sample's own comes last."""
        return output

    def restored(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        """Return latents without the text, which the model returns in front of them."""
        return super().restored(output[:, -math.prod(grid) :], grid, patch)


def _positions(
    module: Any, sample: tuple[tuple[Grid, ...], int, tuple[int, ...]], *, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return the rotary tables of a sample's tokens, its own first, and of its text, `(…, D/2)`, by the module."""
    (grid, *references), length, places = sample
    parts = sequence_parts([*map(math.prod, references), math.prod(grid)], length, places)
    sizes = [*itertools.chain.from_iterable(parts)]
    of_image = torch.cat([torch.full((size,), bool(part % 2), device=device) for part, size in enumerate(sizes)])
    # Not `module(…)`, which would call the hook.
    table = module.forward([*references, grid], of_image, device=device)
    pieces = table.split(sizes)
    *of_references, of_sample = pieces[1::2]
    return torch.cat([of_sample, *of_references]), torch.cat(pieces[::2])


def _locate(tables: Tables, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    tokens, text = joint_tables(tables, module, _samples(active_layout()))
    return torch.cat([text, tokens], 1)


def _mark_sample_tokens(argument: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Say which tokens of each strip have the modulation of their sample's timestep; a forward pre-hook."""
    layout = active_layout()
    if layout.shown is None:
        return None
    if len(args) > argument:
        return (*args[:argument], SampleTokens(layout), *args[argument + 1 :]), kwargs
    return args, {**kwargs, "target_token_mask": SampleTokens(layout)}


class SampleTokens:
    """Mask of the tokens of samples' own grids by strip, in the place of one that all rows share."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout

    def view(self, *shape: int) -> torch.Tensor:
        """Return the mask, `(strips, text_slots + strip_length, 1)`, where one of all rows would be `(1, -1, 1)`."""
        mask = (self.layout.own_ids >= 0).view(-1, self.layout.strip_length, 1)
        return F.pad(mask, (0, 0, self.layout.text_slots, 0))


REFERENCE_AREA = 1024**2
"""Area in pixels in which the pipeline shows each reference."""


class QwenImage21Recipe(Recipe):
    """Recipe of `QwenImage21Pipeline`; see [`Recipe`].

    The pipeline takes captions of any length; here `max_sequence_length` cuts them. A sample may have any number of
    references. The text encoder sees them in the size in which they are encoded, and they stand within the text, where
    the pipeline's template names them.
    """

    pipeline_class = "QwenImage21Pipeline"
    family = QwenImage21Family()
    default_sequence_length = 512
    caption_tokenizer = "processor"
    trims_text = True
    native_sizes = ((1024, 1024),)
    conditions = (
        ReferenceRule(
            area=REFERENCE_AREA,
            multiples=(2, 2),
            resample="lanczos",
            in_text=True,
            text_tokens=8,  # those of its name in the template, up to `<image99>`, and around its tokens
            argument="image",
        ),
    )

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1] with a fourth channel, which says that they are opaque."""
        return super().encode_latents(F.pad(pixel_values, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0))

    @torch.no_grad()
    def encode_text(
        self, captions: list[str], references: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> TextEmbeddings:
        """Encode captions one by one, as the pipeline does with a prompt; padding would move their positions.

        Args:
            captions (list of `str`): Captions.
            references (sequence of sequences of `(3, 1, h, w)`, *optional*): The references of each caption's sample,
                in [−1, 1], which the text encoder sees; by default none. The mask says where they stand in the text.
        """
        by_caption = references or [()] * len(captions)
        texts, masks = (list(parts) for parts in zip(*map(self._encode_caption, captions, by_caption), strict=True))
        most = self.max_sequence_length + self.reference_condition().text_tokens * max(map(len, by_caption))
        return TextEmbeddings(pad_texts(texts)[0], torch.nn.utils.rnn.pad_sequence(masks, True)).padded(most)

    def _encode_caption(self, caption: str, references: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text of a caption, `(length, dim)`, without the tokens of references, and its mask."""
        frames = [frame for pixels in references for frame in pictures(pixels.transpose(0, 1))]
        device = self.pipeline.text_encoder.device
        (values,), _, (slots,) = self.pipeline.encode_prompt(caption, image=frames or None, device=device)
        slots = slots.cpu()
        words = (~slots).nonzero()[:, 0][
            : self.max_sequence_length + self.reference_condition().text_tokens * len(references)
        ]
        followed = F.pad(slots[1:], (0, 1))[words]
        return values[to_device(words, values.device)], 1 + (REFERENCE_FOLLOWS - 1) * followed

    def blank_text_mask(self, shape: tuple[int, int], references: Sequence[int]) -> torch.Tensor:
        """Return one in which references follow the first tokens of their text."""
        marked = torch.arange(shape[1]) < torch.tensor(references)[:, None]
        return 1.0 + (REFERENCE_FOLLOWS - 1) * marked

    @classmethod
    def encoder_pictures(cls, references: Sequence[Size]) -> int:
        """Return what references add to the text, and a token for each 32×32 pixels of them."""
        return super().encoder_pictures(references) + sum(size.height * size.width // 32**2 for size in references)

    def refusal(self, samples: Samples) -> str | None:
        """Refuse stacks of images, or with references, for which the stock model has no room."""
        references, *_ = samples.conditions.get(REFERENCES) or [()]
        for latent in (samples.noised.latents[0], *references):
            _, height, width = latent.shape[1:]
            if height * width % SLOT:
                return (
                    f"diffusers' Qwen-Image 2.1 runs images of a multiple of {SLOT} tokens, got {height}×{width}; use "
                    "sides that are multiples of 32 pixels, or train packs, which take any."
                )
        return super().refusal(samples)

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return what the model is called with.

        Raises:
            BucketingError: If a text was not made with the references of its sample.
        """
        inputs = super().model_inputs(samples)
        counts = [len(of_sample) for of_sample in inputs.references or [()] * len(inputs.latents)]
        made = [0] * len(counts) if samples.text.mask is None else [*map(len, marked_places(samples.text.mask))]
        if made != counts:
            raise BucketingError(
                f"A {self.pipeline_class} has references within the text, and these texts were made with {made} "
                f"references, where samples have {counts}; cache texts again with this data set."
            )
        return inputs

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack, or its samples one by one where texts differ in length, since images stand behind padding."""
        values, mask, others = samples.text
        if mask is None or bool((mask == mask[:1]).all()):
            return super().predict(transformer, samples, inputs)
        references = inputs.references or [()] * len(inputs.latents)
        outputs = [
            super(QwenImage21Recipe, self).predict(
                transformer,
                replace(samples, text=TextEmbeddings(values[row : row + 1], mask[row : row + 1], others)),
                replace(
                    inputs,
                    latents=[latent],
                    timesteps=inputs.timesteps[row : row + 1],
                    references=references[row : row + 1],
                ),
            )
            for row, latent in enumerate(inputs.latents)
        ]
        return torch.cat(outputs)

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Image.Image]], size: Size) -> dict[str, Any]:
        """Return references as arguments of the call, with the resolution that keeps the sizes of most of them.

        The pipeline gives all of them one area, so that others are resized.
        """
        from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions

        sizes = [frame.size for frame, *_ in references]

        def kept(resolution: int) -> int:
            return sum(
                calculate_dimensions(resolution**2, width / height)[:2] == (width, height) for width, height in sizes
            )

        near = [round(math.sqrt(width * height)) for width, height in sorted(sizes, reverse=True)]
        resolution = max([round(math.sqrt(REFERENCE_AREA)), *near], key=kept)
        return {**super().reference_arguments(references, size), "output_resolution": resolution}

    def render(self, *args: Any, **options: Any) -> np.ndarray:
        """Call the pipeline, and return colours without opacity."""
        return super().render(*args, **options)[..., :3]


RECIPES = (QwenImage21Recipe,)
