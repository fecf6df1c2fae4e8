"""The latent frame that a reference adds to a sample counts wherever tokens are counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from hf_bucketing import BucketingError, LatentSpec, Size, open_table
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.loaders import resume
from hf_bucketing.media import write_image
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.settings import changed
from hf_bucketing.training.data import make_data
from hf_bucketing.training.estimate import _random_batch, plan_of_run
from hf_bucketing.training.opened import open_run
from hf_bucketing.training.run_data import ModelTokens
from hf_bucketing.training.steps import make_step
from hf_bucketing.training.streamed import make_streamed_data, open_stream
from tests.training.training_cases import in_process

pytestmark = pytest.mark.usefixtures("files_anywhere")

COUNTING = ModelTokens(width=96, added_frames={"reference": 1})
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
    paths = [str(folder / "reference.png")] * len(prepared.dataset)
    dataset = prepared.dataset.add_column("ref", paths)
    replace(prepared, dataset=dataset, conditions={"reference": "ref"}).save(folder / "prepared")
    return folder / "prepared"


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


@pytest.mark.usefixtures("hooks_that_look")
@pytest.mark.slow
@modes
@pytest.mark.parametrize("source", ["plan", "stream"])
def test_the_sequences_that_a_model_gets_have_the_counted_tokens(
    source: str, settings, pipeline: Path, referenced: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(str(pipeline)).load(str(pipeline), max_sequence_length=32)
    assert recipe.added_frames == COUNTING.added_frames
    config = in_process(pipeline, referenced, tmp_path, **settings)
    step, accelerator = make_step(config, recipe), Accelerator(cpu=True)
    data: Any
    if source == "plan":
        data = make_data(config, recipe.spec, COUNTING)
        loader = resume(accelerator, accelerator.prepare(data.loader))
        memory = plan_of_run(open_run(config, accelerator), data)
        assert memory.shape.tokens == data.largest_step().tokens <= 640
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


@pytest.mark.slow
def test_cached_latents_of_a_step_that_is_tried_out_have_the_frame_of_a_reference(
    pipeline: Path, referenced: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(str(pipeline)).load(str(pipeline), loading=Loading(parts=("trained",)))
    data = make_data(in_process(pipeline, referenced, tmp_path, **MODES["pack"]), recipe.spec, COUNTING)
    batch = _random_batch([Size(9, 32, 48)], recipe, torch.device("cpu"), data=data)
    assert batch["latents"][0].shape[1:] == (4, 4, 6)


def test_added_frames_count_in_grids_and_tables_alone() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
    longer, size = replace(spec, added_frames=1), Size(9, 32, 48)
    assert longer.grid(size) == (4, 2, 3)
    assert longer.size_of(4, 2, 3) == longer.snap(size) == size
    table = open_table(spec)
    ids = table.assign([9, 9], [32, 0], [48, 0]).bucket_id
    assert table.num_tokens(ids, spec=longer).tolist() == [24, 0]
    with pytest.raises(BucketingError, match="whole patches of 2"):
        replace(longer, patch=(2, 2, 2))
