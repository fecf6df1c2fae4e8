"""What a recipe is: how a pipeline encodes media and captions, predicts, and what it is trained to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from accelerate.utils.memory import clear_device_cache
from diffusers.utils import is_bs4_available, is_ftfy_available

from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..devices import to_device
from ..errors import BucketingError, quoted
from ..losses.variational import GaussianPosterior
from ..media.conditions import MASK, REFERENCE
from ..media.references import ReferenceRule
from ..media.row_audio import AUDIO, AudioRule
from ..media.write import Sound
from ..packing.audio import Audio
from ..packing.batch import Rows, token_timesteps
from ..packing.family import Family, freeze_unused
from ..packing.strips import token_grid
from .conditioning import BLACK, ConditionShares
from .experts import TrainedComponent, transformers_of
from .index import PipelineIndex
from .loading import (
    Loading,
    Part,
    call_parameters,
    load_pipeline,
    part_of,
    read_config,
    read_configs,
    read_trained_config,
    strides_of,
)
from .loss_mask import LOSS_MASK, latent_mask
from .objectives import Denoising, FlowMatching, Noised, NoisedAudio, Objective, WeightingScheme
from .shift import ShiftLaw, ShiftOfLatents, chosen_shift, shift_of_scheduler


class TextEmbeddings(NamedTuple):
    """Captions as the transformer takes them.

    Attributes:
        values (`torch.Tensor` of shape `(n, length, text_dim)`): Padded embeddings.
        mask (`torch.Tensor` of shape `(n, length)`, *optional*): Nonzero for real tokens; None where the model also
            attends to padding. It may lie on the CPU, like the masks of `others`.
        others (mapping of `str` to `torch.Tensor` of shape `(n, …)`): What else the transformer takes of a caption,
            such as pooled embeddings, under the names of its forward's arguments.
    """

    values: torch.Tensor
    mask: torch.Tensor | None = None
    others: Mapping[str, torch.Tensor] = MappingProxyType({})

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> TextEmbeddings:
        """Return those of a batch of [`CachedCollator`][hf_bucketing.caching.CachedCollator]."""
        mask = batch.get("text_mask")
        others = {name: torch.as_tensor(values) for name, values in batch.get("text_others", {}).items()}
        return cls(batch["text_values"], None if mask is None else torch.as_tensor(mask), others)

    def to(self, dtype: torch.dtype) -> TextEmbeddings:
        """Cast the embeddings to another dtype."""
        others = {
            name: values.to(dtype) if values.is_floating_point() else values for name, values in self.others.items()
        }
        return TextEmbeddings(self.values.to(dtype), self.mask, others)

    def trimmed(self) -> TextEmbeddings:
        """Return these embeddings without the padding at the end that all captions share."""
        if self.mask is None:
            return self
        length = int(self.mask.bool().any(0).nonzero().max()) + 1
        return TextEmbeddings(self.values[:, :length], self.mask[:, :length], self.others)

    def padded(self, length: int) -> TextEmbeddings:
        """Return these embeddings padded to `(n, length, text_dim)`, with a mask that leaves the padding out."""
        mask = torch.ones_like(self.values[..., 0], dtype=torch.long) if self.mask is None else self.mask
        missing = length - self.values.shape[1]
        return TextEmbeddings(F.pad(self.values, (0, 0, 0, missing)), F.pad(mask, (0, missing)), self.others)

    def replaced(self, rows: Sequence[bool], empty: TextEmbeddings) -> TextEmbeddings:
        """Return these embeddings with those of the null text, `(1, …)` or one per row, in some rows.

        Without a mask of its own, the null text takes the one of each row. Texts of other lengths are padded.
        """
        lengths = {self.values.shape[1], empty.values.shape[1]}
        if len(lengths) > 1:
            return self.padded(max(lengths)).replaced(rows, empty.padded(max(lengths)))

        def replace(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            chosen = to_device(torch.tensor(rows), values.device).view(-1, *[1] * (values.ndim - 1))
            return torch.where(chosen, to_device(by, values.device, dtype=values.dtype), values)

        mask = self.mask if self.mask is None or empty.mask is None else replace(self.mask, empty.mask)
        others = {name: replace(values, empty.others[name]) for name, values in self.others.items()}
        return TextEmbeddings(replace(self.values, empty.values), mask, others)

    def pack_kwargs(self) -> dict[str, Any]:
        """Return these embeddings as arguments of [`Packing.pack`][hf_bucketing.packing.Packing]."""
        return {"text": self.values, "text_mask": self.mask}


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a batch, before the model is called.

    Attributes:
        noised ([`Noised`][hf_bucketing.models.objectives.Noised]): Noisy latents, targets and timesteps.
        text ([`TextEmbeddings`]): One per sample.
        fps (`torch.Tensor` of shape `(n,)`): Frames per second of each sample, as `frame_rates` returns them; on the
            CPU, so that reading a rate waits for no device.
        conditions (mapping of `str` to a sequence): What [`encode_media`][Recipe.encode_media] made of each sample
            beside its latents: a tensor, or of its [`REFERENCES`] a tuple of them.
        audio ([`NoisedAudio`][hf_bucketing.models.objectives.NoisedAudio], *optional*): Noisy audio and its targets;
            None where none is trained.
    """

    noised: Noised
    text: TextEmbeddings
    fps: torch.Tensor
    conditions: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    audio: NoisedAudio | None = None


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
        self, parts: Sequence[torch.Tensor], *, clean: Sequence[torch.Tensor], patch: tuple[int, int, int]
    ) -> ModelInputs:
        """Return inputs in which a part of each sample has no noise, timestep 0 and no weight in the loss.

        Args:
            parts (sequence of `torch.Tensor` of `bool`): What is shown, `(1, f, 1, 1)`, or `(1, f, h, w)` where it is
                not whole frames, which needs a model with a timestep per token.
            clean (sequence of `(C, f, h, w)`): Latents without noise.
            patch (`tuple` of three `int`): Latent frames, rows and columns per token.
        """
        latents, timesteps, weights = [], [], []
        for noisy, own, part, level in zip(self.latents, clean, parts, self.timesteps, strict=True):
            latents.append(torch.where(part, own.to(noisy), noisy))
            tokens = part[0, :: patch[0], :: patch[1], :: patch[2]]
            timesteps.append(torch.where(tokens, 0, level.view(-1, 1, 1)).flatten())
            weights.append((~part).to(noisy).expand_as(noisy[:1]))
        return replace(self, latents=latents, timesteps=timesteps, weights=weights)


