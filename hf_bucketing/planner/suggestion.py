"""Suggest a run: ways of batching, tokens and memory options, each planned, and ranked by one objective.

The objective is the least time per kept pixel: the seconds of an epoch over the pixels of the files that it trains on.
How many pixels that are does not count; what speaks against a run says where it keeps fewer than others.
Candidates that drop many more rows than the best one, or do not fit, come after all others, with the reason.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..buckets.assignment import REJECTED_BUCKET, count_rejections
from ..buckets.sizes import Size
from ..conditions.appended import NO_FRAMES, AppendedFrames
from ..conditions.names import KEYFRAMES
from ..conditions.rows import bucket_parts
from ..conditions.shares import appended_by, read_conditions
from ..errors import BucketingError
from ..placement.context_parallel import check_model
from ..plans.buckets import BucketPlanConfig, plan_buckets
from ..plans.epoch import EpochPlan
from ..plans.packs import FEW, PackPlanConfig, are_few, plan_packs, strip_tokens
from ..plans.rows import EpochConfig, epoch_occurrences
from ..plans.ways import stacks
from ..report.measure import Targets, kept_pixels
from ..settings import changed
from ..units import format_bytes
from .components import Components
from .host import DiskPlan, HostPlan, check_host, plan_disk, plan_host
from .memory import MOST_TOKENS, PLAN_ERROR, MemoryPlan, plan_components, sample_shape, step_shape, verdict_on
from .options import iter_plans
from .rows import DataRows
from .settings import MachineConfig, PlanConfig, as_reference_sizes
from .time import BatchCost, EpochTime, Speed, StepSeconds, encoding_flops, epoch_time, training_flops
from .ways import Way

MOST_DROPPED = 5
"""Percent of all rows that a candidate may drop beyond the one that drops fewest."""

MORE_PIXELS = 1.05
"""Factor from which on it is said that another run keeps more pixels."""

LEAST_STEPS = 20
"""Optimizer steps that an epoch has at least, where tokens per step can be chosen."""

_MORE_TOKENS = 1.25
"""Factor from which on more tokens per step are a candidate of their own."""

_COPIED_PER_SECOND = 20e9
"""Bytes per second between the machine's memory and a GPU: PCIe 4.0 with 16 lanes reaches some 25 GB/s. A guess."""

_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A run that was planned whole.

    Attributes:
        way ([`Way`]): How rows are batched.
        config ([`PlanConfig`]): All settings of memory, with `max_tokens`.
        memory ([`MemoryPlan`]): Memory of each GPU in its largest step.
        host ([`HostPlan`]): Memory of the machine.
        disk ([`DiskPlan`]): Space on disk.
        time ([`EpochTime`]): Steps and seconds of an epoch.
        once ([`EpochTime`], *optional*): Time of encoding all rows once, into a cache.
        workers (`int`, *optional*): Decoding processes of each GPU that would keep up with it without a cache; None if
            it is not known.
        num_workers (`int`): Those that are started, no more than there are processors.
        kept (`float`): Share of the pixels of all readable files that an epoch trains on.
        seconds_per_pixel (`float`): Seconds of an epoch over these pixels: the objective.
        fill (`float`): Share of `max_tokens` that steps hold on average.
        dropped (mapping of `str` to `int`): Rows that an epoch does not train on, by reason, each as often as it would
            occur.
        num_dropped (`int`): Rows of those planned that are dropped, counted so too.
        num_rows (`int`): Rows that are planned, counted so too.
    """

    way: Way
    config: PlanConfig
    memory: MemoryPlan
    host: HostPlan
    disk: DiskPlan
    time: EpochTime
    once: EpochTime | None
    workers: int | None
    num_workers: int
    kept: float
    seconds_per_pixel: float
    fill: float
    dropped: Mapping[str, int]
    num_dropped: int
    num_rows: int

    @property
    def name(self) -> str:
        """Name of the way, and its tokens per step."""
        return f"{self.way.name}, {self.config.run.batches.token_limit:,} tokens"

    @property
    def share_dropped(self) -> float:
        """Share of all rows that an epoch does not train on."""
        return self.num_dropped / self.num_rows

    @property
    def objective(self) -> tuple[int, int]:
        """What is least in the best run: time per kept pixel to 1 % and, where equal, steps."""
        return round(100 * math.log(self.seconds_per_pixel)), self.time.steps


class Refused(NamedTuple):
    """A way of batching that is no run, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Runs that fit, the best first, and those that do not.

    Attributes:
        candidates (`tuple` of [`Candidate`]): Runs by the objective; last those that drop many rows.
        refused (`tuple` of [`Refused`]): Ways that do not fit or cannot be.
        source (`str`): What the times follow from.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    source: str

    @property
    def fewest(self) -> int:
        """Least number of rows that a candidate drops."""
        return min((candidate.num_dropped for candidate in self.candidates), default=0)

    def reason_against(self, candidate: Candidate) -> str:
        """Return why a candidate is not the first, and how many pixels it keeps where another keeps more."""
        best, fewest = self.candidates[0], self.fewest
        if not _keeps_enough(candidate, fewest):
            others = fewest / candidate.num_rows
            return f"drops {candidate.share_dropped:.1%} of the rows, and others {others:.1%}"
        ratio = candidate.seconds_per_pixel / best.seconds_per_pixel
        reasons = [] if candidate is best else [f"{ratio:.2f} times the time per kept pixel"]
        runs = [(run.kept, -rank) for rank, run in enumerate(self.candidates, start=1) if _keeps_enough(run, fewest)]
        kept, rank = max(runs)
        if kept >= MORE_PIXELS * candidate.kept:
            reasons.append(f"keeps {candidate.kept:.1%} of the pixels, and {-rank} keeps {kept:.1%}")
        return "; ".join(reasons)


