"""Render several samples together: calls of a pipeline run side by side, and their forwards as one pack.

Each call is the stock pipeline's own, with its own scheduler, guidance and noise, in a thread of its own; one thread
runs at a time. Where a call comes to the transformer it waits, and when all wait, their forwards run as packs.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from ..errors import PackingError, quoted
from ..packing.batch import Rows, has_latent_size
from ..packing.family import output_of
from ..packing.forward import packed_forward
from ..packing.names import Grid
from ..packing.pack import Packing
from ..packing.texts import apply_text_mask
from ..plans.packs import PackPlanConfig
from .enable import disable_packing, enable_packing, packing_disabled
from .experts import transformers_of
from .recipe import Recipe

logger = logging.getLogger(__name__)

_CHECKED = 2
"""First forwards of each transformer in a call that also run alone and are compared: with and without a condition."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # some models compute positions in float32
_HALF_TOLERANCE = 5e-2
"""Largest difference to the forwards alone, relative to their largest value, if that exceeds 1."""

_SIMPLE = (bool, int, float, str)


class Call(NamedTuple):
    """One call of a pipeline.

    Attributes:
        grid (`(t, h, w)`): Token grid of what it renders.
        run (callable): Takes a recipe, whose pipeline it calls, and returns the result.
    """

    grid: Grid
    run: Callable[[Recipe], Any]


def render_together(
    recipe: Recipe,
    calls: Sequence[Call],
    *,
    strip_length: int = PackPlanConfig.strip_length,
    backend: str = "auto",
    max_tokens: int | None = None,
) -> list[Any]:
    """Run calls of a pipeline together, the forwards of its transformers as packs.

    Results are those of the calls one by one, but for the rounding of attention. All transformers of the pipeline run
    packs, those that a run does not train included. The first forwards of each call are
    also run alone; where a pipeline passes more than packs hold, or results differ, all forwards run alone, and a
    warning says so.

    Args:
        recipe ([`Recipe`]): Its transformers are not packed, and are in evaluation mode.
        calls (sequence of [`Call`]): What to run.
        strip_length (`int`): Tokens per strip, see [`enable_packing`].
        backend (`str`): Backend of attention, see [`enable_packing`].
        max_tokens (`int`, *optional*): Most tokens of a pack, those of texts not counted; by default no limit. A
            larger sample has a pack of its own.

    Returns:
        `list`: What each call returned.

    Raises:
        Exception: Whatever a call raises; the others end too.
    """
    forwards = {
        name: _Forwards(recipe.pipeline_class, transformer, strip_length, backend, max_tokens)
        for name, transformer in _transformers(recipe).items()
    }
    workers = [_Worker(recipe, call) for call in calls]
    try:
        waiting = [worker for worker in workers if worker.go_on()]
        while waiting:
            requests = sorted((worker.request for worker in waiting), key=lambda request: request.name)
            for name, same in groupby(requests, key=lambda request: request.name):
                forwards[name].run(list(same))
            waiting = [worker for worker in waiting if worker.go_on()]
    finally:
        for worker in workers:
            worker.end()
        for answering in forwards.values():
            answering.end()
    return [worker.result for worker in workers]


@dataclass(kw_only=True, eq=False)
class _Request:
    """A forward that a call waits for: the component, its arguments, and the result that answers it."""

    name: str
    grid: Grid
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None

    def answer(self, output: torch.Tensor) -> None:
        """Answer with an output as the forward returns it."""
        as_dict = self.kwargs.get("return_dict", True)
        self.result = Transformer2DModelOutput(sample=output) if as_dict else (output,)


class _Ended(BaseException):
    """Ends the thread of a call that nobody waits for any more."""


