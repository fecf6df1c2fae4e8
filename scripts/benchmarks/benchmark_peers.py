r"""Compare the rules of hf_bucketing.report.peers with the trainers' own code, on random rows.

python scripts/benchmarks/benchmark_peers.py --novelai novelai-aspect-ratio-bucketing --musubi_tuner musubi-tuner \
    --diffusion_pipe diffusion-pipe --ai_toolkit ai-toolkit --ltx_trainer LTX-2 \
    --output scripts/benchmarks/results/peers.json

Each flag names a git checkout, which is no part of this project. The functions that choose sizes, clips and batches
are imported from it and called; what their modules import and these functions do not use is replaced by mocks.
"""

import argparse
import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import torch
from benchmark_tools import write_figures
from PIL import Image

from hf_bucketing import BucketingError, BucketTable, LatentSpec, Size
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.report.measure import Sizes
from hf_bucketing.report.peers.diffusion_pipe import DiffusionPipe
from hf_bucketing.report.peers.musubi_tuner import Folder, MusubiTuner
from hf_bucketing.report.peers.short_rules import AIToolkit, LTXTrainer, NovelAI

Cell = tuple[int, ...]
"""Row, frames, height and width of a sample and, where the trainer says, height and width before the crop."""

BATCH_SIZE, PROCESSES = 4, 8
"""Samples per batch, and processes of the trainers that share batches among them."""


class Taken(NamedTuple):
    """Samples that a trainer's code makes of rows, and its batches."""

    cells: list[Cell]
    batches: int | None


