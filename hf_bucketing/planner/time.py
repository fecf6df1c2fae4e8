"""Time of a run before it starts: operations of its steps, the speed of its GPUs, and the steps of a planned epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.cost import CostFit, CostModel
from ..buckets.sizes import Size
from ..plans.epoch import EpochPlan
from ..settings import changed
from ..units import format_seconds
from .components import Components
from .encoding import encode_media, encode_texts
from .gpus import MEASURED, TimeConfig
from .memory import mean_flops, sample_shape, trace_experts
from .settings import PlanConfig

_TRACED_SIZES = 3

SLOWER_IN_FLOAT32 = 2.0
"""Factor of the time of the VAE, which has float32: tensor cores multiply TF32 at half the rate of bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """Cost of batches, in operations or seconds, of samples that attend to themselves alone.

    Args:
        per_batch (`float`): Cost of a batch whatever it holds.
        per_sample (`float`): Cost of a sample whatever its tokens, such as its text.
        linear (`float`): Cost of a token.
        quadratic (`float`): Cost of a pair of tokens of a sample.
    """

    per_batch: float = 0.0
    per_sample: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    def of_samples(self, lengths: npt.ArrayLike) -> FloatArray:
        """Return the cost of each sample by its tokens, `(n,)`, without that of its batch."""
        tokens = np.asarray(lengths, np.float64)
        return self.per_sample + self.linear * tokens + self.quadratic * tokens**2

    def of_batches(self, lengths: npt.ArrayLike, offsets: IntArray) -> FloatArray:
        """Return the cost of each batch; arguments as those of [`CostModel.pack_cost`][hf_bucketing.CostModel]."""
        samples = self.of_samples(lengths)
        return self.per_batch + (np.add.reduceat(samples, offsets[:-1]) if len(samples) else np.zeros(0))

    def times(self, factor: float) -> BatchCost:
        """Return this cost times a factor."""
        return BatchCost(
            per_batch=factor * self.per_batch,
            per_sample=factor * self.per_sample,
            linear=factor * self.linear,
            quadratic=factor * self.quadratic,
        )

    def plus(self, other: BatchCost) -> BatchCost:
        """Return this cost and the other."""
        return BatchCost(
            per_batch=self.per_batch + other.per_batch,
            per_sample=self.per_sample + other.per_sample,
            linear=self.linear + other.linear,
            quadratic=self.quadratic + other.quadratic,
        )

    @property
    def model(self) -> CostModel:
        """The part that plans balance: tokens and their pairs."""
        return CostModel(linear=self.linear, quadratic=self.quadratic)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlops:
    """Floating-point operations of training on samples, a multiply-add as two, by what they serve.

    Args:
        model ([`BatchCost`]): Forward and backward pass: gradients of activations, and of weights that are trained.
        recomputed ([`BatchCost`]): What the backward pass computes again: checkpointed blocks, scores of attention.
        base ([`BatchCost`]): Forward passes without gradients whose predictions are targets.
    """

    model: BatchCost
    recomputed: BatchCost
    base: BatchCost

    @property
    def total(self) -> BatchCost:
        """All operations of a step."""
        return self.model.plus(self.recomputed).plus(self.base)


def training_flops(components: Components, config: PlanConfig, sizes: Sequence[Size]) -> TrainingFlops:
    """Return the floating-point operations of training on a sample, by its tokens and those of text in its sequence.

    They are counted in the trace that plans the memory, at three of the sizes: of the fewest tokens, of the most, and
    between. In a transformer whose tokens attend to their whole sample, operations are a polynomial of the second
    degree in the tokens, which three sizes determine; in others, such as Latte, it is a curve through the three. Of
    processes that share samples (`context_parallel_degree`), each takes its share; of two experts, which take turns,
    it is the mean.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): What is planned for.
        sizes (sequence of [`Size`]): Sizes of samples in pixels, at least one.

    Raises:
        BucketingError: If the model cannot take such samples.
    """
    degree = config.run.memory.context_parallel_degree
    alone = changed(config, context_parallel_degree=1)
    by_tokens = {components.spec.num_tokens(size): size for size in sizes}
    lengths, counts = [], []
    for tokens in _spread(sorted(by_tokens)):
        shape = sample_shape(components, config, by_tokens[tokens])
        lengths.append(shape.length)
        flops = mean_flops(trace_experts(components, alone, shape))
        counts.append((flops.forward + flops.backward, flops.recomputed, flops.base))
    scale = max(lengths)  # so that the powers are of one order
    powers = np.vander(np.array(lengths) / scale, len(lengths), increasing=True)
    solved = np.linalg.solve(powers, np.array(counts)).T / float(scale) ** np.arange(len(lengths))
    model, recomputed, base = (
        BatchCost(per_sample=per_sample, linear=linear, quadratic=quadratic).times(1 / degree)
        for per_sample, linear, quadratic in ((*row, 0.0, 0.0)[:3] for row in solved.tolist())
    )
    return TrainingFlops(model=model, recomputed=recomputed, base=base)


def _spread(tokens: Sequence[int]) -> list[int]:
    """Return at most three numbers of tokens: the least, the most, and the one nearest to their middle."""
    middle = (tokens[0] + tokens[-1]) / 2
    inner = sorted(tokens[1:-1], key=lambda number: abs(number - middle))[: _TRACED_SIZES - 2]
    return sorted({tokens[0], *inner, tokens[-1]})


