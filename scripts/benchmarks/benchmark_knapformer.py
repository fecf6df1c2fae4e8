r"""Compare KnapFormer's balancing of work over 32 GPUs with our packs, on its three mixes of data.

python scripts/benchmarks/benchmark_knapformer.py --output scripts/benchmarks/results/knapformer.json \
    --figure docs/figures/knapformer.png

Mixes, tokens and cost are those of KnapFormer (Zhang et al., arXiv 2508.06001; Kai-46/KnapFormer, read in its copy
carlosbrian459/KnapFormer, commits fdd4f60 and 5edbd04): `scripts/experiment_launcher.py` names the mixes,
`simulator/simulator_data.py` makes tokens of them, and `knapformer/sequence_balancer.py` has the cost,
24·tokens·width² + gamma·4·tokens²·width with a width of 3072; gamma, which they measure, is taken as 0.4. A code such
as g4b5i512f1s0 is 4 GPUs with 5 samples each of 512×512 pixels and 1 frame. Work is counted, not timed.
"""

import argparse
import heapq
import re
from typing import Any, NamedTuple

import numpy as np
from yardsticks import draw_bars, figure_at, finish, model_cost, yardstick_parser

from hf_bucketing import PackBatchSampler
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.plans import PackPlanConfig

GPUS, GROUP, MOST_TEXT = 32, 4, 392
COST = model_cost(3072, gamma=0.4)
MIXES = {
    "low": "g32b32i256f1s0",
    "mixed": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "joint": "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,"
    "g8b2i256f85s1,g4b1i512f85s1",
}
AS_DEALT, BY_SAMPLE, BY_PACKS = "as dealt", "longest first", "our packs"


class Step(NamedTuple):
    """Samples of one step as dealt: the GPU, the tokens and the tokens of text of each."""

    gpu: np.ndarray
    tokens: np.ndarray
    text: np.ndarray


