"""Optimizers by name, in groups of a model's trained weights, with their learning rate and their bytes."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.optimization import get_scheduler

from ..errors import BucketingError, did_you_mean
from .settings import ADAMW, MUON, OptimizerConfig

_SMALLEST_RATE = 0.1
"""Learning rate below which an optimizer that estimates its own hardly moves."""


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer.

    Raises:
        BucketingError: If it cannot be imported, or is no optimizer of torch.
    """
    module, _, name = ADAMW.get(config.optimizer, config.optimizer).partition(":")
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        members = vars(importlib.import_module(module))
    except ImportError as error:
        install = '"hf_bucketing[8bit]"' if package == "bitsandbytes" else package.replace("_", "-")
        raise BucketingError(
            f'`optimizer="{config.optimizer}"` needs {module} ({error}): pip install {install}, or use '
            '`optimizer="adamw"`.'
        ) from error
    kinds = [
        key for key, kind in members.items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    ]
    if name not in kinds:
        raise BucketingError(
            f'`optimizer="{config.optimizer}"`: {module} has no optimizer {name}{did_you_mean(name, kinds)}'
        )
    kind: type[torch.optim.Optimizer] = members[name]
    return kind


def switches_modes(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether weights differ between training and evaluation, as those of schedule-free optimizers do."""
    return hasattr(kind, "train") and hasattr(kind, "eval")


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise BucketingError for arguments, learning rates and schedules that an optimizer's class does not take."""
    kind = optimizer_class(config)
    parameters = inspect.signature(kind.__init__).parameters
    _check_arguments(config, parameters)
    if inspect.signature(kind.step).parameters["closure"].default is inspect.Parameter.empty:
        raise BucketingError(f"{config.optimizer} computes the loss several times per step; use another optimizer.")
    if switches_modes(kind) and config.lr_scheduler != "constant":
        raise BucketingError(
            f'{config.optimizer} replaces the schedule: use `lr_scheduler="constant"`, and warm up with '
            "`optimizer_args` if it has such an argument (warmup_steps=100)."
        )
    if "d0" not in parameters:
        return
    if config.learning_rate < _SMALLEST_RATE:
        raise BucketingError(
            f"{config.optimizer} estimates the learning rate, and multiplies it by `learning_rate="
            f"{config.learning_rate:g}`; give `learning_rate=1`."
        )
    if config.lora_plus_ratio is not None:
        raise BucketingError(
            f"Omit `lora_plus_ratio`: {config.optimizer} estimates one learning rate for all weights."
        )


def _check_arguments(config: OptimizerConfig, parameters: Any) -> None:
    """Raise BucketingError for arguments that a constructor does not have, or that are settings of their own."""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = {**parameters, **config.arguments()}
    known = [name for name in parameters if name not in ("self", "params", "lr")]
    for name in config.arguments():
        if name not in known:
            hint = "; give `learning_rate`." if name == "lr" else did_you_mean(name, known)
            raise BucketingError(f"{config.optimizer} has no argument {name} for `optimizer_args`{hint}")


_IN_BLOCK = re.compile(r"\w+\.\d+\.")
"""Start of the names of weights that belong to a block of a transformer."""

_SIDE = 512
"""Rows and columns of the weight on which bytes are measured: 8-bit optimizers keep smaller ones in 32 bits."""


def make_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, *, others: Iterable[torch.nn.Module] = ()
) -> torch.optim.Optimizer:
    """Return an optimizer over the parameters of a model, and of others beside it, that need a gradient.

    Groups differ in their learning rate, with LoRA+, and in their weight decay: parameters of fewer than two
    dimensions have none. With Muon, which takes matrices of hidden layers, AdamW takes all weights that are outside
    the blocks or no matrices, as torch advises. Each of several models has an optimizer of its own, which takes a
    step when its model has gradients: what Prodigy estimates and schedule-free averages is of these steps alone.

    Raises:
        BucketingError: If the optimizer is not installed, or no parameter of a model needs a gradient.
    """
    optimizers = [optimizer for trained in (model, *others) for optimizer in _make_optimizers(trained, config)]
    return optimizers[0] if len(optimizers) == 1 else _Joined(optimizers)


