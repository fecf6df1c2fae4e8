"""What is measured of the samples of trainers, by hand, and where it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_bucketing import BucketTable, Size
from hf_bucketing.report import ReportConfig, SizeColumns, make_report
from hf_bucketing.report.peers import PeerReport, compare_peers, describe_peers
from hf_bucketing.report.peers.musubi_tuner import Folder, MusubiTuner
from hf_bucketing.report.peers.outcome import peer_cells
from hf_bucketing.report.peers.short_rules import AIToolkit, DiffusersExamples
from hf_bucketing.report.peers.simple_tuner import SimpleTuner
from hf_bucketing.report.peers.views import Peer
from tests.conftest import run_script_here
from tests.report.peers.test_rules import SPEC

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(9, 64, 64)))
ROWS = [(1, 128, 256), (1, 64, 64), (1, 32, 32), (9, 64, 64), (20, 128, 128), (-1, 64, 64), (1, 0, 64)]


def compare(rows: list[tuple[int, int, int]], peer: Peer, **config: int) -> list[PeerReport]:
    columns = SizeColumns(*zip(*rows, strict=True))
    settings = {"batch_size": 2, "num_processes": 1, "text_tokens": 5, **config}
    report = make_report(columns, TABLE, spec=SPEC, config=ReportConfig(**settings))
    return [*compare_peers(columns, report, {"peer": peer})]


def test_each_measure_is_that_of_a_case_computed_by_hand() -> None:
    bucketing, packing, peer = compare(ROWS, DiffusersExamples(resolution=64))
    assert (peer.kept, peer.samples, peer.skipped) == (3, 3, {"unreadable": 2, "videos": 2})
    assert peer.kept_area == pytest.approx(1 - 0.5 / 3), "a half of the first image"
    assert (peer.kept_frames, peer.enlarged, peer.stretched, peer.retimed) == (1, 1, 0, 0)
    assert (peer.tokens_per_sample, peer.batches, peer.dropped, peer.repeated) == (16, 1, 1, 0)
    assert "resolution=64" in peer.rule
    assert (bucketing.name, bucketing.kept, bucketing.enlarged) == ("here, bucketing", 4, 0)
    assert bucketing.skipped == {"too_small": 1, "unreadable": 1, "empty": 1}
    assert bucketing.tokens_per_sample == 32, "without those of texts"
    assert (packing.name, packing.kept, packing.samples) == ("here, packing", 5, 5)


def test_samples_and_not_rows_are_counted_where_a_row_gives_several() -> None:
    folder = Folder(resolution=(64, 64), target_frames=(5, 9), frame_extraction="chunk")
    *_, peer = compare([(9, 64, 64), (20, 128, 256)], MusubiTuner(images=None, videos=folder))
    assert (peer.kept, peer.samples) == (2, 1 + 1 + 4 + 2)
    assert peer.kept_frames == pytest.approx(1), "all of both, by their clips of 9 and of 5"
    assert peer.kept_area == pytest.approx(1 - 6 / 8 * 16 / 96), "48×96 is cropped to 48×80 in six samples"
    assert peer.tokens_per_sample == pytest.approx((16 * (2 + 3) + 15 * (4 * 2 + 2 * 3)) / 8)
    assert (peer.batches, peer.dropped) == (5, 0)


def test_videos_at_another_speed_and_stretched_frames_are_counted() -> None:
    *_, peer = compare(ROWS, AIToolkit(resolution=64, num_frames=9, step=16))
    assert (peer.kept, peer.retimed, peer.kept_frames) == (5, 1, 1)
    *_, peer = compare([(1, 700, 720), (1, 300, 300)], SimpleTuner(megapixels=0.5, num_frames=9))
    assert (peer.stretched, peer.enlarged) == (1, 2), "both get 768×768, which 700×720 does not cover"


def test_a_trainer_that_takes_no_row_is_a_line_too() -> None:
    *_, peer = compare([(20, 128, 128), (9, 64, 64)], DiffusersExamples(resolution=64))
    assert (peer.kept, peer.samples, peer.skipped, peer.batches) == (0, 0, {"videos": 2}, 0)
    assert peer_cells([peer])[1][4:6] == ("–", "–")
    assert "peer skips 2 (videos)." in describe_peers([peer])


@pytest.mark.slow
def test_the_script_compares_in_text_json_and_page(prepared_dir: Path, tmp_path: Path) -> None:
    files = {"--json": tmp_path / "report.json", "--html": tmp_path / "report.html"}
    flags = [value for pair in files.items() for value in pair]
    result = run_script_here("report_buckets.py", prepared_dir, *flags, "--compare", "diffusers,musubi-tuner")
    lines = result.stdout.split("What other trainers would do with these rows\n")[1].splitlines()
    assert [line.split("  ")[0] for line in lines[:5]] == [
        "trainer", "here, bucketing", "here, packing", "diffusers", "musubi-tuner",
    ]  # fmt: skip
    saved = json.loads(files["--json"].read_text())["peers"]
    assert [peer["kept"] + sum(peer["skipped"].values()) for peer in saved] == [20] * 4
    page = files["--html"].read_text()
    assert "What other trainers would do with these rows" in page
    assert "MusubiTuner(images=Folder(" in page
    plain = run_script_here("report_buckets.py", prepared_dir, *flags)
    assert "other trainers" not in plain.stdout + files["--html"].read_text()
    assert "peers" not in json.loads(files["--json"].read_text())
    refused = run_script_here("report_buckets.py", prepared_dir, "--compare", "sd-scripts", check=False)
    assert "not 'sd-scripts'" in refused.stderr
