"""What a report says about references: how many batches they cost, and when to pack."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Sequence, Value

from hf_bucketing import BucketTable, LatentSpec
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.audio import AudioRule, RowAudio
from hf_bucketing.conditions.references import REFERENCE_SIZES, ReferenceRule, RowReferences
from hf_bucketing.conditions.rows import RowConditions
from hf_bucketing.planner import MemoryParts, PlanConfig, memory
from hf_bucketing.report import (
    ReportConfig,
    SizeColumns,
    describe_references,
    format_report,
    make_report,
    measure_references,
)
from tests.conftest import run_script_here

SPEC = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable.parse("64,64;64,96", frames=[1])
CONFIG = ReportConfig(batch_size=2, num_processes=1)


def references_of(cells: list[list[int]]) -> RowConditions:
    return RowConditions.of(RowReferences.of_lists(cells, rule=ReferenceRule(multiples=(16, 16))))


def test_batches_are_counted_with_references_and_without() -> None:
    ids = np.array([0, 0, 0, 0, 1, 1, -1])
    cells = [[1, 64, 64], [1, 64, 64], [1, 32, 64], [], [], [], [1, 64, 64] * 3]
    found = measure_references(ids, references_of(cells), table=TABLE, spec=SPEC, config=CONFIG)
    assert found is not None
    assert (found.num_samples, found.shown, found.most) == (6, 3, 1)
    assert (found.buckets, found.groups) == (2, 4)
    assert found.token_share == pytest.approx((16 + 16 + 8) / (16 + 16 + 8 + 4 * 16 + 2 * 24))
    assert (found.in_full_batches, found.without) == (pytest.approx(4 / 6), 1.0)
    assert (found.num_steps, found.steps_without) == (4, 3)
    text = describe_references(found)
    assert "3 of 6 samples are shown some, at most 1, which are 26% of all tokens" in text
    assert "there are 4 groups in 2 buckets" in text
    assert "hold 67% of the samples (without references 100%) in 4 steps (3)" in text
    assert "Train packs" in text


def test_padding_buckets_and_packs_count_references_as_computed_by_hand() -> None:
    references = references_of([[1, 64, 64], [1, 64, 64], [], [1, 32, 64]])  # 16, 16, 0 and 8 tokens beside 16
    report, without = (
        make_report(
            SizeColumns([1] * 4, [64] * 4, [64] * 4),
            TABLE,
            spec=SPEC,
            config=replace(CONFIG, batch_size=size, strip_length=16, max_tokens=80),
            conditions=shown,
        )
        for size, shown in ((4, references), (2, None))
    )
    padding, bucketing, packing = report.strategies
    assert [strategy.real_tokens for strategy in report.strategies] == [104] * 3
    assert [strategy.real_tokens for strategy in without.strategies] == [64] * 3
    assert (padding.computed_tokens, bucketing.computed_tokens, packing.computed_tokens) == (4 * 32, 104, 112)
    assert (padding.num_steps, bucketing.num_steps, packing.num_steps) == (1, 3, 2)
    assert (report.buckets.num_steps, without.buckets.num_steps) == (3, 2)
    (use,) = report.buckets.used
    assert (use.batches, use.short_batches, use.num_tokens) == (3, 3, 16)


def test_padding_buckets_and_packs_count_audio_as_computed_by_hand() -> None:
    spec, table = (
        LatentSpec(temporal_stride=8, spatial_stride=16, patch=(1, 1, 1)),
        BucketTable.parse("64,64", frames=[9]),
    )
    rule = AudioRule(rate=16000, samples_per_token=640)
    audio = RowAudio(rule=rule, present=np.array([1, 1, 0, 0], bool), fps=np.full(4, 25.0))  # 9, 9, 0 and 0 tokens
    report = make_report(
        SizeColumns([9] * 4, [64] * 4, [64] * 4),
        table,
        spec=spec,
        config=replace(CONFIG, batch_size=4, strip_length=1, max_tokens=100),
        conditions=RowConditions.of(audio),
    )
    padding, bucketing, packing = report.strategies
    assert [strategy.real_tokens for strategy in report.strategies] == [4 * 32 + 2 * 9] * 3
    assert padding.computed_tokens == 4 * (32 + 9)
    assert (bucketing.num_steps, bucketing.computed_tokens) == (2, 4 * 32 + 2 * 9), "two stacks: with audio, without"
    assert (packing.num_steps, packing.computed_tokens) == (2, 4 * 32 + 2 * 9)
    assert report.condition_shares == {"audio": 2 * 9 / (4 * 32 + 2 * 9)}
    assert report.to_dict()["condition_shares"] == report.condition_shares
    assert "Conditions, of all tokens in buckets: audio 12%." in format_report(report).replace("\n", " ")


def test_references_in_front_of_samples_divide_buckets_by_their_number_alone() -> None:
    columns = SizeColumns([1] * 4, [64] * 4, [64] * 4)
    cells = [[1, 64, 64], [1, 32, 64], [1, 32, 32], []]
    steps = {}
    for in_front in (False, True):
        rule = ReferenceRule(multiples=(16, 16), enters="latent frames" if in_front else "tokens").counted
        conditions = RowConditions.of(RowReferences.of_lists(cells, rule=rule))
        report = make_report(columns, TABLE, spec=SPEC, config=CONFIG, conditions=conditions)
        assert report.references is not None
        steps[in_front] = (report.references.groups, report.buckets.num_steps, report.strategies[1].real_tokens)
    assert steps == {False: (4, 4, 64 + 16 + 8 + 4), True: (2, 3, 64 + 3 * 16)}


def test_equal_references_need_no_packs() -> None:
    references = references_of([[1, 64, 64]] * 8)
    found = measure_references(np.zeros(8, np.int64), references, table=TABLE, spec=SPEC, config=CONFIG)
    assert found is not None
    assert "Buckets serve as well as packs here." in describe_references(found)


def test_nothing_is_said_where_no_usable_sample_has_references() -> None:
    for references in (RowConditions(num_rows=2), references_of([[], [1, 64, 64]])):
        assert measure_references(np.array([0, -1]), references, table=TABLE, spec=SPEC, config=CONFIG) is None


@pytest.mark.slow
def test_the_script_says_it_in_its_text_json_and_page(prepared_dir: Path, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(prepared_dir)
    cells = [[1, 40, 72] if row % 2 else [] for row in range(len(prepared.dataset))]
    dataset = prepared.dataset.add_column(REFERENCE_SIZES, cells, feature=Sequence(Value("int32")))
    dataset = dataset.add_column("ref", [None] * len(dataset))
    rule = ReferenceRule(multiples=prepared.spec.multiples)
    replace(prepared, dataset=dataset, conditions={"reference": "ref"}, references=rule).save(tmp_path / "shown")
    front = replace(rule, enters="latent frames")
    replace(prepared, dataset=dataset, conditions={"reference": "ref"}, references=front).save(tmp_path / "front")
    shares = []
    for folder in (prepared_dir, tmp_path / "shown", tmp_path / "front"):
        files = {"json": tmp_path / "report.json", "html": tmp_path / "report.html"}
        result = run_script_here("report_buckets.py", folder, num_processes=1, **files)
        said = "samples are shown some"
        shown = json.loads(files["json"].read_text())["references"]
        texts = (" ".join(result.stdout.split()), files["html"].read_text())
        assert [said in text for text in texts] == [folder != prepared_dir] * 2
        assert (shown is not None) == (folder != prepared_dir)
        shares.append(0 if shown is None else shown["token_share"])
    assert shares == sorted({*shares}), "a reference in front of a sample has more tokens than its own size"


@pytest.mark.slow
def test_the_memory_of_the_page_is_planned_with_the_references_of_the_row_that_has_most(
    prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[PlanConfig] = []
    parts = SimpleNamespace(peak=MemoryParts(weights=1), total=1)
    monkeypatch.setattr(memory, "plan_memory", lambda model, config: planned.append(config) or parts)
    prepared = PreparedDataset.load(prepared_dir)
    cells = [[1, 16, 32] * (row % 3) for row in range(len(prepared.dataset))]
    dataset = prepared.dataset.add_column(REFERENCE_SIZES, cells, feature=Sequence(Value("int32")))
    rule = ReferenceRule(multiples=prepared.spec.multiples)
    replace(prepared, dataset=dataset, conditions={"reference": "ref"}, references=rule).save(tmp_path / "shown")
    for folder in (prepared_dir, tmp_path / "shown"):
        flags = {"html": tmp_path / "page.html", "pretrained_model_name_or_path": "a/model"}
        run_script_here("report_buckets.py", folder, num_processes=1, **flags)
    assert "tokens, and references of 16×32, 16×32), in bf16" in (tmp_path / "page.html").read_text()
    assert [config.samples.reference_sizes for config in planned] == [None] * 3 + ["1,16,32;1,16,32"] * 3