def _make_optimizers(model: torch.nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise BucketingError("No parameter of the transformer needs a gradient; nothing would be trained.")
    arguments = {"lr": config.learning_rate, **config.arguments()}
    if config.optimizer != MUON:
        return [optimizer_class(config)(_groups(named, config), **arguments)]
    # With this factor of Muon's steps, learning rates found for AdamW fit both (Liu et al., 2025).
    arguments = {"adjust_lr_fn": "match_rms_adamw", **arguments}
    hidden = {name: value for name, value in named.items() if value.ndim == 2 and _IN_BLOCK.match(name)}
    others = {name: value for name, value in named.items() if name not in hidden}
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(torch.optim.Muon(_groups(hidden, config), **arguments))
    if others:
        optimizers.append(torch.optim.AdamW(_groups(others, config), lr=config.learning_rate, **config.adam()))
    return optimizers


def _groups(named: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the groups of parameters, each with the ratio of its learning rate to the run's."""
    groups: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in named.items():
        ratio = (config.lora_plus_ratio or 1.0) if ".lora_B." in name else 1.0
        groups.setdefault((ratio, parameter.ndim >= 2), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": config.learning_rate * ratio,
            "lr_ratio": ratio,
            **({} if decays else {"weight_decay": 0.0}),
        }
        for (ratio, decays), parameters in groups.items()
    ]


class _Joined(torch.optim.Optimizer):
    """Several optimizers, each of its groups, as one whose state is saved and loaded whole."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def _with_groups(self) -> Iterator[torch.optim.Optimizer]:
        """Iterate over the optimizers, each with its part of what is here: others replace groups and state."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state
            yield optimizer

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step with each optimizer whose parameters have gradients."""
        for optimizer in self._with_groups():
            if any(value.grad is not None for group in optimizer.param_groups for value in group["params"]):
                optimizer.step()

    def train(self) -> None:
        """Put the weights for training into the models."""
        for optimizer in self._with_groups():
            set_training(optimizer)

    def eval(self) -> None:
        """Put the weights to evaluate into the models."""
        for optimizer in self._with_groups():
            if switches_modes(type(optimizer)):
                optimizer.eval()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the part of each optimizer by its own method, as those in 8 bits keep the precision of their state."""
        saved = iter(state_dict["param_groups"])
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in self._with_groups():
            groups = [next(saved) for _ in optimizer.param_groups]
            names = {name for group in groups for name in group["params"]}
            state_of_part = {name: values for name, values in state_dict["state"].items() if name in names}
            optimizer.load_state_dict({**state_dict, "state": state_of_part, "param_groups": groups})
            state.update(optimizer.state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = state


def make_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, num_training_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate schedule over a number of optimizer steps."""
    return get_scheduler(
        config.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=num_training_steps,
    )


def apply_settings(config: OptimizerConfig, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Give a schedule and its optimizer their present settings, which loading a checkpoint has replaced.

    The learning rate becomes the present one times the group's ratio and the schedule's factor at the current step.
    Arguments of an optimizer's class stay as they were.
    """
    groups = schedule.optimizer.param_groups
    for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = config.learning_rate * group["lr_ratio"]
        rate = group["initial_lr"] * factor(schedule.last_epoch)
        if isinstance(group["lr"], torch.Tensor):  # torchao's optimizers are compiled with it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        if config.optimizer in ADAMW or (config.optimizer == MUON and "betas" in group):
            decays = any(parameter.ndim >= 2 for parameter in group["params"])
            group.update({**config.adam(), **({} if decays else {"weight_decay": 0.0})})
    schedule.base_lrs = [group["initial_lr"] for group in groups]
    schedule._last_lr = [float(group["lr"]) for group in groups]  # the values that get_last_lr() returns


def omits_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can omit an update by a flag on its device, as torch's fused ones can."""
    return all(getattr(part, "_step_supports_amp_scaling", False) for part in _parts_of(optimizer))


@contextmanager
def omitted_if(found_inf: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make steps of such an optimizer inside a `with` block change nothing if a flag on its device is 1.

    The flag has the name and the form that torch's gradient scaler gives it: one number in float32.
    """
    for part in _parts_of(optimizer):
        part.grad_scale, part.found_inf = None, found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for part in _parts_of(optimizer):
            del part.grad_scale, part.found_inf  # type: ignore[attr-defined]


def _parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    return optimizer.optimizers if isinstance(optimizer, _Joined) else [optimizer]


def set_training(optimizer: Any) -> None:
    """Put the weights for training into a model whose optimizer tells them from those to evaluate."""
    if switches_modes(type(optimizer)):
        optimizer.train()


def state_bytes(config: OptimizerConfig, *, dtype: torch.dtype) -> float:
    """Return the bytes that an optimizer keeps per trained number, measured by a step on a matrix of a block.

    Args:
        config ([`OptimizerConfig`]): Settings.
        dtype (`torch.dtype`): Precision of what is trained.

    Raises:
        BucketingError: If the optimizer is not installed.

    Example:
        >>> state_bytes(OptimizerConfig(), dtype=torch.float32)
        8.0
    """
    with torch.random.fork_rng(devices=[]):
        layer = torch.nn.Linear(_SIDE, _SIDE, bias=False, dtype=dtype)
        optimizer = make_optimizer(torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([layer])}), config)
        set_training(optimizer)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    tensors = [value for value in _tensors_in(optimizer.state[layer.weight].values()) if value.ndim]
    return sum(tensor.nbytes for tensor in tensors) / layer.weight.numel()


def _tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Iterate over tensors, the parts of quantised ones, and those in containers."""
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            yield from _tensors_in(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from _tensors_in(value.values() if isinstance(value, dict) else value)
