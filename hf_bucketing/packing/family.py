"""The class in which packing and a model family meet: packing defines it, each model family implements it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from ..devices import to_device
from ..errors import PackingError
from .batch import PackedBatch, Rows, has_latent_size, token_timesteps
from .context import exact_inputs, keep_inputs_exact, keeps_inputs_exact
from .isolated import run_isolated
from .layout import PackedLayout
from .names import Backend, Grid
from .positions import PackTables, Tables, hook_tables, strip_tables
from .processors import PackedAttnProcessor, PackedJointAttnProcessor, Rotary
from .strips import grids_to_tokens, patchify, token_grid, unpatchify
from .texts import TextTokens

Transformer: TypeAlias = Any
"""A diffusers model; its attributes differ by family."""

Draw: TypeAlias = Callable[[Sequence[Grid]], Any]
"""Function of the samples' token grids that draws plausible conditioning for them.

It draws a tensor `(n, …)`, or, of what has the size of a latent, a list of `(channels, frames, height, width)`.
"""

LatentsAs: TypeAlias = Literal["videos", "images", "frames_first", "tokens"]
"""How a model takes latents, see [`Family`]."""

TimestepsPer: TypeAlias = Literal["row", "frame", "token"]
"""What of a batch row has a timestep, see [`Family`]."""

TRIAL_REFERENCES: tuple[Grid, ...] = ((1, 2, 3), (1, 3, 2), (1, 2, 2))
"""Token grids of references with which models are tried out."""

UNLIMITED = sys.maxsize
"""Limit of an axis whose positions can be computed for any length."""


class Family:
    """How the transformers of one diffusers class attend, place their tokens and are called.

    A family holds no state; each method is given the transformer. The defaults suit a model that takes latents
    `(batch, channels, frames, height, width)`, one timestep per batch row, and text that each row attends to.

    Attributes:
        title (`str`): Name of the models, for tables.
        transformer_class (`str`): Name of the class in `diffusers`.
        tested_forwards (`tuple[str, ...]`): Digests of the code of that class and its blocks, in the versions of
            diffusers that packing was tested with; see `models/enable.py`.
        processor_class (`type`): Packed processor of the attention modules.
        stock_processors (`tuple` of `str`): Names of the processors in diffusers that it stands for; models with
            others are refused.
        stock_attention (`tuple` of `str`): Parts of the names of attention modules that keep their own processors,
            since they attend inside one text.
        processors_read_fusion (`bool`): Whether all of these use the projections that diffusers fused; else those do
            that say so in their name.
        text ([`TextTokens`][hf_bucketing.packing.texts.TextTokens]): How text tokens take part in a pack.
        interpolates (`bool`): Whether positions can be stretched to a base size.
        images_only (`bool`): Whether the model takes images, samples of one frame.
        latents_as (`"videos"`, `"images"`, `"frames_first"` or `"tokens"`): How the model takes latents: as
            `(rows, channels, frames, height, width)`, without frames, with frames before channels, or as
            `(rows, tokens, channels)`, where a token holds the channels of a patch.
        strips_have_positions (`bool`): Whether the stock model looks up positions for the columns of strips, which
            hooks then replace, so that strips are no longer than there are positions; else it sees those of samples.
        position_module (`str`, *optional*): Module of the transformer that makes the rotary tables. By default, its
            pipeline makes them.
        lora_targets (`tuple` of `str`): Ends of the names of the projections that get adapters by default.
        without_lora (`tuple` of `str`): Parts of the names of projections that get none by default.
        original_names (`tuple`, *optional*): Modules of diffusers, each with the layer of the original checkpoint that
            holds its rows. `*` stands for a number, `**` for any rest. Some layers hold several modules, their rows in
            the order given here. By default, the names are not proven.
        original_prefix (`str`): What ComfyUI expects in front of these names.
        token_patch (`(t, h, w)`, *optional*): Latent frames, rows and columns per token, where the pipeline chooses
            them; by default, the configuration says them.
        channels (`str`): Setting of the transformer's configuration that holds the channels of its input.
        width_settings (`tuple` of `str`): Settings whose product is the channels of a token between the blocks.
        timesteps_per (`"row"`, `"frame"` or `"token"`): Whether the model takes one timestep for each row alone, or
            also one for each frame, `(rows, frames)`, or each token of a row, `(rows, tokens)`. For timesteps of
            frames, the strips of a pack lie along frames instead of columns, so that each token is a frame of its own.
        cast_inputs (`tuple` of `str`): Arguments of the forward that layers take in the model's own dtype. Positions
            and schedules read all others, which stay exact where FSDP or DeepSpeed cast inputs.
        attention_kwargs (`str`, *optional*): Argument of the transformer's forward that has the scale of LoRA layers.
        timestep_unit (`float`): How many of the scheduler's timesteps, which go up to 1000, are one of the model's.
        turns_timesteps (`bool`): Whether the model's timesteps rise from noise to data.
        negates (`bool`): Whether the model predicts data − noise, where training and others have noise − data.
        max_references (`int`): Most references of a sample, 0 where the model takes none. Families that take some
            override [`reference_positions`], or place references where they place a sample's own tokens.
        references_as_frames (`bool`): Whether the references of an unpacked sample are further frames of it, of its
            height and width.
        reference_parts (`tuple` of `str`): Parts of the names of parameters that serve references alone.
        unused_parts (`tuple` of `str`): Parts of the names of further parameters that predictions do not depend on.
        unused_at_end (`tuple` of `str`): Likewise, of parameters of the last of `transformer_blocks`, such as what it
            does with the text after attention.
        references_apart (`bool`): Whether the references of a sample attend to themselves alone, while all else of the
            sample attends to them too.
        runs_alone (`bool`): Whether the unpacked model takes one sample per forward, or masks no text, so that the
            samples of a stack run one after another, each with its own text.
        audio_parts (`tuple` of `str`): Parts of the names of parameters that serve audio alone, for models whose packs
            may hold audio.
        audio_to_video (`str`, *optional*): Name in its block of the module by which video attends to audio, for models
            with layers of their own for audio. Stacks without audio then run them all the same, see
            [`run_isolated`][hf_bucketing.packing.isolated.run_isolated].
        audio_by_sample (`bool`): Whether the model modulates audio by batch row, so that the audio of a pack lies in
            rows of the strips of its own sample.
        shared_audio (`tuple` of `str`): Names of the attention modules of audio, where processes that share the tokens
            of a pack share its audio too.
        audio_in_sequence (`bool`): Whether audio is further tokens of the one sequence of a pack, which processes that
            share it split as a whole.
        optional_conditioning (`tuple` of `str`): Conditioning that packs and stacks may lack.
        joined_frames (`tuple` of `str`): Names among the conditioning of what each sample has as `(channels, frames,
            height, width)` of a size that is not its latent's; the forward of a pack gets the frames of all samples
            one after another, `(1, channels, frames, height, width)`.
        untraceable (`str`, *optional*): Why `torch.compile` cannot trace the blocks of packs; None where it can.
    """

    title: ClassVar[str]
    transformer_class: ClassVar[str]
    tested_forwards: ClassVar[tuple[str, ...]]
    processor_class: ClassVar[type[PackedAttnProcessor | PackedJointAttnProcessor]] = PackedAttnProcessor
    stock_processors: ClassVar[tuple[str, ...]] = (
        "AttnProcessor2_0",
        "AttnProcessor",
        "FusedAttnProcessor2_0",
        "SlicedAttnProcessor",
        "XFormersAttnProcessor",
        "AttnProcessorNPU",
    )
    stock_attention: ClassVar[tuple[str, ...]] = ()
    processors_read_fusion: ClassVar[bool] = False
    text: ClassVar[TextTokens] = TextTokens()
    interpolates: ClassVar[bool] = False
    images_only: ClassVar[bool] = False
    latents_as: ClassVar[LatentsAs] = "videos"
    strips_have_positions: ClassVar[bool] = True
    position_module: ClassVar[str | None] = None
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    without_lora: ClassVar[tuple[str, ...]] = ()
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = None
    original_prefix: ClassVar[str] = "diffusion_model."
    token_patch: ClassVar[Grid | None] = None
    channels: ClassVar[str] = "in_channels"
    width_settings: ClassVar[tuple[str, ...]] = ("num_attention_heads", "attention_head_dim")
    timesteps_per: ClassVar[TimestepsPer] = "row"
    cast_inputs: ClassVar[tuple[str, ...]] = ("hidden_states", "encoder_hidden_states", "encoder_attention_mask")
    attention_kwargs: ClassVar[str | None] = None
    timestep_unit: ClassVar[float] = 1
    turns_timesteps: ClassVar[bool] = False
    negates: ClassVar[bool] = False
    max_references: ClassVar[int] = 0
    references_as_frames: ClassVar[bool] = False
    reference_parts: ClassVar[tuple[str, ...]] = ()
    unused_parts: ClassVar[tuple[str, ...]] = ()
    unused_at_end: ClassVar[tuple[str, ...]] = ()
    references_apart: ClassVar[bool] = False
    runs_alone: ClassVar[bool] = False
    audio_parts: ClassVar[tuple[str, ...]] = ()
    audio_by_sample: ClassVar[bool] = False
    audio_to_video: ClassVar[str | None] = None
    shared_audio: ClassVar[tuple[str, ...]] = ()
    audio_in_sequence: ClassVar[bool] = False
    optional_conditioning: ClassVar[tuple[str, ...]] = ()
    joined_frames: ClassVar[tuple[str, ...]] = ()
    untraceable: ClassVar[str | None] = None

    def variant(self, transformer: Transformer) -> Family:
        """Return the family of this transformer, for classes whose attention processors tell families apart."""
        return self

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Raise PackingError if this transformer cannot run strips of that length."""
        longest = self.longest_strip(transformer)
        if strip_length > longest:
            raise PackingError(f"strip_length={strip_length} exceeds the {longest} positions of this model's axes.")

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Raise PackingError if the model cannot run a sample or a text of a pack.

        Positions that are `stretched` over those of a base size fit every grid.
        """
        name, fixed = type(transformer).__name__, self.text_length(transformer.config)
        limits = (UNLIMITED,) * 3 if stretched else self.limits(transformer)
        for sample, (grids, words) in enumerate(zip(layout.sample_grids, layout.text_lengths, strict=True)):
            self._check_references(transformer, len(grids) - 1, sample=sample, stretched=stretched)
            for number, grid in enumerate(grids):
                self._check_size(
                    transformer, grid, limits, name=f"{'Reference of sample' if number else 'Sample'} {sample}"
                )
            if words < self.text.shortest:
                raise PackingError(
                    f"{name} attends among or takes the mean of a text's tokens; text {sample} has none."
                )
            if fixed not in (None, words):
                raise PackingError(
                    f"This {name} takes texts of {fixed} tokens, padding included; text {sample} has {words}."
                )

    def _check_references(self, transformer: Transformer, count: int, *, sample: int, stretched: bool) -> None:
        name = type(transformer).__name__
        if count > self.max_references:
            most = f"at most {self.max_references}" if self.max_references else "none"
            raise PackingError(f"Sample {sample} has {count} references, but {name} takes {most}.")
        if count and stretched:
            raise PackingError(
                f"Sample {sample} has references, whose positions are those of {name}'s pipeline; they cannot be "
                "stretched over a base size. Use positions='native'."
            )

    def _check_size(self, transformer: Transformer, grid: Grid, limits: Grid, *, name: str) -> None:
        if self.images_only and grid[0] > 1:
            raise PackingError(f"{name} has {grid[0]} latent frames, but {type(transformer).__name__} takes images.")
        for axis, count, limit in zip(("frames", "rows", "columns"), grid, limits, strict=True):
            if count > limit:
                raise PackingError(
                    f"{name} has a token grid of {grid}, but this model has {limit} positions for {axis}; use a "
                    "smaller size."
                )

    def breaks_graphs(self, config: Mapping[str, Any]) -> bool:
        """Return whether attention makes segments of its own for a pack, which a compiled graph cannot hold."""
        return False

    def check_grid(
        self,
        transformer: Transformer,
        grid: Grid,
        *,
        shown: tuple[Grid, ...] = (),
        kept: torch.Tensor | None = None,
    ) -> None:
        """Raise PackingError if the model cannot run a sample of this token grid, whatever its text.

        `shown` are the token grids of its references; `kept` are the indices of its own tokens that are not dropped,
        if some are.
        """
        words, tokens = self.text_length(transformer.config) or self.text.shortest, None if kept is None else (kept,)
        layout = PackedLayout(grids=(grid,), shown=(shown,), text_lengths=(words,), strip_length=1, kept=tokens)
        try:
            self.check_layout(transformer, layout)
        except PackingError as error:  # which numbers the samples of a pack
            raise PackingError(
                str(error).replace("Sample 0 ", "A sample ", 1).replace("of sample 0 ", "of a sample ", 1)
            ) from error

    def refusal(self, transformer: Transformer, grid: Grid) -> str | None:
        """Return why the model cannot run a sample of this token grid; None if it can."""
        try:
            self.check_grid(transformer, grid)
        except PackingError as error:
            return str(error)
        return None

    def limits(self, transformer: Transformer) -> Grid:
        """Return the largest token grid that the model has positions for."""
        return 1 if self.images_only else UNLIMITED, UNLIMITED, UNLIMITED

    def longest_strip(self, transformer: Transformer) -> int:
        """Return the longest strip that the model's positions allow; a strip counts as one row of columns."""
        return self.limits(transformer)[2] if self.strips_have_positions else UNLIMITED

    def patch(self, config: Mapping[str, Any]) -> Grid:
        """Return latent frames, rows and columns per token, by the configuration of the transformer."""
        if self.token_patch is not None:
            return self.token_patch
        size = config["patch_size"]
        sides = [size, size] if isinstance(size, int) else list(size)
        t, h, w = sides if len(sides) == 3 else [config.get("patch_size_t") or 1, *sides]
        return t, h, w

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent; where latents are taken as tokens, the model counts those of a patch."""
        per_patch = math.prod(self.patch(transformer.config)) if self.latents_as == "tokens" else 1
        return int(getattr(transformer.config, self.channels)) // per_patch

    def width(self, transformer: Transformer) -> int:
        """Return the channels of a token between the blocks."""
        return math.prod(int(getattr(transformer.config, name)) for name in self.width_settings)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding."""
        return int(getattr(transformer.config, self.text.channels))

    def audio_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent of audio, for models whose packs may hold it."""
        return int(transformer.config.audio_in_channels)

    def audio_text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding for audio; 0 where audio attends to the text of its video."""
        return 0

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return parts of the names of parameters that predictions do not depend on, such as those of an audio stream.

        [`freeze_unused`] freezes them: they get no gradient, for which DDP would wait. Those of `audio_parts` and
        `reference_parts` are among them.
        """
        parts = (*self.audio_parts, *self.reference_parts, *self.unused_parts)
        if not self.unused_at_end:
            return parts
        last = len(transformer.transformer_blocks) - 1
        return *parts, *(f"transformer_blocks.{last}.{part}" for part in self.unused_at_end)

    def unused_in(self, transformer: Transformer, *, audio: bool, references: bool = False) -> list[str]:
        """Return what is [`unused`], without `audio_parts` and `reference_parts` where samples have such parts too."""
        used = (*(self.audio_parts if audio else ()), *(self.reference_parts if references else ()))
        return [part for part in self.unused(transformer) if part not in used]

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return what the transformer's forward needs of each sample beside the text, and how to draw it."""
        return {}

    def draw_latents(self, transformer: Transformer, grids: Sequence[Grid], *, channels: int) -> list[torch.Tensor]:
        """Return random tensors of the sizes of latents, `(channels, frames, height, width)` each."""
        p_t, p_h, p_w = self.patch(transformer.config)
        return [torch.randn(channels, t * p_t, h * p_h, w * p_w) for t, h, w in grids]

    def draw_conditioning(self, transformer: Transformer, grids: Sequence[Grid]) -> dict[str, Any]:
        """Return plausible values of [`conditioning`] for samples of these grids, for trying a model out."""
        return {name: draw(grids) for name, draw in self.conditioning(transformer).items()}

    def added_lengths(self, conditioning: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return how many tokens each sample's conditioning adds to its text in joint attention; None if none."""
        return None

    def reference_places(
        self, references: Sequence[Sequence[Grid]], text_mask: torch.Tensor | None
    ) -> tuple[tuple[int, ...], ...] | None:
        """Return how many text tokens of each sample precede each of its references; None where text lies apart.

        Args:
            references (sequence of sequences of `(t, h, w)`): Token grids of the references of each sample.
            text_mask (`torch.Tensor` of shape `(n, length)`, *optional*): Mask of the texts.

        Raises:
            PackingError: If the mask marks places for another number of references.
        """
        return None

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the packed processor for the attention module of that name; `None` keeps the module's own."""
        return None if any(part in name for part in self.stock_attention) else self.processor_class(backend)

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return token grids of samples that the model takes, for trying it out: of mixed sizes, and of one token."""
        limits = self.limits(transformer)
        frames, rows, columns = zip((3, 4, 6), (1, 8, 4), (5, 3, 3), (1, 1, 1), strict=True)
        sides = [
            [min(side, limit) for side in axis] for axis, limit in zip((frames, rows, columns), limits, strict=True)
        ]
        return list(zip(*sides, strict=True))

    def trial_references(self, transformer: Transformer, grid: Grid) -> tuple[Grid, ...]:
        """Return token grids of references of a sample of a grid, for trying the model out; take the first of them."""
        return TRIAL_REFERENCES[: self.max_references]

    def text_length(self, config: Mapping[str, Any]) -> int | None:
        """Return the one length that texts must have, padding included; None where each has its own.

        It is that of [`text`][Family], or follows from the configuration of the transformer.
        """
        return self.text.length

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return a sample's rotary tables, cosines and sines in turn, each `(t·h·w, channels)`.

        The module is the position module, or the transformer where its pipeline makes the tables. Positions are
        stretched to `base_size`, a token grid, unless it is None.
        """
        raise NotImplementedError

    def reference_positions(self, module: Any, grids: tuple[Grid, ...], *, device: torch.device) -> Rotary:
        """Return the rotary tables of a sample's references, one after another, `(tokens, channels)` each.

        The module is that of [`positions`]; `grids` are the sample's own token grid and those of its references.
        """
        raise NotImplementedError

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Register hooks that give each token its position in its own sample, and return their handles.

        By default, the tables of [`positions`] replace the output of the position module, or are passed to the
        transformer where there is none. Hooks are copied and pickled with the transformer: functions of a module, or
        a `partial` of one.
        """
        return [hook_tables(transformer, self.position_module, self.pack_tables(base_size))]

    def pack_tables(self, base_size: Grid | None) -> PackTables:
        """Return a function of the module that makes the tables of the active pack from those of [`positions`]."""
        positions, references = partial(self.positions, base_size=base_size), self.reference_positions
        return partial(strip_tables, Tables(positions), Tables(references))

    @property
    def shares_audio(self) -> bool:
        """Whether processes that share the tokens of a pack can share its audio too."""
        return self.audio_in_sequence or bool(self.shared_audio)

    def parallel_plan_of_audio(self, transformer: Transformer) -> Mapping[str, Any]:
        """Return the plan by which processes share the audio of packs, beside [`parallel_plan`]; by default none."""
        return {}

    def parallel_plan(self, transformer: Transformer) -> Mapping[str, Any]:
        """Return what processes that share samples split and gather: by default diffusers' `_cp_plan`."""
        plan: Mapping[str, Any] = transformer._cp_plan
        return plan

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Return the layout with text where this family has it, and the text tokens to pad the pack to, if any.

        Raises:
            PackingError: If the model cannot run such texts or samples.
        """
        return layout, pad_text_to

    def rows(self, batch: PackedBatch) -> Rows:
        """Return a pack as batch rows: one per strip, each with its sample's timestep and conditioning."""
        text, text_mask = batch.text_rows(self.text.rows)
        conditioning = {name: to_device(values, batch.strips.device) for name, values in batch.conditioning.items()}
        return Rows(
            latents=_laid_out(batch.strips, batch.patch, self._grid_of_strips(batch)),
            timesteps=batch.timesteps_by_strip(),
            text=text,
            text_mask=text_mask,
            patch=batch.patch,
            conditioning={
                name: values if has_latent_size(values) else batch.per_strip(values)
                for name, values in conditioning.items()
            },
        )

    def _grid_of_strips(self, batch: PackedBatch) -> Grid:
        """Return the token grid of a strip as the model gets it: along columns, or along frames with timesteps."""
        length = batch.layout.strip_length
        return (length, 1, 1) if self.timesteps_per == "frame" and batch.timesteps.ndim == 2 else (1, 1, length)

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the arguments of the transformer's forward for batch rows, packed or not."""
        timesteps = rows.frame_timesteps if self.timesteps_per == "frame" else rows.timesteps
        mask = rows.known_mask if self.text.needs_mask else rows.text_mask
        return {
            "hidden_states": self.arranged((rows.latents, *rows.references), rows.patch),
            "timestep": self.model_timesteps(timesteps),
            "encoder_hidden_states": rows.text,
            **({} if self.text.mask is None else {self.text.mask: mask}),
            **rows.conditioning,
        }

    def model_timesteps(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the scheduler's timesteps, up to 1000, as the model counts them."""
        scaled = timesteps if self.timestep_unit == 1 else timesteps / self.timestep_unit
        return 1000 / self.timestep_unit - scaled if self.turns_timesteps else scaled

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the arguments that differ without packing, such as positions, which hooks provide in a pack."""
        return {}

    def arranged(self, grids: Sequence[torch.Tensor], patch: Grid) -> torch.Tensor:
        """Return latents `(rows, channels, frames, height, width)` of the grids of samples as the model takes them."""
        if self.latents_as == "tokens":
            return grids_to_tokens(grids, patch).flatten(2)
        (latents,) = grids
        if self.latents_as == "frames_first":
            return latents.transpose(1, 2)
        return latents.squeeze(2) if self.latents_as == "images" else latents

    def restored(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        """Return the transformer's output as latents `(rows, channels, frames, height, width)` of a token grid."""
        latents = self.laid_out(output, grid, patch)
        return -latents if self.negates else latents

    def laid_out(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        """Return what the model takes or returns as latents of a token grid: the inverse of [`arranged`]."""
        if self.latents_as == "tokens":
            return unpatchify(output.unflatten(2, (-1, *patch)), grid)
        if self.latents_as == "frames_first":
            return output.transpose(1, 2)
        return output.unsqueeze(2) if self.latents_as == "images" else output

    def own_output(self, output: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the output of the tokens of samples' own grids, which by default precede those of references."""
        return output[:, : math.prod(grid)]

    def audio_rows(self, result: Any) -> torch.Tensor:
        """Return noise − data of audio, `(rows, tokens, channels)`, from what a forward returns: its second output."""
        predicted: torch.Tensor = result[1]
        return -predicted if self.negates else predicted

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the transformer's output as strips `(num_strips, channels, p_t, p_h, strip_length·p_w)`."""
        rows = self.restored(output, self._grid_of_strips(batch), batch.patch)
        return _laid_out(rows, batch.patch, (1, 1, batch.layout.strip_length))

    def run(self, transformer: Transformer, rows: Rows, *, wrapped: Any = None) -> torch.Tensor:
        """Run the unpacked transformer on samples of one size, as its pipeline does.

        The forward is called on `wrapped`, the transformer as accelerate wraps it, if there is one; what positions
        and schedules read stays exact, as in a pack. The output has shape `(rows, out_channels, frames, height,
        width)`.
        """
        if self._splits(rows):
            return torch.cat([self.run(transformer, row, wrapped=wrapped) for row in rows.one_by_one()])
        return self._run(transformer, rows, wrapped)[0]

    def run_with_audio(
        self, transformer: Transformer, rows: Rows, *, wrapped: Any = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run samples as [`run`], and return with their output the prediction of their audio, `(tokens, channels)`.

        All have audio of one length, or none.
        """
        if self._splits(rows):
            outputs = [self.run_with_audio(transformer, row, wrapped=wrapped) for row in rows.one_by_one()]
            return torch.cat([output for output, _ in outputs]), [audio for _, (audio,) in outputs]
        run = partial(self._run_audio, transformer, wrapped=wrapped)
        if self.audio_to_video is None or rows.audio is None or any(rows.audio.lengths):
            return run(rows)
        modules = (module for name, module in transformer.named_modules() if name.endswith(f".{self.audio_to_video}"))
        return run_isolated(run, transformer, rows, attentions=modules)

    def _run_audio(
        self, transformer: Transformer, rows: Rows, *, wrapped: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        output, result = self._run(transformer, rows, wrapped)
        return output, list(self.audio_rows(result))

    def _splits(self, rows: Rows) -> bool:
        """Return whether samples of one size run one after another, each with its own text."""
        return self.runs_alone and (len(rows.latents) > 1 or rows.text_mask is not None)

    def _run(self, transformer: Transformer, rows: Rows, wrapped: Any) -> tuple[torch.Tensor, Any]:
        """Return the output as latents, and all that the forward returned."""
        if rows.references:
            rows = self.with_references(transformer, rows)
        kwargs = {**self.inputs(rows), **self.unpacked_inputs(transformer, rows)}
        device = rows.latents.device
        kwargs = tree_map_only(torch.Tensor, lambda value: to_device(value, device), kwargs)
        if wrapped is not None and not keeps_inputs_exact(transformer):
            keep_inputs_exact(transformer)
        with exact_inputs(kwargs, cast=self.cast_inputs):
            result = (transformer if wrapped is None else wrapped)(**kwargs, return_dict=False)
        output = output_of(result)
        if rows.references:
            output = self.own_output(output, rows.grid)
        return self.restored(output, rows.grid, rows.patch), result

    def with_references(self, transformer: Transformer, rows: Rows) -> Rows:
        """Check the references of unpacked samples, and give them timesteps where each token has one."""
        grids = rows.grids
        self.check_grid(transformer, grids[0], shown=grids[1:])
        if self.timesteps_per == "row":
            return rows
        by_row = [token_timesteps(levels, *grids, sample=row) for row, levels in enumerate(rows.timesteps)]
        return replace(rows, timesteps=torch.stack(by_row))

    def run_alone(
        self,
        transformer: Transformer,
        latent: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
        references: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Run the unpacked transformer on one sample `(channels, frames, height, width)`; see [`run`].

        The timestep is that of the sample, `()`, or of its tokens or frames, as in a pack.
        """
        if timestep.ndim:
            timestep = token_timesteps(
                timestep, token_grid(latent, self.patch(transformer.config), sample=0), sample=0
            )
        rows = Rows(
            latents=latent[None],
            timesteps=timestep[None],
            text=text[None],
            patch=self.patch(transformer.config),
            conditioning={name: values[None] for name, values in conditioning.items()},
            references=tuple(latent[None] for latent in references),
        )
        return self.run(transformer, rows)[0]


def _laid_out(rows: torch.Tensor, patch: Grid, grid: Grid) -> torch.Tensor:
    """Return batch rows `(rows, channels, frames, height, width)` with the same tokens on another grid."""
    sides = tuple(count * part for count, part in zip(grid, patch, strict=True))
    return rows if rows.shape[2:] == sides else unpatchify(patchify(rows, patch), grid)


def freeze_unused(family: Family, transformer: Transformer, *, audio: bool = False, references: bool = False) -> None:
    """Freeze the parameters that predictions do not depend on, see [`Family.unused_in`]."""
    parts = family.unused_in(transformer, audio=audio, references=references)
    for name, parameter in transformer.named_parameters():
        if any(part in name for part in parts):
            parameter.requires_grad_(False)


def output_of(result: Any) -> torch.Tensor:
    """Return the output among what a forward returns with `return_dict=False`; outputs in a list are stacked.

    Most forwards return a tuple, whose first entry it is; some return it alone.
    """
    output = result[0] if isinstance(result, tuple) else result
    return torch.stack(output) if isinstance(output, list) else output
