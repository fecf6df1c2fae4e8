"""How MiniMax-H3 is trained, with sound or without: flow matching, with the shifts of both schedulers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn.utils.rnn import pad_sequence

from ...buckets.sizes import LatentSpec, Size
from ...conditions.audio import AudioRule
from ...conditions.names import REFERENCE
from ...conditions.references import ReferenceRule
from ...conditions.shares import APPENDED, APPENDED_FIRST
from ...devices import to_device
from ...errors import BucketingError
from ...packing.texts import pad_texts
from ...randomness import Purpose, integer_seed
from ..experts import TrainedComponent
from ..first_frame import pictures
from ..loading import read_config
from ..modular import ModularRecipe
from ..samples import KEYFRAME_PLACES, Samples
from ..texts import TextEmbeddings
from .packing import AT_END, AUDIO_CHANNELS, FAMILY, PICTURE_TOKENS, SHOWN_TIMESTEP

FEWEST_FRAMES = 124
"""Frames of the shortest video that the pipeline makes, of about five seconds."""

TRANSFORMER_REF: Final = "transformer_ref"
"""Name of the pipeline's transformer for samples with references."""

SHORT_SIDE = "reference_image_short_edge"
"""Setting of the pipeline: the shorter side in pixels to which it brings pictures that are references."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of pixels in [0, 1], by which those that the VAE encodes are normalised."""


