"""All settings of a training run, composed of the values that they configure: the flags of the training script."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..adapters.settings import AdapterConfig
from ..errors import BucketingError, quoted
from ..loaders.captions import CaptionRule
from ..loaders.faults import FaultRule
from ..loaders.workers import worker_options
from ..losses.names import Reduction
from ..media.views import ViewRule
from ..models.conditioning import read_conditions
from ..models.experts import TrainedComponent
from ..models.shift import read_shift
from ..optimizers.settings import OptimizerConfig
from ..packing.names import Backend
from ..packing.token_drop import Mode as TokenDropMode, TokenDrop
from ..placement.settings import MemoryConfig
from ..plans.bin_packing import PackStrategy
from ..plans.buckets import BucketLimits, BucketPlanConfig
from ..plans.deal import Remainder
from ..plans.packs import Balance, PackLimits, PackPlanConfig
from ..settings import (
    build,
    check_at_least,
    check_literals,
    check_shares,
    explains_names,
    flatten,
    marked,
    not_default,
    number_or_text,
    part,
    setting,
)
from ..streaming.config import StreamConfig
from .checkpoints import CheckpointConfig
from .held_out import HeldOutConfig
from .hub import HubConfig
from .preservation import PreservationConfig
from .reporting import ReportingConfig
from .source_weights import read_loss_weight
from .validation import ValidationConfig

COST_MODEL = "cost_model.json"
"""File in the output folder of a run that holds the measured cost of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How samples are put into batches.

    Args:
        batching (`"bucket"` or `"pack"`): Stacks of samples of one size, or packs of samples of any sizes.
        train_batch_size (`int`): Samples per process and step, for buckets without `max_tokens`.
        max_tokens (`int` or `"auto"`, *optional*): Tokens per process and step, which packs need. Where text sits in
            one sequence with its sample, the `max_sequence_length` tokens of each caption count too. With `"auto"`,
            the run finds the largest number that fits in memory.
        remainder (`"short"`, `"drop"`, `"repeat"` or `"catch_all"`): Treatment of the samples of a bucket that do not
            fill a step on all processes: a smaller step, none, a step filled up with samples seen before, or batches
            shared by all buckets.
        pack_strategy (`"sequential"`, `"first_fit"` or `"best_fit_decreasing"`): Bin packing of samples into packs.
        balance (`"none"` or `"cost"`): Whether the packs of one step are chosen to cost the same on all processes.
        cost_model (`str`, *optional*): Cost of tokens as a run measured it, the cost_model.json in its output folder,
            for `balance`, `longest_first` of balanced packs and the efficiency that is reported; by default the
            floating-point operations of a transformer.
        strip_length (`int`): Tokens per strip of a pack.
        longest_first (`bool`): Whether every epoch starts with its most expensive step, so that a run that does not
            fit in memory fails at once.
        random_resize (`int`, *optional*): Minimum side, in pixels, for random resizing of packed samples; by default
            they keep their own size.
        attention_backend (`"auto"`, `"segments"`, `"varlen"`, `"flex"` or `"dense"`): Backend of attention in packs.
        positions (`"native"` or `"interpolate"`): Positions of packed tokens: those that the model gives them, or
            positions stretched to `base_size`, for samples larger than the model was trained with. Renderings for
            validation have native ones.
        base_size (`list` of `int`, *optional*): Frames, rows and columns, in tokens, to which positions are stretched.
        cached_views (`"draw"`, `"all"` or `"first"`): What an epoch holds, where a cache has several views of each
            sample: one view drawn for each sample, each view once, or the first, which is without augmentation. Views
            of several sizes come in turn instead of drawn, so that as many epochs as there are views hold each once.
        token_drop_rate (`float`): Share of the tokens of each packed sample that training leaves out (NaViT's token
            dropping). Packs are planned by the tokens that are kept; those of `random_resize` by all tokens.
        token_drop_mode (`"random"`, `"tube"` or `"frames"`): Unit of token drop: single tokens, spatial positions over
            all frames, or whole frames.

    Raises:
        BucketingError: On an impossible value, or a setting that the chosen way of batching does not use.
    """

    batching: Literal["bucket", "pack"] = setting("bucket", on_resume="equal", common=True)
    train_batch_size: int = setting(4, argument="batch_size")
    max_tokens: int | Literal["auto"] | None = setting(None, left_open="auto", common=True)
    remainder: Remainder = setting(
        BucketPlanConfig.remainder,
        batching="bucket",
        held_out="short",
        needs_rows="what remains of a bucket at the end of a stream comes in smaller batches",
    )
    pack_strategy: PackStrategy = setting(
        PackPlanConfig.strategy,
        argument="strategy",
        batching="pack",
        needs_rows="rows go into packs as they come, each into the oldest one that has room",
    )
    balance: Balance = setting(
        PackPlanConfig.balance,
        batching="pack",
        held_out="none",
        needs_rows="packs can be chosen only among those of a plan",
    )
    cost_model: str | None = None
    strip_length: int = PackPlanConfig.strip_length
    longest_first: bool = setting(
        False, held_out=False, needs_rows="the most expensive step of a stream is not known before it comes"
    )
    random_resize: int | None = setting(
        None,
        argument="resize",
        batching="pack",
        on_resume="equal",  # the sampler's state holds the tokens of one epoch, and not the sizes that are drawn
        encoded="media",
        held_out=None,
        needs_rows="a plan counts the tokens of the sizes that are drawn",
    )
    attention_backend: Backend = setting("auto", argument="backend", batching="pack", on_resume="free")
    positions: Literal["native", "interpolate"] = setting("native", batching="pack", on_resume="equal")
    base_size: list[int] | None = setting(None, batching="pack", on_resume="equal")
    cached_views: Literal["draw", "all", "first"] = setting(
        "draw", on_resume="applied", held_out="first", needs_rows="a stream is read from its files, not from a cache"
    )
    token_drop_rate: float = setting(0.0, argument="rate", batching="pack", on_resume="equal", held_out=0.0)
    token_drop_mode: TokenDropMode = setting(
        "random", argument="mode", batching="pack", on_resume="equal", held_out="random"
    )

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, self, "train_batch_size", "strip_length", "random_resize")
        if self.max_tokens not in (None, "auto") and (not isinstance(self.max_tokens, int) or self.max_tokens < 1):
            raise BucketingError(f'`max_tokens` must be a number of tokens or "auto", got {self.max_tokens!r}.')
        if self.batching == "pack" and self.max_tokens is None:
            raise BucketingError("Packing needs `max_tokens`, the tokens per process and step.")
        of_others = [name for name, batching in marked(BatchConfig, "batching").items() if batching != self.batching]
        if given := not_default(self, *of_others):
            raise BucketingError(f"Omit {quoted(given)}: no effect with `batching={self.batching}`.")
        check_shares(self, "token_drop_rate")
        if not self.token_drop_rate and self.token_drop_mode != "random":
            raise BucketingError("Omit `token_drop_mode`: no effect without `token_drop_rate`.")
        if (self.positions == "interpolate") != (self.base_size is not None):
            raise BucketingError('`positions="interpolate"` and `base_size` go together; give both or neither.')
        if self.base_size is not None and (len(self.base_size) != 3 or min(self.base_size) < 1):
            raise BucketingError(
                f"`base_size` must be three positive counts of tokens: frames, rows and columns; got {self.base_size}."
            )

    @property
    def token_drop(self) -> TokenDrop | None:
        """Token drop of packs, or None."""
        return TokenDrop(rate=self.token_drop_rate, mode=self.token_drop_mode) if self.token_drop_rate else None

    @property
    def token_limit(self) -> int | None:
        """Tokens per process and step, or None."""
        assert self.max_tokens != "auto", "fill_max_tokens replaces it by a number"
        return self.max_tokens

    @property
    def bucket_limits(self) -> BucketLimits:
        """Limits of a batch of one bucket."""
        batch_size = self.train_batch_size if self.max_tokens is None else None
        return BucketLimits(batch_size=batch_size, max_tokens=self.token_limit)

    @property
    def pack_limits(self) -> PackLimits:
        """Limits of a pack."""
        assert self.token_limit is not None, "BatchConfig checks it"
        return PackLimits(max_tokens=self.token_limit, strip_length=self.strip_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Worker processes that decode samples.

    Args:
        dataloader_num_workers (`int`): Decoding processes per training process; with 0, training processes decode.
        dataloader_timeout (`int`): Seconds without a batch after which a worker counts as hung; 0 waits forever.

    Raises:
        BucketingError: On a negative number.
    """

    dataloader_num_workers: int = setting(2, argument="num_workers")
    dataloader_timeout: int = setting(600, argument="timeout")

    def __post_init__(self) -> None:
        check_at_least(0, self, "dataloader_num_workers", "dataloader_timeout")

    def options(self) -> dict[str, Any]:
        """Return options of a `DataLoader`; batches for a GPU lie in pinned memory, which it reads while it computes.

        Raises:
            BucketingError: As [`worker_options`][hf_bucketing.loaders.worker_options].
        """
        from accelerate import PartialState

        workers = self.dataloader_num_workers
        return {
            "timeout": self.dataloader_timeout if workers else 0,
            "pin_memory": PartialState().device.type == "cuda",
            **worker_options(workers),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What the model is trained to do.

    Args:
        weighting_scheme (`"logit_normal"` or `"uniform"`, *optional*): Distribution of noise levels in flow matching;
            by default `"logit_normal"`. Denoising models such as Latte have none.
        shift (`float` or `str`, *optional*): Shift of noise levels towards noise in flow matching; by default that of
            the pipeline's scheduler, which for some models grows with a sample's tokens, up to the most that its
            configuration names. A number is one shift for all samples. `"tokens"` grows with the tokens as Flux's,
            `"pixels"` with the square root of the pixels as in Stable Diffusion 3, 3 at 1024×1024. `"resolution"` is
            what the model's authors name for some resolutions, and `480x832:2,720x1280:5` names them: height, width
            and shift. `"unbounded"` is the scheduler's, also beyond the most tokens that it names. `"flux2"` is what
            FLUX.2's pipelines render with in 50 steps, about 7.6 at 1024×1024; the default there is the scheduler's,
            3.2.
        guidance (`float`, *optional*): Guidance scale that distilled models which embed one are given in training:
            Flux, FLUX.2 [dev], HunyuanVideo and HunyuanImage. It is 1 by default, since the loss aims at the data
            itself, without guidance. diffusers' examples take 3.5, and 30 for controls.
        snr_gamma (`float`, *optional*): Gamma of min-SNR loss weighting, such as 5.0, for denoising models such as
            Latte.
        loss_reduction (`"sample"` or `"token"`): Unit of equal weight in the loss: every sample, or every token.
        caption_dropout (`float`): Share of captions replaced by the empty one, for classifier-free guidance.
        reference_dropout (`float`): Share of samples that are shown no references, so that the model also works
            without; in buckets, the share of batches.
        condition (`str`, *optional*): Parts of samples that the model is shown without noise, and the share of samples
            that each is drawn for, such as `first_frame:0.3,prefix:0.2,none:0.5`. A condition is `first_frame`,
            `last_frame`, `prefix`, `suffix`, `keyframes`, `appended_first_frame`, `appended_last_frame` or
            `appended_keyframes` (as further tokens), `mask` (what masks leave black) or `reference` (which the others
            of a list that names it are not shown), or several of them joined by `+`; `prefix@2` has two latent frames,
            and `prefix` any number. Where audio is trained, `video` shows a sample's video and `audio` its audio, so
            that the other is generated, and `no_audio` trains its video alone. `prefix:0.2:0.5` gives these samples a
            weight of 0.5 in the loss, beside 1 of others. After a semicolon, a source of the data set has shares of
            its own: `first_frame:0.3,none:0.7;stills=none`. By default image-to-video models are shown what their
            pipelines show, and others nothing.
        loss_weight (`str`, *optional*): Weights of sources of the data set in the loss, such as `stills=0.5,edits=2`:
            how much a sample counts beside one of another source; 1 where it is not named.
        audio_weight (`float`): Weight of the loss of a sample's audio beside that of its video, where a data set has
            audio; the losses are added.

    Raises:
        BucketingError: On an impossible value.
    """

    weighting_scheme: Literal["logit_normal", "uniform"] | None = None
    shift: float | str | None = setting(None, parse=number_or_text)
    guidance: float | None = None
    snr_gamma: float | None = None
    loss_reduction: Reduction = "sample"
    caption_dropout: float = setting(0.0, on_resume="applied", held_out=0.0)
    reference_dropout: float = setting(0.0, on_resume="applied", held_out=0.0)
    condition: str | None = setting(None, on_resume="applied")
    loss_weight: str | None = setting(None, on_resume="applied")
    audio_weight: float = 1.0

    def __post_init__(self) -> None:
        check_literals(self)
        check_shares(self, "caption_dropout", "reference_dropout")
        if self.shift is not None:
            read_shift(self.shift)
        if self.condition is not None:
            conditions = read_conditions(self.condition)
            if self.reference_dropout and conditions.draws_references:
                raise BucketingError(
                    "`reference_dropout` and `reference` in `condition` both draw who is shown references; give one."
                )
        if self.loss_weight is not None:
            read_loss_weight(self.loss_weight)
        if self.guidance is not None and not 0 <= self.guidance < math.inf:
            raise BucketingError(f"`guidance` must be a number that is not negative, got {self.guidance!r}.")
        if not 0 < self.audio_weight < math.inf:
            raise BucketingError(f"`audio_weight` must be above 0 and finite, got {self.audio_weight!r}.")


@explains_names
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of [`train`][hf_bucketing.training.train].

    The names of all settings, those of its parts included, are the flags of `scripts/train_text_to_video.py` and
    follow diffusers' training examples. [`from_flat`][TrainingConfig.from_flat] takes them all by name.

    Args:
        pretrained_model_name_or_path (`str`): Diffusers pipeline to fine-tune, on the hub or in a folder.
        dataset_dir (`str`): Folder that scripts/prepare_dataset.py or scripts/cache_latents.py wrote.
        output_dir (`str`): Folder that receives the pipeline or the adapters, checkpoints and logs.
        dry_run (`bool`): Whether to print the plan, its cost and an estimate of memory, and to train nothing.
        seed (`int`): Seed of plans, crops, noise and timesteps.
        num_train_epochs (`int`): Epochs to train for, unless `max_train_steps` is given.
        max_train_steps (`int`, *optional*): Optimizer steps to train for; by default those of all epochs.
        gradient_accumulation_steps (`int`): Batches per optimizer step.
        mixed_precision (`"no"`, `"fp16"` or `"bf16"`, *optional*): Precision of activations and of the frozen text
            encoder; by default accelerate's own setting.
        trained_component (`"transformer"`, `"transformer_2"`, `"both"` or `"transformer_ref"`): Transformer to train,
            where a pipeline has two: the second one of Wan 2.2 A14B serves low noise levels. With `"both"`, each
            optimizer step trains one of them at its noise levels; they take turns as often as these are drawn.
            `"transformer_ref"` is that of MiniMax-H3 for samples with references.
        max_sequence_length (`int`, *optional*): Text tokens per caption; by default those of cached texts, or else the
            pipeline's own number.
        trust_cache (`bool`): Whether a cache is trained although it seems to be of another model, or does not say of
            which; by default it is refused.
        ema_decay (`float`, *optional*): Decay of the exponential moving average of the weights, such as 0.999. The
            average is saved in place of the last weights; by default there is none.
        batches ([`BatchConfig`]): Batches or packs.
        memory ([`MemoryConfig`][hf_bucketing.placement.settings.MemoryConfig]): How the model is kept in memory.
        views ([`ViewRule`][hf_bucketing.media.ViewRule]): Crop, frames, flip and decoder.
        captions ([`CaptionRule`][hf_bucketing.loaders.CaptionRule]): Tags of captions.
        faults ([`FaultRule`][hf_bucketing.loaders.FaultRule]): Unreadable samples.
        loader ([`LoaderConfig`]): Worker processes.
        stream ([`StreamConfig`][hf_bucketing.streaming.config.StreamConfig]): Rows from a stream.
        objective ([`ObjectiveConfig`]): Noise levels and loss.
        preservation ([`PreservationConfig`][hf_bucketing.training.base_targets.PreservationConfig]): Samples whose
            targets are predictions of the base model.
        adapters ([`AdapterConfig`][hf_bucketing.adapters.lora.AdapterConfig]): LoRA.
        optimizer ([`OptimizerConfig`][hf_bucketing.optimizers.settings.OptimizerConfig]): Optimizer and schedule.
        validation ([`ValidationConfig`][hf_bucketing.training.validation.ValidationConfig]): Prompts to render.
        held_out ([`HeldOutConfig`][hf_bucketing.training.held_out.HeldOutConfig]): Samples held out of training.
        checkpoints ([`CheckpointConfig`][hf_bucketing.training.checkpoint.CheckpointConfig]): Saving and resuming.
        reporting ([`ReportingConfig`]): Trackers, and the page of the run.
        hub ([`HubConfig`][hf_bucketing.training.hub.HubConfig]): Upload of the result.

    Raises:
        BucketingError: On an impossible value or combination, or a video decoder that cannot be loaded.
    """

    pretrained_model_name_or_path: str = field(metadata={"on_resume": "weights"})
    dataset_dir: str = field(metadata={"on_resume": "plan"})
    output_dir: str = field(metadata={"on_resume": "free"})
    dry_run: bool = setting(False, on_resume="free", common=True)
    seed: int = setting(0, on_resume="plan")
    num_train_epochs: int = setting(1, on_resume="applied", decides_steps=True)
    max_train_steps: int | None = setting(None, on_resume="applied", common=True)
    gradient_accumulation_steps: int = setting(
        1, argument="accumulation_steps", on_resume="applied", decides_steps=True
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = setting(None, on_resume="equal", common=True)
    trained_component: TrainedComponent = setting("transformer", on_resume="equal")
    max_sequence_length: int | None = setting(None, on_resume="equal", left_open=None)
    trust_cache: bool = setting(False, on_resume="free")
    ema_decay: float | None = setting(None, on_resume="equal")
    batches: BatchConfig = part(BatchConfig, on_resume="plan")
    memory: MemoryConfig = part(MemoryConfig, on_resume="applied")
    views: ViewRule = part(ViewRule, on_resume="applied", encoded="media")
    captions: CaptionRule = part(CaptionRule, on_resume="applied", encoded="captions")
    faults: FaultRule = part(FaultRule, on_resume="applied")
    loader: LoaderConfig = part(LoaderConfig, on_resume="free")
    stream: StreamConfig = part(StreamConfig, on_resume="plan")
    objective: ObjectiveConfig = part(ObjectiveConfig, on_resume="equal")
    preservation: PreservationConfig = part(PreservationConfig, on_resume="equal")
    adapters: AdapterConfig = part(AdapterConfig, on_resume="equal")
    optimizer: OptimizerConfig = part(OptimizerConfig, on_resume="applied")
    validation: ValidationConfig = part(ValidationConfig, on_resume="free")
    held_out: HeldOutConfig = part(HeldOutConfig, on_resume="free")
    checkpoints: CheckpointConfig = part(CheckpointConfig, on_resume="free")
    reporting: ReportingConfig = part(ReportingConfig, on_resume="free")
    hub: HubConfig = part(HubConfig, on_resume="free")

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(
            1, self, "num_train_epochs", "max_train_steps", "gradient_accumulation_steps", "max_sequence_length"
        )
        check_at_least(0, self, "seed")
        check_shares(self, "ema_decay")
        own, given = Path(self.output_dir) / COST_MODEL, self.batches.cost_model
        if given is not None and Path(given).resolve() == own.resolve():
            raise BucketingError(
                f"`cost_model` is {given}, which this run replaces by its own; copy the file to another place, or "
                "give another `output_dir`."
            )
        validation = self.held_out.validation_dataset_dir
        if validation is not None and Path(validation).resolve() == Path(self.dataset_dir).resolve():
            raise BucketingError(
                f"`validation_dataset_dir` is {validation}, as `dataset_dir` is; hold some of its rows out with "
                "`validation_split`."
            )
        if self.preservation.base_predictions and self.adapters.lora_rank is None:
            raise BucketingError(
                "`preservation` and `slider` ask the base model for its predictions, which a run of the whole "
                "transformer changes and no longer has; train adapters (`lora_rank`), or omit them."
            )
        if self.stream.streaming:
            _check_stream(self)
        if self.adapters.init_from_adapters and self.checkpoints.resume_from_checkpoint not in (None, "latest"):
            raise BucketingError(
                "`init_from_adapters` begins a new run and `resume_from_checkpoint` continues one; omit one of them, "
                'or give `resume_from_checkpoint="latest"`, which continues once there is a checkpoint.'
            )

    @classmethod
    def from_flat(cls, **settings: Any) -> TrainingConfig:
        """Build the settings of a run from all its settings by name, such as those in `training_config.json`.

        Raises:
            BucketingError: On an unknown name, an impossible value or an impossible combination.
        """
        return build(cls, settings)

    def flat(self) -> dict[str, Any]:
        """Return all settings by name, as `training_config.json` holds them."""
        return flatten(self)


def _check_stream(config: TrainingConfig) -> None:
    """Raise BucketingError for settings that need the rows to be known before they come."""
    needs_rows = marked(TrainingConfig, "needs_rows")
    if given := not_default(config, *needs_rows):
        reasons = "; ".join(f"`{name}`: {needs_rows[name]}" for name in given)
        raise BucketingError(f"Omit {quoted(given)} with `streaming=True`: {reasons}.")
    if config.batches.max_tokens == "auto":
        raise BucketingError(
            '`max_tokens="auto"` searches the most expensive step of a plan, which a stream has not; give a number of '
            "tokens (scripts/plan_memory.py says what fits)."
        )
    if config.max_train_steps is None and config.stream.steps_per_epoch is None:
        raise BucketingError(
            "A stream has no known length: give `max_train_steps`, or `steps_per_epoch` and `num_train_epochs`."
        )
