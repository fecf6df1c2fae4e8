"""Suggested runs: what is tried, what they are ranked by, and the files that prepare, cache and train."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hf_bucketing import BucketingError, BucketTable
from hf_bucketing.buckets.assignment import AssignmentRule, has_bucket
from hf_bucketing.buckets.sizes import Size
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared_stream import PreparedStream, prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.commands.suggested import describe_suggestion, suggestion_page
from hf_bucketing.conditions.references import RowReferences
from hf_bucketing.conditions.rows import RowConditions
from hf_bucketing.planner import PlanConfig, options, suggestion as suggestion_module
from hf_bucketing.planner.components import Components, read_components
from hf_bucketing.planner.gpus import TimeConfig
from hf_bucketing.planner.memory import PLAN_ERROR, MemoryParts, MemoryPlan, plan_components
from hf_bucketing.planner.rows import DataRows
from hf_bucketing.planner.settings import MachineConfig
from hf_bucketing.planner.suggestion import Candidate, Suggester, Suggestion
from hf_bucketing.planner.time import Speed
from hf_bucketing.planner.ways import Way, tables_of, ways_of
from hf_bucketing.report import ReportConfig, SizeColumns, make_report
from hf_bucketing.report.measure import Sizes
from hf_bucketing.report.page import render_page
from hf_bucketing.report.verdict import choose_way
from hf_bucketing.settings import changed
from tests.conftest import run_script_here
from tests.training.test_reference_runs import CLIPS, make_samples

BASE = PlanConfig.from_flat(device="cpu", mixed_precision="no", max_sequence_length=16, lora_rank=4)
MACHINE = MachineConfig(gpu_memory=1.0)
ROOMY = MachineConfig(gpu_memory=0.2)


@pytest.fixture(scope="module")
def components(pipeline_dir: Path) -> Components:
    return read_components(str(pipeline_dir))


def rows_of(*sizes: tuple[int, int, int], repeats: int = 20) -> DataRows:
    columns = np.repeat(np.array(sizes), repeats, axis=0).T
    total = repeats * len(sizes)
    nothing = RowConditions(num_rows=total)
    return DataRows(sizes=Sizes(*columns), total=total, conditions=nothing, caption_characters=20.0, decoding=1e-3)


MIXED = rows_of((17, 96, 128), (9, 64, 96), (1, 128, 96))


def ways(components: Components, rows: DataRows) -> list[Way]:
    made = {}
    for name, table in tables_of(components, rows.sizes).items():
        made[name] = table, table.make(components.spec, native_sizes=components.recipe.native_sizes)
    return [*ways_of(made, rows.sizes, spec=components.spec)]


def suggest(
    components: Components, rows: DataRows, machine: MachineConfig = MACHINE, *, names: str = ""
) -> Suggestion:
    speed = Speed.of(TimeConfig(), gpu_memory=24)
    suggester = Suggester(components, rows, machine=machine, base=BASE, speed=speed)
    return suggester.suggest(way for way in ways(components, rows) if names in way.name)


def test_tables_are_those_of_the_models_sizes_and_of_the_data(components: Components) -> None:
    tables = tables_of(components, MIXED.sizes)
    assert [*tables] == ["480×832", "720×1280", "sizes of the data"]
    assert tables["480×832"].bucket_frames == [1, 9, 17]
    assert [table.bucket_tokens[-1] == 4 * table.bucket_tokens[0] for table in tables.values()] == [True, True, False]
    images = rows_of((1, 64, 64)).sizes
    assert tables_of(components, images)["sizes of the data"].bucket_frames == [1]
    chosen = tables_of(components, MIXED.sizes, num_buckets=7)
    assert {name: chosen[name] for name in tables} == tables
    assert chosen["480×832, 7 chosen"] == dataclasses.replace(tables["480×832"], num_buckets=7)
    assert len(chosen) == 6


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["A sample has a token grid of", "needs 9 GiB"])
def test_a_panorama_rules_out_no_packs(reason: str, components: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny Wan model has 128 positions for columns, and a larger sample may need more memory than there is."""
    if reason == "needs 9 GiB":
        option = Suggester._option

        def limited(suggester: Suggester, way: Way, size: Size) -> tuple[PlanConfig, MemoryPlan]:
            if size.width > 128:
                raise BucketingError(reason)
            return option(suggester, way, size)

        monkeypatch.setattr(Suggester, "_option", limited)
    panorama = (1, 16, 4096 if reason.startswith("A") else 2048)
    for images, fits in ((40, True), (10, False)):
        sizes = Sizes(*np.array([(1, 96, 128)] * images + [panorama]).T)
        nothing = RowConditions(num_rows=images + 1)
        rows = DataRows(sizes=sizes, total=images + 1, conditions=nothing, caption_characters=20.0, decoding=1e-3)
        if fits:
            suggestion = suggest(components, rows, names="packs")
            assert {(run.dropped["too_large"], run.way.batching) for run in suggestion.candidates} == {(1, "pack")}
        else:
            with pytest.raises(BucketingError, match=reason):
                suggest(components, rows, names="packs")


