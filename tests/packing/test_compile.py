"""Packs of one shape: padding is inert, and a compiled model has one set of graphs for all of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark_operations import Graphs
from torch._dynamo.backends.debugging import aot_eager

from hf_bucketing import BucketingError, PackingError
from hf_bucketing.models import compile_blocks, enable, enable_packing
from hf_bucketing.models.enable import packing_disabled
from hf_bucketing.packing import packed_forward, packed_mse
from hf_bucketing.packing.attention import torch_backends
from tests.conftest import ROOT
from tests.models.cases import (
    SIZES,
    FamilyCase,
    Samples,
    assert_same_gradients,
    gradients,
    largest_difference,
    make_model,
)
from tests.models.families import CASES
from tests.packing.flash_attention import flash_attention_4

STRIPS, TEXT = 120, 64


def packs(packing, count: int):
    """Return packs of one shape and of ever other samples."""
    numbers = random.Random(0)
    for seed in range(count):
        order = tuple(numbers.randrange(len(SIZES)) for _ in range(numbers.randint(1, 6)))
        samples = Samples(seed=seed, order=order)
        inputs = {"timesteps": samples.timesteps, "text": samples.text}
        yield samples, packing.pack(samples.latents, **inputs, pad_to=STRIPS, pad_text_to=TEXT)


def test_packs_of_one_shape_need_both_limits_that_the_pages_name() -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("packing.md", "buckets-or-packs.md")]
    (arguments,) = {argument for page in pages for argument in re.findall(r"pack\(…, (pad_to=\d+[^)]*)\)", page)}
    limits = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", arguments)}
    assert set(limits) == {"pad_to", "pad_text_to"}
    packing = enable_packing(make_model(), strip_length=4)

    def shapes(**shape: int) -> set[tuple[torch.Size, ...]]:
        seen = set()
        for samples, _ in packs(packing, 6):
            batch = packing.pack(samples.latents, timesteps=samples.timesteps, text=samples.text, **shape)
            seen.add((batch.strips.shape, batch.text.shape, batch.layout.segment_ids.shape))
        return seen

    assert len(shapes(**limits)) == 1
    assert len(shapes(pad_to=limits["pad_to"])) > 1


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.cases(slow=("segments",))
@pytest.mark.parametrize(
    ("backend", "checkpointing"),
    [("segments", False), ("segments", True), ("dense", True)],
    ids=["segments", "segments, checkpointing", "dense, checkpointing"],
)
def test_packs_of_other_samples_need_no_further_graph(backend: str, checkpointing: bool) -> None:
    model, graphs = make_model(num_layers=1), Graphs()
    if checkpointing:
        model.enable_gradient_checkpointing()
    packing = enable_packing(model, strip_length=4, backend=backend)
    compiled = torch.compile(model, backend=graphs)
    warm = None
    for number, (_, batch) in enumerate(packs(packing, 6)):
        output = packed_forward(compiled, batch)
        output.square().mean().backward()
        assert largest_difference([output], [packed_forward(model, batch)]) <= 1e-6
        warm = graphs.count if number == 1 else warm
    assert 0 < graphs.count <= warm + 2


@pytest.mark.slow
def test_flex_attention_needs_no_further_graph_either(monkeypatch) -> None:
    """Here FlexAttention runs without gradients and eagerly."""
    monkeypatch.setattr(torch_backends, "compiled_flex_attention", lambda: torch_backends.flex_attention)
    model, graphs = make_model(num_layers=1), Graphs()
    packing = enable_packing(model, strip_length=4, backend="flex")
    compiled = torch.compile(model, backend=graphs)
    warm = None
    with torch.no_grad():
        for number, (_, batch) in enumerate(packs(packing, 6)):
            output = packed_forward(compiled, batch)
            assert largest_difference([output], [packed_forward(model, batch)]) <= 1e-5
            warm = graphs.count if number == 2 else warm
    assert 0 < graphs.count <= warm + 2


@pytest.mark.slow
def test_blocks_compile_as_one_graph_each_with_a_masked_backend() -> None:
    model, graphs = make_model(), Graphs()
    packing = enable_packing(model, strip_length=4, backend="dense")
    expected = [packed_forward(model, batch) for _, batch in packs(packing, 3)]
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    outputs = [packed_forward(model, batch) for _, batch in packs(packing, 3)]
    assert largest_difference(expected, outputs) <= 1e-6
    assert graphs.count <= len(model.blocks)


FIVE = ["wan", *(pytest.param(name, marks=pytest.mark.every) for name in ("ltx", "flux", "hunyuan", "qwen-image"))]
OTHERS = ["flux.3", "hunyuan-image", "hunyuan-1.5", "ideogram4", "qwen-image-2.1"]


def compiled(case: FamilyCase, compiler: Any, *, checkpointing: bool = True) -> torch.nn.Module:
    model = case.model()
    if checkpointing:
        model.enable_gradient_checkpointing()
    assert compile_blocks(model, backend=compiler)
    return model


def kinds_of_blocks(model: torch.nn.Module) -> int:
    return len({type(module) for module in model.modules() if type(module).__name__ in model._repeated_blocks})


def of_several_tokens(case: FamilyCase) -> FamilyCase:
    """Return a case with at least two text tokens in each strip, and two frames in each clip, as one is a constant."""
    frames = 1 if all(frames == 1 for frames, _, _ in case.sizes) else 2
    sizes = tuple((max(frames, size[0]), *(max(4, side) for side in size[1:])) for size in case.sizes)
    return replace(case, sizes=sizes, text_lengths=tuple(150 + sample for sample in range(len(sizes))))


def orders(case: FamilyCase, count: int, *, most: int = 6) -> Iterator[tuple[int, ...]]:
    numbers = random.Random(1)
    for _ in range(count):
        yield tuple(numbers.randrange(len(case.sizes)) for _ in range(numbers.randint(min(2, most), most)))


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let packs run on FlashAttention 4 on the CPU."""
    monkeypatch.setattr(enable, "resolve_backend", lambda backend: backend)
    with flash_attention_4():
        yield