class Setting(NamedTuple):
    """A rule of this project, and the trainer's code with the same settings."""

    name: str
    rule: Any
    trainer_views: Callable[[Sizes], Taken]
    processes: int = 1


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports an empty module for each of some modules and all below them, but for those that are wanted."""

    def __init__(self, names: Sequence[str], wanted: Sequence[str] = ()) -> None:
        self.names, self.wanted = names, wanted

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        replaced = any(f"{name}.".startswith(f"{absent}.") for absent in self.names)
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if replaced and name not in self.wanted
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_from(folder: Path, module: str, *, absent: Sequence[str], wanted: Sequence[str] = ()) -> Any:
    """Import a module of a checkout, with empty modules for what is not needed, whether it is installed or not."""
    finder = _Absent(absent, wanted)
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(finder)
        for name in [name for name, loaded in sys.modules.items() if isinstance(loaded, MagicMock)]:
            del sys.modules[name]


def rows_of(sizes: Sizes) -> Iterator[tuple[int, int, int, int]]:
    """Yield the position, frames, height and width of each row."""
    for row, size in enumerate(zip(*(column.tolist() for column in sizes), strict=True)):
        yield row, *size


def novelai(folder: Path) -> Iterator[Setting]:
    manager = import_from(folder, "bucketmanager", absent=()).BucketManager

    def trainer_views(sizes: Sizes, num_processes: int = PROCESSES) -> Taken:
        images = {row: (width, height) for row, frames, height, width in rows_of(sizes) if frames == 1}
        with tempfile.NamedTemporaryFile() as file:
            file.write(pickle.dumps(images))
            file.flush()
            ranks = [
                manager(file.name, bsz=BATCH_SIZE, world_size=num_processes, global_rank=rank)
                for rank in range(num_processes)
            ]
        buckets = ranks[0].resolutions.tolist()
        cells = [(row, 1, *buckets[bucket][::-1]) for bucket, rows in ranks[0].buckets.items() for row in rows]
        return Taken(cells, sum(rank.batch_total for rank in ranks))

    yield Setting("its 19 buckets", NovelAI(), trainer_views, PROCESSES)


def musubi_tuner(folder: Path) -> Iterator[Setting]:
    import_from(folder / "src", "musubi_tuner.dataset.media_utils", absent=["cv2"])
    module = import_from(folder / "src", "musubi_tuner.dataset.image_video_dataset", absent=["cv2"])
    media, wan = sys.modules["musubi_tuner.dataset.media_utils"], module.ARCHITECTURE_WAN
    resized: list[tuple[int, int]] = []

    def resize(image: Any, size: tuple[int, int], *_: Any, **__: Any) -> Any:
        resized.append(size)
        return blank(size)

    def blank(size: tuple[int, int]) -> Any:
        return np.broadcast_to(np.uint8(0), (size[1], size[0], 3))

    picture = SimpleNamespace(resize=functools.partial(resize, None))
    media.Image = SimpleNamespace(Image=Image.Image, fromarray=lambda image: picture, LANCZOS=None)  # type: ignore[attr-defined]
    media.cv2 = SimpleNamespace(resize=resize, INTER_AREA=None)  # type: ignore[attr-defined]

    def before_crop(height: int, width: int, bucket: tuple[int, int]) -> tuple[int, int]:
        resized[:] = [(width, height)]
        media.resize_image_to_bucket(blank((width, height)), bucket)  # type: ignore[attr-defined]
        return resized[-1][::-1]

    class Videos(list[Any]):
        has_control = False

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: None

    def clips_of(sizes: Sizes, settings: Folder) -> Iterator[Cell]:
        named = {name: getattr(settings, name) for name in ("frame_extraction", "frame_stride", "frame_sample")}
        with tempfile.TemporaryDirectory() as videos:
            dataset = module.VideoDataset(
                settings.resolution, ".txt", 1, 1, settings.enable_bucket, settings.bucket_no_upscale, **named,
                target_frames=list(settings.target_frames), max_frames=settings.max_frames, video_directory=videos,
                architecture=wan,
            )  # fmt: skip
        videos_of_rows = [
            functools.partial(
                lambda row, size, frames: (f"{row}.mp4", [blank(size)] * frames, ""), row, (w, h), frames
            )
            for row, frames, h, w in rows_of(sizes)
            if frames > 1
        ]
        dataset.datasource = Videos(videos_of_rows)
        for (width, height, frames), items in dataset.retrieve_latent_cache_batches(8):
            for item in items:
                row = int(item.item_key.partition("_")[0])
                whole = int(sizes.heights[row]), int(sizes.widths[row])
                yield row, frames, height, width, *before_crop(*whole, (width, height))

    stacked = SimpleNamespace(
        **{**vars(np), "stack": lambda frames, axis: np.broadcast_to(frames[0], (len(frames), *frames[0].shape))}
    )
    module.np, module.time = stacked, SimpleNamespace(sleep=lambda seconds: None)
    module.resize_image_to_bucket = lambda frame, bucket: blank(bucket)

    def trainer_views(settings: Folder, sizes: Sizes) -> Taken:
        selector = module.BucketSelector(settings.resolution, settings.enable_bucket, settings.bucket_no_upscale, wan)
        cells = [*clips_of(sizes, settings)]
        for row, frames, height, width in rows_of(sizes):
            if frames == 1:
                bucket = selector.get_bucket_resolution((width, height))
                cells.append((row, 1, *bucket[::-1], *before_crop(height, width, bucket)))
        counts = Counter(cell[1:4] for cell in cells)
        return Taken(cells, len(module.BucketBatchManager({key: range(n) for key, n in counts.items()}, BATCH_SIZE)))

    for name, settings in {
        "head": Folder(resolution=(960, 544), target_frames=(25, 45)),
        "chunk, no_upscale": Folder(
            resolution=(512, 512), bucket_no_upscale=True, target_frames=(33, 81), frame_extraction="chunk"
        ),
        "slide, no buckets of images": Folder(
            resolution=(832, 480), enable_bucket=False, target_frames=(24, 26, 49), frame_extraction="slide",
            frame_stride=10,
        ),
        "uniform": Folder(
            resolution=(640, 640), target_frames=(17, 33), frame_extraction="uniform", frame_sample=4
        ),
        "full": Folder(resolution=(1280, 720), frame_extraction="full"),
    }.items():  # fmt: skip
        yield Setting(name, MusubiTuner(images=settings, videos=settings), functools.partial(trainer_views, settings))


def diffusion_pipe(folder: Path) -> Iterator[Setting]:
    absent = ["deepspeed", "imageio", "multiprocess", "comfy", "comfy_api", "torchaudio", "torchvision", "utils.cache"]
    absent += ["accelerate", "diffusers", "peft"]
    dataset = import_from(folder, "utils.dataset", absent=absent)
    align = import_from(folder, "models.base", absent=absent).PreprocessMediaFile({}).align_frames
    dataset.SizeBucketDataset = lambda rows, config, bucket, *_: SimpleNamespace(
        size_bucket=bucket, cache_latents=lambda *_, **__: None
    )
    rows_in_bucket = SimpleNamespace(map=lambda *_, **__: None)

    def sides_of(directory: Any, bucket: Any, place: Path) -> list[Cell]:
        """Return each size, with its ratio, that the rows of a bucket are trained at."""
        if directory.use_size_buckets:
            to_16 = [dataset.round_to_nearest_multiple(int(side), 16) for side in bucket[:2]]
            return [(*bucket.tolist(), align(int(bucket[2])), *to_16[::-1])]
        ratios = dataset.ARBucketDataset(
            bucket, directory.resolutions, rows_in_bucket, {"path": "."}, place, 16, directory
        )
        ratios.cache_latents(None)
        return [(*part.size_bucket, align(int(bucket[1])), *part.size_bucket[2:0:-1]) for part in ratios.size_buckets]

    def trainer_views(keys: dict[str, Any], sizes: Sizes) -> Taken:
        with tempfile.TemporaryDirectory() as media:
            config = {**keys, "path": media}
            directory = dataset.DirectoryDataset(config, keys, "model", framerate=16, skip_dataset_validation=True)
            find = (
                directory._find_closest_size_bucket
                if directory.use_size_buckets
                else directory._find_closest_ar_bucket
            )
            cells, counts = [], Counter[Cell]()
            for row, frames, height, width in rows_of(sizes):
                bucket = find(np.log(width / height), frames, frames > 1)
                for size in [] if bucket is None else sides_of(directory, bucket, Path(media)):
                    cells.append((row, *map(int, size[-3:])))
                    counts[size] += 1
        each = {None: BATCH_SIZE * PROCESSES}
        batches = 0
        for size, count in counts.items():
            members = MagicMock(size_bucket=size[:-3])
            members.__len__.return_value = count
            concatenated = dataset.ConcatenatedBatchedDataset([members])
            concatenated.post_init(each, each, 0, PROCESSES)
            batches += len(concatenated) * PROCESSES
        return Taken(cells, batches)

    ratios = {"enable_ar_bucket": True, "min_ar": 0.5, "max_ar": 2.0, "num_ar_buckets": 7}
    areas = {"resolutions": [[1280, 720]], "enable_ar_bucket": True, "ar_buckets": [1.0, 1.5, 0.66667]}
    buckets = [[960, 960, 1], [960, 704, 1], [704, 960, 33], [1280, 704, 1], [704, 1280, 65], [480, 832, 33]]
    table, spec = (
        BucketTable(sizes=(Size(1, 64, 64),)),
        LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2)),
    )
    for name, keys in {
        "aspect ratios": {"resolutions": [512], **ratios, "frame_buckets": [1, 33]},
        "named ratios": {**areas, "frame_buckets": [34, 65]},
        "two areas of squares": {"resolutions": [333, 640], "frame_buckets": [1, 200]},
        "size_buckets": {"size_buckets": buckets},
    }.items():
        rule = DiffusionPipe.read([keys], table, spec)
        yield Setting(name, rule, functools.partial(trainer_views, keys), PROCESSES)


def ai_toolkit(folder: Path) -> Iterator[Setting]:
    mixins = import_from(
        folder,
        "toolkit.dataloader_mixins",
        absent=["toolkit", "cv2", "albumentations", "diffusers", "torchvision", "transformers"],
        wanted=["toolkit", "toolkit.buckets", "toolkit.dataloader_mixins"],
    )

    class Files(mixins.BucketsMixin):  # type: ignore[misc, name-defined]
        epoch_num, batch_size, is_audio_model, is_video, dataset_path = 0, BATCH_SIZE, False, True, ""

    def trainer_views(rule: AIToolkit, sizes: Sizes) -> Taken:
        files = Files()
        config = files.dataset_config = SimpleNamespace(
            resolution=rule.resolution, bucket_tolerance=rule.step, scale=1.0, square_crop=False, random_crop=False
        )
        files.file_list = [
            SimpleNamespace(
                width=width,
                height=height,
                dataset_config=config,
                num_frames=rule.num_frames if frames > 1 else 1,
            )
            for _, frames, height, width in rows_of(sizes)
        ]
        files.setup_buckets(quiet=True)
        cells = [
            (row, file.num_frames, file.crop_height, file.crop_width, file.scale_to_height, file.scale_to_width)
            for row, file in enumerate(files.file_list)
        ]
        return Taken(cells, len(files.batch_indices))

    for resolution, step in ((512, 16), (1024, 32)):
        rule = AIToolkit(resolution=resolution, num_frames=33, step=step)
        yield Setting(f"{resolution} pixels, steps of {step}", rule, functools.partial(trainer_views, rule))


def ltx_trainer(folder: Path) -> Iterator[Setting]:
    scripts = folder / "packages" / "ltx-trainer" / "scripts"
    absent = ["pandas", "torchaudio", "typer", "pillow_heif", "rich", "torchvision", "ltx_core", "ltx_trainer"]
    module = import_from(scripts, "process_videos", absent=absent)
    resized: list[list[int]] = []

    def resize(tensor: torch.Tensor, size: list[int], interpolation: Any) -> torch.Tensor:
        resized.append(size)
        return torch.empty(*tensor.shape[:2], *size, device="meta")

    module.resize, module.crop = resize, lambda tensor, **_: tensor

    def trainer_views(rule: LTXTrainer, sizes: Sizes) -> Taken:
        dataset = module.MediaDataset.__new__(module.MediaDataset)
        dataset.resolution_buckets, dataset.reshape_mode = [tuple(size) for size in rule.buckets], "center"
        least, cells = min(size.frames for size in rule.buckets), []
        for row, frames, height, width in rows_of(sizes):
            if frames >= least:  # others are filtered when the data set is read
                media = torch.empty(frames, 3, height, width, device="meta")
                size = dataset._get_resolution_bucket_for_item(media)
                dataset._resize_and_crop(media, *size[1:])
                cells.append((row, *size, *resized[-1]))
        return Taken(cells, None)

    sides = ((1, 544, 960), (49, 544, 960), (49, 512, 512), (25, 960, 544), (1, 512, 512))
    for name, buckets in {"images and videos": sides, "videos": sides[1:4]}.items():
        rule = LTXTrainer(buckets=tuple(Size(*size) for size in buckets))
        yield Setting(name, rule, functools.partial(trainer_views, rule))


TRAINERS = {
    "novelai": ("NovelAI/novelai-aspect-ratio-bucketing", novelai),
    "musubi_tuner": ("kohya-ss/musubi-tuner", musubi_tuner),
    "diffusion_pipe": ("tdrussell/diffusion-pipe", diffusion_pipe),
    "ai_toolkit": ("ostris/ai-toolkit", ai_toolkit),
    "ltx_trainer": ("Lightricks/LTX-2", ltx_trainer),
}


def random_rows(count: int, *, seed: int) -> Sizes:
    """Return images and videos, half each, of sides from 64 to 2,560 pixels and 2 to 200 frames."""
    rng = np.random.default_rng(seed)
    heights, widths = np.exp(rng.uniform(np.log(64), np.log(2560), (2, count))).astype(np.int64)
    return Sizes(np.where(np.arange(count) % 2, rng.integers(2, 201, count), 1), heights, widths)


def compare(setting: Setting, sizes: Sizes) -> dict[str, Any]:
    """Return the samples and batches of the trainer's code, and how many samples it and the rule do not share."""
    trainer_views, views = setting.trainer_views(sizes), setting.rule.views(sizes).views
    length = max(map(len, trainer_views.cells), default=4)
    columns = (views.rows, *views.sizes, views.resized_heights, views.resized_widths)[:length]
    repeated = np.repeat(np.stack(columns, 1).astype(np.int64), views.clips, axis=0)
    here, there = Counter(map(tuple, repeated.tolist())), Counter(trainer_views.cells)
    _, bucket = np.unique(views.buckets, return_inverse=True)
    counts = np.bincount(bucket, views.clips).astype(np.int64)
    batches = setting.rule.batches(counts, batch_size=BATCH_SIZE, num_processes=setting.processes).number
    differing = itertools.chain((here - there).elements(), (there - here).elements())
    return {
        "settings": setting.name,
        "samples": len(trainer_views.cells),
        "samples that differ": sum(1 for _ in differing),
        "sides before the crop": length > 4,
        "batches": trainer_views.batches,
        "batches here": None if trainer_views.batches is None else batches,
    }


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    for name, (repository, _) in TRAINERS.items():
        parser.add_argument(f"--{name}", type=Path, help=f"Checkout of {repository}.")
    parser.add_argument("--rows", type=int, default=2000, help="Random rows.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the rows.")
    return parser


def main(args: argparse.Namespace) -> None:
    sizes = random_rows(args.rows, seed=args.seed)
    table = []
    for name, (repository, settings_of) in TRAINERS.items():
        folder = getattr(args, name)
        if folder is None:
            continue
        asked = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        commit = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        for setting in settings_of(folder.resolve()):
            table.append({"trainer": repository, "commit": commit[:8], **compare(setting, sizes)})
            print(table[-1])
    if not table:
        raise BucketingError("Name the checkout of at least one trainer.")
    write_figures({"rows": args.rows, "seed": args.seed, "table": table}, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