def test_packs_are_prepared_with_the_table_that_rejects_fewest_rows(components: Components) -> None:
    (packs,) = (way for way in ways(components, MIXED) if way.batching == "pack")
    assert packs.settings == tables_of(components, MIXED.sizes)["sizes of the data"]
    assert has_bucket(packs.table.assign(*MIXED.sizes).bucket_id).all()


@pytest.mark.parametrize(
    ("pipeline", "condition", "cached"),
    [
        ("wan-2.2-i2v", None, True),
        ("wan-2.2-i2v", "first_frame:0.5,prefix:0.5", False),
        ("wan-2.2-ti2v", "first_frame:0.5,prefix:0.5", True),
        ("ltx-condition", "appended_keyframes", True),
        ("minimax-h3", "appended_last_frame:0.5,none:0.5", False),
        ("minimax-h3", "no_audio:0.5,none:0.5", True),
    ],
)
def test_no_cache_is_planned_for_a_run_that_draws_what_none_can_hold(
    pipeline: str, condition: str | None, cached: bool, tiny_folder: Callable[[str], Path]
) -> None:
    made, blocks = read_components(str(tiny_folder(pipeline))), 2
    assert made.can_cache(condition) == cached
    (first, *_) = options._steps(BASE, blocks, can_cache=made.can_cache(condition))
    assert first[1] == ({"cached": "all"} if cached else {})


@pytest.mark.slow
def test_a_report_of_the_same_rows_has_the_figure_that_a_suggestion_ranks_by(components: Components) -> None:
    """Buckets that enlarge images lose nothing of them, but compute more for each of their pixels."""
    rows, table = rows_of((1, 48, 64)), BucketTable.parse("96,128", frames=[1])
    rule = AssignmentRule(max_upscale=2.0)
    base, speed = changed(BASE, strip_length=4), Speed.of(TimeConfig(), gpu_memory=24)
    found = ways_of({"table": (None, table)}, rows.sizes, spec=components.spec, rule=rule)
    best = Suggester(components, rows, machine=MACHINE, base=base, speed=speed).suggest(found).candidates[0]
    assert best.way.batching == "pack"
    config = ReportConfig(width=96, num_processes=1, strip_length=4, rule=rule)
    report = make_report(SizeColumns(*rows.sizes), table, spec=components.spec, config=config)
    verdict = choose_way(report)
    assert verdict.way == "bucketing"
    title, of_buckets, of_packs = verdict.figures[-1]
    assert title == "time per kept pixel"
    assert float(of_packs.rstrip("×")) < float(of_buckets.rstrip("×")) == 1
    packs = report.strategies[-1]
    assert packs.kept_pixels == rows.sizes.heights.dot(rows.sizes.widths) * best.kept


