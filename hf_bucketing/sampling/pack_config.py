"""What a pack plan depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..cost import CostModel
from ..errors import PlanError

PackStrategy = Literal["sequential", "first_fit", "best_fit_decreasing"]
Balance = Literal["none", "cost"]
PackOversize = Literal["error", "own_pack", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlanConfig:
    """What a pack plan depends on, beside the rows, the epoch and the number of processes.

    Args:
        capacity (`int`): Tokens that one process takes in one step: the limit of memory.
        strategy (`str`): Samples come in random order.
            `"sequential"` fills one pack after the other, and starts the next when a sample does not fit.
            `"first_fit"` puts each into the oldest of `open_packs` open packs that has room; nearly keeps the order.
            `"best_fit_decreasing"` takes `window` samples at a time, the largest first, each into the pack that it
            fills best; the samples of the emptiest packs go on to the next window. The fullest packs.
        open_packs (`int`): For `"first_fit"`: packs held open at once; the fullest is closed when one more is needed.
        window (`int`): For `"best_fit_decreasing"`: samples at a time.
        max_samples (`int`, *optional*): Largest number of samples per pack.
        cost_model ([`CostModel`][hf_bucketing.cost.CostModel], *optional*): For `max_cost` and `balance`.
        max_cost (`float`, *optional*): Largest cost of a pack: the limit of time, in the units of the cost model.
            Packs filled to the same cost take the same time, if the capacity lets them get there.
        multiple (`int`): Each sample takes its tokens rounded up to this multiple, as a pack of strips does.
        balance (`"none"` or `"cost"`): Which packs meet in a step. `"none"`: random ones. `"cost"`: without gradient
            accumulation, packs of like cost among those of 64 steps, which are more alike than random ones (packs
            filled to one `max_cost` need no such choice); with it, the packs of each accumulation window are dealt to
            the processes, the most expensive first, each to the process with the least so far.
        accumulation_steps (`int`): Steps per optimizer step, for `balance="cost"`; the processes wait for each other
            once per window.
        oversize (`str`): A sample that exceeds `capacity` or `max_cost` by itself is an `"error"` that names it, gets
            an `"own_pack"` above the limit, or is a counted `"drop"`.
        seed (`int`): Not negative.

    Raises:
        PlanError: On a value below 1, an unknown name, or a cost option without a cost model.
    """

    capacity: int
    strategy: PackStrategy = "first_fit"
    open_packs: int = 16
    window: int = 4096
    max_samples: int | None = None
    cost_model: CostModel | None = None
    max_cost: float | None = None
    multiple: int = 1
    balance: Balance = "none"
    accumulation_steps: int = 1
    oversize: PackOversize = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        names = {"strategy": PackStrategy, "balance": Balance, "oversize": PackOversize}
        for name, choices in names.items():
            if getattr(self, name) not in get_args(choices):
                raise PlanError(
                    f"`{name}` must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}."
                )
        for name in ("capacity", "open_packs", "window", "max_samples", "multiple", "accumulation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"`{name}` must be at least 1, got {value}.")
        if self.max_cost is not None and not self.max_cost > 0:
            raise PlanError(f"max_cost must be above 0, got {self.max_cost}.")
        if self.cost_model is None and (self.max_cost is not None or self.balance == "cost"):
            raise PlanError('max_cost and balance="cost" need cost_model=, such as CostModel.for_transformer(width).')