def samples_of(mix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the GPU and the tokens of each sample of a step."""
    gpus, tokens, first = [], [], 0
    for code in mix.split(","):
        codes = re.fullmatch(r"g(\d+)b(\d+)i(\d+)f(\d+)s(\d)", code)
        assert codes is not None
        count, batch, side, frames, video = map(int, codes.groups())
        latent_frames = max(int(frames / 3.4), 1) if video else frames
        gpus += [first + gpu for gpu in range(count) for _ in range(batch)]
        tokens += [(side // 16) ** 2 * latent_frames] * (count * batch)
        first += count
    return np.array(gpus), np.array(tokens)


def draw_steps(mix: str, steps: int) -> list[Step]:
    rng = np.random.default_rng(0)
    gpu, tokens = samples_of(mix)
    return [Step(gpu, tokens, rng.integers(0, MOST_TEXT + 1, len(tokens))) for _ in range(steps)]


def longest_first(costs: np.ndarray, groups: int) -> np.ndarray:
    """Return the work of each group, if the most expensive sample is assigned first, each to the least busy group."""
    work = [(0.0, group) for group in range(groups)]
    for cost in np.sort(costs)[::-1].tolist():
        least, group = heapq.heappop(work)
        heapq.heappush(work, (least + cost, group))
    return np.array([done for done, _ in work])


def packed_step(step: Step, groups: int) -> np.ndarray:
    """Return the work of each group, if the samples of one step are packed into as many packs as groups.

    The limit of cost rises from the mean, or the largest sample's, until the packs fit into one step.
    """
    tokens = step.tokens + step.text
    costs = COST.cost(tokens)
    limit = max(costs.max(), costs.sum() / groups)
    while True:
        config = PackPlanConfig(
            max_tokens=int(tokens.sum()),
            max_cost=limit * (1 + 1e-9),
            cost_model=COST,
            strip_length=1,
            strategy="best_fit_decreasing",
        )
        plan = PackBatchSampler(step.tokens, config=config, text_tokens=step.text, num_processes=groups).plan()
        if plan.num_steps == 1:
            return COST.pack_cost(tokens[plan.indices], plan.offsets)
        limit *= 1.002


def packed_epoch(steps: list[Step], groups: int) -> tuple[np.ndarray, dict[str, float]]:
    """Return the work of each step and group of an epoch in which any samples may meet, and what packs hold."""
    tokens, text = (np.concatenate([getattr(step, name) for step in steps]) for name in ("tokens", "text"))
    whole = tokens + text
    costs = COST.cost(whole)
    limit = max(1.02 * costs.max(), costs.sum() / len(steps) / groups)
    config = PackPlanConfig(
        max_tokens=2 * max(int(whole.max()), int(whole.sum() / len(steps) / groups)),
        max_cost=limit,
        cost_model=COST,
        strip_length=1,
        strategy="best_fit_decreasing",
        balance="cost",
    )
    plan = PackBatchSampler(tokens, config=config, text_tokens=text, num_processes=groups).plan()
    work = COST.pack_cost(whole[plan.indices], plan.offsets).reshape(-1, groups)
    most = int(np.add.reduceat(whole[plan.indices], plan.offsets[:-1]).max())
    return work, {"samples per step": len(plan.indices) / plan.num_steps, "most tokens": most}


def dealt_work(step: Step) -> np.ndarray:
    return np.bincount(step.gpu, COST.cost(step.tokens + step.text), GPUS)


def row_of(work: np.ndarray, dealt: np.ndarray, *, mix: str, way: str, choice: str) -> dict[str, Any]:
    """Return the medians over the steps, the range from the 5th to the 95th percentile, and how much sooner all end.

    Args:
        work: Work of each step and group.
        dealt: Work of each step and GPU as dealt.
        mix: Name of the mix.
        way: Way of assigning samples to GPUs.
        choice: "yes" if any samples of the epoch may meet in a step.
    """
    largest, mean = work.max(axis=1), work.mean(axis=1)
    ratio, share = largest / work.min(axis=1), mean / largest
    low, high = np.percentile(ratio, [5, 95])
    return {
        "mix": mix,
        "way": way,
        "any samples meet": choice,
        "max ÷ min": float(np.median(ratio)),
        "5 to 95 %": f"{low:.3f}–{high:.3f}",
        "mean ÷ max": float(np.median(share)),
        "times shorter": float(dealt.max(axis=1).sum() * (dealt.shape[1] / work.shape[1]) / largest.sum()),
    }


def measure_mix(name: str, steps: list[Step]) -> list[dict[str, Any]]:
    tokens = [step.tokens + step.text for step in steps]
    samples = float(len(tokens[0]))
    most = int(max(np.bincount(step.gpu, step.tokens + step.text, GPUS).max() for step in steps))
    dealt = {"samples per step": samples, "most tokens": most}
    fixed = {"samples per step": samples, "most tokens": None}
    work = np.array([dealt_work(step) for step in steps])
    rows = [row_of(work, work, mix=name, way=AS_DEALT, choice="no") | dealt]
    for groups, size in ((GPUS, 1), (GPUS // GROUP, GROUP)):
        of = "single GPUs" if size == 1 else f"groups of {size}"
        assigned = np.array([longest_first(COST.cost(count), groups) for count in tokens])
        packed = np.array([packed_step(step, groups) for step in steps])
        free, held = packed_epoch(steps, groups)
        rows += [
            row_of(assigned, work, mix=name, way=f"{BY_SAMPLE}, {of}", choice="no") | fixed,
            row_of(packed, work, mix=name, way=f"{BY_PACKS}, {of}", choice="no") | fixed,
            row_of(free, work, mix=name, way=f"{BY_PACKS}, {of}", choice="yes") | held,
        ]
    return rows


def make_parser() -> FlagParser:
    return yardstick_parser(__doc__, samples=200, unit="Steps of each mix")


def main(args: argparse.Namespace) -> None:
    rows = [row for name, mix in MIXES.items() for row in measure_mix(name, draw_steps(mix, args.samples))]
    with figure_at(args.figure, rows=1, height=6) as axes:
        for axis in axes:
            kinds = dict.fromkeys((row["way"], row["any samples meet"]) for row in rows)
            series = {
                f"{way}{', any samples meet' if choice == 'yes' else ''}": [
                    row["mean ÷ max"] for row in rows if (row["way"], row["any samples meet"]) == (way, choice)
                ]
                for way, choice in kinds
                if "groups" not in way
            }
            draw_bars(axis, list(MIXES), series, title="Share of the GPUs' time that is work", text="{:.1%}".format)
    finish({"steps": args.samples, "gpus": GPUS, "rows": rows}, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
