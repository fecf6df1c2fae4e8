"""What stock pipelines pass to their transformers, and what packs of the same samples give.

A pipeline of small random weights is called until its transformer is called for the first time; a sample holds the
arguments of that call. The stock model, called with them, gives what a pack must give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_bucketing.packing import Packing, packed_forward
from hf_bucketing.packing.strips import patchify
from tests.models.cases import assert_same_gradients, gradients, largest_difference


class _Recorded(Exception):  # noqa: N818
    """Ends the call of a pipeline."""


def record_call(pipeline: Any, **call: Any) -> dict[str, Any]:
    """Call a pipeline until it calls its transformer, and return the keyword arguments of that call."""
    recorded: dict[str, Any] = {}

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args
        recorded.update(kwargs)
        raise _Recorded

    hook = pipeline.transformer.register_forward_pre_hook(record, with_kwargs=True)
    try:
        pipeline(**call)
    except _Recorded:
        return recorded
    finally:
        hook.remove()
    raise AssertionError("the pipeline did not call its transformer")


@dataclass(frozen=True, kw_only=True)
class RecordedSample:
    """A sample as its pipeline passes it to the transformer, and the same sample as a pack takes it.

    Args:
        call: Keyword arguments of the transformer's call, with one batch row.
        latent: Its own latent with noise, `(C, F, H, W)`.
        references: Latents `(C, f, h, w)` of its references.
        timestep: Its timestep, `()`, up to 1000.
        text: Its text, `(length, text_dim)`, without what the call masks.
        conditioning: Its further inputs, `(…)` each.
        text_mask: Mask of its text, `(length,)`, where it says where references stand.
        own_last: Whether the output has its own tokens behind those of its references.
    """

    call: Mapping[str, Any]
    latent: torch.Tensor
    references: Sequence[torch.Tensor]
    timestep: torch.Tensor
    text: torch.Tensor
    conditioning: Mapping[str, torch.Tensor] = field(default_factory=dict)
    text_mask: torch.Tensor | None = None
    own_last: bool = False

    def own_output(self, output: torch.Tensor, count: int) -> torch.Tensor:
        """Return the output of its `count` own tokens, of an output `(tokens, channels)`."""
        return output[-count:] if self.own_last else output[:count]


class Results(NamedTuple):
    """Outputs of the samples' own tokens, `(tokens, channels)` each, and the gradients of their mean squares."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def results_of_calls(model: Any, samples: Sequence[RecordedSample], patch: tuple[int, int, int]) -> Results:
    """Call the stock model as the pipeline called it."""
    outputs = []
    for sample in samples:
        own = math.prod(sample.latent.shape[1:]) // math.prod(patch)
        outputs.append(sample.own_output(model(**{**sample.call, "return_dict": False})[0][0], own))
    return _results(model, outputs)


def results_of_pack(model: Any, packing: Packing, samples: Sequence[RecordedSample], **options: Any) -> Results:
    """Run the samples in one pack of a model whose packing is on; `options` are those of `Packing.pack`."""
    return _results(model, packed_outputs(model, packing, samples, **options))


def packed_outputs(
    model: Any, packing: Packing, samples: Sequence[RecordedSample], **options: Any
) -> list[torch.Tensor]:
    """Return the outputs of the samples' own tokens, `(tokens, channels)` each, from one pack."""
    batch = packing.pack(
        [sample.latent for sample in samples],
        references=[sample.references for sample in samples],
        timesteps=torch.stack([sample.timestep for sample in samples]),
        **texts_of(samples),
        conditioning={
            name: torch.stack([sample.conditioning[name] for sample in samples]) for name in samples[0].conditioning
        },
        **options,
    )
    return [patchify(output, batch.patch).flatten(1) for output in batch.unpack(packed_forward(model, batch))]


def texts_of(samples: Sequence[RecordedSample]) -> dict[str, Any]:
    """Return the texts of samples as a pack takes them, with their masks where they have some."""
    texts, masks = ([getattr(sample, name) for sample in samples] for name in ("text", "text_mask"))
    if masks[0] is None:
        return {"text": texts}
    return {"text": pad_sequence(texts, batch_first=True), "text_mask": pad_sequence(masks, batch_first=True)}


def mean_squares(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss whose gradients are compared: the sum of the mean squares of the samples' outputs."""
    return torch.stack([output.square().mean() for output in outputs]).sum()


def _results(model: Any, outputs: list[torch.Tensor]) -> Results:
    return Results([output.detach() for output in outputs], gradients(model, mean_squares(outputs)))


def assert_equal(expected: Results, packed: Results, *, without_gradient: tuple[str, ...] = ()) -> None:
    """Compare in float64: outputs to 1e-11, gradients to 1e-6 of their norm."""
    assert largest_difference(expected.outputs, packed.outputs) <= 1e-11
    assert_same_gradients(expected.gradients, packed.gradients, 1e-6, without_gradient=without_gradient)
