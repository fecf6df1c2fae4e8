"""How samples are read by worker processes and put into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import BucketingError, quoted
from ..loaders.workers import worker_options
from ..packing.names import Backend
from ..packing.token_drop import Mode as TokenDropMode, TokenDrop
from ..plans.bin_packing import PackStrategy
from ..plans.buckets import BucketLimits, BucketPlanConfig
from ..plans.deal import Remainder
from ..plans.lengths import LengthPlanConfig, LengthStrategy
from ..plans.packs import Balance, PackLimits, PackPlanConfig
from ..plans.ways import WayName, stacks
from ..settings import check_at_least, check_literals, check_shares, marked, not_default, setting

_UNSTACKED = tuple(name for name in get_args(WayName) if not stacks(name))
"""Ways of batching whose samples keep their own size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How samples are put into batches.

    Args:
        batching (`"bucket"`, `"pack"` or `"length"`): Stacks of samples of one size, packs of samples of any sizes, or
            samples of their own sizes padded to the longest of their batch.
        train_batch_size (`int`): Samples per process and step without `max_tokens`, which packs need.
        max_tokens (`int` or `"auto"`, *optional*): Tokens per process and step, which packs need. Where text sits in
            one sequence with its sample, the `max_sequence_length` tokens of each caption count too. With `"auto"`,
            the run finds the largest number that fits in memory. For batches of like length, padding counts too.
        remainder (`"short"`, `"drop"`, `"repeat"` or `"catch_all"`): Treatment of the samples of a bucket that do not
            fill a step on all processes: a smaller step, none, a step filled up with samples seen before, or batches
            shared by all buckets.
        length_strategy (`"bucket"`, `"random"` or `"sorted"`): Samples of a padded batch: those whose lengths lie
            between the same two boundaries, any, or those of neighbouring lengths.
        length_buckets (`int`, *optional*): Intervals of lengths, for `length_strategy="bucket"`; by default as many
            as leave each some four batches, at most 50.
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

    batching: WayName = setting("bucket", on_resume="equal", common=True, planned=True, chosen=True)
    train_batch_size: int = setting(4, argument="batch_size", planned=True, chosen=True)
    max_tokens: int | Literal["auto"] | None = setting(None, left_open="auto", common=True, planned=True, chosen=True)
    remainder: Remainder = setting(
        BucketPlanConfig.remainder,
        batching=("bucket",),
        held_out="short",
        needs_rows="what remains of a bucket at the end of a stream comes in smaller batches",
    )
    length_strategy: LengthStrategy = setting(LengthPlanConfig.strategy, argument="strategy", batching=("length",))
    length_buckets: int | None = setting(None, argument="num_buckets", batching=("length",))
    pack_strategy: PackStrategy = setting(
        PackPlanConfig.strategy,
        argument="strategy",
        batching=("pack",),
        needs_rows="rows go into packs as they come, each into the oldest one that has room",
    )
    balance: Balance = setting(
        PackPlanConfig.balance,
        batching=("pack",),
        held_out="none",
        needs_rows="packs can be chosen only among those of a plan",
    )
    cost_model: str | None = None
    strip_length: int = setting(PackPlanConfig.strip_length, planned=True)
    longest_first: bool = setting(
        False, held_out=False, needs_rows="the most expensive step of a stream is not known before it comes"
    )
    random_resize: int | None = setting(
        None,
        argument="resize",
        batching=("pack",),
        on_resume="equal",  # the sampler's state holds the tokens of one epoch, and not the sizes that are drawn
        encoded="media",
        held_out=None,
        needs_rows="a plan counts the tokens of the sizes that are drawn",
    )
    attention_backend: Backend = setting("auto", argument="backend", batching=_UNSTACKED, on_resume="free")
    positions: Literal["native", "interpolate"] = setting("native", batching=_UNSTACKED, on_resume="equal")
    base_size: list[int] | None = setting(None, batching=_UNSTACKED, on_resume="equal")
    cached_views: Literal["draw", "all", "first"] = setting(
        "draw", on_resume="applied", held_out="first", needs_rows="a stream is read from its files, not from a cache"
    )
    token_drop_rate: float = setting(0.0, argument="rate", batching=("pack",), on_resume="equal", held_out=0.0)
    token_drop_mode: TokenDropMode = setting(
        "random", argument="mode", batching=("pack",), on_resume="equal", held_out="random"
    )

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, self, "train_batch_size", "strip_length", "random_resize", "length_buckets")
        if self.max_tokens not in (None, "auto") and (not isinstance(self.max_tokens, int) or self.max_tokens < 1):
            raise BucketingError(f'`max_tokens` must be a number of tokens or "auto", got {self.max_tokens!r}.')
        if self.strips is not None and self.max_tokens is None:
            raise BucketingError("Packing needs `max_tokens`, the tokens per process and step.")
        ways = marked(BatchConfig, "batching").items()
        of_others = [name for name, of_ways in ways if self.batching not in of_ways]
        if unused := not_default(self, *of_others):
            raise BucketingError(f"Omit {quoted(unused)}: no effect with `batching={self.batching}`.")
        if self.length_buckets is not None and self.length_strategy != "bucket":
            raise BucketingError('Omit `length_buckets`: no effect unless `length_strategy="bucket"`.')
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
    def strips(self) -> int | None:
        """Tokens of each strip of a pack; None where batches have no strips."""
        return self.strip_length if self.batching == "pack" else None

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
