"""Runs as a page, made of their logs alone."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

from hf_bucketing import BucketingError, BucketTable, Size
from hf_bucketing.adapters.settings import SETTINGS
from hf_bucketing.media.write import write_image, write_video
from hf_bucketing.report import render_page
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.page import PAGE, run_page, write_live_page
from hf_bucketing.runs.review import losses_by_bucket
from hf_bucketing.runs.run_log import TABLE, RunLog, write_status
from tests.browser import look_at
from tests.conftest import run_script_here
from tests.report.test_page import check_complete

PROMPTS = ["a <red> square & more", "a cat"]
STEPS = 24


def write_run(folder: Path, *, pack: bool = False, streamed: bool = False) -> Path:
    """Write the logs, settings and renderings of a run of one epoch on two processes."""
    for process in range(2):
        log = RunLog(folder, process_index=process, num_processes=2, keep={} if process else None)
        if not streamed:
            counts = {
                "num_steps": STEPS,
                "num_mixed_steps": 0,
                "kept": 2 * STEPS,
                "repeated": 0,
                "consumed": 0,
                "dropped": {},
                "kept_area": 0.875,
            }
            log.write_plan(0, {"num_processes": 2, **counts})
        for step in range(STEPS):
            index, loss = [2 * step + process], [4.0 - 0.15 * step]
            log.write_samples(epoch=0, step=step, bucket_id=None if pack else step % 2, index=index, loss=loss)
            values = {"tokens_per_second": 100.0 + step, "imbalance": 1.0, **({"fill": 0.9} if pack else {})}
            counted = {"busy_batches": 1, "epoch": 0}
            by_noise = {f"loss_by_noise/0.{step % 10}": loss[0]}
            log.write_step(
                "losses",
                step + 1,
                {"train_loss": loss[0], "samples": 2, "seconds": 2.0, **values, **by_noise, **counted},
            )
        for step, loss in ((0, 2.5), (STEPS, 1.25)):
            means = {"samples": 3, "loss": loss, "by_noise": [loss]}
            log.write_step("validation", step, {
                "validation_loss": loss,
                "samples": 3,
                "by_bucket": [{"bucket_id": 1, "size": [9, 32, 48], **means}],
                "by_noise": [{"noise_level": 0.5, "loss": loss}],
                "by_source": [{"source": "clips", **means}],
            })  # fmt: skip
        log.close()
    settings = {"batching": "pack" if pack else "bucket", "validation_prompts": PROMPTS, "learning_rate": 1e-4}
    (folder / SETTINGS).write_text(json.dumps(settings))
    if not pack:
        (folder / "logs" / TABLE).write_text(BucketTable(sizes=(Size(1, 64, 64), Size(9, 32, 48))).to_json())
    for step in (5, 10, 15, 20):
        place = folder / "validation" / f"step-{step}"
        place.mkdir(parents=True)
        write_video(place / "9x32x48-a-red-square-more.mp4", np.zeros((9, 32, 48, 3), np.uint8), fps=8)
        write_image(place / "1x64x64-a-cat.png", np.zeros((64, 64, 3), np.uint8))
    return folder


def test_the_page_shows_what_the_logs_hold(tmp_path: Path) -> None:
    bucket, pack = write_run(tmp_path / "bucket"), write_run(tmp_path / "pack", pack=True)
    (bucket / "validation" / "step-20" / "1x64x64-a-cat.png").write_bytes(b"no image")
    log = RunLog(bucket, process_index=0, num_processes=2, keep={"samples": STEPS, "losses": STEPS, "plans": 1})
    log.write_step("resumes", STEPS, {"epoch": 0, "num_processes": 2, "changes": ["learning_rate 0.1 → 0.2"]})
    log.close()
    assert log.state_dict()["resumes"] == 1
    page = check_complete(render_page(run_page([bucket, pack])))
    head, *figures = page.tables["Runs"]
    assert head == ["", "bucket", "pack"]
    of_runs = {title: values for title, *values in figures}
    assert of_runs["batching"] == ["bucket", "pack"]
    assert [of_runs[name] for name in ("processes", "steps", "samples")] == [["2"] * 2, ["24"] * 2, ["48"] * 2]
    assert of_runs["loss, first tenth"][1] == f"{4 - 0.15 / 2:.4f}"
    assert of_runs["loss, last tenth"][1] == f"{4 - 0.15 * (STEPS - 1.5):.4f}"
    assert of_runs["kept area, mean"] == ["87.5%", "87.5%"]
    assert {row[1] for row in page.tables["Checks"][1:]} == {"holds"}
    buckets = {int(row[1]): row for row in page.tables["bucket: loss by bucket in numbers"][1:]}
    assert {bucket: row[0] for bucket, row in buckets.items()} == {0: "64×64", 1: "9×32×48"}
    for number, (count, loss) in losses_by_bucket(Logs(bucket)).items():
        assert buckets[number][2:4] == [str(count), f"{loss:.4f}"]
    assert page.tables["pack: loss by bucket in numbers"][1] == ["9×32×48", "1", "0", "–", "3", "1.2500"]
    assert page.text.count("-50%") == len(["all", "9×32×48", "clips"]), "of the packs: the other log was cut"
    said = [f"Rendering of “{PROMPTS[0]}” after step {step}." for step in (5, 10, 15, 20)]
    assert [alt for alt in page.images if PROMPTS[0] in alt] == 2 * said
    assert "1x64x64-a-cat.png could not be shown" in page.text
    assert page.tables["Settings that differ"][1:] == [["batching", "bucket", "pack"]]
    assert page.tables["Resumes"][1] == ["bucket", f"{STEPS}", "0", "2", "learning_rate 0.1 → 0.2"]


def test_the_page_begins_with_what_was_trained_and_how_it_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    named = {
        "pretrained_model_name_or_path": "Wan-AI/Wan2.1",
        "dataset_dir": "clips",
        "lora_rank": 8,
        "adapter": "dora",
    }
    (folder / SETTINGS).write_text(json.dumps(named))
    write_status(folder, "interrupted", global_step=STEPS, max_train_steps=1000, lines={})
    text = render_page(run_page([folder]))
    head = check_complete(text).text.partition("Overview")[0]
    year = datetime.now(timezone.utc).year
    said = ("model Wan-AI/Wan2.1", "data clips", "adapter DoRA of rank 8", f"ended {year}-", f"{STEPS} of 1,000")
    assert [words for words in said if words not in head] == []
    assert '<span class="mark fair">interrupted</span>' in text
    assert '<span class="mark poor">FAILED</span>' in text, "as it made too few steps"
    write_status(folder, "running", global_step=STEPS, max_train_steps=1000, lines={})
    assert "begun or resumed" in render_page(run_page([folder]))


def test_a_run_of_an_earlier_release_says_what_is_not_logged(tmp_path: Path) -> None:
    head = check_complete(render_page(run_page([write_run(tmp_path / "run")]))).text.partition("Overview")[0]
    assert "adapter none ended not logged" in head
    assert "state its end was not logged" in head


def test_runs_without_plans_are_shown_with_what_they_have(tmp_path: Path) -> None:
    streamed = write_run(tmp_path / "streamed", streamed=True)
    short = tmp_path / "short"
    log = RunLog(short, process_index=0, num_processes=1)
    log.write_samples(epoch=0, step=0, bucket_id=0, index=[0], loss=[1.0])
    log.write_step(
        "losses", 1, {"train_loss": 1.0, "samples": 1, "seconds": 1.0, "tokens_per_second": 9.0, "imbalance": 1.0}
    )
    log.close()
    page = check_complete(render_page(run_page([streamed, short])))
    checks = {row[0]: row[1:] for row in page.tables["Checks"][1:]}
    assert checks["streamed"][0] == checks["short"][0] == "not checked"
    assert "there is no optimizer step or no plan yet" in checks["streamed"][1]
    with pytest.raises(BucketingError, match="does not exist"):
        run_page([tmp_path / "none"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_ended_at_a_loss_that_is_not_finite_is_shown(value: float, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    log = run / "logs" / "samples-1.jsonl"
    *lines, last = log.read_text().splitlines()
    log.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"loss": [value]})]) + "\n")
    page = check_complete(render_page(run_page([run])))
    assert f"The loss of run is not finite for 1 samples, first in epoch 0, step {STEPS - 1}." in page.text


def test_files_that_people_put_beside_renderings_are_not_taken_for_some(tmp_path: Path) -> None:
    validation = write_run(tmp_path / "run") / "validation"
    shown = check_complete(render_page(run_page([tmp_path / "run"]))).images
    for name in ("step-5/chosen.png", "step-5 copy/1x64x64-a-cat.png"):
        (validation / name).parent.mkdir(exist_ok=True)
        (validation / name).write_bytes((validation / "step-5" / "1x64x64-a-cat.png").read_bytes())
    assert check_complete(render_page(run_page([tmp_path / "run"]))).images == shown


@pytest.mark.slow
def test_the_page_of_two_runs_is_whole_in_a_browser(tmp_path: Path, browser) -> None:
    runs = write_run(tmp_path / "bucket"), write_run(tmp_path / "pack", pack=True)
    page = tmp_path / "run.html"
    assert f"Page: {page}" in run_script_here("report_training.py", *runs, "--html", page).stdout
    assert page.stat().st_size < 3_000_000
    assert not any(look_at(browser, page.as_uri()))


@pytest.mark.slow
def test_no_column_of_the_page_is_cut_on_a_laptop(tmp_path: Path, browser) -> None:
    """As four runs on GPUs have it, with TFLOP/s and names of models in their settings."""
    runs = []
    for number in range(4):
        folder = write_run(tmp_path / f"wan-lora-16-packs-{number}", pack=number % 2 == 1)
        log = folder / "logs" / "losses.jsonl"
        rates = {"model_tflops": 312.5, "mfu": 0.31, "hardware_tflops": 401.25, "hfu": 0.41}
        lines = [json.loads(line) | rates for line in log.read_text().splitlines()]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = json.loads((folder / SETTINGS).read_text())
        model = {"pretrained_model_name_or_path": f"Wan-AI/Wan2.1-T2V-1.3B-Diffusers-{number}"}
        (folder / SETTINGS).write_text(json.dumps({**settings, **model}))
        runs.append(folder)
    page = tmp_path / "run.html"
    page.write_text(render_page(run_page(runs)), encoding="utf-8")
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    view.goto(page.as_uri())
    view.evaluate("() => document.querySelectorAll('details').forEach(details => { details.open = true })")
    cut = view.eval_on_selector_all(
        ".scroll", "tables => tables.filter(one => one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"
    )
    view.close()
    assert cut == []


def test_references_of_a_prompt_stand_before_its_renderings(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    files = [str(tmp_path / f"{name}.png") for name in ("red", "cat")]
    for file in files:
        write_image(file, np.zeros((48, 32, 3), np.uint8))
    settings = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps({**settings, "validation_references": files}))
    images = check_complete(render_page(run_page([folder]))).images
    of_first = [alt for alt in images if PROMPTS[0] in alt]
    assert of_first == [
        f"Reference of “{PROMPTS[0]}”.",
        *(f"Rendering of “{PROMPTS[0]}” after step {step}." for step in (5, 10, 15, 20)),
    ]
    shown = {alt for alt in images if alt.startswith("Reference")}
    assert shown == {f"Reference of “{prompt}”." for prompt in PROMPTS}


@pytest.mark.parametrize(("status", "refreshes"), [("running", True), ("finished", False)])
def test_the_page_of_a_run_refreshes_while_it_trains_and_reads_no_log_of_samples(
    status, refreshes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    write_status(folder, status, global_step=STEPS, max_train_steps=50, lines={})
    whole = check_complete(render_page(run_page([folder])))
    monkeypatch.setattr(Logs, "samples", property(lambda _: pytest.fail("a log of samples was read")))
    write_live_page(folder)
    text = (folder / PAGE).read_text()
    assert ('<meta http-equiv="refresh"' in text) == refreshes
    live = check_complete(text)
    assert live.tables["Runs"] == whole.tables["Runs"]
    assert live.images == whole.images
    assert whole.tables.keys() - live.tables.keys() == {"Checks", "run: loss by bucket in numbers"}


def test_a_run_without_steps_has_no_page_yet(tmp_path: Path) -> None:
    RunLog(tmp_path, process_index=0, num_processes=1).close()
    write_live_page(tmp_path)
    assert not (tmp_path / PAGE).exists()


def test_prompts_share_the_pictures_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run")
    monkeypatch.setattr("hf_bucketing.runs.page._MOST_PICTURES", 6)
    shown = [int(alt.split()[-1][:-1]) for alt in check_complete(render_page(run_page([folder]))).images]
    assert shown == 2 * [5, 15, 20], "both prompts, each from its first to its last rendering"
