"""What is known of a recipe before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from ..buckets.sizes import LatentSpec, Size
from ..conditions.audio import AUDIO, AudioRule
from ..conditions.condition import Condition, condition_named
from ..conditions.names import MASK
from ..conditions.references import ReferenceRule, references_of
from ..packing.family import Family
from .experts import TrainedComponent
from .index import PipelineIndex
from .loading import ModelPart, call_parameters, read_configs, strides_of
from .objectives import FlowMatching


class RecipeFacts:
    """What a recipe says about its pipeline, before weights are loaded."""

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
    caption_tokenizer: ClassVar[str] = "tokenizer"
    """Component of the pipeline whose tokens these are."""
    added_text_tokens: ClassVar[int] = 0
    """Tokens that stand beside these in the sequence of a sample, such as those of a second text encoder."""
    image_vae: ClassVar[bool] = False
    """Whether the VAE encodes images, so that videos are encoded frame by frame."""
    takes_image: ClassVar[bool] = False
    """Whether the pipeline's call takes an image to begin the clip with; in training it is a sample's first frame."""
    conditions: ClassVar[tuple[Condition, ...]] = ()
    """What the model is shown of a sample beside its latents and its caption; every model takes the mask of its loss,
    and audio where it makes some."""
    reference_code: ClassVar[tuple[str, str] | None] = None
    """Where one transformer of several needs a reference: an import, and an argument of the call, for the card."""
    renders_prompts: ClassVar[bool] = True
    """Whether prompts, images and references are all that the pipeline's call needs, so that a run can render them."""
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
    call_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Arguments of the pipeline's call in renders that name no others, where its own fit one number of steps alone."""
    constructor_reads: ClassVar[tuple[ModelPart, ...]] = ()
    """Parts without which the pipeline cannot be made, whatever a run calls of it."""
    sound_rate: ClassVar[str] = "vocoder.config.output_sampling_rate"
    """Attribute of the pipeline that holds the samples per second of its sound, for models that make some."""
    sound_fps: ClassVar[float | None] = None
    """Frames per second for which the pipeline makes sound; None where its call takes a `frame_rate`."""
    read_with_lora: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings that the pipeline's own `load_lora_weights` reads of a transformer whose configuration has none."""
    output: ClassVar[str | None] = None
    """What a modular pipeline returns, `"images"` or `"videos"`; None for other pipelines."""
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ()
    """The model's own sizes, `(height, width)` in pixels, which [`token_ladder`][hf_bucketing.token_ladder] takes."""

    @classmethod
    def condition(cls, name: str) -> Condition | None:
        """Return a condition that the model takes, by its name; None if it takes none of this name."""
        return condition_named(cls.conditions, name)

    @classmethod
    def reference_condition(cls) -> ReferenceRule:
        """Return the condition of references, whatever the pipeline's settings; one of none where it takes none."""
        return references_of(cls.conditions)

    @classmethod
    def required_conditions(cls) -> tuple[str, ...]:
        """Return the names of the conditions without which the model cannot be trained."""
        return tuple(condition.name for condition in cls.conditions if condition.least)

    @classmethod
    def call_arguments(cls) -> dict[str, str]:
        """Return the arguments of the pipeline's call for controls, masks and references, by name of the condition."""
        return {condition.name: condition.argument for condition in cls.conditions if condition.argument}

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
    def blocks(cls, trained: str = "transformer") -> Any:
        """Return the blocks of a modular pipeline that a run of a transformer calls; None for other pipelines."""
        return None

    @classmethod
    def called_components(cls, index: PipelineIndex, trained: str = "transformer") -> list[str]:
        """Return the components that a run of a transformer may call: all, but for modular pipelines."""
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
    def read_sequence_length(cls, name_or_path: str) -> int:
        """Return the pipeline's own number of text tokens per caption, where it needs one from the configurations."""
        return cls.default_sequence_length

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
    def text_tokens(cls, max_sequence_length: int | None = None) -> int:
        """Return the most tokens that a caption adds to its sample's sequence: none where text is attended to apart.

        Args:
            max_sequence_length (`int`, *optional*): Text tokens per caption; by default the pipeline's own number.
        """
        if not cls.family.text.in_sequence:
            return 0
        return cls.text_length(max_sequence_length) + cls.added_text_tokens

    @classmethod
    def text_length(cls, max_sequence_length: int | None = None) -> int:
        """Return the text tokens that the model attends to for each caption, padding included, at most.

        Args:
            max_sequence_length (`int`, *optional*): Tokens to which captions are cut; by default the pipeline's own
                number.
        """
        return max_sequence_length or cls.default_sequence_length

    @classmethod
    def reference_text(cls, references: Sequence[Size], spec: LatentSpec) -> int:
        """Return the tokens that references of these sizes add to the text of their sample."""
        rule = cls.reference_condition()
        tokens = sum(map(spec.num_tokens, references)) if rule.text_factor else 0
        return rule.text_tokens * len(references) + rule.text_factor * tokens

    @classmethod
    def encoder_pictures(cls, references: Sequence[Size]) -> int:
        """Return the tokens that the text encoder reads of references: by default those that they add to the text."""
        return cls.reference_condition().text_tokens * len(references)

    @classmethod
    def num_images(cls, config: Mapping[str, Any]) -> int:
        """Return how many images the pipeline's call takes: none, the first frame, or the first and the last.

        Args:
            config (mapping): Configuration of the transformer to train.
        """
        return int(cls.takes_image)

    @classmethod
    def reference_rule(
        cls, settings: Mapping[str, Any] = MappingProxyType({}), trained: str | None = None
    ) -> ReferenceRule:
        """Return which references of a sample the model takes, and where; multiples of sides are in tokens.

        Args:
            settings (mapping): Settings of the pipeline, see [`PipelineIndex`][hf_bucketing.models.index]; by default
                those of its class.
            trained (`str`, *optional*): Name of the transformer that is shown them, where a pipeline has several that
                take unlike numbers; by default any of them.
        """
        return cls.reference_condition()

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return whether samples have parts with timesteps of their own, as models that embed several take them.

        Args:
            settings (mapping): Settings of the pipeline, see [`PipelineIndex`][hf_bucketing.models.index].
            draws (`bool`): Whether a run draws conditions.
        """
        return draws and cls.family.timesteps_per != "row"

    @classmethod
    def transformer_for(cls, conditions: Collection[str]) -> TrainedComponent:
        """Return a transformer of the pipeline that is shown these conditions of a data set: by default the first."""
        return "transformer"

    @classmethod
    def taken_conditions(cls) -> tuple[str, ...]:
        """Return the conditions of a data set that the model can be shown, beside the mask of its loss."""
        audio = [AUDIO] if cls.makes_audio() else []
        named = [condition.name for condition in cls.conditions if condition.most and not condition.own_frames]
        return (*(name for name in named if name != MASK), *audio)
