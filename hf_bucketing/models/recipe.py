"""What a recipe is: how a pipeline encodes media and captions, predicts, and what it is trained to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils.memory import clear_device_cache

from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..conditions.audio import AUDIO
from ..conditions.names import KEYFRAMES, MASK, REFERENCE
from ..devices import to_device
from ..errors import BucketingError
from ..losses.variational import GaussianPosterior
from ..packing.audio import Audio
from ..packing.batch import Rows, token_timesteps
from ..packing.family import freeze_unused
from ..packing.strips import token_grid
from .condition_checks import ConditionChecks
from .experts import TrainedComponent, transformers_of
from .index import IndexEntry, read_index
from .loading import (
    Loading,
    ModelPart,
    empty_component,
    load_pipeline,
    part_of,
    read_config,
    read_trained_config,
)
from .loss_mask import LOSS_MASK, latent_mask
from .objectives import Denoising, Objective, WeightingScheme
from .samples import REFERENCES, SHOWN_LATENTS, Conditions, Media, ModelInputs, Samples
from .shift import ShiftLaw, ShiftOfLatents, chosen_shift, shift_of_scheduler
from .texts import AUDIO_TEXT, TextEmbeddings, cleans_captions
from .weight_files import read_vae_weights


@dataclass(frozen=True, kw_only=True)
class Recipe(ConditionChecks):
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
        name_or_path (`str`): Repository or folder that the pipeline comes from.
        vae_file (`str`, *optional*): File that the weights of its VAE come from, if they do not come from there.
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
    name_or_path: str = ""
    vae_file: str | None = None

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        max_sequence_length: int | None = None,
        trained: TrainedComponent = "transformer",
        loading: Loading | None = None,
        audio: bool = False,
        references: bool = False,
    ) -> Recipe:
        """Load a pipeline from the hub or a folder, by default whole and in float32; freeze all but what is trained.

        With `audio`, audio is trained with video; with `references`, also what serves references or appended frames
        alone.

        Raises:
            BucketingError: If the pipeline has no such transformer, cannot be loaded, or takes captions of another
                length.
        """
        names, length = transformers_of(trained), max_sequence_length or cls.read_sequence_length(name_or_path)
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
            loading=(loading or Loading()).widened(cls.constructor_reads),
            replaced=cls.replaced_components(),
            blocks=cls.blocks(names[0]),
        )
        for name in names:
            if (transformer := getattr(pipeline, name)) is not None:
                freeze_unused(cls.family, transformer, audio=audio, references=references)
        return cls(
            pipeline=pipeline,
            spec=cls.read_spec(name_or_path),
            max_sequence_length=length,
            trained=names[0],
            beside=names[1:],
            config=config,
            vae_config=read_config(name_or_path, "vae"),
            audio=audio,
            name_or_path=name_or_path,
            vae_file=None if loading is None else loading.vae_file,
        )

    @property
    def components(self) -> Mapping[str, IndexEntry]:
        """Components of the pipeline by name, as its index has them."""
        return read_index(self.name_or_path).components

    def file_weights(self, component: str) -> tuple[str, Mapping[str, torch.Tensor]] | None:
        """Return the file that a component has to itself, and the weights in it by their names in diffusers."""
        if component != "vae" or self.vae_file is None:
            return None
        return self.vae_file, read_vae_weights(self.vae_file, empty_component(self.name_or_path, "vae"))

    @classmethod
    def latents_rule(cls) -> str:
        """Return the name of the recipe that encodes media as this one does."""
        return cls._first_with("encode_latents", "encode_media", "encode_reference", "encode_audio", "image_vae")

    @classmethod
    def text_rule(cls) -> str:
        """Return the name of the recipe that encodes captions as this one does, if its pipeline does too."""
        return cls._first_with(
            "encode_text", "encode_null", "_encode_prompt", "_encode_pictures", "prompt_outputs", "null_as_long"
        )

    @classmethod
    def _first_with(cls, *members: str) -> str:
        """Return the name of the nearest class that defines one of some members, or else of the first of its kind.

        The first of a kind is the most general recipe that has a model family.
        """
        kin = [base for base in cls.__mro__ if hasattr(base, "family")]
        return next((base for base in kin if not vars(base).keys().isdisjoint(members)), kin[-1]).__name__

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
    def needs_reference(self) -> bool:
        """Whether the trained transformer needs references, which others of its pipeline do without."""
        return not self.reference_condition().least and self.reference_rule(trained=self.trained).least > 0

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

    def modules(self, *parts: ModelPart) -> list[torch.nn.Module]:
        """Return the loaded models of some parts of the pipeline."""
        named = self.pipeline.components.items()
        return [
            component
            for name, component in named
            if isinstance(component, torch.nn.Module) and part_of(name, trained=(self.trained, *self.beside)) in parts
        ]

    def to(self, device: torch.device | str, *parts: ModelPart) -> None:
        """Move the models of some parts to a device; by default what encodes: text encoders and VAE."""
        for module in self.modules(*parts or ("text_encoders", "vae")):
            module.to(device)

    @contextmanager
    def moved_to(self, device: torch.device, *parts: ModelPart) -> Iterator[None]:
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
            law = chosen_shift(shift, model_shift=law, resolutions=self.shifts_by_resolution)
        return self.flow(
            num_train_timesteps=int(scheduler.config.get("num_train_timesteps", 1000)),
            shift=law if isinstance(law, (int, float)) else ShiftOfLatents(law, self.spec),
            weighting_scheme=weighting_scheme or "logit_normal",
            sigmas=self.sigmas(),
            audio_shift=self.audio_shift(),
            seed=seed,
        )

    def shift(self) -> float | ShiftLaw:
        """Return the shift of noise levels, for flow matching: by default that of the scheduler."""
        return shift_of_scheduler(self.pipeline.scheduler.config)

    def audio_shift(self) -> float:
        """Return the shift of the noise levels of audio relative to that of its video; 1 where both have one."""
        return 1.0

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
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Encode what the model is shown of a stack beside its text, such as the first frame; by default nothing.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, F, H, W)`): Pixels in [−1, 1].
            latents (`torch.Tensor` of shape `(B, C, f, h, w)`): Their latents.
            conditions (mapping of `str` to a sequence of `torch.Tensor`): The data set's conditions of each sample,
                see [`Media`].

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

    def blank_text_mask(self, shape: tuple[int, int], references: Sequence[int]) -> torch.Tensor:
        """Return the mask of texts without padding, `(n, length)`, made with so many references of each sample.

        For trying a run out.
        """
        return torch.ones(shape)

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

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents."""
        return int(self.vae_config.get("latent_channels") or self.vae_config["z_dim"])

    def encode_media(self, pixel_values: torch.Tensor, conditions: Media = MappingProxyType({})) -> Conditions:
        """Encode a stack of samples.

        Args:
            pixel_values (`torch.Tensor` of shape `(B, 3, F, H, W)`): Pixels in [−1, 1].
            conditions (mapping of `str` to a sequence of `torch.Tensor`): The data set's conditions of each sample,
                see [`Media`].

        Returns:
            Mapping of `str` to `torch.Tensor`: `latents`, `(B, C, f, h, w)`, what [`encode_conditions`] returns and,
            where samples have a mask, `loss_mask`, `(B, 1, f, h, w)`: the weights of the loss. Where the model is
            shown references, `references` has a tuple of latents `(C, f, h, w)` for each sample.
        """
        latents = self.encode_latents(pixel_values)
        encoded: dict[str, torch.Tensor | Sequence[Any]] = {"latents": latents}
        encoded |= self.encode_conditions(pixel_values, latents, conditions)
        if self.reference_condition().most and not self.reference_condition().in_front and REFERENCE in conditions:
            encoded[REFERENCES] = [tuple(map(self.encode_reference, pixels)) for pixels in conditions[REFERENCE]]
        if KEYFRAMES in conditions:
            pairs = zip(pixel_values, conditions[KEYFRAMES], strict=True)
            encoded[KEYFRAMES] = [
                tuple(self.encode_reference(pixels[:, frame : frame + 1]) for frame in frames)
                for pixels, frames in pairs
            ]
        if masks := conditions.get(MASK):
            latent_size = tuple(latents.shape[2:])
            frames = {"repeats": self.spec.num_repeats, "chunk_frames": self.spec.chunk_frames}
            encoded[LOSS_MASK] = torch.stack([latent_mask(mask, latent_size, **frames) for mask in masks])
        if AUDIO in conditions:
            encoded[AUDIO] = [self.encode_audio(waveform) for waveform in conditions[AUDIO]]
        return encoded

    def encode_audio(self, waveform: torch.Tensor) -> torch.Tensor:
        """Encode sound `(2, samples)` in [−1, 1], or no samples, to normalised latents `(tokens, channels)`.

        Models that make audio override it.
        """
        raise NotImplementedError

    def audio_inputs(self, samples: Samples) -> Audio | None:
        """Return the audio of samples as the model takes it; None where none is trained.

        Its text is that of the same caption. A modality that is shown has timestep 0.
        """
        if samples.audio is None:
            return None
        audio, text = samples.audio, samples.text.others.get(AUDIO_TEXT)
        return Audio(
            latents=audio.latents, timesteps=audio.timesteps, video_timesteps=audio.video_timesteps, text=text
        )

    def encode_reference(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode a reference `(3, F, h, w)` in [−1, 1], or a frame that is appended, to a latent `(C, f, h, w)`.

        By default it is encoded as any sample.
        """
        return self.encode_latents(pixels[None])[0]

    def keyframe_of(self, latent_frame: int) -> int:
        """Return the frame of pixels that is shown as further tokens at a latent frame.

        Its tokens lie at its time. By default it is the last frame that the latent frame holds.
        """
        return latent_frame * self.spec.temporal_stride

    def keyframes_at(self, latent_frames: Sequence[Sequence[int]]) -> Media:
        """Return what [`encode_media`] takes to encode frames by themselves, at these latent frames of each sample."""
        return {KEYFRAMES: [[self.keyframe_of(latent) for latent in of_sample] for of_sample in latent_frames]}

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
        if parts is None:
            return inputs
        return inputs.showing(parts, clean=noised.clean, patch=self.spec.patch, per=self.family.timesteps_per)

    def clean_parts(self, samples: Samples) -> Sequence[torch.Tensor] | None:
        """Return the part of each sample that its latents show without noise, see [`ModelInputs.showing`].

        By default it is what the run draws; None where it draws nothing, or the model is shown it in another way.
        """
        return samples.conditions.get(SHOWN_LATENTS)

    def references(self, samples: Samples) -> Sequence[Sequence[torch.Tensor]] | None:
        """Return the references of each sample and behind them its keyframes, in the dtype of its latent.

        None where there are no such conditions.
        """
        sequences = [samples.conditions[name] for name in (REFERENCES, KEYFRAMES) if name in samples.conditions]
        if not sequences:
            return None
        latents = samples.noised.latents
        return [
            [reference.to(latent) for references in parts for reference in references]
            for latent, *parts in zip(latents, *sequences, strict=True)
        ]

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
        if len({tuple(reference.shape for reference in of_sample) for of_sample in references}) > 1:
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