class MiniMaxH3Recipe(ModularRecipe):
    """Recipe of `MiniMaxH3ModularPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Videos have 17·n + 5 frames, which the VAE encodes to 5·n + 2, at 24 frames per second; an image is one latent
    frame. A render has at least the 124 frames of the shortest video that the pipeline makes.

    Where the data set has audio, each sample's is trained at the level that the scheduler of audio has in the step in
    which the other one has the level of its video; else it is neither encoded nor predicted, what belongs to it is not
    trained, and renders have the sound that the model makes up.

    A run can show samples their first and their last frame, as the pipeline is called with `image` and `last_image`:
    as further tokens, each encoded by itself, with a little noise, and in front of the caption as pictures that the
    text encoder sees.

    The pipeline has a transformer of its own for samples with references, `transformer_ref`. A run that trains it
    shows each sample its pictures, as the pipeline is called with `references`; a run of the other one shows none.

    The pipeline has no empty prompt, as its model is distilled to guided predictions: a dropped caption is a space.
    """

    pipeline_class = "MiniMaxH3ModularPipeline"
    output = "videos"
    family = FAMILY
    default_sequence_length = 512
    native_sizes = ((768, 1344), (768, 768), (1344, 768))
    sound_rate = "audio_sampling_rate"
    sound_fps = 24
    keyframe_text_tokens = 118
    """Those of a label, of at most 16 bytes, of the two tokens around a picture, and of one that is made larger for
    the text encoder, which sees no less than 256×256 pixels, in whole tokens of 32×32."""
    max_references = 9
    max_reference_ratio = 4.0
    reference_pictures_only = True
    text_sees_references = True
    reference_text_tokens = 118
    """As for a frame that a run appends."""
    reference_text_factor = 1
    shown_as = MappingProxyType({REFERENCE: "references"})
    reference_code = (
        "from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference",
        '[MiniMaxH3ImageReference.from_file("reference.png")]',
    )

    @classmethod
    def blocks(cls, trained: str = "transformer") -> Any:
        """Return the blocks of references, which call `transformer_ref`, or all others."""
        from diffusers import MiniMaxH3Blocks

        blocks = MiniMaxH3Blocks()
        if trained == TRANSFORMER_REF:
            return blocks.get_workflow("ref2va")
        for block in blocks.sub_blocks.values():
            block.sub_blocks.pop("ref2va", None)
        return blocks

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the product of the factors of the VAE's levels."""
        return math.prod(vae["temporal_downsample_factors"]), math.prod(vae["spatial_downsample_factors"])

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read also the length of the chunks in which the VAE encodes videos."""
        chunk = read_config(name_or_path, "vae")["clip_length"]
        return replace(super().read_spec(name_or_path), chunk_frames=chunk)

    @classmethod
    def read_audio_rule(cls, name_or_path: str) -> AudioRule:
        """Read the rate and the hop of the audio VAE, which encodes left and right each by itself."""
        config = read_config(name_or_path, "audio_vae")
        return AudioRule(
            rate=config["sampling_rate"],
            samples_per_token=math.prod(config["encoder_rates"]),
            tokens_at_once=AUDIO_CHANNELS,
        )

    @torch.no_grad()
    def encode_audio(self, waveform: torch.Tensor) -> torch.Tensor:
        """Encode sound `(2, samples)` in [−1, 1] to normalised latents `(tokens, channels)`, the posterior's mode.

        Those of the left channel precede those of the right one.
        """
        vae = self.pipeline.audio_vae
        config = vae.config
        if not waveform.shape[1]:
            return waveform.new_zeros(0, config.latent_channels)
        latents = vae.encode(waveform[:, None]).latent_dist.mode().transpose(1, 2)
        mean, std = (
            to_device(torch.tensor(values), latents.device) for values in (config.latents_mean, config.latents_std)
        )
        return ((latents - mean) / std).flatten(0, 1)

    def audio_shift(self) -> float:
        """Return the shift of the scheduler of audio over that of the scheduler of videos."""
        pipeline = self.pipeline
        return float(pipeline.audio_scheduler.config.shift / pipeline.scheduler.config.shift)

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode `(B, 3, F, H, W)` in [−1, 1], normalised by ImageNet's statistics as the VAE expects."""
        return super().encode_latents(_normalised((pixel_values + 1) / 2, IMAGENET))

    @classmethod
    def reference_rule(
        cls, settings: Mapping[str, Any] = MappingProxyType({}), trained: str | None = None
    ) -> ReferenceRule:
        """Return the rule with the shorter side that the pipeline's settings or its blocks name."""
        configs = cls.blocks(TRANSFORMER_REF).expected_configs
        short_side = next(settings.get(SHORT_SIDE, config.default) for config in configs if config.name == SHORT_SIDE)
        rule = replace(super().reference_rule(settings), short_side=int(short_side), resample="lanczos")
        if trained is None:
            return rule
        return replace(rule, least=1) if trained == TRANSFORMER_REF else replace(rule, most=0)

    @classmethod
    def transformer_for(cls, conditions: Collection[str]) -> TrainedComponent:
        """Return the transformer of references where samples have some."""
        return TRANSFORMER_REF if REFERENCE in conditions else "transformer"

    @property
    def shows_references(self) -> bool:
        """Whether the trained transformer is that of samples with references."""
        return self.trained == TRANSFORMER_REF

    def check_conditions(self, names: Collection[str]) -> None:
        """Refuse references for the transformer that takes none, and data without them for that which needs some."""
        super().check_conditions(names)
        if REFERENCE in names and not self.shows_references:
            raise BucketingError(
                f"The {self.trained} of a {self.pipeline_class} is shown no references, which the data set has. Train "
                f"the transformer that the pipeline has for them (--trained_component {TRANSFORMER_REF}), or prepare "
                "the data set without --reference_column."
            )
        if self.shows_references and REFERENCE not in names:
            raise BucketingError(
                f"The {self.trained} of a {self.pipeline_class} is shown references, which the data set lacks; "
                "prepare it again with --reference_column, or train another `trained_component`."
            )

    @classmethod
    def check_renders(cls, *, references: int, trained: str) -> None:
        """Refuse references for the transformer that takes none, and a call without any of the other one."""
        if bool(references) != (trained == TRANSFORMER_REF):
            raise BucketingError(
                f"The {trained} of a {cls.pipeline_class} is shown {'no' if references else 'at least one'} reference "
                f"in a render, got {references or 'none'}; `trained_component` {TRANSFORMER_REF} is the one that is "
                "shown some."
            )

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return references as the pipeline's call takes them: pictures of a class of its own."""
        from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference

        arguments = super().reference_arguments(references, size)
        return {name: [MiniMaxH3ImageReference(frame) for frame in frames] for name, frames in arguments.items()}

    @classmethod
    def encoder_pictures(cls, references: Sequence[Size]) -> int:
        """Return what references add to the text: a token for each 32×32 pixels of them, and those around it."""
        return super().encoder_pictures(references) + sum(size.height * size.width // 32**2 for size in references)

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """The first and the last frame, unless samples have references, and what the base class takes."""
        return (*(() if self.shows_references else (APPENDED_FIRST, APPENDED[0])), *super().drawn_kinds)

    def keyframe_of(self, latent_frame: int) -> int:
        """Return the last frame that a latent frame holds, in the chunks of the VAE."""
        return self.spec.size_of(latent_frame + 1, 1, 1).frames - 1

    @torch.no_grad()
    def encode_reference(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode a picture `(3, 1, H, W)` as the pipeline does: a draw from the posterior, always the same, rounded.

        The pipeline takes pictures of 8 bits.
        """
        vae = self.pipeline.vae
        levels = ((pixels[None].float() + 1) * 127.5).round() / 255
        posterior = vae.encode(_normalised(levels, IMAGENET).to(vae.dtype)).latent_dist
        draw = posterior.sample(generator=torch.Generator().manual_seed(self.pipeline.keyframe_encode_seed))
        return _normalised(draw.half().float(), self.latent_statistics())[0]

    def references(self, samples: Samples) -> Sequence[Sequence[torch.Tensor]] | None:
        """Return what each sample is shown with the noise that the pipeline adds to it."""
        if (shown := super().references(samples)) is None:
            return None
        return [_noised(latents, key) for latents, key in zip(shown, samples.keys, strict=True)]

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return which tokens of texts are those of pictures, and which keyframe is the last frame.

        Raises:
            BucketingError: If another frame is appended, as to a stack with samples of a source that appends none.
        """
        pictures = samples.text.others.get(PICTURE_TOKENS)
        conditioning: dict[str, Any] = {} if pictures is None else {PICTURE_TOKENS: pictures}
        if (places := samples.conditions.get(KEYFRAME_PLACES)) is not None:
            for latent, frames in zip(samples.noised.latents, places, strict=True):
                if {*frames} - {0, self.keyframe_of(latent.shape[1] - 1)}:
                    raise BucketingError(
                        f"A {self.pipeline_class} is shown first and last frames alone, and the samples of a stack as "
                        'many as its first; train packs (`batching="pack"`), or let all sources append as many.'
                    )
            ends = [[min(1, place) for place in frames] for frames in places]
            conditioning[AT_END] = torch.tensor([[*at_end, 0, 0][:2] for at_end in ends])
        return conditioning

    @torch.no_grad()
    def encode_text(
        self, captions: list[str], references: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> TextEmbeddings:
        """Encode each caption behind the pictures of its sample, without a template, padded, with a mask.

        Args:
            captions (list of `str`): Captions, of which `max_sequence_length` tokens are read.
            references (sequence of sequences of `(3, 1, h, w)`, *optional*): Pictures that are seen before each
                caption, in [−1, 1]; by default none.

        Returns:
            [`TextEmbeddings`]: With pictures, they say which tokens are theirs, `(n, length)`.
        """
        shown = references or [()] * len(captions)
        texts, marks = zip(*map(self._encode_caption, captions, shown), strict=True)
        values, mask = pad_texts(texts)
        length = max(values.shape[1], self.max_sequence_length)
        others = {} if references is None else {PICTURE_TOKENS: pad_sequence([*marks], batch_first=True)}
        return TextEmbeddings(values, mask.long(), others).padded(length)

    def _encode_caption(self, caption: str, shown: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text of a caption and the pictures before it, `(length, dim)`, and which tokens are theirs."""
        from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

        pipeline, tokenizer = self.pipeline, self.pipeline.tokenizer
        encoder, processor = pipeline.text_encoder, pipeline.processor
        tokens: list[int] = []
        marks: list[int] = []
        inputs = None
        if shown:
            frames = [frame for pixels in shown for frame in pictures(pixels.transpose(0, 1))]
            inputs = dict(processor.image_processor(images=frames, return_tensors="pt"))
            counts = inputs["image_grid_thw"].prod(1) // processor.image_processor.merge_size**2
            start, pad, end = map(
                tokenizer.convert_tokens_to_ids, ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
            )
            for number, count in enumerate(counts.tolist(), 1):
                label = tokenizer(f"<Picture {number}>: ", add_special_tokens=False)["input_ids"]
                tokens += [*label, start, *[pad] * count, end]
                marks += [0] * len(label) + [1] * (count + 2)
        words = tokenizer(caption or " ", add_special_tokens=False)["input_ids"][: self.max_sequence_length]
        values = get_qwen3vl_prompt_embeds(
            encoder,
            processor,
            [*tokens, *words],
            inputs,
            text_encoder_layer=pipeline.text_encoder_layer,
            device=encoder.device,
            dtype=encoder.dtype,
        )
        return values[0], torch.tensor([*marks, *[0] * len(words)])

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, int]:
        """Return the size with as many frames as the pipeline makes at least."""
        return super().size_arguments(size._replace(frames=max(size.frames, FEWEST_FRAMES)))


def _normalised(values: torch.Tensor, statistics: tuple[Any, Any]) -> torch.Tensor:
    """Return values `(n, C, F, H, W)` less the mean of each channel, over its deviation."""
    mean, std = (to_device(torch.tensor(numbers), values.device).view(1, -1, 1, 1, 1) for numbers in statistics)
    return (values - mean) / std


def _noised(latents: Sequence[torch.Tensor], key: tuple[int, ...]) -> list[torch.Tensor]:
    """Return what a sample is shown, with the noise of its timestep."""
    generator = torch.Generator().manual_seed(integer_seed(Purpose.SHOWN_NOISE, *key))
    share = SHOWN_TIMESTEP / 1000
    noises = [torch.randn(latent.shape, generator=generator) for latent in latents]
    pairs = zip(latents, noises, strict=True)
    return [
        (1 - share) * latent + share * to_device(noise, latent.device, dtype=latent.dtype) for latent, noise in pairs
    ]


RECIPES = (MiniMaxH3Recipe,)
