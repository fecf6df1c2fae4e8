"""References of a sample count wherever its tokens do: frames in front of it, or grids of their own."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Sequence as Cells, Value

from hf_bucketing import BucketingError, LatentSpec, Size
from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.run_data import LargestStep
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.batching.streamed import make_streamed_data, open_stream
from hf_bucketing.batching.ways import make_step
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.references import REFERENCE_SIZES, ReferenceRule, RowReferences
from hf_bucketing.conditions.rows import RowConditions
from hf_bucketing.loaders import resume
from hf_bucketing.media import write_image
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing.texts import marked_places
from hf_bucketing.planner import PlanConfig
from hf_bucketing.settings import changed
from hf_bucketing.training import estimate
from hf_bucketing.training.estimate import _random_batch, plan_of_run
from hf_bucketing.training.opened import _stacked_sizes, open_run
from tests.training.training_cases import in_process

pytestmark = pytest.mark.usefixtures("files_anywhere")

COUNTING = ModelTokens(width=96, conditions=(ReferenceRule(enters="latent frames"),))
GRIDS = ModelTokens(width=96)
SEEN = ModelTokens(width=96, text_tokens=10, conditions=(ReferenceRule(text_tokens=7),))
SIZES = Cells(Value("int32"))
STORED = [[], [1, 40, 72], [1, 40, 72, 1, 20, 20]]
"""References of rows one after another: none, one, two."""
MODES = {
    "bucket": {"max_tokens": 640, "loss_reduction": "token"},
    "pack": {"batching": "pack", "max_tokens": 640, "strip_length": 16, "loss_reduction": "token"},
}
modes = pytest.mark.parametrize("settings", MODES.values(), ids=MODES)


@pytest.fixture(scope="module")
def pipeline(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("wan-vace")


@pytest.fixture(scope="module")
def referenced(prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared media, each sample with one and the same reference."""
    folder = tmp_path_factory.mktemp("referenced")
    write_image(folder / "reference.png", np.full((40, 72, 3), 128, np.uint8))
    prepared = PreparedDataset.load(prepared_dir)
    count = len(prepared.dataset)
    dataset = prepared.dataset.add_column("ref", [str(folder / "reference.png")] * count)
    dataset = dataset.add_column(REFERENCE_SIZES, [[1, 40, 72]] * count, feature=SIZES)
    rule = ReferenceRule(multiples=prepared.spec.multiples)
    replace(prepared, dataset=dataset, conditions={"reference": "ref"}, references=rule).save(folder / "prepared")
    return folder / "prepared"


