"""What a packed forward does not pay again: position tables, index operations, look-ups and waits for the device."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward, positions
from hf_bucketing.packing.positions import Tables
from hf_bucketing.packing.texts import apply_text_mask
from tests.models.cases import CASES, Samples, each_case


class Operations(TorchDispatchMode):
    """Count the operations that run inside, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function.name()] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Count the tables that are made."""
    made: list[Any] = []
    init = Tables.__init__

    def counting(self: Tables, make: Any) -> None:
        init(self, lambda *key, **device: made.append(key) or make(*key, **device))

    monkeypatch.setattr(Tables, "__init__", counting)
    yield made


@each_case(
    {name: case for name, case in CASES.items() if "cosmos" not in name}
)  # whose angles follow each sample's fps
def test_position_tables_of_a_grid_are_made_once(case, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_tables(monkeypatch) as made:
        model, samples = case.model(), Samples(case=case)
        packing = enable_packing(model, strip_length=4)
        first = packed_forward(model, samples.pack(packing))
        count = len(made)
        assert count
        assert torch.equal(packed_forward(model, samples.pack(packing)), first)
        assert len(made) == count


def test_tables_follow_their_modules_buffers_and_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Module()
    module.register_buffer("scale", torch.tensor([2.0]))
    tables = Tables(_scaled)
    first = tables(module, (1, 2, 2), torch.device("cpu"))
    assert tables(module, (1, 2, 2), torch.device("cpu")) is first
    module.scale.fill_(3)
    assert tables(module, (1, 2, 2), torch.device("cpu"))[0].tolist() == [3.0] * 4
    module.double()
    assert tables(module, (1, 2, 2), torch.device("cpu"))[0].dtype == torch.float64
    with torch.inference_mode():
        inferred = tables(module, (1, 2, 2), torch.device("cpu"))
    assert inferred[0].is_inference()
    assert not tables(module, (1, 2, 2), torch.device("cpu"))[0].is_inference(), "training could not save it"
    for copied in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert not copied._kept
        assert copied(module, (1, 1, 1), torch.device("cpu"))[0].tolist() == [3.0]
    monkeypatch.setattr(positions, "CACHED_BYTES", 3 * 8 * 10)
    for width in range(1, 11):
        tables(module, (1, 1, width), torch.device("cpu"))
    assert [len(kept[0]) for kept in tables._kept.values()] == [8, 9, 10], "those used last"


def _scaled(module: Any, grid: Any, device: torch.device) -> tuple[torch.Tensor]:
    return (torch.ones(grid, device=device).flatten() * module.scale,)


@pytest.mark.usefixtures("hooks_that_look")
@pytest.mark.parametrize("name", ["sd3", "sd3.5", "cogvideox", "flux", "latte"])
def test_the_backward_of_permuted_tokens_gathers(name: str) -> None:
    model, samples = CASES[name].model(), Samples(case=CASES[name])
    packing = enable_packing(model, strip_length=4)
    blocks = "temporal_transformer_blocks" if name == "latte" else "transformer_blocks"
    inputs: list[torch.Tensor] = []
    attention = [part for part in getattr(model, blocks).modules() if hasattr(part, "set_processor")]
    for part in attention:  # what comes before attention indexes too: time embeddings by strip
        part.register_forward_hook(
            lambda _, args, kwargs, output: inputs.append((args, kwargs, output)), with_kwargs=True
        )
    packed_forward(model, samples.pack(packing))
    assert inputs
    with Operations() as ran:
        for args, kwargs, output in inputs:
            of = [
                tensor
                for tensor in (*args, *kwargs.values())
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad
            ]
            outputs = [output] if isinstance(output, torch.Tensor) else [*output]
            torch.autograd.grad([output.sum() for output in outputs], of, retain_graph=True, allow_unused=True)
    assert not [name for name in ran.names if "index_add" in name or "index_put" in name], ran.names


def test_a_text_mask_costs_one_copy_to_the_host_for_all_samples() -> None:
    text, mask = torch.randn(3, 5, 2), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    expected = [words[keep.bool()] for words, keep in zip(text, mask, strict=True)]
    with Operations() as ran:
        texts = apply_text_mask("masked", text, mask=mask)
    assert all(torch.equal(text, other) for text, other in zip(texts, expected, strict=True))
    assert "aten::index.Tensor" not in ran.names, "indexing by a mask waits for the device"