def graphs_of_packs(case: FamilyCase, *, backend: str, packs: int, compiler: Graphs) -> list[int]:
    """Train on packs of ever other samples, with at least two text tokens in each strip; count the graphs so far."""
    case = of_several_tokens(case)
    model, counts = compiled(case, compiler), []
    packing = enable_packing(model, strip_length=max(4, case.shortest_strip), backend=backend)
    for seed, order in enumerate(orders(case, packs)):
        output = packed_forward(model, Samples(seed=seed, order=order, case=case).pack(packing))
        output.square().mean().backward()
        counts.append(compiler.count)
    assert counts[0] > 0
    return counts


@pytest.mark.slow
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", FIVE)
def test_twenty_packs_share_a_graph_for_each_kind_of_block(name: str) -> None:
    counts = graphs_of_packs(CASES[name], backend="varlen:fa4", packs=20, compiler=Graphs())
    assert counts[-1] == counts[1] <= 2 * kinds_of_blocks(CASES[name].model())


@pytest.mark.every
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", ["flux.2", *OTHERS])
def test_packs_of_other_families_need_no_graph_after_the_second(name: str) -> None:
    counts = graphs_of_packs(CASES[name], backend="varlen:fa4", packs=8, compiler=Graphs())
    assert counts[-1] == counts[1] <= 8


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("backend", [pytest.param("varlen:fa4", marks=pytest.mark.slow), "auto"])
def test_packs_share_one_graph_of_a_block(backend: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert graphs_of_packs(CASES["wan"], backend=backend, packs=3, compiler=Graphs()) == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIVE)
def test_segments_break_a_block_at_its_attention_alone(name: str) -> None:
    counts = graphs_of_packs(CASES[name], backend="segments", packs=20, compiler=Graphs())
    assert counts[-1] == counts[1]
    attentions = [
        sum(hasattr(layer, "processor") for layer in module.modules())
        for module in CASES[name].model().modules()
        if type(module).__name__ in CASES[name].model()._repeated_blocks
    ]
    assert counts[-1] <= 2 * kinds_of_blocks(CASES[name].model()) * (1 + max(attentions))