@pytest.fixture(scope="module")
def several(prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared media with none, one or two references of other sizes, whose files nobody opens."""
    prepared = PreparedDataset.load(prepared_dir)
    dataset = prepared.dataset.add_column("ref", [None] * len(prepared.dataset))
    cells = [STORED[row % 3] for row in range(len(dataset))]
    dataset = dataset.add_column(REFERENCE_SIZES, cells, feature=SIZES)
    folder = tmp_path_factory.mktemp("several") / "prepared"
    rule = ReferenceRule(multiples=prepared.spec.multiples)
    replace(prepared, dataset=dataset, conditions={"reference": "ref"}, references=rule).save(folder)
    return folder


def reference_tokens(prepared: PreparedDataset, sizes: list[Size]) -> list[int]:
    """Return the tokens of the references of rows of some sizes, one by one."""
    tokens = []
    for row, size in enumerate(sizes):
        files = np.array(STORED[row % 3]).reshape(-1, 3)
        shown = prepared.references.sizes(files, [size] * len(files))
        tokens.append(sum(prepared.spec.num_tokens(Size(*own)) for own in shown.tolist()))
    return tokens


def tokens_of(step: LargestStep, spec: LatentSpec) -> int:
    """Return the tokens of the samples of a step and of their references."""
    return sum(map(spec.num_tokens, itertools.chain(step.sizes, *step.references)))


@modes
def test_references_count_in_plans_and_not_in_the_loss(settings, several: Path, prepared_dir: Path, tmp_path) -> None:
    prepared, rows = PreparedDataset.load(several), np.arange(20)
    configs = [in_process(tmp_path, folder, tmp_path, **settings) for folder in (several, prepared_dir)]
    data, without = (make_data(config, prepared.spec, GRIDS) for config in configs)
    shown = reference_tokens(prepared, data.sizes(rows))
    assert {*shown} == {0, 8, 9}
    assert (data.num_tokens - without.num_tokens).tolist() == shown
    assert data.loss_weights(rows, epoch=0).equal(without.loss_weights(rows, epoch=0))
    assert [len(sizes) for sizes in data.reference_sizes(rows)] == [row % 3 for row in range(20)]
    for epoch in range(2):
        plan = data.sampler.plan(epoch)
        spans = in_strips(data.lengths_of(plan.indices, epoch=epoch), settings)
        assert 400 < np.add.reduceat(spans, plan.offsets[:-1]).max() <= 640
        if "batching" not in settings:
            sizes = data.reference_sizes(plan.indices)
            batches = zip(plan.offsets[:-1], plan.offsets[1:], strict=True)
            assert all(len({*sizes[start:stop]}) == 1 for start, stop in batches)
    plan = data.sampler.plan()
    lengths = np.add.reduceat(data.num_tokens[plan.indices], plan.offsets[:-1])
    assert data.largest_step().tokens == lengths.max() == tokens_of(data.largest_step(), prepared.spec)
    with pytest.raises(BucketingError, match=r"exceeds `max_tokens"):
        make_data(changed(configs[0], max_tokens=int(without.num_tokens.max())), prepared.spec, GRIDS)


@modes
def test_references_that_the_text_encoder_sees_count_as_text_too(settings, several: Path, tmp_path: Path) -> None:
    prepared, rows = PreparedDataset.load(several), np.arange(20)
    config = in_process(tmp_path, several, tmp_path, **settings)
    data, unseen = (make_data(config, prepared.spec, counting) for counting in (SEEN, GRIDS))
    assert (data.num_tokens - unseen.num_tokens).tolist() == [7 * (row % 3) for row in range(20)]
    assert data.loss_weights(rows, epoch=0).equal(unseen.loss_weights(rows, epoch=0))
    plan = data.sampler.plan()
    spans = in_strips(data.tokens_of(plan.indices, epoch=0), settings) + data.text_tokens
    assert np.add.reduceat(spans, plan.offsets[:-1]).max() <= 640


@modes
@pytest.mark.parametrize("counting", [GRIDS, SEEN], ids=["unseen", "seen"])
def test_references_count_in_a_stream_as_in_a_plan(
    settings, counting: ModelTokens, several: Path, tmp_path: Path
) -> None:
    prepared = PreparedDataset.load(several)
    config = in_process(tmp_path, several, tmp_path, streaming=True, **settings)
    data = make_streamed_data(config, prepared.spec, counting, opened=open_stream(config, Accelerator(cpu=True)))
    plan = make_data(changed(config, streaming=False), prepared.spec, counting)
    largest = data.largest_step()
    text = 10 * len(largest.sizes) + 7 * sum(map(len, largest.references)) if counting is SEEN else 0
    assert largest.tokens == tokens_of(largest, prepared.spec) + text <= 640
    assert any(largest.references)
    stored = list(prepared.dataset[REFERENCE_SIZES])
    batch = {"size": plan.sizes(np.arange(20)), REFERENCE_SIZES: stored, "weight": torch.ones(20)}
    counted = data.rows_of(None, batch, epoch=0)
    assert counted.tokens.tolist() == (plan.num_tokens + counting.text_tokens).tolist()
    assert counted.weights.equal(plan.loss_weights(np.arange(20), epoch=0))


def test_references_follow_the_size_that_is_drawn_for_their_sample(several: Path, tmp_path: Path) -> None:
    prepared, rows = PreparedDataset.load(several), np.arange(20)
    config = in_process(tmp_path, several, tmp_path, **MODES["pack"], random_resize=16)
    data = make_data(config, prepared.spec, GRIDS)
    first, second = (data.tokens_of(rows, epoch=epoch) for epoch in (0, 1))
    assert (first != second).any()
    learned = data.loss_weights(rows, epoch=1).numpy()
    without = rows[rows % 3 == 0]
    assert learned[without].tolist() == second[without].tolist()
    assert (learned[rows % 3 > 0] < second[rows % 3 > 0]).all()


def test_dropped_tokens_are_never_those_of_references(several: Path, prepared_dir: Path, tmp_path: Path) -> None:
    prepared, rows = PreparedDataset.load(several), np.arange(20)
    settings = {**MODES["pack"], "token_drop_rate": 0.5}
    data, without = (
        make_data(in_process(tmp_path, folder, tmp_path, **settings), prepared.spec, GRIDS)
        for folder in (several, prepared_dir)
    )
    assert (data.num_tokens - without.num_tokens).tolist() == reference_tokens(prepared, data.sizes(rows))
    assert data.loss_weights(rows, epoch=0).tolist() == without.num_tokens.tolist()


def test_data_whose_references_a_model_does_not_take_is_refused(several: Path, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(several)
    data = make_data(in_process(tmp_path, several, tmp_path, **MODES["pack"]), prepared.spec, GRIDS)
    kind = partial(type, "Edits", (Recipe,))
    none, one, any_number, needing = (
        object.__new__(kind({"pipeline_class": "EditPipeline", "conditions": (rule,)}))
        for rule in (ReferenceRule(most=0), ReferenceRule(most=1), ReferenceRule(), ReferenceRule(least=1))
    )
    names, counts = data.conditions, data.reference_counts()
    for recipe in (none, one, any_number, needing):
        object.__setattr__(recipe, "audio", False)
        object.__setattr__(recipe, "trained", "transformer")
    any_number.check_conditions(names, references=counts)
    with pytest.raises(BucketingError, match="A EditPipeline is not shown `reference`"):
        none.check_conditions(names)
    with pytest.raises(BucketingError, match=r"6 of 20 samples, such as row 2: It has 2 .* takes at most 1\."):
        one.check_conditions(names, references=counts)
    with pytest.raises(BucketingError, match=r"7 of 20 samples, such as row 0: It has no .* needs 1\."):
        needing.check_conditions(names, references=counts)
    with pytest.raises(
        BucketingError, match=r"(?s)^- A EditPipeline is not shown `reference`.*\n- .*with the references"
    ):
        none.check_conditions(names, references=counts)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("`reference_dropout`", {"reference_dropout": 0.2}),
        ("`reference` in `condition`", {"condition": "reference:0.8,none:0.2"}),
    ],
)
def test_references_that_cannot_be_dropped_are_refused(
    name: str, settings: dict[str, Any], streaming: bool, several: Path, prepared_dir: Path, tmp_path
) -> None:
    def make(folder: Path, counting: ModelTokens) -> object:
        config = in_process(tmp_path, folder, tmp_path, **MODES["pack"], **settings, streaming=streaming)
        spec = PreparedDataset.load(folder).spec
        if streaming:
            return make_streamed_data(config, spec, counting, opened=open_stream(config, Accelerator(cpu=True)))
        return make_data(config, spec, counting)

    make(several, GRIDS)
    with pytest.raises(BucketingError, match=rf"Omit {name}: the samples of .* have no references"):
        make(prepared_dir, GRIDS)
    with pytest.raises(BucketingError, match=f"Omit {name}: references of this model are frames"):
        make(several, COUNTING)
    with pytest.raises(BucketingError, match="both draw who is shown references"):
        in_process(tmp_path, several, tmp_path, condition="reference:0.8,none:0.2", reference_dropout=0.2)


def in_strips(tokens: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    """Return the tokens that samples take, each whole strips where they are packed."""
    length = settings.get("strip_length", 1)
    return -(-tokens // length) * length


@modes
def test_batches_count_references_in_max_tokens_and_not_in_the_loss(
    settings, referenced: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    prepared, rows = PreparedDataset.load(prepared_dir), np.arange(20)
    configs = [in_process(tmp_path, folder, tmp_path, **settings) for folder in (referenced, prepared_dir)]
    data, without = (make_data(config, prepared.spec, COUNTING) for config in configs)
    if "batching" not in settings:
        assert without.num_tokens.tolist() == list(prepared.dataset["num_tokens"])
    frames = np.array([prepared.spec.grid(size)[0] for size in data.sizes(rows)])
    assert (data.num_tokens * frames == without.num_tokens * (frames + 1)).all()
    assert data.loss_weights(rows, epoch=0).equal(without.loss_weights(rows, epoch=0))
    for epoch in range(3):
        plan = data.sampler.plan(epoch)
        assert np.unique(plan.indices).size == 20
        spans = in_strips(data.lengths_of(plan.indices, epoch=epoch), settings)
        assert 400 < np.add.reduceat(spans, plan.offsets[:-1]).max() <= 640
    with pytest.raises(BucketingError, match=r"exceeds `max_tokens"):
        make_data(changed(configs[0], max_tokens=int(without.num_tokens.max())), prepared.spec, COUNTING)


@pytest.mark.cases(slow=("plan-bucket", "stream-pack"))
@pytest.mark.usefixtures("hooks_that_look")
@modes
@pytest.mark.parametrize("source", ["plan", "stream"])
def test_the_sequences_that_a_model_gets_have_the_counted_tokens(
    source: str, settings, pipeline: Path, referenced: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(str(pipeline)).load(str(pipeline), max_sequence_length=32)
    assert recipe.reference_condition().in_front
    config = in_process(pipeline, referenced, tmp_path, **settings)
    step, accelerator = make_step(config, recipe), Accelerator(cpu=True)
    data: Any
    if source == "plan":
        data = make_data(config, recipe.spec, COUNTING)
        loader = resume(accelerator, accelerator.prepare(data.loader))
        memory = plan_of_run(open_run(config, accelerator), data)
        largest = data.largest_step()
        sizes, tokens, references = largest.sizes, largest.tokens, largest.references
        assert memory.shape.tokens == tokens <= 640
        assert memory.shape.pixels == sum(math.prod(size) for size in itertools.chain(sizes, *references))
    else:
        config = changed(config, streaming=True)
        data = make_streamed_data(config, recipe.spec, COUNTING, opened=open_stream(config, accelerator))
        loader = resume(accelerator, data.loader)
        assert data.largest_step().tokens <= 640
    found: list[int] = []

    def count(_: Any, args: Any, given: dict[str, Any]) -> None:
        latents = given["hidden_states"]
        found.append(latents.numel() // latents.shape[1] // int(np.prod(recipe.spec.patch)))

    recipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
    for batch in itertools.islice(loader, 1):
        with torch.no_grad():
            step(recipe.transformer, batch, epoch=0)
        rows = data.rows_of(loader, batch, epoch=0)
        assert found[-1] == in_strips(rows.tokens, settings).sum() <= 640
        own = [recipe.spec.num_tokens(Size(*size)) for size in batch["size"]]
        assert rows.weights.tolist() == own, "the loss of a reference does not count"


def test_the_search_for_max_tokens_starts_from_a_plan_with_references(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[PlanConfig] = []
    config = PlanConfig.from_flat(device="cpu", mixed_precision="no", train_batch_size=1)
    monkeypatch.setattr(estimate, "planned_run", lambda opened, **sample: changed(config, **sample))
    monkeypatch.setattr(estimate, "components_of", lambda opened: None)
    monkeypatch.setattr(estimate, "largest_tokens", lambda parts, config, **limits: planned.append(config) or 7)
    opened: Any = SimpleNamespace(accelerator=Accelerator(cpu=True))
    shown, recipe = (Size(1, 32, 64), Size(9, 32, 32)), SimpleNamespace(experts=())
    assert estimate._planned_tokens(opened, Size(1, 64, 64), shown, at_most=9, recipe=recipe) == 7
    assert estimate._planned_tokens(opened, Size(1, 64, 64), (), at_most=9, recipe=recipe) == 7
    assert [config.samples.references() for config in planned] == [shown, ()]


def conditions_of(cells: list[list[int]]) -> RowConditions:
    return RowConditions.of(RowReferences.of_lists(cells, rule=ReferenceRule()))


@pytest.mark.slow
def test_cached_latents_of_a_step_that_is_tried_out_have_the_frame_of_a_reference(
    pipeline: Path, referenced: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(str(pipeline)).load(str(pipeline), loading=Loading(parts=("trained",)))
    data = make_data(in_process(pipeline, referenced, tmp_path, **MODES["pack"]), recipe.spec, COUNTING)
    largest = LargestStep([Size(9, 32, 48)], 0, conditions_of([[1, 32, 48]]))
    batch = _random_batch(largest, recipe, torch.device("cpu"), data=data)
    assert batch["latents"][0].shape[1:] == (4, 4, 6)


@pytest.mark.slow
def test_texts_of_a_step_that_is_tried_out_have_places_for_references(
    tiny_folder: Callable[[str], Path], referenced: Path, tmp_path: Path
) -> None:
    pipeline = str(tiny_folder("qwen-image-2.1"))
    recipe = recipe_of(pipeline).load(pipeline, loading=Loading(parts=("trained",)))
    spec = PreparedDataset.load(referenced).spec  # of another model, which texts do not depend on
    data = make_data(in_process(Path(pipeline), referenced, tmp_path, **MODES["pack"]), spec, SEEN)
    largest = LargestStep([Size(1, 64, 64)] * 2, 0, conditions_of([[1, 32, 64, 1, 32, 32], []]))
    batch = _random_batch(largest, recipe, torch.device("cpu"), data=data)
    assert marked_places(batch["text_mask"]) == [(1, 2), ()]


@modes
def test_a_replacement_can_be_stacked_with_the_others_of_its_batch(settings, several: Path, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(several)
    config = in_process(tmp_path, several, tmp_path, on_error="replace", **settings)
    data = make_data(config, prepared.spec, GRIDS)
    collator, sizes = data.loader.collate_fn, data.reference_sizes(np.arange(20))
    for number in range(20):
        others = collator.candidates(data.dataset[number], collator.replacements)
        assert number in others
        if "batching" in settings:
            assert (data.num_tokens[others] <= data.num_tokens[number]).all()
        else:
            assert {sizes[row] for row in others} == {sizes[number]}


def test_the_stacks_that_processes_share_have_the_tokens_of_references(several: Path) -> None:
    prepared = PreparedDataset.load(several)
    recipe, objective = SimpleNamespace(reference_condition=ReferenceRule), SimpleNamespace(condition=None)
    config = SimpleNamespace(objective=objective)
    opened: Any = SimpleNamespace(prepared=prepared, held_out=None, recipe=recipe, config=config)
    ids = np.array(prepared.dataset["bucket_id"])
    sizes = [prepared.table.size(int(bucket)) for bucket in ids]
    tokens = zip(prepared.dataset["num_tokens"], reference_tokens(prepared, sizes), strict=True)
    assert _stacked_sizes(opened) == Counter(zip(sizes, map(sum, tokens), strict=True))