def encoding_flops(components: Components, config: PlanConfig, size: Size) -> BatchCost:
    """Return the operations of encoding a sample, in those of bf16 that take as long.

    The VAE convolves, so that its operations grow with the pixels, and thereby with the tokens.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): What is planned for.
        size ([`Size`]): A size of samples, in pixels, at which the VAE is traced.
    """
    media = encode_media(components, config, size=size, samples=1).flops
    pictures = components.recipe.encoder_pictures(config.samples.references())
    texts = encode_texts(components, config, samples=1, pictures=pictures).flops
    return BatchCost(per_sample=texts, linear=SLOWER_IN_FLOAT32 * media / components.spec.num_tokens(size))


class Speed(NamedTuple):
    """Range of operations per second of a GPU in training.

    Attributes:
        slowest (`float`): Fewest operations per second.
        fastest (`float`): Most operations per second.
        source (`str`): What they follow from, for people.
        by_step (`tuple` of `(float, Speed)`): Speeds of larger and larger steps, each with the operations of a step in
            a block from which on it holds; none where all steps have this one.
    """

    slowest: float
    fastest: float
    source: str
    by_step: tuple[tuple[float, Speed], ...] = ()

    @classmethod
    def of(cls, config: TimeConfig, *, gpu_memory: float) -> Speed:
        """Return the speed of the GPU that the settings name, or of the usual one of this memory in GiB."""
        peak, origin = config.peak_of(gpu_memory)

        def reaching(least: float, most: float, of: str = "") -> Speed:
            source = f"{least:.0%} to {most:.0%}{of} of the {peak:g} TFLOP/s of {origin}"
            return cls(least * peak * 1e12, most * peak * 1e12, source)

        if config.utilisation is not None:
            least, most = config.utilisation
            return reaching(least, most)
        overall = reaching(
            min(shares.least for shares in MEASURED),
            max(shares.most for shares in MEASURED),
            ", the more the larger the step,",
        )
        by_step = ((1e12 * shares.block_tflop, reaching(shares.least, shares.most)) for shares in MEASURED)
        return overall._replace(by_step=tuple(by_step))

    def of_step(self, flops: float, *, blocks: int) -> Speed:
        """Return the speed of steps by the operations of one; small ones reach less, as they wait for Python.

        Args:
            flops (`float`): Operations of a step, recomputation included.
            blocks (`int`): Blocks of the transformer.
        """
        return next((speed for least, speed in reversed(self.by_step) if flops >= least * blocks), self)

    def seconds(self, flops: BatchCost) -> StepSeconds:
        """Return the seconds that operations take."""
        middle = math.sqrt(self.slowest * self.fastest)
        return StepSeconds(flops.times(1 / middle), middle / self.fastest, middle / self.slowest, self.source)


class StepSeconds(NamedTuple):
    """Seconds of batches, and how far they may be off.

    Attributes:
        cost ([`BatchCost`]): Seconds as they are most likely.
        least (`float`): Factor of the least that they may be.
        most (`float`): Factor of the most.
        source (`str`): What they follow from, for people.
    """

    cost: BatchCost
    least: float
    most: float
    source: str

    @classmethod
    def measured(cls, fit: CostFit) -> StepSeconds:
        """Return those that a run measured; they are off by its residual."""
        cost = BatchCost(per_batch=fit.per_batch, linear=fit.linear, quadratic=fit.quadratic)
        return cls(cost, 1 - min(fit.residual, 1.0), 1 + fit.residual, f"{fit.num_steps} measured steps")

    def describe(self, seconds: float) -> str:
        """Return a time as a text, with the least and the most that it may be."""
        least, most = (format_seconds(factor * seconds) for factor in (self.least, self.most))
        return f"{format_seconds(seconds)} ({least} to {most})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTime:
    """Time of the steps of an epoch, each of which lasts as long as its slowest process.

    Attributes:
        steps (`int`): Steps.
        seconds (`float`): Seconds of all steps.
        least (`float`): Seconds at least.
        most (`float`): Seconds at most.
        p5 (`float`): Seconds that 5 % of the steps do not exceed.
        median (`float`): Seconds of the median step.
        p95 (`float`): Seconds that 95 % of the steps do not exceed.
    """

    steps: int
    seconds: float
    least: float
    most: float
    p5: float
    median: float
    p95: float

    def price(self, per_hour: float, *, num_gpus: int) -> float:
        """Return the price of the epoch by that of an hour of one GPU."""
        return self.seconds / 3600 * per_hour * num_gpus


def epoch_time(plan: EpochPlan, lengths: IntArray, seconds: StepSeconds, *, rows_of_plan: float = 1.0) -> EpochTime:
    """Return the time of a planned epoch.

    Args:
        plan ([`EpochPlan`][hf_bucketing.plans.EpochPlan]): All batches of all processes.
        lengths (array of `int`, shape `(n,)`): Tokens that are computed for each sample of the plan, in its order.
        seconds ([`StepSeconds`]): Seconds of batches.
        rows_of_plan (`float`): Share of the rows of a data set that the plan holds; below 1 where rows were sampled.
    """
    by_step = seconds.cost.of_batches(lengths, plan.offsets).reshape(plan.num_steps, plan.num_processes).max(axis=1)
    p5, median, p95 = np.percentile(by_step, [5, 50, 95]).tolist() if len(by_step) else (0.0, 0.0, 0.0)
    total = float(by_step.sum()) / rows_of_plan
    return EpochTime(
        steps=math.ceil(plan.num_steps / rows_of_plan),
        seconds=total,
        least=seconds.least * total,
        most=seconds.most * total,
        p5=p5,
        median=median,
        p95=p95,
    )
