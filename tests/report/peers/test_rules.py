"""Rules of trainers, against sizes that their own code gave for the same rows.

The sizes were computed by the functions of each repository at the commit that its module names; on 2,000 random rows
the rules gave the same as these functions (scripts/benchmarks/benchmark_peers.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_bucketing import BucketTable, LatentSpec, Size
from hf_bucketing.report.measure import Sizes
from hf_bucketing.report.peers.diffusion_pipe import DiffusionPipe
from hf_bucketing.report.peers.musubi_tuner import Folder, MusubiTuner
from hf_bucketing.report.peers.outcome import PEERS
from hf_bucketing.report.peers.short_rules import AIToolkit, DiffusersExamples, LTXTrainer, NovelAI
from hf_bucketing.report.peers.simple_tuner import SimpleTuner
from hf_bucketing.report.peers.views import Peer, Views

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable(sizes=(Size(1, 640, 640), Size(33, 480, 832), Size(81, 512, 512), Size(81, 832, 480)))
ROWS = [
    (1, 480, 640), (1, 1080, 1920), (1, 300, 2000), (1, 96, 100), (1, 700, 704),
    (20, 720, 1280), (50, 832, 480), (100, 512, 515), (200, 1080, 1916),
]  # fmt: skip
SIZES = Sizes(*np.array(ROWS).T)


def folders(resolution: tuple[int, int], **settings: Any) -> MusubiTuner:
    folder = Folder(resolution=resolution, **settings)
    return MusubiTuner(images=folder, videos=folder)


def pipe(**keys: Any) -> DiffusionPipe:
    return DiffusionPipe.read([keys], TABLE, SPEC)


def cells(views: Views) -> list[tuple[int, ...]]:
    """Row, frames, height, width, height and width before the crop, clips and their frames of each view."""
    columns = (*views.sizes, views.resized_heights, views.resized_widths, views.clips, views.used_frames)
    return sorted(tuple(int(value) for value in line) for line in zip(views.rows, *columns, strict=True))


RATIOS = {"enable_ar_bucket": True, "min_ar": 0.5, "max_ar": 2.0, "num_ar_buckets": 7}
CROPPED: dict[str, tuple[Peer, list[tuple[int, ...]]]] = {
    "novelai": (
        NovelAI(),
        [(0, 1, 512, 704), (1, 1, 448, 832), (2, 1, 256, 1024), (3, 1, 512, 512), (4, 1, 512, 512)],
    ),
    "diffusion-pipe": (
        pipe(resolutions=[512], **RATIOS, frame_buckets=[1, 33]),
        [
            (0, 1, 464, 576), (1, 1, 400, 640), (2, 1, 368, 720), (3, 1, 512, 512), (4, 1, 512, 512),
            (6, 33, 640, 400), (7, 33, 512, 512), (8, 33, 400, 640),
        ],
    ),
    "diffusion-pipe, ratios": (
        pipe(resolutions=[[1280, 720]], enable_ar_bucket=True, ar_buckets=[1.0, 1.5, 0.66667], frame_buckets=[34, 65]),
        [
            (0, 1, 784, 1168), (1, 1, 784, 1168), (2, 1, 784, 1168), (3, 1, 960, 960), (4, 1, 960, 960),
            (6, 33, 1168, 784), (7, 65, 960, 960), (8, 65, 784, 1168),
        ],
    ),
    "diffusion-pipe, two areas and squares": (
        pipe(resolutions=[333, 640], frame_buckets=[1, 200]),
        [
            *((row, 1, side, side) for row in range(5) for side in (336, 640)), (8, 197, 336, 336), (8, 197, 640, 640),
        ],
    ),
    "diffusion-pipe, sizes": (
        pipe(size_buckets=[[512, 512, 1], [768, 512, 1], [512, 768, 1]]),
        [(0, 1, 768, 512), (1, 1, 768, 512), (2, 1, 768, 512), (3, 1, 512, 768), (4, 1, 512, 768)],
    ),
    "diffusion-pipe, sizes of videos": (
        pipe(size_buckets=[
            [960, 960, 1], [960, 704, 1], [704, 960, 33], [1280, 704, 1], [704, 1280, 65], [480, 832, 33],
        ]),
        [
            (0, 1, 704, 960), (1, 1, 704, 1280), (2, 1, 704, 1280), (3, 1, 960, 960), (4, 1, 960, 960),
            (6, 33, 960, 704), (7, 33, 832, 480), (8, 33, 832, 480),
        ],
    ),
}  # fmt: skip
RESIZED: dict[str, tuple[Peer, list[tuple[int, ...]]]] = {
    "ltx-trainer": (
        LTXTrainer(buckets=(
            Size(1, 544, 960), Size(49, 544, 960), Size(49, 512, 512), Size(25, 960, 544), Size(1, 512, 512),
        )),
        [
            (0, 1, 544, 960, 720, 960), (1, 1, 544, 960, 544, 967), (2, 1, 544, 960, 544, 3626),
            (3, 1, 512, 512, 512, 533), (4, 1, 512, 512, 512, 514), (5, 1, 544, 960, 544, 967),
            (6, 25, 960, 544, 960, 553), (7, 49, 512, 512, 512, 515), (8, 49, 544, 960, 544, 965),
        ],
    ),
    "ai-toolkit": (
        AIToolkit(resolution=512, num_frames=33, step=16),
        [
            (0, 1, 448, 576, 448, 598), (1, 1, 384, 672, 384, 683), (2, 1, 192, 1328, 200, 1328),
            (3, 1, 96, 96, 96, 100), (4, 1, 512, 512, 512, 515), (5, 33, 384, 672, 384, 683),
            (6, 33, 672, 384, 672, 388), (7, 33, 512, 512, 512, 515), (8, 33, 384, 672, 384, 682),
        ],
    ),
    "diffusers": (
        DiffusersExamples(resolution=640),
        [
            (0, 1, 640, 640, 640, 853), (1, 1, 640, 640, 640, 1138), (2, 1, 640, 640, 640, 4267),
            (3, 1, 640, 640, 640, 667), (4, 1, 640, 640, 640, 644),
        ],
    ),
    "simpletuner": (
        SimpleTuner(megapixels=0.5, num_frames=81),
        [
            (0, 1, 640, 832, 640, 853), (1, 1, 512, 960, 540, 960), (2, 1, 256, 1792, 268, 1792),
            (3, 1, 768, 768, 768, 768), (4, 1, 768, 768, 768, 768), (7, 81, 768, 768, 768, 768),
            (8, 81, 512, 960, 541, 960),
        ],
    ),
    "simpletuner, steps of 16": (
        SimpleTuner(megapixels=0.7, num_frames=81, alignment=16),
        [
            (0, 1, 720, 960, 720, 960), (1, 1, 624, 1104, 624, 1109), (2, 1, 320, 2144, 321, 2144),
            (3, 1, 816, 848, 816, 850), (4, 1, 832, 832, 832, 836), (7, 81, 832, 832, 832, 836),
            (8, 81, 624, 1104, 624, 1107),
        ],
    ),
}  # fmt: skip
CLIPS: dict[str, tuple[Peer, list[tuple[int, ...]]]] = {
    "head": (
        folders((960, 544), target_frames=(1, 25, 45)),
        [
            (0, 1, 624, 832, 624, 832, 1, 1), (1, 1, 544, 960, 544, 967, 1, 1), (2, 1, 352, 1472, 352, 2347, 1, 1),
            (3, 1, 704, 736, 707, 736, 1, 1), (4, 1, 720, 720, 720, 724, 1, 1), (5, 1, 544, 960, 544, 967, 1, 1),
            (6, 1, 960, 544, 960, 554, 1, 1), (6, 25, 960, 544, 960, 554, 1, 25), (6, 45, 960, 544, 960, 554, 1, 45),
            (7, 1, 720, 720, 720, 724, 1, 1), (7, 25, 720, 720, 720, 724, 1, 25), (7, 45, 720, 720, 720, 724, 1, 45),
            (8, 1, 544, 960, 544, 965, 1, 1), (8, 25, 544, 960, 544, 965, 1, 25), (8, 45, 544, 960, 544, 965, 1, 45),
        ],
    ),
    "chunk, no_upscale": (
        folders((512, 512), bucket_no_upscale=True, target_frames=(33, 81), frame_extraction="chunk"),
        [
            (0, 1, 432, 592, 444, 592, 1, 1), (1, 1, 384, 672, 384, 683, 1, 1), (2, 1, 256, 1024, 256, 1707, 1, 1),
            (3, 1, 96, 96, 96, 100, 1, 1), (4, 1, 512, 512, 512, 515, 1, 1), (6, 33, 672, 384, 672, 388, 1, 33),
            (7, 33, 512, 512, 512, 515, 3, 99), (7, 81, 512, 512, 512, 515, 1, 81),
            (8, 33, 384, 672, 384, 681, 6, 198), (8, 81, 384, 672, 384, 681, 2, 162),
        ],
    ),
    "slide, no buckets of images": (
        folders(
            (832, 480), enable_bucket=False, target_frames=(24, 26, 49), frame_extraction="slide", frame_stride=10
        ),
        [
            (0, 1, 480, 832, 624, 832, 1, 1), (1, 1, 480, 832, 480, 853, 1, 1), (2, 1, 480, 832, 480, 3200, 1, 1),
            (3, 1, 480, 832, 799, 832, 1, 1), (4, 1, 480, 832, 827, 832, 1, 1),
            (6, 21, 832, 480, 832, 480, 3, 41), (6, 25, 832, 480, 832, 480, 3, 45), (6, 49, 832, 480, 832, 480, 1, 49),
            (7, 21, 624, 640, 636, 640, 8, 91), (7, 25, 624, 640, 636, 640, 8, 95), (7, 49, 624, 640, 636, 640, 6, 99),
            (8, 21, 480, 832, 480, 852, 18, 191), (8, 25, 480, 832, 480, 852, 18, 195),
            (8, 49, 480, 832, 480, 852, 16, 199),
        ],
    ),
    "uniform": (
        folders((640, 640), target_frames=(17, 33), frame_extraction="uniform", frame_sample=4),
        [
            (0, 1, 560, 720, 560, 747, 1, 1), (1, 1, 480, 848, 480, 853, 1, 1), (2, 1, 320, 1280, 320, 2133, 1, 1),
            (3, 1, 624, 656, 630, 656, 1, 1), (4, 1, 640, 640, 640, 644, 1, 1), (5, 17, 480, 848, 480, 853, 4, 20),
            (6, 17, 848, 480, 848, 489, 4, 50), (6, 33, 848, 480, 848, 489, 4, 50),
            (7, 17, 640, 640, 640, 644, 4, 68), (7, 33, 640, 640, 640, 644, 4, 100),
            (8, 17, 480, 848, 480, 852, 4, 68), (8, 33, 480, 848, 480, 852, 4, 132),
        ],
    ),
    "full": (
        folders((1280, 720), bucket_no_upscale=True, frame_extraction="full"),
        [
            (0, 1, 480, 640, 480, 640, 1, 1), (1, 1, 720, 1280, 720, 1280, 1, 1), (2, 1, 288, 2000, 300, 2000, 1, 1),
            (3, 1, 96, 96, 96, 100, 1, 1), (4, 1, 688, 704, 700, 704, 1, 1), (5, 17, 720, 1280, 720, 1280, 1, 17),
            (6, 49, 1248, 736, 1276, 736, 1, 49), (7, 97, 960, 960, 960, 966, 1, 97),
            (8, 129, 720, 1280, 722, 1280, 1, 129),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "sizes"), CROPPED.values(), ids=[*CROPPED])
def test_a_frame_covers_its_size_as_the_trainers_code_chooses_it(rule: Peer, sizes: list[tuple[int, ...]]) -> None:
    views = rule.views(SIZES).views
    assert [line[:4] for line in cells(views)] == sizes
    _, heights, widths = SIZES.select(views.rows)
    assert views.resized_heights / heights == pytest.approx(views.resized_widths / widths)
    assert np.maximum(views.sizes.heights / views.resized_heights, views.sizes.widths / views.resized_widths) == (
        pytest.approx(1)
    )


@pytest.mark.parametrize(("rule", "sizes"), RESIZED.values(), ids=[*RESIZED])
def test_sizes_before_and_after_the_crop_are_those_of_the_trainers_code(
    rule: Peer, sizes: list[tuple[int, ...]]
) -> None:
    assert [line[:6] for line in cells(rule.views(SIZES).views)] == sizes


@pytest.mark.parametrize(("rule", "lines"), CLIPS.values(), ids=[*CLIPS])
def test_clips_of_musubi_tuner_are_those_of_its_code(rule: Peer, lines: list[tuple[int, ...]]) -> None:
    assert cells(rule.views(SIZES).views) == lines


def sizes_of(rule: Peer, rows: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    return [line[:6] for line in cells(rule.views(Sizes(*np.array(rows).T)).views)]


def test_novelai_skips_what_is_far_from_its_widest_and_tallest_bucket() -> None:
    assert [line[:4] for line in sizes_of(NovelAI(), [(1, 100, 790), (1, 100, 900), (1, 900, 100)])] == [
        (0, 1, 256, 1024), (2, 1, 1024, 256),
    ]  # fmt: skip


def test_of_two_near_ratios_the_first_decides_the_size_in_simpletuner() -> None:
    rule = SimpleTuner(megapixels=0.4096, num_frames=1, alignment=8)
    tall, wider = (1, 1000, 620), (1, 1000, 630)
    assert sizes_of(rule, [tall, wider]) == [(0, 1, 816, 504, 816, 506), (1, 1, 816, 504, 816, 514)]
    assert sizes_of(rule, [wider, tall]) == [(0, 1, 808, 504, 808, 509), (1, 1, 808, 504, 812, 504)]


def test_a_ratio_that_rounds_to_zero_is_skipped_by_simpletuner_which_divides_by_it() -> None:
    sizes = Sizes(np.ones(3, int), np.array([4096, 640, 16]), np.array([16, 480, 4096]))
    for name, make in PEERS.items():
        taken = make.like(TABLE, SPEC).views(sizes) if hasattr(make, "like") else None
        if name == "simpletuner":
            assert taken.skipped == {"aspect ratio that rounds to 0": 1}


def test_ratios_of_simpletuner_are_rounded_by_their_binary_value() -> None:
    """171 ÷ 120 as a float is a little more than 1.425, which numpy rounds down."""
    rule = SimpleTuner(megapixels=0.7, num_frames=1, alignment=16)
    assert sizes_of(rule, [(1, 120, 171)]) == [(0, 1, 688, 992, 696, 992)]


def test_only_ai_toolkit_changes_the_speed_of_videos() -> None:
    for rule, _ in [*CROPPED.values(), *RESIZED.values(), *CLIPS.values()]:
        views = rule.views(SIZES).views
        retimed = views.rows[views.retimed].tolist()
        assert retimed == ([5, 6, 7, 8] if isinstance(rule, AIToolkit) else [])


def test_batches_are_those_of_the_trainers_samplers() -> None:
    """Buckets of 7, 1 and 12 samples, by 3 on 2 processes: batches, samples dropped, and drawn again."""
    counted = {}
    for name, kind in PEERS.items():
        batches = kind.like(TABLE, SPEC).batches(np.array([7, 1, 12]), batch_size=3, num_processes=2)
        counted[name] = (batches.number, batches.dropped, batches.repeated)
    assert counted == {
        "novelai": (6, 2, 0),
        "musubi-tuner": (8, 0, 0),
        "diffusion-pipe": (6, 2, 0),
        "simpletuner": (8, 1, 5),
        "ai-toolkit": (8, 0, 4),
        "ltx-trainer": (20, 0, 0),
        "diffusers": (6, 2, 0),
    }
    single = LTXTrainer(buckets=TABLE.sizes).batches(np.array([20]), batch_size=3, num_processes=4)
    assert (single.number, single.dropped, single.note) == (4, 8, "")
    musubi = MusubiTuner(images=None, videos=None).batches(np.array([7]), batch_size=3, num_processes=2)
    assert (musubi.number, musubi.repeated) == (4, 3)


def test_notes_say_what_else_happens() -> None:
    counts = np.array([7, 1, 12])
    notes = {
        name: kind.like(TABLE, SPEC).batches(counts, batch_size=4, num_processes=2).note
        for name, kind in PEERS.items()
    }
    assert notes["novelai"] == "About 4 samples meet in batches of 512×512, cropped to that."
    assert notes["simpletuner"].startswith("1 buckets hold fewer samples than a step")
    assert {name for name, note in notes.items() if note} == {"novelai", "simpletuner", "ai-toolkit", "ltx-trainer"}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("table", [TABLE, BucketTable(sizes=(Size(1, 512, 512), Size(1, 384, 640)))])
def test_every_row_gives_a_sample_or_is_skipped_for_one_reason(name: str, table: BucketTable) -> None:
    rng = np.random.default_rng(0)
    sizes = Sizes(np.where(rng.random(500) < 0.5, 1, rng.integers(2, 120, 500)), *rng.integers(9, 3000, (2, 500)))
    views, skipped = PEERS[name].like(table, SPEC).views(sizes)
    assert len(np.unique(views.rows)) + sum(skipped.values()) == 500
    assert all(len(column) == len(views.rows) for column in (*views.sizes, *views[2:]))
    assert (views.used_frames <= sizes.frames[views.rows]).all()
    assert min(side.min(initial=16) for side in views.sizes[1:]) >= 16


@pytest.mark.parametrize("name", PEERS)
def test_no_rows_give_no_samples(name: str) -> None:
    none = np.zeros(0, np.int64)
    views, skipped = PEERS[name].like(TABLE, SPEC).views(Sizes(none, none, none))
    assert (len(views.rows), skipped) == (0, {})