@pytest.mark.every
def test_runs_are_ranked_by_the_time_of_a_kept_pixel(components: Components) -> None:
    suggestion = suggest(components, MIXED)
    runs = suggestion.candidates
    assert {run.way.batching for run in runs} == {"bucket", "pack"}
    assert [run.objective for run in runs] == sorted(run.objective for run in runs)
    assert ("480×832, buckets", "no row can be trained: 60 too_small.") in suggestion.refused
    assert not re.search("times the time", suggestion.reason_against(runs[0]))
    assert re.match(r"\d\.\d\d times the time per kept pixel", suggestion.reason_against(runs[-1]))
    for run in runs:
        assert run.memory.total <= 2**30
        assert run.time.steps >= 1
        assert run.time.least < run.time.seconds < run.time.most
        assert 0 < run.fill <= 1
        assert 0 < run.kept <= 1
        assert run.config.run.batches.max_tokens >= run.way.targets.num_tokens.max()
        assert run.once is not None, "ten epochs are worth a cache"
    pack = next(run for run in runs if run.way.batching == "pack")
    assert pack.kept == 1, "whole files at their own size"


@pytest.mark.slow
def test_tokens_per_step_fit_where_memory_grows_faster_than_between_two_samples(
    components: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steeper(*args: object) -> MemoryPlan:
        plan = plan_components(*args)
        late = MemoryParts(activations=200_000 * max(plan.shape.length - 500, 0))
        return dataclasses.replace(plan, phases={**plan.phases, "late": late})

    rows = dataclasses.replace(MIXED, total=10**6)
    flat = max(run.config.run.batches.max_tokens for run in suggest(components, rows, ROOMY, names="packs").candidates)
    for module in (options, suggestion_module):
        monkeypatch.setattr(module, "plan_components", steeper)
    runs = suggest(components, rows, ROOMY, names="packs").candidates
    assert 500 < max(run.config.run.batches.max_tokens for run in runs) < flat
    assert all(run.memory.total * (1 + PLAN_ERROR) <= ROOMY.gpu_memory * 2**30 for run in runs)
    packs = [run for run in runs if run.way.batching == "pack"]
    assert packs
    for run in packs:
        shape, strips = run.memory.shape, -(-components.spec.num_tokens(run.memory.shape.size) // 64)
        assert run.config.run.batches.strip_length == 64
        assert shape.tokens == shape.samples * 64 * strips, "whole strips, as packs hold them"


@pytest.mark.every
def test_runs_that_drop_many_rows_come_last(components: Components) -> None:
    rows = rows_of((17, 96, 128), (9, 64, 96), (1, 128, 96), (1, 1, 512))
    suggestion = suggest(components, rows)
    (last,) = {run.way.name for run in suggestion.candidates if run.share_dropped > 0.2}
    assert suggestion.candidates[-1].way.name == last == "sizes of the data, buckets"
    assert suggestion.reason_against(suggestion.candidates[-1]) == "drops 25.0% of the rows, and others 0.0%"
    assert sum(suggestion.candidates[-1].dropped.values()) == 20


@pytest.mark.slow
def test_rows_are_compared_as_counts_and_fewer_pixels_are_named(components: Components) -> None:
    """As floats, 1 − 14 ÷ 20 is more than 1 − 15 ÷ 20 + 0.05."""
    (run, *_) = suggest(components, MIXED, names="packs").candidates

    def made(num_dropped: int, *, kept: float, seconds: float = 1.0) -> Candidate:
        return dataclasses.replace(run, num_rows=20, num_dropped=num_dropped, kept=kept, seconds_per_pixel=seconds)

    runs = made(6, kept=0.24), made(5, kept=0.68, seconds=1.25), made(7, kept=0.9)
    suggestion = Suggestion(candidates=runs, refused=(), source="a guess")
    assert [suggestion.reason_against(candidate) for candidate in runs] == [
        "keeps 24.0% of the pixels, and 2 keeps 68.0%",
        "1.25 times the time per kept pixel",
        "drops 35.0% of the rows, and others 25.0%",
    ]
    text = describe_suggestion(suggestion, machine=MACHINE, price_per_hour=None)
    assert text.startswith(f"1: {run.name}; keeps 24.0% of the pixels, and 2 keeps 68.0%\n2: {run.name}; 1.25 times")
    page = render_page(suggestion_page(suggestion, MIXED, name="clips", machine=MACHINE))
    for said in ("keeps 24.0% of the pixels, and 2 keeps 68.0%", "It does not count how many pixels are kept"):
        assert said in page
        assert said in text


@pytest.mark.every
def test_a_sample_of_rows_says_the_steps_of_all(components: Components) -> None:
    whole = suggest(components, MIXED).candidates[0]
    tenth = suggest(components, dataclasses.replace(MIXED, total=10 * MIXED.total)).candidates
    (same,) = (run for run in tenth if run.name == whole.name)
    assert same.time.steps == pytest.approx(10 * whole.time.steps, rel=0.01)
    assert same.time.seconds == pytest.approx(10 * whole.time.seconds)
    assert same.seconds_per_pixel == pytest.approx(whole.seconds_per_pixel)
    assert same.disk.cache == pytest.approx(10 * whole.disk.cache)


@pytest.mark.slow
def test_one_epoch_and_streams_have_no_cache_and_decode(components: Components) -> None:
    once = suggest(components, MIXED, dataclasses.replace(MACHINE, num_train_epochs=1, cpus=3)).candidates[0]
    cached = suggest(components, MIXED).candidates[0]
    assert (once.once, once.config.samples.cached, once.disk.cache) == (None, "nothing", 0)
    assert once.time.seconds > cached.time.seconds
    assert once.workers > 3 == once.num_workers
    of_step = cached.disk.cache / MIXED.total * cached.memory.shape.samples
    assert cached.host.phases["training"].batches == pytest.approx(4 * of_step, rel=1e-3), "two of each of two workers"
    stream = dataclasses.replace(MIXED, total=None, decoding=None)
    run = suggest(components, stream).candidates[0]
    assert (run.config.samples.cached, run.workers, run.num_workers) == ("nothing", None, 2)


@pytest.mark.every
def test_what_does_not_fit_is_refused_with_the_reason_of_each_way(components: Components) -> None:
    small = rows_of((1, 64, 64))
    with pytest.raises(BucketingError, match=r"`gpu_memory=0.0002` GiB:\n- 480×832(?s:.*)the least that options make"):
        suggest(components, small, dataclasses.replace(MACHINE, gpu_memory=0.0002), names="buckets")
    with pytest.raises(BucketingError, match=r"`cpu_memory` is 0\.1 GiB"):
        suggest(components, small, dataclasses.replace(MACHINE, cpu_memory=0.1), names="buckets")


@pytest.mark.slow
def test_references_count_in_tokens_memory_and_time(tiny_folder: Callable[[str], Path]) -> None:
    components = read_components(str(tiny_folder("flux2")))
    spec = components.spec
    rule = dataclasses.replace(components.recipe.reference_rule(), multiples=spec.multiples)
    rows = rows_of((1, 64, 96), (1, 96, 64), repeats=10)
    shown = RowReferences.of_lists([[1, 64, 32, 1, 32, 32], [1, 32, 32], []] * 6 + [[], []], rule=rule)
    without, with_references = (
        suggest(components, found, names="data")
        for found in (rows, dataclasses.replace(rows, conditions=RowConditions.of(shown)))
    )
    assert {run.config.samples.reference_sizes for run in without.candidates} == {None}
    assert {run.config.samples.reference_sizes for run in with_references.candidates} == {"1,64,32;1,32,32"}
    tokens = sum(spec.num_tokens(Size(1, *sides)) for sides in ((64, 32), (32, 32)))
    for alone, beside in zip(
        *(sorted(run.candidates, key=by_way) for run in (without, with_references)), strict=False
    ):
        assert beside.way.targets.condition_tokens.max() == tokens
        assert beside.memory.shape.references == (Size(1, 64, 32), Size(1, 32, 32))
        assert beside.memory.shape.length >= alone.memory.shape.length + tokens
        assert beside.time.seconds > alone.time.seconds


def by_way(run: Candidate) -> tuple[str, int]:
    return run.way.name, run.config.run.batches.token_limit or 0


@pytest.mark.cases(slow=("False",))
@pytest.mark.parametrize("streaming", [False, True])
def test_a_suggested_run_with_references_prepares_and_trains_as_written(
    streaming: bool, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    make_samples(tmp_path / "images", clips=[clip._replace(frames=1, fps=0) for clip in CLIPS])
    kind = {"streaming": True} if streaming else {}
    common = ("--pretrained_model_name_or_path", tiny_folder("flux2"), "--gpu_memory", 1, "--device", "cpu")
    run_script_here(
        "suggest_run.py", *common, dataset=tmp_path / "images", reference_column="several", mixed_precision="no",
        output_dir=tmp_path, **kind,
    )  # fmt: skip
    file = tmp_path / "1" / "config.yaml"
    run_script_here("prepare_dataset.py", config=file, **kind)
    if not streaming:
        run_script_here("cache_latents.py", config=file)
    run_script_here(
        "train_text_to_video.py", config=file, max_train_steps=2, report_to="none", dataloader_num_workers=0
    )
    assert (tmp_path / "1" / "trained" / "model_index.json").is_file()


@pytest.mark.slow
def test_a_suggested_run_prepares_caches_and_trains_as_written(
    media_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    common = ("--pretrained_model_name_or_path", pipeline_dir, "--gpu_memory", 1, "--device", "cpu")
    common = (*common, "--mixed_precision", "no", "--price_per_hour", 3)
    done = run_script_here(
        "suggest_run.py", *common, dataset=media_dir, target_fps=8, output_dir=tmp_path, num_train_epochs=2,
        html=tmp_path / "runs.html",
    )  # fmt: skip
    page = (tmp_path / "runs.html").read_text()
    best = re.search(r"^1: ([^;\n]*)", done.stdout, re.MULTILINE)
    assert best is not None
    assert f"Train with {best[1]}: an epoch takes" in page
    assert "price of an epoch" in page
    assert "\n1: " in done.stdout
    assert "price of an epoch" in done.stdout
    assert "rtx-" in done.stdout, "a guess is named"
    file = tmp_path / "1" / "config.yaml"
    assert "hf_bucketing prepare --config" in file.read_text()
    for script in ("prepare_dataset.py", "cache_latents.py"):
        run_script_here(script, config=file)
    trained = run_script_here(
        "train_text_to_video.py", config=file, max_train_steps=2, report_to="none", dataloader_num_workers=0
    )
    assert trained.returncode == 0
    assert (tmp_path / "1" / "trained" / "model_index.json").is_file()
    again = run_script_here(
        "suggest_run.py", *common, dataset=tmp_path / "1" / "prepared", output_dir=tmp_path / "again"
    )
    assert "table of the folder, buckets" in again.stdout
    assert f"dataset_dir: {tmp_path / '1' / 'prepared'}" in (tmp_path / "again" / "1" / "config.yaml").read_text()


@pytest.mark.slow
def test_suggested_tables_that_are_chosen_prepare_as_suggested(
    media_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    common = ("--pretrained_model_name_or_path", pipeline_dir, "--gpu_memory", 1, "--device", "cpu")
    common = (*common, "--mixed_precision", "no", "--num_buckets", 9)
    done = run_script_here(
        "suggest_run.py", *common, dataset=media_dir, target_fps=8, output_dir=tmp_path, check=False
    )
    assert "sizes of the data, 9 chosen, buckets" in done.stdout
    files = [path for path in sorted(tmp_path.glob("*/config.yaml")) if "num_buckets: 9" in path.read_text()]
    assert files, "one of the three best has a table that is chosen"
    run_script_here("prepare_dataset.py", config=files[0])
    folder = files[0].parent / "prepared"
    assert len(PreparedDataset.load(folder).table) <= 9
    refused = run_script_here("suggest_run.py", *common, dataset=folder, output_dir=tmp_path / "again", check=False)
    assert "Omit --num_buckets" in refused.stderr


@pytest.mark.slow
def test_suggestions_for_a_stream_prepare_and_train_as_written(
    media_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    common = ("--pretrained_model_name_or_path", pipeline_dir, "--gpu_memory", 1, "--device", "cpu", "--streaming")
    done = run_script_here(
        "suggest_run.py", *common, dataset=media_dir, target_fps=8, mixed_precision="no", output_dir=tmp_path
    )
    assert "Of the stream, the first 20 rows are known" in done.stdout
    files = [tmp_path / rank / "config.yaml" for rank in "12"]
    assert "packs" in "".join(file.read_text() for file in files)
    for file in files:
        run_script_here("prepare_dataset.py", "--streaming", config=file)
        run_script_here(
            "train_text_to_video.py", config=file, max_train_steps=2, report_to="none", dataloader_num_workers=0
        )
        assert (file.parent / "trained" / "model_index.json").is_file()
    stream = tmp_path / "1" / "prepared"
    again = run_script_here(
        "suggest_run.py", *common[:-1], dataset=stream, mixed_precision="no", output_dir=tmp_path / "again"
    )
    assert "table of the folder, buckets" in again.stdout
    assert "Of the stream, the first 20 rows are known" in again.stdout
    settings = (tmp_path / "again" / "1" / "config.yaml").read_text()
    assert f"dataset_dir: {stream}\n" in settings
    assert "streaming: " in settings
    assert "prepare_dataset.py" not in settings


def test_a_prepared_stream_is_read_through_its_own_description(
    media_dir: Path, components: Components, tmp_path: Path
) -> None:
    folder, table = tmp_path / "stream", TableConfig(buckets="64,64", bucket_frames=[1, 9])
    source = SourceConfig(dataset=str(media_dir), target_fps=8, clips="all", table=table)
    prepare_stream(source, spec=components.spec, say=lambda text: None)[0].save(folder)
    columns = PreparedStream.load(folder).read_first()
    whole = prepare(source, spec=components.spec, say=lambda text: None).dataset
    for name in ("num_frames", "height", "width", "bucket_id"):
        assert columns[name].tolist() == whole[name][:], name


def test_rows_of_a_prepared_folder_keep_their_buckets(media_dir: Path, components: Components) -> None:
    table = TableConfig(buckets="512,512", bucket_frames=[1, 9])
    source = SourceConfig(dataset=str(media_dir), target_fps=8, table=table, rule=AssignmentRule(max_upscale=100.0))
    prepared = prepare(source, spec=components.spec, say=lambda text: None)
    rows, tables = DataRows.of_prepared(prepared), {"own": (None, prepared.table)}
    buckets, _ = ways_of(tables, rows.sizes, spec=prepared.spec, assigned=rows.assigned)
    assert buckets.targets.bucket_id.tolist() == prepared.dataset["bucket_id"][:]
    anew, _ = ways_of(tables, rows.sizes, spec=prepared.spec)
    assert anew.targets.bucket_id.tolist() != prepared.dataset["bucket_id"][:], "other limits are the default"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"clip_frames": 9}, "Omit --clip_frames"),
        ({"clips": "head"}, "Give --clip_frames with --clips"),
        ({"num_buckets": 4, "streaming": True}, "Omit --num_buckets: a stream"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_anything_is_read(
    flags: dict[str, object], message: str, tmp_path: Path
) -> None:
    ended = run_script_here(
        "suggest_run.py", check=False, pretrained_model_name_or_path=tmp_path / "none", dataset=tmp_path / "none",
        gpu_memory=1, output_dir=tmp_path, **flags,
    )  # fmt: skip
    assert message in ended.stderr