class _Worker:
    """A call in a thread of its own, which runs while [`go_on`] waits for it, and else waits for [`go_on`]."""

    def __init__(self, recipe: Recipe, call: Call) -> None:
        self.call = call
        self.request: _Request
        self.result: Any = None
        self._recipe = _with_waiting(recipe, self._wait)
        self._numbers: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._ended = False
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self) -> bool:
        """Let the call run until it waits for a forward; return False if it came to its end instead.

        Raises:
            BaseException: What the call raised.
        """
        self._may_run.release()
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error
        return not self._ended

    def end(self) -> None:
        """End the thread, wherever it waits."""
        if not self._ended:
            self._ended = True
            self._may_run.release()
        self._thread.join()

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self._ended:
                self.result = self.call.run(self._recipe)
        except _Ended:
            pass
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        self._ended = True
        self._has_stopped.release()

    def _wait(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.request = _Request(name=name, grid=self.call.grid, number=self._numbers[name], args=args, kwargs=kwargs)
        self._numbers[name] += 1
        self._has_stopped.release()
        self._may_run.acquire()
        if self._ended:
            raise _Ended
        return self.request.result


class _Waiting:
    """Stands for a transformer in the pipeline of a call: its forward waits, all else is the transformer's own."""

    def __init__(self, transformer: Any, forward: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._transformer = transformer
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(args, kwargs)


def _transformers(recipe: Recipe) -> dict[str, torch.nn.Module]:
    """Return the transformers of a recipe's pipeline by their names in it."""
    components = recipe.pipeline.components
    named = {name: components.get(name) for name in (*transformers_of("both"), recipe.trained)}
    return {name: component for name, component in named.items() if isinstance(component, torch.nn.Module)}


def _with_waiting(recipe: Recipe, wait: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> Recipe:
    """Return a recipe with a pipeline of the same components, schedulers of its own, and waiting transformers."""
    pipeline = copy.copy(recipe.pipeline)
    pipeline.__dict__ = dict(recipe.pipeline.__dict__)
    for name, component in recipe.pipeline.components.items():
        if name.endswith(("scheduler", "guider")):
            pipeline.__dict__[name] = copy.deepcopy(component)
    for name, transformer in _transformers(recipe).items():

        def forward(args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> Any:
            return wait(name, args, kwargs)

        # not by setattr, which would write the class into the pipeline's configuration
        pipeline.__dict__[name] = _Waiting(transformer, forward)
    return replace(recipe, pipeline=pipeline)


class _Forwards:
    """Answer the requests to one transformer, as packs while these give what the forwards alone give."""

    def __init__(
        self, pipeline_class: str, transformer: Any, strip_length: int, backend: str, max_tokens: int | None
    ) -> None:
        self.pipeline_class = pipeline_class
        self.transformer = transformer
        self.max_tokens = max_tokens
        self.packing: Packing | None = None
        try:
            self.packing = enable_packing(transformer, strip_length=strip_length, backend=backend)
        except PackingError as error:
            self._warn(error)

    def end(self) -> None:
        """Leave the transformer as it was."""
        if self.packing is not None:
            disable_packing(self.transformer)
            self.packing = None

    @torch.no_grad()
    def run(self, requests: Sequence[_Request]) -> None:
        """Run the forwards that calls wait for."""
        if self.packing is not None:
            try:
                self._run_packed(requests, self.packing)
            except PackingError as error:
                self._warn(error)
                self.end()
            else:
                return
        for request in requests:
            request.result = self._alone(request)

    def _run_packed(self, requests: Sequence[_Request], packing: Packing) -> None:
        family, calls = packing.family, [_rows_of_call(packing, request) for request in requests]
        outputs = iter(self._packed(calls, packing))
        for request, rows in zip(requests, calls, strict=True):
            found = torch.stack([next(outputs) for _ in rows.latents])
            output = family.arranged([-found if family.negates else found], rows.patch)
            if request.number < _CHECKED:
                _check_equal(output, self._alone(request))
            request.answer(output)

    def _packed(self, calls: Sequence[Rows], packing: Packing) -> list[torch.Tensor]:
        """Return the output of each sample of some calls, `(C_out, f, h, w)`."""
        rule = packing.family.text.padding
        texts = [apply_text_mask(rule, rows.text, mask=rows.text_mask) for rows in calls]
        samples = [
            (rows, row, words[row]) for rows, words in zip(calls, texts, strict=True) for row in range(len(words))
        ]
        outputs: list[torch.Tensor] = []
        for pack in self._split(samples):
            conditioning = {}
            for name, first in pack[0][0].conditioning.items():
                values = [rows.conditioning[name][row] for rows, row, _ in pack]
                conditioning[name] = values if has_latent_size(first) else torch.stack(values)
            timesteps = [rows.timesteps[row] for rows, row, _ in pack]
            batch = packing.pack(
                [rows.latents[row] for rows, row, _ in pack],
                timesteps=torch.stack(timesteps) if timesteps[0].ndim == 0 else timesteps,
                text=[words for _, _, words in pack],
                conditioning=conditioning,
            )
            outputs += batch.unpack(packed_forward(self.transformer, batch))
        return outputs

    def _split(self, samples: Sequence[tuple[Rows, int, torch.Tensor]]) -> list[list[tuple[Rows, int, torch.Tensor]]]:
        """Split samples, in order, into packs of at most `max_tokens`."""
        packs: list[list[tuple[Rows, int, torch.Tensor]]] = [[]]
        taken = 0
        for sample in samples:
            t, h, w = sample[0].grid
            if packs[-1] and self.max_tokens is not None and taken + t * h * w > self.max_tokens:
                packs.append([])
                taken = 0
            packs[-1].append(sample)
            taken += t * h * w
        return packs

    def _alone(self, request: _Request) -> Any:
        with nullcontext() if self.packing is None else packing_disabled(self.transformer):
            return self.transformer(*request.args, **request.kwargs)

    def _warn(self, error: PackingError) -> None:
        logger.warning(f"A {self.pipeline_class} renders one by one: {error}")


def _check_equal(packed: torch.Tensor, result: Any) -> None:
    """Raise PackingError unless a pack gave what a forward returns alone, up to rounding."""
    if len(result) > 1:
        raise PackingError(f"its transformer returns {len(result)} outputs, of which packs make the first.")
    alone = output_of(result if isinstance(result, tuple) else result.to_tuple())
    if packed.shape != alone.shape:
        raise PackingError(f"a pack gives its forward {tuple(packed.shape)} instead of {tuple(alone.shape)}.")
    difference = float((packed - alone).abs().max()) / max(1.0, float(alone.abs().max()))
    if not difference <= _TOLERANCE.get(alone.dtype, _HALF_TOLERANCE):
        raise PackingError(f"a pack changes its forward by {difference:.1e}: the pipeline passes it something else.")


def _rows_of_call(packing: Packing, request: _Request) -> Rows:
    """Return the samples of a pipeline's call of its transformer.

    Raises:
        PackingError: If it passes something that packs do not hold.
    """
    family, transformer = packing.family, packing.transformer
    arguments = signature(transformer.forward).bind(*request.args, **request.kwargs).arguments
    if missing := sorted({"hidden_states", "encoder_hidden_states", "timestep"} - arguments.keys()):
        raise PackingError(f"the pipeline passes no {quoted(missing)}, which packs are made of.")
    hidden, text, timestep = (arguments[name] for name in ("hidden_states", "encoder_hidden_states", "timestep"))
    count, text = len(hidden), text.flatten(2)  # some pipelines pass layers of the text encoder apart
    if family.latents_as == "tokens" and hidden.shape[1] != math.prod(request.grid):
        raise PackingError(f"the pipeline passes {hidden.shape[1]} tokens where its size has {request.grid}.")
    rows = Rows(
        latents=family.laid_out(hidden, request.grid, family.patch(transformer.config)),
        timesteps=torch.zeros(count, dtype=torch.float64, device=hidden.device),
        text=text,
        patch=family.patch(transformer.config),
        text_mask=torch.ones_like(text[..., 0], dtype=torch.bool),
        conditioning=_conditioning_of_call(packing, arguments, grid=request.grid, count=count),
    )
    lowest, highest = (family.inputs(replace(rows, timesteps=rows.timesteps + level)) for level in (0, 1000))
    unpacked = {**lowest, **family.unpacked_inputs(transformer, rows)}
    masks = [name for name, value in unpacked.items() if name.endswith("mask") and value.shape == text.shape[:2]]
    zero, scale = (values.flatten()[0] for values in (lowest["timestep"], highest["timestep"] - lowest["timestep"]))
    timesteps = torch.as_tensor(timestep, device=hidden.device, dtype=torch.float64)
    if timesteps.ndim < 2:
        timesteps = timesteps.expand(count)
    rows = replace(
        rows,
        timesteps=(timesteps - zero) * 1000 / scale,
        text_mask=arguments.get(masks[0]) if masks else None,
    )
    _check_switches(transformer, arguments, family.inputs(rows))
    return rows


def _conditioning_of_call(
    packing: Packing, arguments: Mapping[str, Any], *, grid: Grid, count: int
) -> dict[str, torch.Tensor]:
    """Return the conditioning of each of `count` rows from the arguments of a forward."""
    conditioning: dict[str, torch.Tensor] = {}
    nested: dict[str, Any] = {}
    for value in arguments.values():
        nested |= value if isinstance(value, Mapping) else {}
    arguments = {**nested, **arguments}
    for name, drawn in packing.family.draw_conditioning(packing.transformer, [grid]).items():
        if arguments.get(name) is None:
            raise PackingError(f"the pipeline passes no {name}, which packs take of each sample.")
        values = torch.as_tensor(arguments[name])
        shape = drawn[0].shape
        per_row = values.numel() in (shape.numel(), count * shape.numel())
        conditioning[name] = values.reshape(-1, *shape).expand(count, *shape) if per_row else values
    return conditioning


def _check_switches(transformer: Any, arguments: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Raise PackingError if a forward gets a number or a switch that a pack has otherwise.

    Tensors, such as positions, show in the output.
    """
    defaults = {name: parameter.default for name, parameter in signature(transformer.forward).parameters.items()}
    for name, value in arguments.items():
        expected = held.get(name, defaults[name])
        if (
            name != "return_dict"
            and isinstance(value, _SIMPLE)
            and not torch.is_tensor(expected)
            and value != expected
        ):
            raise PackingError(f"the pipeline passes {name}={value}, where a pack has {expected}.")