@pytest.mark.parametrize("name", FIVE)
def test_twenty_stacks_share_a_graph_for_each_kind_of_block(name: str) -> None:
    case, compiler = of_several_tokens(CASES[name]), Graphs()
    model, counts = compiled(case, compiler), []
    for seed, order in enumerate(orders(case, 20, most=1)):
        Samples(seed=seed, order=order, case=case).alone(model)[0].square().mean().backward()
        counts.append(compiler.count)
    assert 0 < counts[-1] == counts[9] <= 2 * kinds_of_blocks(model)


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param("varlen:fa4", torch.float32, marks=pytest.mark.every),
        pytest.param("varlen:fa4", torch.bfloat16, marks=pytest.mark.every),
        pytest.param("auto", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("segments", torch.float32, marks=pytest.mark.every),
        pytest.param("segments", torch.bfloat16, marks=pytest.mark.every),
    ],
    ids=str,
)
def test_compiled_blocks_have_the_gradients_of_others(backend: str, dtype: torch.dtype) -> None:
    case, found = CASES["wan"], []
    for compiler in (None, aot_eager):
        model = case.model() if compiler is None else compiled(case, compiler)
        packing = enable_packing(model, strip_length=4, backend=backend)
        samples = [Samples(seed=seed, order=order, case=case) for seed, order in enumerate([(0, 1, 2), (4, 4)])]
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            losses = [pack.loss_packed(model, packing) for pack in samples]
        found.append((torch.stack(losses).detach(), gradients(model, *losses)))
    (expected, slopes), (losses, compiled_slopes) = found
    exact = dtype == torch.float32
    assert torch.allclose(losses, expected, rtol=1e-5 if exact else 2**-7, atol=0)
    assert_same_gradients(slopes, compiled_slopes, 1e-4 if exact else 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("any_device")
def test_attention_to_image_tokens_runs_outside_the_graphs() -> None:
    case, compiler = CASES["wan image"], Graphs()
    model, counts = compiled(case, compiler), []
    packing = enable_packing(model, strip_length=4, backend="varlen:fa4")
    for order in ((0, 1), (2, 3, 4), (5, 0, 1, 2)):
        packed_forward(model, Samples(order=order, case=case).pack(packing)).square().mean().backward()
        counts.append(compiler.count)
    assert counts == [3, 3, 3]


@pytest.mark.every
def test_blocks_are_whole_again_for_the_pipelines_own_call() -> None:
    case, compiler = CASES["wan"], Graphs()
    model = compiled(case, compiler)
    packing = enable_packing(model, strip_length=4, backend="segments")
    samples = Samples(case=case)
    packed_forward(model, samples.pack(packing))
    in_parts = compiler.count
    with packing_disabled(model), torch.no_grad():
        outputs = samples.alone(model)
    assert compiler.count > in_parts
    assert largest_difference(outputs, case.expected.outputs) <= 1e-5


def test_models_whose_blocks_diffusers_does_not_name_are_refused() -> None:
    with pytest.raises(BucketingError, match="a SD3Transformer2DModel: diffusers names no repeated"):
        compile_blocks(CASES["sd3"].model())


@pytest.mark.every
def test_the_default_compiler_computes_the_same() -> None:
    model = make_model(num_layers=1)
    packing = enable_packing(model, strip_length=4, backend="dense")
    compiled = torch.compile(model)
    for samples, batch in packs(packing, 3):
        losses = [
            packed_mse(packed_forward(which, batch), batch.pack_like(samples.targets), batch.layout).mean()
            for which in (model, compiled)
        ]
        assert_same_gradients(gradients(model, losses[0]), gradients(model, losses[1]), 1e-4)


@pytest.mark.parametrize("backend", ["segments", "dense"])
def test_padding_to_a_shape_changes_nothing(backend: str) -> None:
    model, samples = make_model(torch.float64), Samples(torch.float64)
    packing = enable_packing(model, strip_length=4, backend=backend)
    inputs = {"timesteps": samples.timesteps, "text": samples.text}
    plain, padded = (
        packing.pack(samples.latents, **inputs, **shape) for shape in ({}, {"pad_to": 40, "pad_text_to": 50})
    )
    assert plain.strips.shape[0] < padded.strips.shape[0] == 40 == padded.layout.num_strips
    assert plain.text.shape[0] < padded.text.shape[0] == 50 == padded.layout.num_text_tokens
    assert padded.layout.segment_ids.shape == (160,)
    assert padded.layout.strip_segments.tolist() == [
        *plain.layout.strip_segments.tolist(),
        *[-1] * padded.layout.padding_strips,
    ]
    assert padded.layout.self_attention_mask().sum() == plain.layout.self_attention_mask().sum()
    assert padded.layout.cross_attention_mask().sum() == plain.layout.cross_attention_mask().sum()
    outputs = [packed_forward(model, batch) for batch in (plain, padded)]
    pairs = [batch.unpack(output) for batch, output in zip((plain, padded), outputs, strict=True)]
    assert largest_difference(*pairs) <= 1e-12
    losses = [
        packed_mse(output, batch.pack_like(samples.targets), batch.layout).mean()
        for batch, output in zip((plain, padded), outputs, strict=True)
    ]
    assert_same_gradients(*(gradients(model, loss) for loss in losses), 1e-10)


def test_a_pack_that_exceeds_its_shape_is_an_error() -> None:
    model, samples = make_model(), Samples()
    packing = enable_packing(model, strip_length=4)
    inputs = {"timesteps": samples.timesteps, "text": samples.text}
    strips = packing.pack(samples.latents, **inputs).layout.num_strips
    for message, shape in {
        f"{strips} strips, more than the {strips - 1}": {"pad_to": strips - 1},
        "27 text tokens, more than the 26": {"pad_text_to": 26},
    }.items():
        with pytest.raises(PackingError, match=message):
            packing.pack(samples.latents, **inputs, **shape)
    assert packing.pack(samples.latents, **inputs, pad_to=strips, pad_text_to=27).layout.padding_strips == 0