Shown: TypeAlias = Mapping[str, Sequence[Any]]
"""What a data set holds of each sample beside its pixels and text, by name: one tensor per sample, `float32`.

`first_frame` and `last_frame` are `(3, 1, H, W)` and `control` is `(3, F, H, W)`, in [−1, 1]; `mask` is `(1, F, H, W)`
in [0, 1], where 1 is learned; `reference` is a tuple of any number of `(3, f, h, w)`, each at its own size; `audio` is
`(2, samples)` in [−1, 1], with no samples where a file has no sound. A collator returns it as `shown`.
"""

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


def cleans_captions() -> bool:
    """Return whether pipelines that can clean captions do so, which takes two libraries."""
    return bool(is_bs4_available() and is_ftfy_available())


AUDIO_TEXT = "audio_text"
"""Name among the `others` of captions of the embeddings that audio attends to, where they are not those of video."""

IMAGES = ("image", "last_image")
"""Arguments of a pipeline's call for the frames to begin and to end a clip with."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A loaded pipeline with one transformer to train, and everything that training needs to know about it.

    Args:
        pipeline (`DiffusionPipeline`): The pipeline, loaded by [`load`][Recipe.load].
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides of the VAE and patch of the transformer.
        max_sequence_length (`int`): Text tokens per caption.
        trained (`str`): Name of the component to train.
        beside (tuple of `str`): Names of other transformers that are trained in the same run, see [`experts`].
        config (mapping): Configuration of that component, which is known even where its weights are not loaded.
        vae_config (mapping): Configuration of the VAE, likewise.
        guidance (`float`): Guidance scale that a model which embeds one is given in training, not negative.
            [`guided`][Recipe.guided] changes it. 1 stands for predictions without guidance, which the loss aims at;
            docs/models/index.md says what other trainers take.
        audio (`bool`): Whether audio is trained with video.
    """

    pipeline: Any
    spec: LatentSpec
    max_sequence_length: int
    trained: str = "transformer"
    beside: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    vae_config: Mapping[str, Any] = field(default_factory=dict)
    guidance: float = 1.0
    audio: bool = False

    pipeline_class: ClassVar[str]
    """Class name in the pipeline's `model_index.json`."""
    family: ClassVar[Family]
    """The family of the transformer, which says how it is called."""
    denoises: ClassVar[bool] = False
    """Whether the model is trained by denoising on a discrete schedule; else by flow matching."""
    flow: ClassVar[type[FlowMatching]] = FlowMatching
    """Class of the objective of models trained by flow matching."""
    default_sequence_length: ClassVar[int]
    """Text tokens per caption by default, as in the pipeline's own call."""
    added_text_tokens: ClassVar[int] = 0
    """Tokens that stand beside these in the sequence of a sample, such as those of a second text encoder."""
    image_vae: ClassVar[bool] = False
    """Whether the VAE encodes images, so that videos are encoded frame by frame."""
    takes_image: ClassVar[bool] = False
    """Whether the pipeline's call takes an image to begin the clip with; in training it is a sample's first frame."""
    shown: ClassVar[tuple[str, ...]] = ()
    """Conditions of a data set that [`encode_conditions`] takes beside `mask` and references, see [`Shown`]."""
    required: ClassVar[tuple[str, ...]] = ()
    """Conditions among them without which the model cannot be trained."""
    max_references: ClassVar[int] = 0
    """Most references of a sample that the model is shown; `sys.maxsize` where any number will do."""
    min_reference_side: ClassVar[int] = 1
    """Least height and width of a reference that the pipeline's call takes, in pixels."""
    max_reference_ratio: ClassVar[float | None] = None
    """Largest ratio of the longer to the shorter side of such a reference; None for any."""
    references_in_front: ClassVar[bool] = False
    """Whether [`encode_media`] puts references in front of a sample as latent frames; else they are grids of tokens of
    their own, see [`REFERENCES`]."""
    text_sees_references: ClassVar[bool] = False
    """Whether the text encoder is shown the references of a caption's sample too."""
    reference_text_tokens: ClassVar[int] = 0
    """Most tokens that each of these adds to the text."""
    shown_as: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Arguments of the pipeline's call for controls, masks and references, by the name of the condition."""
    trims_text: ClassVar[bool] = False
    """Whether a stack runs with no more padding than its longest text needs."""
    null_as_long: ClassVar[bool] = False
    """Whether the null text has as many tokens as the caption that it replaces, the padding of the empty caption
    included; else it is the empty caption."""
    prompt_outputs: ClassVar[tuple[str, ...]] = ("values", "mask")
    """What the first outputs of the pipeline's `encode_prompt` are: embeddings, their mask, arguments of the model's
    forward, or `""` for what it does not take."""
    guidance_factor: ClassVar[float | None] = None
    """Factor by which the pipeline multiplies the guidance scale, where models can have `guidance_embeds`."""
    shifts_by_resolution: ClassVar[tuple[tuple[int, int, float], ...]] = ()
    """Height and width in pixels, and the shift of noise levels that the model's authors name for them."""
    output: ClassVar[str | None] = None
    """What a modular pipeline returns, `"images"` or `"videos"`; None for other pipelines."""
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ()
    """The model's own sizes, `(height, width)` in pixels, which [`token_ladder`][hf_bucketing.token_ladder] takes."""

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        max_sequence_length: int | None = None,
        trained: TrainedComponent = "transformer",
        loading: Loading | None = None,
        audio: bool = False,
    ) -> Recipe:
        """Load a pipeline from the hub or a folder, by default whole and in float32; freeze all but what is trained.

        With `audio`, audio is trained with video.

        Raises:
            BucketingError: If the pipeline has no such transformer, cannot be loaded, or takes captions of another
                length.
        """
        names, length = transformers_of(trained), max_sequence_length or cls.default_sequence_length
        config = read_trained_config(name_or_path, names[0])
        if (fixed := cls.family.text_length(config)) not in (None, length):
            raise BucketingError(
                f"The {names[0]} of {name_or_path} takes captions of {fixed} tokens, and `max_sequence_length` is "
                f"{length}; omit it."
            )
        pipeline = load_pipeline(
            cls.pipeline_type(),
            name_or_path,
            trained=names,
            loading=loading or Loading(),
            replaced=cls.replaced_components(),
            blocks=cls.blocks(),
        )
        for name in names:
            if (transformer := getattr(pipeline, name)) is not None:
                freeze_unused(cls.family, transformer, audio=audio)
        return cls(
            pipeline=pipeline,
            spec=cls.read_spec(name_or_path),
            max_sequence_length=length,
            trained=names[0],
            beside=names[1:],
            config=config,
            vae_config=read_config(name_or_path, "vae"),
            audio=audio,
        )

    @classmethod
    def pipeline_type(cls) -> Any:
        """Return the class of the pipeline."""
        import diffusers

        return getattr(diffusers, cls.pipeline_class)

    @classmethod
    def replaced_components(cls) -> dict[str, Any]:
        """Return components that replace those of the pipeline when it is loaded; by default none."""
        return {}

    @classmethod
    def blocks(cls) -> Any:
        """Return the blocks of a modular pipeline that a run calls; None for other pipelines."""
        return None

    @classmethod
    def called_components(cls, index: PipelineIndex) -> list[str]:
        """Return the components of a pipeline that a run may call: all, but for modular pipelines."""
        return list(index.components)

    @classmethod
    def call_parameters(cls) -> dict[str, bool]:
        """Return the names of the arguments that the pipeline's call takes, and whether it needs them."""
        return call_parameters(cls.pipeline_type(), cls.blocks())

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer from the configurations, without weights."""
        vae, transformer = read_configs(name_or_path)
        temporal, spatial = cls.vae_strides(vae)
        return LatentSpec(
            temporal_stride=1 if cls.image_vae else temporal,
            spatial_stride=spatial,
            patch=cls.family.patch(transformer),
        )

    @classmethod
    def makes_audio(cls) -> bool:
        """Return whether the model makes audio with video, and is trained on both where a data set has audio."""
        return bool(getattr(cls, "family", None) and cls.family.audio_parts)

    @classmethod
    def read_audio_rule(cls, name_or_path: str) -> AudioRule | None:
        """Read the rate and the length of audio from the configurations; None for models that make none."""
        return None

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the temporal and the spatial stride of the VAE by its configuration."""
        return strides_of(vae)

    @classmethod
    def text_tokens(cls, max_sequence_length: int | None = None, *, references: int = 0) -> int:
        """Return the most tokens that a caption adds to its sample's sequence: none where text is attended to apart.

        Args:
            max_sequence_length (`int`, *optional*): Text tokens per caption; by default the pipeline's own number.
            references (`int`): References of the sample, for a text encoder that sees them.
        """
        if not cls.family.text.in_sequence:
            return 0
        beside = cls.added_text_tokens + references * cls.reference_text_tokens
        return (max_sequence_length or cls.default_sequence_length) + beside

    @property
    def transformer(self) -> Any:
        """The model to train."""
        return getattr(self.pipeline, self.trained)

    @property
    def experts(self) -> tuple[Recipe, ...]:
        """This recipe, and another for each transformer of the pipeline that is trained beside its own."""
        names = (self.trained, *self.beside)
        return self, *(
            replace(
                self,
                trained=name,
                beside=tuple(other for other in names if other != name),
                config=getattr(self.pipeline, name).config,
            )
            for name in self.beside
        )

    @property
    def embeds_guidance(self) -> bool:
        """Whether the transformer is distilled to guided predictions, and takes the scale of the guidance."""
        return self.guidance_factor is not None and bool(self.transformer.config.get("guidance_embeds"))

    def guided(self, scale: float | None) -> Recipe:
        """Return this recipe with another guidance scale, `guidance`; None changes nothing.

        Raises:
            BucketingError: If the model takes no guidance scale.
        """
        if scale is None:
            return self
        if not self.embeds_guidance:
            raise BucketingError(
                f"`guidance` is the scale that distilled models embed; this {type(self.transformer).__name__} embeds "
                "none; omit it."
            )
        return replace(self, guidance=scale)

    def modules(self, *parts: Part) -> list[torch.nn.Module]:
        """Return the loaded models of some parts of the pipeline."""
        named = self.pipeline.components.items()
        return [
            component
            for name, component in named
            if isinstance(component, torch.nn.Module) and part_of(name, trained=(self.trained, *self.beside)) in parts
        ]

    def to(self, device: torch.device | str, *parts: Part) -> None:
        """Move the models of some parts to a device; by default what encodes: text encoders and VAE."""
        for module in self.modules(*parts or ("text_encoders", "vae")):
            module.to(device)

    @contextmanager
    def lent_to(self, device: torch.device, *parts: Part) -> Iterator[None]:
        """Move the models of some parts to a device inside a `with` block, and to the CPU after it."""
        self.to(device, *parts)
        try:
            yield
        finally:
            self.to("cpu", *parts)
            clear_device_cache()

    def objective(
        self,
        *,
        weighting_scheme: WeightingScheme | None,
        snr_gamma: float | None,
        seed: int,
        shift: float | str | ShiftLaw | None = None,
    ) -> Objective:
        """Return the training objective that fits the pipeline's scheduler.

        Args:
            weighting_scheme (`"logit_normal"` or `"uniform"`, *optional*): Distribution of noise levels, for flow
                matching.
            snr_gamma (`float`, *optional*): Gamma of min-SNR weights, for denoising.
            seed (`int`): Seed of noise and timesteps.
            shift (`float`, `str` or `ShiftLaw`, *optional*): Shift of noise levels, for flow matching: a law, or what
                [`read_shift`][hf_bucketing.models.shift.read_shift] takes; by default that of [`shift`].

        Raises:
            BucketingError: If a setting does not apply to this model's objective.
        """
        scheduler = self.pipeline.scheduler
        if self.denoises:
            for name, value in (("weighting_scheme", weighting_scheme), ("shift", shift)):
                if value is not None:
                    raise BucketingError(
                        f"`{name}` is about the noise levels of a flow, but a {self.pipeline_class} is trained by "
                        "denoising at uniformly drawn timesteps; omit it."
                    )
            return Denoising(posterior=GaussianPosterior.from_scheduler(scheduler), snr_gamma=snr_gamma, seed=seed)
        if snr_gamma is not None:
            raise BucketingError(
                f"`snr_gamma` weights denoising losses; a {self.pipeline_class} is trained by flow matching; omit it."
            )
        law = self.shift()
        if shift is not None:
            law = chosen_shift(shift, own=law, resolutions=self.shifts_by_resolution)
        return self.flow(
            num_train_timesteps=int(scheduler.config.get("num_train_timesteps", 1000)),
            shift=law if isinstance(law, (int, float)) else ShiftOfLatents(law, self.spec),
            weighting_scheme=weighting_scheme or "logit_normal",
            sigmas=self.sigmas(),
            seed=seed,
        )

    def shift(self) -> float | ShiftLaw:
        """Return the shift of noise levels, for flow matching: by default that of the scheduler."""
        return shift_of_scheduler(self.pipeline.scheduler.config)

    def sigmas(self) -> tuple[float, float]:
        """Return the lowest and the highest noise level at which the pipeline calls the trained transformer."""
        return 0.0, 1.0

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode `(B, 3, F, H, W)` in [−1, 1] to normalised latents `(B, C, f, h, w)`, the mode of the posterior."""
        vae = self.pipeline.vae
        if self.image_vae:
            frames = pixel_values.to(vae.dtype).transpose(1, 2)
            latents = vae.encode(frames.flatten(0, 1)).latent_dist.mode()
            latents = (latents - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor
            return latents.unflatten(0, frames.shape[:2]).transpose(1, 2)
        latents = vae.encode(pixel_values.to(vae.dtype)).latent_dist.mode()
        statistics = map(torch.as_tensor, self.latent_statistics())
        mean, std = (
            to_device(values, latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1) for values in statistics
        )
        return (latents - mean) * vae.config.get("scaling_factor", 1.0) / std

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
        """Encode what the model is shown of a stack beside its text, such as the first frame; by default nothing.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, F, H, W)`): Pixels in [−1, 1].
            latents (`torch.Tensor` of shape `(B, C, f, h, w)`): Their latents.
            shown (mapping of `str` to a sequence of `torch.Tensor`): The data set's conditions of each sample, see
                [`Shown`].

        Returns:
            Mapping of `str` to `torch.Tensor` of shape `(B, …)`, or to a list with one tensor per sample: Conditions,
            which [`model_inputs`] reads. A cache holds them beside the latents.
        """
        return {}

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return conditions of the shapes that [`encode_conditions`] gives a sample, for trying a run out.

        Args:
            latent (`torch.Tensor` of shape `(C, f, h, w)`): The sample's latent.
        """
        return {}

    @property
    def media_rule(self) -> str:
        """What [`encode_media`] depends on beside the models that encode, for the keys of caches."""
        return ""

    @property
    def fewest_frames(self) -> int:
        """Frames of the shortest clip that leaves the model something to predict; 1 where it may be an image."""
        return 1

    def check_frames(self, table: BucketTable | OpenTable, bucket_ids: npt.ArrayLike) -> None:
        """Raise BucketingError if samples are too short to train this model on, such as images for image-to-video.

        Args:
            table (`BucketTable` or `OpenTable`): Sizes of samples.
            bucket_ids (array of `int`, shape `(n,)`): The bucket of each sample.
        """
        ids, counts = np.unique(np.asarray(bucket_ids), return_counts=True)
        frames = np.array([table.size(bucket).frames for bucket in ids.tolist()])
        if short := int(counts[frames < self.fewest_frames].sum()):
            raise BucketingError(
                f"{short} of the samples have fewer than the {self.fewest_frames} frames that a "
                f"{self.pipeline_class} of this configuration needs: fewer leave it nothing to predict. Prepare the "
                "data set again without images and shorter videos."
            )

    @classmethod
    def num_images(cls, config: Mapping[str, Any]) -> int:
        """Return how many images the pipeline's call takes: none, the first frame, or the first and the last.

        Args:
            config (mapping): Configuration of the transformer to train.
        """
        return int(cls.takes_image)

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents."""
        return int(self.vae_config.get("latent_channels") or self.vae_config["z_dim"])

    def encode_media(self, pixel_values: torch.Tensor, shown: Shown = MappingProxyType({})) -> Conditions:
        """Encode a stack of samples.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, F, H, W)`): Pixels in [−1, 1].
            shown (mapping of `str` to a sequence of `torch.Tensor`): The data set's conditions of each sample, see
                [`Shown`].

        Returns:
            Mapping of `str` to `torch.Tensor`: `latents`, `(B, C, f, h, w)`, what [`encode_conditions`] returns and,
            where samples have a mask, `loss_mask`, `(B, 1, f, h, w)`: the weights of the loss. Where the model is
            shown references, `references` has a tuple of latents `(C, f, h, w)` for each sample.
        """
        latents = self.encode_latents(pixel_values)
        encoded: dict[str, torch.Tensor | Sequence[Any]] = {"latents": latents}
        encoded |= self.encode_conditions(pixel_values, latents, shown)
        if self.max_references and not self.references_in_front and REFERENCE in shown:
            encoded[REFERENCES] = [tuple(map(self.encode_reference, pixels)) for pixels in shown[REFERENCE]]
        if masks := shown.get(MASK):
            latent_size = tuple(latents.shape[2:])
            frames = {"repeats": self.spec.num_repeats, "chunk_frames": self.spec.chunk_frames}
            encoded[LOSS_MASK] = torch.stack([latent_mask(mask, latent_size, **frames) for mask in masks])
        if AUDIO in shown:
            encoded[AUDIO] = [self.encode_audio(waveform) for waveform in shown[AUDIO]]
        return encoded

    def encode_audio(self, waveform: torch.Tensor) -> torch.Tensor:
        """Encode sound `(2, samples)` in [−1, 1], or no samples, to normalised latents `(tokens, channels)`.

        Models that make audio override it.
        """
        raise NotImplementedError

    def audio_inputs(self, samples: Samples) -> Audio | None:
        """Return the audio of samples as the model takes it; None where none is trained.

        Audio has the noise level of its video, as in the pipeline's call, and its text is that of the same caption.
        """
        if samples.audio is None:
            return None
        timesteps, text = samples.noised.timesteps, samples.text.others[AUDIO_TEXT]
        return Audio(latents=samples.audio.latents, timesteps=timesteps, video_timesteps=timesteps, text=text)

    def encode_reference(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode a reference `(3, F, h, w)` in [−1, 1] to a latent `(C, f, h, w)`; by default as any sample."""
        return self.encode_latents(pixels[None])[0]

    def check_references(self, counts: npt.NDArray[np.int64], names: Sequence[Any]) -> None:
        """Raise BucketingError if samples have more references than the model takes, or lack one that it needs.

        Args:
            counts (array of `int`, shape `(n,)`): References of each sample.
            names (sequence): What messages call each sample, such as the number of its row.
        """
        faults = {number: self.reference_rule().fault(number) for number in np.unique(counts).tolist()}
        rows = np.flatnonzero(np.isin(counts, [number for number, fault in faults.items() if fault]))
        if len(rows):
            raise BucketingError(
                f"A {self.pipeline_class} cannot be trained with the references of {len(rows)} of {len(counts)} "
                f"samples, such as row {names[rows[0]]}: {faults[int(counts[rows[0]])]}. Prepare the data set again "
                "for this model, and correct these rows or reject them with --on_error reject."
            )

    @classmethod
    def reference_rule(cls) -> ReferenceRule:
        """Return which references of a sample the model takes, and where, in sizes of any multiples."""
        return ReferenceRule(
            least=int(REFERENCE in cls.required),
            most=cls.max_references,
            in_front=cls.references_in_front,
            text_tokens=cls.reference_text_tokens,
            min_side=cls.min_reference_side,
            max_ratio=cls.max_reference_ratio,
        )

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """Kinds of conditions that a run may draw for its samples, see [`read_condition`]; by default none."""
        return ()

    @property
    def encodes_drawn(self) -> bool:
        """Whether [`encode_conditions`] encodes the drawn frames, so that a cache cannot hold them."""
        return False

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return whether samples have parts with timesteps of their own, as models that embed several take them.

        Args:
            settings (mapping): Settings of the pipeline, see [`PipelineIndex`][hf_bucketing.models.index].
            draws (`bool`): Whether a run draws conditions.
        """
        return draws and cls.family.timesteps_per != "row"

    def check_drawn(self, shares: ConditionShares, names: Collection[str], *, cached: bool) -> None:
        """Raise BucketingError if a run cannot show the model what it would draw.

        Args:
            shares ([`ConditionShares`][hf_bucketing.models.conditioning.ConditionShares]): What it draws.
            names (collection of `str`): Names of the data set's conditions.
            cached (`bool`): Whether latents come from a cache.
        """
        if unknown := sorted({*shares.kinds} - {*self.drawn_kinds}):
            takes = f"takes {quoted(self.drawn_kinds)} alone" if self.drawn_kinds else "takes none; omit it"
            raise BucketingError(
                f"`condition` shows the model {quoted(unknown)}, but a {self.pipeline_class} of this configuration "
                f"{takes}."
            )
        if BLACK in shares.kinds and MASK not in names:
            raise BucketingError(
                "`condition` shows what masks leave out, but the data set has no masks; prepare it with --mask_column."
            )
        if cached and self.encodes_drawn:
            raise BucketingError(
                f"A {self.pipeline_class} encodes the frames that it is shown, and `condition` draws others in each "
                "epoch; train from the folder that scripts/prepare_dataset.py wrote, not from a cache."
            )

    @classmethod
    def taken_conditions(cls) -> tuple[str, ...]:
        """Return the conditions of a data set that the model can be shown, beside the mask of its loss."""
        audio = [AUDIO] if cls.makes_audio() else []
        return (*cls.shown, *([REFERENCE] if cls.max_references else []), *audio)

    def check_conditions(self, names: Collection[str]) -> None:
        """Raise BucketingError if a data set has conditions that the model is not shown, or lacks required ones.

        Args:
            names (collection of `str`): Names of the data set's conditions. Every model takes `mask`, since it
                weighs the loss.
        """
        taken = (*self.taken_conditions(), MASK)
        if unknown := sorted(set(names) - set(taken)):
            raise BucketingError(
                f"A {self.pipeline_class} is not shown {quoted(unknown)}, which the data set has; of a data set's "
                f"conditions it takes {quoted(taken)}. Prepare the data set again without the others, or train a "
                "pipeline that takes them."
            )
        if self.audio and AUDIO not in names:
            raise BucketingError("Audio is trained, but this data set has none; prepare it again with --with_audio.")
        if missing := sorted(set(self.required) - set(names)):
            raise BucketingError(
                f"A {self.pipeline_class} must be shown {quoted(missing)}, which the data set lacks; name their "
                f"columns when it is prepared, such as --{missing[0]}_column of scripts/prepare_dataset.py."
            )

    def latent_statistics(self) -> tuple[Any, Any]:
        """Return the mean and the standard deviation of each channel of the VAE's latents, 0 and 1 by default."""
        mean, std = (self.pipeline.vae.config.get(name) for name in ("latents_mean", "latents_std"))
        return (0.0, 1.0) if mean is None or std is None else (mean, std)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions as the pipeline does, with a mask where the model does not attend to padding."""
        outputs = dict(zip(self.prompt_outputs, self._encode_prompt(captions), strict=False))
        values, mask, _ = (outputs.pop(name, None) for name in ("values", "mask", ""))
        return TextEmbeddings(values, mask if self.family.text.padding == "masked" else None, outputs)

    def _encode_prompt(self, captions: str | list[str]) -> Any:
        """Call `encode_prompt` of the pipeline, where its text encoder is, with the settings that it takes."""
        settings = {
            "prompt_2": None,
            "prompt_3": None,
            "batch_size": len(captions),
            "do_classifier_free_guidance": False,
            "clean_caption": cleans_captions(),
            "max_sequence_length": self.max_sequence_length,
            "device": self.pipeline.text_encoder.device,
        }
        taken = signature(self.pipeline.encode_prompt).parameters
        if "max_sequence_length" not in taken:
            self.pipeline.tokenizer_max_length = self.max_sequence_length
        return self.pipeline.encode_prompt(
            captions, **{name: value for name, value in settings.items() if name in taken}
        )

    def encode_null(self) -> TextEmbeddings:
        """Encode the null text, `(1, length, dim)`, that stands for a dropped caption: the empty caption's.

        Where it is as long as the caption that it replaces ([`null_as_long`]), it has no mask of its own.
        """
        text = self.encode_text([""])
        return text._replace(mask=None) if self.null_as_long else text

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return what the model is called with: by default noisy latents, their timesteps and [`conditioning`].

        Behind the latents come [`added_channels`]; some latents may be clean ([`clean_parts`]).
        """
        noised, latents = samples.noised, samples.noised.latents
        if added := self.added_channels(samples):
            pairs = zip(latents, added, strict=True)
            latents = [torch.cat([latent, channels.to(latent)]) for latent, channels in pairs]
        timesteps = noised.timesteps if noised.frame_timesteps is None else noised.frame_timesteps
        inputs = ModelInputs(
            latents=latents,
            timesteps=timesteps,
            conditioning=self.conditioning(samples),
            references=self.references(samples),
            audio=self.audio_inputs(samples),
        )
        parts = self.clean_parts(samples)
        return inputs if parts is None else inputs.showing(parts, clean=noised.clean, patch=self.spec.patch)

    def clean_parts(self, samples: Samples) -> Sequence[torch.Tensor] | None:
        """Return the part of each sample that its latents show without noise, see [`ModelInputs.showing`].

        By default it is what the run draws; None where it draws nothing, or the model is shown it in another way.
        """
        return samples.conditions.get(SHOWN_LATENTS)

    def references(self, samples: Samples) -> Sequence[Sequence[torch.Tensor]] | None:
        """Return the references of each sample, in the dtype of its latent; None where no data set has any."""
        shown = samples.conditions.get(REFERENCES)
        if shown is None:
            return None
        pairs = zip(shown, samples.noised.latents, strict=True)
        return [[reference.to(latent) for reference in references] for references, latent in pairs]

    def added_channels(self, samples: Samples) -> Sequence[torch.Tensor]:
        """Return the channels `(C', f, h, w)` that the model takes behind those of each latent; by default none."""
        return ()

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the conditioning that the model needs of each sample.

        By default it is what comes from its caption and, where the model embeds one, the guidance scale, `(n,)`.
        """
        taken = self.family.conditioning(self.transformer)
        inputs: dict[str, Any] = {name: values for name, values in samples.text.others.items() if name in taken}
        if self.embeds_guidance:
            assert self.guidance_factor is not None, "else the model embeds none"
            inputs["guidance"] = torch.full_like(samples.fps, self.guidance * self.guidance_factor)
        return inputs

    def refusal(self, samples: Samples) -> str | None:
        """Return why the model cannot run these samples as one stack, see [`predict`]; None if it can."""
        return None

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack of samples of one size.

        Args:
            transformer (`torch.nn.Module`): This recipe's transformer, bare or wrapped.
            samples ([`Samples`]): The samples.
            inputs ([`ModelInputs`]): Their [`model_inputs`].

        Returns:
            `torch.Tensor` of shape `(B, C_out, f, h, w)`.

        Raises:
            BucketingError: If the model cannot run these samples as one stack.
        """
        return self.family.run(self.transformer, self._stack(samples, inputs), wrapped=transformer)

    def predict_with_audio(
        self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run a stack of samples of one size as [`predict`], with audio of one length or none.

        Returns:
            `tuple`: `torch.Tensor` of shape `(B, C_out, f, h, w)`, and a list of one of shape `(tokens, channels)` per
            sample.

        Raises:
            BucketingError: If the samples have audio of several lengths; and as [`predict`].
        """
        assert inputs.audio is not None, "audio is trained"
        if len(set(inputs.audio.lengths)) > 1 and not self.family.runs_alone:
            raise BucketingError(
                f"The samples of a stack must have audio of one length, or none; got {inputs.audio.lengths} tokens. "
                "Train packs, or let the plan group samples by their audio."
            )
        return self.family.run_with_audio(self.transformer, self._stack(samples, inputs), wrapped=transformer)

    def _stack(self, samples: Samples, inputs: ModelInputs) -> Rows:
        """Return samples of one size as batch rows; raises as [`predict`]."""
        if reason := self.refusal(samples):
            raise BucketingError(reason)
        text = samples.text.trimmed() if self.trims_text else samples.text
        patch, timesteps = self.family.patch(self.transformer.config), inputs.timesteps
        references = inputs.references or [[]] * len(inputs.latents)
        if len({tuple(reference.shape for reference in shown) for shown in references}) > 1:
            raise BucketingError(
                "The samples of a stack must have as many references, of the same sizes, as each other; train packs, "
                "or let the plan group samples by their references."
            )
        if not isinstance(timesteps, torch.Tensor):
            grid = token_grid(inputs.latents[0], patch, sample=0)
            timesteps = torch.stack(
                [token_timesteps(levels, grid, sample=row) for row, levels in enumerate(timesteps)]
            )
        return Rows(
            latents=torch.stack(list(inputs.latents)),
            timesteps=timesteps,
            text=text.values,
            patch=patch,
            text_mask=text.mask,
            references=[torch.stack(stack) for stack in zip(*references, strict=True)],
            conditioning={
                name: values if isinstance(values, torch.Tensor) else torch.stack(list(values))
                for name, values in inputs.conditioning.items()
            },
            audio=inputs.audio,
        )

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return references as arguments of the pipeline's call: by default a list of images.

        Args:
            references (sequence of sequences of `PIL.Image.Image`): The frames of each reference, at the size in which
                it is shown; at least one reference.
            size ([`Size`][hf_bucketing.Size]): Frames, height and width in pixels of what is rendered.

        Raises:
            BucketingError: If the pipeline's call takes no references, or fewer, or none of such a shape.
        """
        name, most = cls.shown_as.get(REFERENCE), cls.max_references
        if name is None or len(references) > most:
            takes = "no references" if name is None else f"at most {most} references"
            raise BucketingError(f"The call of a {cls.pipeline_class} takes {takes}, got {len(references)}.")
        for number, (frame, *_) in enumerate(references):
            if fault := cls.reference_rule().shape_fault(frame.height, frame.width):
                raise BucketingError(f"Reference {number} is shown to a {cls.pipeline_class} at {fault}.")
        return {name: [frames[0] for frames in references]}

    def render(
        self,
        prompt: str,
        size: Size,
        *,
        image: Any = None,
        last_image: Any = None,
        references: Any = (),
        **options: Any,
    ) -> np.ndarray:
        """Call the pipeline.

        Args:
            prompt (`str`): Caption.
            size ([`Size`][hf_bucketing.Size]): Frames, height and width in pixels.
            image (`PIL.Image.Image`, *optional*): First frame, for pipelines that take one ([`num_images`]).
            last_image (`PIL.Image.Image`, *optional*): Last frame, for pipelines that take two images.
            references (sequence of sequences of `PIL.Image.Image`): The frames of each reference, for pipelines that
                take some ([`reference_arguments`]).
            options: Further arguments of the pipeline's call.

        Returns:
            `numpy.ndarray` of shape `(frames, height, width, 3)`: In [0, 1].
        """
        images = {"image": image, "last_image": last_image}
        return self.frames_of(self.call(prompt, size, images=images, references=references, **options))

    def call(self, prompt: str, size: Size, *, images: Mapping[str, Any], references: Any = (), **options: Any) -> Any:
        """Call the pipeline as [`render`] does, with `images` that may be None, and return what it returns."""
        given = {name: image for name, image in images.items() if image is not None}
        shown = self.reference_arguments(references, size) if references else {}
        arguments = {**given, **shown, **self.size_arguments(size), **options}
        return self.pipeline(prompt=prompt, output_type="np", **arguments)

    def render_with_sound(
        self, prompt: str, size: Size, *, fps: float, **options: Any
    ) -> tuple[np.ndarray, Sound | None]:
        """Render frames as [`render`] does, and sound that lasts as long as they do at `fps`, where there is some."""
        return self.render(prompt, size, **options), None

    @classmethod
    def frames_of(cls, result: Any) -> np.ndarray:
        """Return the frames `(frames, height, width, 3)` of what the pipeline's call returned as arrays."""
        return np.asarray(result.images if "images" in result else result.frames[0])

    @classmethod
    def sound_of(cls, pipeline: Any, result: Any) -> Sound | None:
        """Return the sound of what the call of the pipeline returned; None for models that make none."""
        return None

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, int]:
        """Return the size as arguments of the pipeline's call, which need not take all: some render one frame."""
        sides = {"height": size.height, "width": size.width, "num_frames": size.frames, "video_length": size.frames}
        taken = cls.call_parameters()
        return {name: side for name, side in sides.items() if name in taken}
