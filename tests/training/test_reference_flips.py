"""Samples that are mirrored, and their references: both, or neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketingError, LatentSpec, PackCollator
from hf_bucketing.batching import checks as data_checks
from hf_bucketing.caching import CacheConfig
from hf_bucketing.caching.columns import LatentColumns
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared import CacheInfo, PreparedDataset
from hf_bucketing.columns.prepared_stream import prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.media import ViewRule
from hf_bucketing.models.families.flux2 import Flux2Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.opened import open_run
from tests.training.training_cases import in_process

pytestmark = pytest.mark.usefixtures("files_anywhere")

SPEC = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
REFUSED = "`flip_probability` would mirror samples and not their references.*`flip_references`"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceConfig:
    """Twelve pictures that are dark on the left, each with one as its reference."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("edits", "before"):
        (folder / name).mkdir()
    pixels = np.tile(np.linspace(0, 255, 64, dtype=np.uint8)[None, :, None], (64, 1, 3))
    for number in range(12):
        for name in ("edits", "before"):
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
        (folder / "edits" / f"{number}.txt").write_text("the bar on the left")
    rows = [{"image": f"{folder}/edits/{n}.png", "caption": "c", "ref": f"{folder}/before/{n}.png"} for n in range(12)]
    Dataset.from_list(rows).to_json(folder / "rows.jsonl")
    table = TableConfig(buckets="64,64", bucket_frames=[1])
    return SourceConfig(dataset=str(folder / "rows.jsonl"), table=table, reference_column=["ref"])


@pytest.fixture
def folders(source: SourceConfig, tmp_path: Path) -> dict[str, Path]:
    """The pairs for FLUX.2: rows, a stream, rows without references, and a cache that was mirrored without these."""
    rule = Flux2Recipe.reference_rule()
    plain = replace(source, reference_column=None)
    made: dict[str, Any] = {
        "rows": prepare(source, spec=SPEC, taken=rule, say=lambda text: None),
        "stream": prepare_stream(source, spec=SPEC, taken=rule, say=lambda text: None)[0],
        "without": prepare(plain, spec=SPEC, taken=rule, say=lambda text: None),
    }
    views = {"flip_probability": 0.5}  # as caches hold them that were made before references could be mirrored
    info = CacheInfo(
        folder="cache", batching="bucket", latents_model="", text_model=None, empty_text_key=None, views=views
    )
    made["cached"] = replace(made["rows"], cache=info)
    for name, data in made.items():
        data.save(tmp_path / name)
    return {name: tmp_path / name for name in made}


def test_samples_with_references_are_mirrored_with_them_or_refused_before_weights_are_loaded(
    folders: dict[str, Path], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline, accelerator = tiny_folder("flux2"), Accelerator(cpu=True)
    both = {"flip_probability": 0.5, "flip_references": True}

    def opened(name: str, **settings: Any) -> None:
        streaming = {"streaming": True} if name == "stream" else {}
        open_run(in_process(pipeline, folders[name], tmp_path / "out", **streaming, **settings), accelerator)

    for name in ("rows", "stream"):
        opened(name)
        opened(name, **both)
        with pytest.raises(BucketingError, match=REFUSED):
            opened(name, flip_probability=0.5)
    opened("without", flip_probability=0.5)
    with pytest.raises(BucketingError, match="Omit `flip_references`: there are none"):
        opened("without", **both)
    with pytest.raises(BucketingError, match=r"mirrored without their references\. Cache them again"):
        opened("cached", trust_cache=True)
    prepared = PreparedDataset.load(folders["rows"])
    for views, refused in ((ViewRule(flip_probability=0.5), True), (ViewRule(**both), False)):
        config = CacheConfig(folder=str(tmp_path / "cache"), views=views)
        makers: list[Callable[[], Any]] = [
            lambda config=config: LatentColumns(
                encode=lambda pixels, shown: {"latents": pixels, **shown},
                model="",
                table=prepared.table,
                files=prepared.files,
                config=config,
            ),
            lambda views=views: collator_of(prepared, views),
        ]
        for make in makers:
            if refused:
                with pytest.raises(BucketingError, match=REFUSED):
                    make()
            else:
                make()


def collator_of(prepared: PreparedDataset, views: ViewRule) -> PackCollator:
    files = prepared.files
    options: dict[str, Any] = {"column": files.column, "root": files.root, "conditions": files.conditions}
    return PackCollator(prepared.open_table, **options, references=files.references, views=views, seed=0)


def test_a_reference_is_mirrored_when_its_sample_is(folders: dict[str, Path]) -> None:
    prepared = PreparedDataset.load(folders["rows"])
    rows = list(prepared.dataset)
    batch = collator_of(prepared, ViewRule(flip_probability=0.5, flip_references=True))(rows)
    plain = collator_of(prepared, ViewRule())(rows)
    assert 0 < sum(batch["flip"]) < len(rows)
    for flip, (reference,), (same,) in zip(
        batch["flip"], batch["shown"]["reference"], plain["shown"]["reference"], strict=True
    ):
        assert torch.equal(reference, same.flip(-1) if flip else same)
        assert not torch.equal(same, same.flip(-1))


def test_references_that_lie_over_their_sample_are_mirrored_unasked() -> None:
    over = {"conditions": {"reference": "ref"}, "references": ReferenceRule(downscale_factor=2)}
    PackCollator(SPEC, **over, views=ViewRule(flip_probability=0.5))
    with pytest.raises(BucketingError, match="Omit `flip_references`: references that lie over"):
        PackCollator(SPEC, **over, views=ViewRule(flip_probability=0.5, flip_references=True))
    with pytest.raises(BucketingError, match="Omit `flip_references`: no effect without `flip_probability`"):
        ViewRule(flip_references=True)


def test_folders_of_earlier_rules_stay_what_they_were_and_runs_say_how_pipelines_differ(
    folders: dict[str, Path], tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(data_checks.logger, "warning", said.append)
    pipeline = tiny_folder("flux2")
    recipe, config = recipe_of(str(pipeline)), in_process(pipeline, folders["rows"], tmp_path)
    prepared = PreparedDataset.load(folders["rows"])
    earlier = replace(prepared, references=ReferenceRule(multiples=(16, 16), min_side=64, max_ratio=8))
    for data in (prepared, replace(prepared, references=prepared.references.within(64**2))):
        data_checks.check_reference_views(config, data, recipe, views=ViewRule())
    assert not said
    data_checks.check_reference_views(config, earlier, recipe, views=ViewRule())
    assert "resized to multiples, with a bicubic filter; the pipeline of the model shows them" in said[0]
    assert "cropped to multiples, with a lanczos filter. Prepare the data set again" in said[0]
    assert repr(earlier.references).endswith("appended=0, appended_first=False, appended_text=None)")
    assert prepared.references.added == {"cropped": True, "resample": "lanczos"}
    assert PreparedDataset.load(folders["without"]).references.added == {}