def _keeps_enough(candidate: Candidate, fewest: int) -> bool:
    """Return whether a candidate drops at most [`MOST_DROPPED`] percent of the rows more than the best of them."""
    return 100 * (candidate.num_dropped - fewest) <= MOST_DROPPED * candidate.num_rows


class Suggester:
    """Plan candidates for a pipeline, rows and a machine.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        rows ([`DataRows`]): The rows.
        machine ([`MachineConfig`]): The machine.
        base ([`PlanConfig`]): Settings that all candidates share: what is trained, and in which precision.
        speed ([`Speed`]): Speed of a GPU.
        measured ([`StepSeconds`], *optional*): Seconds of training that a run measured, in place of this speed.
        num_workers (`int`): Decoding processes of each GPU, where it is not known how many keep up.
    """

    def __init__(
        self,
        components: Components,
        rows: DataRows,
        *,
        machine: MachineConfig,
        base: PlanConfig,
        speed: Speed,
        measured: StepSeconds | None = None,
        num_workers: int = 2,
    ) -> None:
        count = len(rows.sizes.frames)
        frames = appended_by(base.run.objective.condition, components.recipe.condition(KEYFRAMES))
        rows = replace(rows, conditions=rows.conditions.appending(frames))
        self.components, self.rows, self.machine = components, rows, machine
        self.speed, self.measured = speed, measured
        audio_fps = None if rows.conditions.audio is None else rows.conditions.audio.slowest
        self.base = changed(base, num_processes=machine.num_gpus, audio_fps=audio_fps)
        self.num_workers = num_workers
        self.text_tokens = components.recipe.text_tokens(base.run.max_sequence_length)
        self.times = epoch_occurrences(rows.weights, num_rows=count, seed=EpochConfig.seed)
        pixels = np.prod([column.astype(np.float64) for column in rows.sizes], axis=0) * rows.readable
        self.pixels = float((pixels * self.times).sum())

    def suggest(self, ways: Iterable[Way]) -> Suggestion:
        """Plan all ways, and rank them.

        Args:
            ways (iterable of [`Way`]): Ways of batching.

        Raises:
            BucketingError: If none of them fits; the message has the reason for each.
        """
        candidates: list[Candidate] = []
        refused = []
        for way in ways:
            targets = way.targets.showing(self.rows.conditions, spec=self.components.spec)
            way = way._replace(targets=targets)
            try:
                candidates += self._candidates_of(way)
            except BucketingError as error:
                refused.append(Refused(way.name, str(error)))
        if not candidates:
            reasons = "".join(f"\n- {way.name}: {way.reason}" for way in refused)
            raise BucketingError(f"No run can be suggested for `gpu_memory={self.machine.gpu_memory:g}` GiB:{reasons}")
        fewest = min(candidate.num_dropped for candidate in candidates)
        candidates.sort(key=lambda run: (not _keeps_enough(run, fewest), *run.objective))
        source = self.speed.source if self.measured is None else self.measured.source
        return Suggestion(candidates=tuple(candidates), refused=tuple(refused), source=source)

    def _candidates_of(self, way: Way) -> list[Candidate]:
        """Plan a way with the tokens of its largest sample per step, and with as many as memory holds.

        A few rows that fit no pack are rejected, as training rejects them, where no run would be possible otherwise.
        """
        if stacks(way.batching):
            return [*self._planned(way)]
        way = self._within_positions(way)
        try:
            return [*self._planned(way)]
        except BucketingError:
            largest = _few_largest(way.targets.all_tokens)
            if not largest.any():
                raise
            return [*self._planned(way.without(largest))]

    def _within_positions(self, way: Way) -> Way:
        """Return a way without the rows whose size the model cannot take, if they are few."""
        spec, model = self.components.spec, self.components.transformer.build()
        ids, first, of_row = np.unique(way.targets.bucket_id, return_index=True, return_inverse=True)
        sizes = (Size(*(int(side[row]) for side in way.targets.sizes)) for row in first)
        refused = [
            bucket_id > REJECTED_BUCKET and self.components.recipe.family.refusal(model, spec.grid(size)) is not None
            for bucket_id, size in zip(ids.tolist(), sizes, strict=True)
        ]
        beyond = np.array(refused, np.bool_)[of_row.ravel()]
        return way.without(beyond) if are_few(beyond, way.targets.num_tokens) else way

    def _planned(self, way: Way) -> Iterator[Candidate]:
        ids, where = np.unique(way.targets.num_tokens, return_index=True)
        if not len(ids) or ids[-1] == 0:
            rejected = count_rejections(way.targets.rejection, times=self.times).items()
            reasons = ", ".join(f"{round(count / self.rows.share):,} {reason}" for reason, count in rejected)
            raise BucketingError(f"no row can be trained: {reasons}.")
        sizes = [Size(*(int(side[row]) for side in way.targets.sizes)) for row in where[ids > 0]]
        config, plan = self._option(way, sizes[-1])
        flops = training_flops(self.components, config, sizes).total
        processes = self.machine.num_gpus // config.run.memory.context_parallel_degree
        for max_tokens in self._tokens_per_step(way, sizes[0], config, plan, processes=processes):
            yield self._plan(way, sizes[-1], changed(config, max_tokens=max_tokens), flops, processes=processes)

    def _tokens_per_step(
        self, way: Way, smallest: Size, config: PlanConfig, plan: MemoryPlan, *, processes: int
    ) -> list[int]:
        """Return the tokens of the largest sample, and as many as memory holds where that is noticeably more.

        Memory is a line through the smallest sample and the largest, which were traced for their operations.
        """
        text, length = self.text_tokens, plan.shape.length
        of_rows = way.targets.all_tokens + text * (way.targets.num_tokens > 0)
        of_epoch = float((of_rows * self.times).sum()) / self.rows.share
        at_most = min(of_epoch / (LEAST_STEPS * processes), MOST_TOKENS)
        small = self._memory(config, smallest)
        room = self.machine.gpu_memory * 2**30 / (1 + PLAN_ERROR)
        most = min(_tokens_that_fit(small, plan, room), at_most)
        if most >= _MORE_TOKENS * length:
            more = self._memory(changed(config, max_tokens=int(most)), plan.shape.size)
            if more.total > room:  # another moment of the step is its highest, and each token adds more to it
                most = min(_tokens_that_fit(plan, more, room), most)
        if stacks(way.batching):
            most -= most % length  # more hold no further sample of the largest bucket
        return [length, int(most)] if most >= _MORE_TOKENS * length else [length]

    def _memory(self, config: PlanConfig, size: Size) -> MemoryPlan:
        """Plan the memory of a step of samples of a size."""
        return plan_components(self.components, config, step_shape(self.components, config, size))

    def _option(self, way: Way, size: Size) -> tuple[PlanConfig, MemoryPlan]:
        """Return the first options with which a step of the largest sample fits, with shared samples where need be."""
        base, condition = changed(self.base, sample_size=[*size]), self.base.run.objective.condition
        most = self.rows.conditions.references.most(size, spec=self.components.spec)
        base = changed(base, reference_sizes=as_reference_sizes(most))
        if self.rows.total and self.machine.num_train_epochs > 1 and self.components.can_cache(condition):
            base = changed(base, cached="all")
        length = sample_shape(self.components, base, size).length
        base = changed(base, batching=way.batching, max_tokens=length)
        memory, degree = self.machine.gpu_memory * 2**30, 1
        tried: list[tuple[str, PlanConfig, MemoryPlan]] = []
        while degree <= self.machine.num_gpus and not self.machine.num_gpus % degree:
            if degree > 1:
                transformer = self.components.transformer.config
                check_model(degree, self.components.recipe, transformer, packed=not stacks(way.batching))
            for name, config, plan in iter_plans(self.components, changed(base, context_parallel_degree=degree)):
                if not self.rows.total and config.samples.cached != "nothing":
                    continue  # a stream has no cache
                tried.append((name, config, plan))
                if verdict_on(plan.total, memory) == "fits":
                    return config, plan
            degree *= 2
        name, config, plan = min(tried, key=lambda option: option[-1].total)
        if verdict_on(plan.total, memory) == "does not fit":
            raise BucketingError(
                f"a sample of {size} ({plan.shape.length:,} tokens) needs {format_bytes(plan.total)}; the least that "
                f"options make of it, those up to {name!r}"
            )
        return config, plan

    def _plan(self, way: Way, size: Size, config: PlanConfig, flops: BatchCost, *, processes: int) -> Candidate:
        """Plan an epoch of a way, its memory and its time."""
        limit = config.run.batches.token_limit
        assert limit is not None, "every candidate has tokens"
        plan, computed = self._epoch(way, config, processes=processes, weights=self.rows.weights)
        memory = self._memory(config, size)
        encoding = self.speed.seconds(encoding_flops(self.components, config, size))
        step = self.measured
        if step is None:
            copied = BatchCost(per_batch=self._copied(memory, config) / _COPIED_PER_SECOND)
            step = self.speed.of_step(memory.flops.hardware, blocks=memory.blocks).seconds(flops)
            step = step._replace(cost=step.cost.plus(copied))
        if config.samples.cached == "nothing":
            step = step._replace(cost=step.cost.plus(encoding.cost))
        time = epoch_time(plan, computed, step, rows_of_plan=self.rows.share)
        once = None
        if config.samples.cached == "all":
            rows, lengths = plan, computed
            if self.rows.weights is not None:  # a cache encodes each row once, however often it is trained on
                rows, lengths = self._epoch(way, config, processes=processes)
            more = self._cached_tokens(way.targets, config) - way.targets.all_tokens
            once = epoch_time(rows, lengths + more[rows.indices], encoding, rows_of_plan=self.rows.share)
        kept = kept_pixels(self.rows.sizes, way.targets)[plan.indices].sum()
        dropped = {**count_rejections(way.targets.rejection, times=self.times), **plan.drop_reasons}
        for counted in ("rejected", "weight"):  # by their reason; not asked for in this epoch
            dropped.pop(counted, None)
        workers = self._workers(plan, way.targets, time)
        num_workers = self.num_workers if once is not None else self._started(workers)
        cache = 0 if once is None else self._cache_bytes(way.targets, config)
        of_step = round(cache / (self.rows.total or 1) * memory.shape.samples)
        host = plan_host(memory, config, num_workers=num_workers, cached_bytes=of_step)
        if self.machine.cpu_memory is not None:
            check_host(host, cpu_memory=self.machine.cpu_memory)
        return Candidate(
            way=way,
            config=config,
            memory=memory,
            host=host,
            disk=plan_disk(memory, config, checkpoints=self.machine.checkpoints_total_limit, cache=cache),
            time=time,
            once=once,
            workers=workers,
            num_workers=num_workers,
            kept=float(kept / self.pixels),
            seconds_per_pixel=time.seconds * self.rows.share / float(kept),
            fill=float(computed.sum()) / (plan.num_batches * limit),
            dropped={reason: round(count / self.rows.share) for reason, count in dropped.items() if count},
            num_dropped=int(self.times.sum()) - len(plan.indices),
            num_rows=int(self.times.sum()),
        )

    def _epoch(
        self, way: Way, config: PlanConfig, *, processes: int, weights: FloatArray | None = None
    ) -> tuple[EpochPlan, IntArray]:
        """Return the plan of an epoch, and the tokens that are computed for each of its samples."""
        tokens, text = way.targets.all_tokens, self.text_tokens
        batches = config.run.batches
        if not stacks(way.batching):
            packs = PackPlanConfig(**asdict(batches.pack_limits))
            plan = plan_packs(tokens, packs, epoch=0, num_processes=processes, text_tokens=text, weights=weights)
            return plan, strip_tokens(tokens[plan.indices], batches.strip_length) + text
        spec = self.components.spec
        parts = bucket_parts(way.targets.bucket_id, self.rows.conditions, table=way.table, spec=spec)
        limits = BucketPlanConfig(**asdict(batches.bucket_limits))
        other_tokens = parts.condition_tokens + text
        sizes = limits.solved_sizes(parts.bucket_ids, table=way.table, spec=spec, text_tokens=other_tokens)
        by_part = dict(enumerate(sizes.tolist()))
        buckets = BucketPlanConfig(batch_size=by_part)
        plan = plan_buckets(parts.ids, buckets, epoch=0, num_processes=processes, weights=weights)
        return plan, tokens[plan.indices] + text

    def _copied(self, memory: MemoryPlan, config: PlanConfig) -> float:
        """Return the bytes that a step copies to and from a GPU: blocks twice, activations there and back."""
        traced = memory.experts[0]
        return 2 * (traced.frozen_bytes * config.run.memory.offload_blocks / memory.blocks + traced.waiting)

    def _workers(self, plan: EpochPlan, targets: Targets, time: EpochTime) -> int | None:
        """Return the decoding processes per GPU that take no longer than the GPU at its fastest; None if not known."""
        if self.rows.decoding is None or not time.seconds:
            return None
        frames, heights, widths = (side[plan.indices].astype(np.float64) for side in self.rows.sizes)
        pixels = (np.minimum(frames, targets.sizes.frames[plan.indices]) * heights * widths).sum() / self.rows.share
        return max(1, math.ceil(self.rows.decoding * pixels / 1e6 / (time.least * self.machine.num_gpus)))

    def _started(self, workers: int | None) -> int:
        """Return the decoding processes per GPU that a run starts: as many as keep up, and as there are processors."""
        most = max(1, (self.machine.cpus or 2**10) // self.machine.num_gpus)
        return min(workers or self.num_workers, most)

    def _cached_tokens(self, targets: Targets, config: PlanConfig) -> IntArray:
        """Return the tokens of each row that a cache holds, `(n,)`: with all frames that may be appended."""
        condition = config.run.objective.condition
        frames = None if condition is None else read_conditions(condition).appended_frames
        most = {None: 0, "first": 1, "last": 1, "all": sys.maxsize}[frames]
        held = self.rows.conditions.appending(AppendedFrames(most))
        return targets.showing(held, spec=self.components.spec).all_tokens

    def _cache_bytes(self, targets: Targets, config: PlanConfig) -> int:
        """Return the bytes of cached latents in float32 and of texts, whose tokens are counted by characters."""
        components, recipe = self.components, self.components.recipe
        transformer, family = components.transformer.build(), recipe.family
        vae = components.vae.config
        values = math.prod(components.spec.patch) * int(vae.get("latent_channels") or vae["z_dim"])
        conditions, sizes = self.rows.conditions, targets.assigned_sizes
        audio_tokens = sum(conditions.audio_tokens(sizes))
        pictures = self._cached_tokens(targets, config).sum() - audio_tokens
        read = conditions.appending(NO_FRAMES).text_tokens(sizes, spec=components.spec).sum()
        latents = 4 * values * (pictures - read)
        most = config.run.max_sequence_length or recipe.default_sequence_length
        length = min(most, 1 + (self.rows.caption_characters or 0) / _CHARACTERS_PER_TOKEN)
        width = family.text_dim(transformer)
        if self.base.samples.audio_fps is not None:
            width += family.audio_text_dim(transformer)
            latents += 4 * transformer.config.audio_in_channels * audio_tokens
        half = 4 if config.precision == "no" else 2
        texts = half * width * (length * (self.rows.total or 0) + read / self.rows.share)
        return round(latents / self.rows.share + texts)


def _few_largest(num_tokens: IntArray) -> BoolArray:
    """Return the rows with the most tokens that a run may reject, `(n,)`: as many as there may be at most."""
    ordered = np.sort(num_tokens[num_tokens > 0])
    limit = ordered[len(ordered) - 1 - (len(ordered) - 1) // FEW] if len(ordered) else 0
    return np.asarray(num_tokens > limit)


def _tokens_that_fit(fewer: MemoryPlan, more: MemoryPlan, memory: float) -> float:
    """Return the tokens at which the first phase reaches the memory, on lines through two plans."""
    between = more.shape.length - fewer.shape.length
    counts = [MOST_TOKENS * 1.0]
    for name, parts in more.phases.items():
        per_token = (parts.total - fewer.phases[name].total) / between if between else 0.0
        if per_token > 0:
            counts.append(more.shape.length + (memory - parts.total) / per_token)
    return min(counts) if between else float(more.shape.length)
