"""What README.md and the pages under docs/ show runs as it stands, on small data and models of random weights.

The Python blocks of a page run one after the other, as in a notebook. They begin with the names that pages speak of as
given (`Given`). The code in tables runs on the same names. Both sides of a diff run, the old loop and the new one.
"""

from __future__ import annotations

import ast
import copy
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import hf_bucketing
import hf_bucketing.loaders
import hf_bucketing.plans
import hf_bucketing.streaming
from hf_bucketing.columns import BucketColumns, MediaMetadata, map_columns
from hf_bucketing.loaders import (
    BucketBatchSampler,
    BucketCollator,
    PackBatchSampler,
    PackCollator,
    PadCollator,
    PlannedBatchSampler,
)
from hf_bucketing.loaders.collators import MediaCollator
from hf_bucketing.models.objectives import FlowMatching
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing import PackedBatch, Packing
from hf_bucketing.streaming import StreamingBucketBatcher
from tests.docs.pages import PAGES, spans

REPLACEMENTS = {
    '"clips"': "CLIPS",
    '"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"': "WAN",
    '"Lightricks/LTX-Video"': "LTX",
    "tokens=[8190, 32760]": "tokens=[60, 110]",
    "frames=[1, 17, 49, 81]": "frames=[1, 9, 17]",
    "batch_size=8": "batch_size=2",
    "num_proc=8": "num_proc=2",
    '(ds["num_tokens"], max_tokens=32768': '(ds["num_tokens"], max_tokens=4096',
    "loader.step % 500": "loader.step % 3",
}


def with_replacements(code: str) -> str:
    for original, replacement in REPLACEMENTS.items():
        code = code.replace(original, replacement)
    return code


def run(code: str, names: dict[str, Any], *, page: str) -> None:
    exec(compile(with_replacements(code), page, "exec"), names)


def test_every_replacement_replaces_something() -> None:
    whole = "".join(page.whole for page in PAGES.values())
    assert not [original for original in REPLACEMENTS if original not in whole]


class Given:
    """What pages speak of as given: a data set, a table, a model, and functions that encode; fresh for each page."""

    def __init__(self, media: Path, clips: Path, pipelines: dict[str, Path]) -> None:
        self.paths = {"MEDIA": media, "CLIPS": str(clips), "WAN": str(pipelines["wan"]), "LTX": str(pipelines["ltx"])}
        self.recipe = recipe_of(self.paths["WAN"]).load(self.paths["WAN"])
        self.spec = self.recipe.read_spec(self.paths["WAN"])
        self.table = hf_bucketing.token_ladder(self.spec, tokens=[60, 110], frames=[1, 9, 17])
        files = datasets.load_dataset("videofolder", data_dir=str(media / "videos"), split="train")
        self.files = files.cast_column("video", datasets.Video(decode=False))  # their decoder is not installed
        sized = map_columns(self.files, MediaMetadata("video", target_fps=16))
        self.ds = map_columns(sized, BucketColumns(self.table, self.spec))

    def names(self) -> dict[str, Any]:
        """Return the names with which a page begins."""
        collator = BucketCollator(self.table)
        return {
            **self.paths,
            "__name__": "__main__",
            "accelerator": Accelerator(),
            "ds": self.ds,
            "spec": self.spec,
            "table": self.table,
            "sampler": BucketBatchSampler(self.ds["bucket_id"], table=self.table, batch_size=2),
            "collator": collator,
            "transformer": copy.deepcopy(self.recipe.transformer),
            "encode_latents": self.recipe.encode_latents,
            "encode_text": lambda captions: self.recipe.encode_text(captions).values,
        }

    def names_of_a_loop(self) -> dict[str, Any]:
        """Return the names with which a diff begins: files without columns, and one size for all samples."""
        names = self.names()
        one_size = BucketCollator(hf_bucketing.BucketTable.parse("64,64", frames=[9]))
        generator = torch.Generator().manual_seed(0)
        channels, width = names["transformer"].config.in_channels, names["transformer"].config.text_dim
        sizes = ((3, 4, 6), (1, 8, 8), (2, 6, 4))

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return {
            **names,
            "ds": self.files.select(range(4)),
            "collate": lambda rows: one_size([{**row, "bucket_id": 0, "num_frames": 9, "fps": 8.0} for row in rows]),
            "loader": DataLoader(self.ds, batch_sampler=names["sampler"], collate_fn=names["collator"]),
            "latents": [drawn(channels, *size) for size in sizes],
            "noise": [drawn(channels, *size) for size in sizes],
            "text": drawn(len(sizes), 7, width),
            "sigmas": torch.tensor([0.9, 0.1, 0.5]),
        }


@pytest.fixture(scope="module")
def given(media_dir: Path, clips_dir: Path, pipeline_dirs: dict[str, Path]) -> Given:
    return Given(media_dir, clips_dir, pipeline_dirs)


@pytest.fixture(scope="module")
def clips_dir(media_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The videos in a folder with a `.txt` caption beside each."""
    folder = tmp_path_factory.mktemp("captioned") / "clips"
    folder.mkdir()
    for line in (media_dir / "videos" / "metadata.jsonl").read_text().splitlines():
        row = json.loads(line)
        shutil.copy(media_dir / "videos" / row["file_name"], folder)
        (folder / row["file_name"]).with_suffix(".txt").write_text(row["caption"])
    return folder


@pytest.fixture(scope="module")
def run_pages(given: Given) -> dict[str, list[dict[str, Any]]]:
    """The names after each block of the pages that have run."""
    return {}


@pytest.fixture
def run_page(
    given: Given, run_pages: dict[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Run the blocks of a page, once for all tests; return the names after the block that holds a text."""
    monkeypatch.chdir(tmp_path)  # where pages write to

    def run_once(name: str, holds: str = "") -> dict[str, Any]:
        if name not in run_pages:
            names, states = given.names(), []
            for block in PAGES[name].blocks("python"):
                run(block, names, page=name)
                states.append(dict(names))
            run_pages[name] = states
        blocks = PAGES[name].blocks("python")
        return next(state for block, state in zip(blocks, run_pages[name], strict=True) if holds in block)

    return run_once


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "docs/your-own-loop.md" else ())
        for name, page in PAGES.items()
        if page.blocks("python")
    ],
)
def test_the_blocks_of_a_page_run(name: str, run_page: Any) -> None:
    assert run_page(name)


@pytest.mark.slow
def test_batching_makes_batches_of_buckets(run_page: Any) -> None:
    names = run_page("docs/batching.md")
    assert names["sampler"].plan(0).kept == 14
    shape = tuple(names["batch"]["pixel_values"].shape)
    assert shape[2:] == names["table"].size(names["batch"]["bucket_id"])


def test_resuming_counts_epochs(run_page: Any) -> None:
    names = run_page("docs/resuming.md", "import BucketCollator, resume")
    assert (names["loader"].epoch, names["loader"].step) == (2, 0)


@pytest.mark.slow
def test_packing_returns_each_sample(run_page: Any) -> None:
    names = run_page("docs/packing.md")
    assert [output.shape for output in names["outputs"]] == [latent.shape for latent in names["latents"]]
    assert names["loss"].isfinite()


@pytest.mark.slow
def test_the_whole_loop_trains_adapters_alone(run_page: Any) -> None:
    names = run_page("docs/your-own-loop.md", "global_mean(losses")
    assert names["losses"].isfinite().all()
    assert names["text"].mask is not None
    weights = {
        name.replace(".base_layer", ""): weight for name, weight in names["recipe"].transformer.state_dict().items()
    }
    fresh = type(names["recipe"]).load(names["LTX"]).transformer.state_dict()
    assert all(torch.equal(weights[name], fresh[name]) for name in fresh), "the base is frozen"
    upper = [weight for name, weight in weights.items() if "lora_B" in name]
    assert upper
    assert all(weight.any() for weight in upper), "they begin at 0, so that each has trained"
    assert set(names["ds"]["caption"]) == {path.read_text() for path in Path(names["CLIPS"]).glob("*.txt")}


@pytest.mark.slow
def test_the_whole_loop_resumes_and_saves_the_same_adapters_as_diffusers_loads_them(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (loop,) = [block for block in PAGES["docs/your-own-loop.md"].blocks("python") if "add_adapter" in block]
    indices: list[list[int]] = []
    draw = FlowMatching.__call__

    def counted(self: FlowMatching, *args: Any, **options: Any) -> Any:
        indices.append(options["indices"])
        return draw(self, *args, **options)

    monkeypatch.setattr(FlowMatching, "__call__", counted)
    saved = []
    for _ in range(2):  # the second time, it finds the checkpoint of the first
        names = given.names()
        run(loop, names, page="docs/your-own-loop.md")
        saved.append(load_file("trained/pytorch_lora_weights.safetensors"))
        shutil.rmtree("trained")
        indices.append([])
    whole, resumed = (list(group) for drawn, group in itertools.groupby(indices, key=bool) if drawn)
    steps = names["sampler"].plan(1).num_steps
    assert 3 < steps < 6, "the last checkpoint is that of step 3 of the second epoch"
    assert resumed == whole[3 - steps :]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())
    pipeline = type(names["recipe"]).load(names["LTX"]).pipeline
    pipeline.load_lora_weights({name: weight.clone() for name, weight in saved[0].items()})
    assert pipeline.get_active_adapters() == ["default_0"]


# A diff


DIFFS = [(name, block) for name, page in PAGES.items() for block in page.blocks("diff")]


def side(block: str, sign: str) -> str:
    """Return the code of a diff before (`-`) or after (`+`)."""
    kept = [line for line in block.splitlines() if line[:1] in (sign, " ", "")]
    return "\n".join(line[1:] for line in kept)


@pytest.mark.parametrize(("name", "block"), DIFFS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(DIFFS)])
def test_both_sides_of_a_diff_run(name: str, block: str, given: Given) -> None:
    assert side(block, "-") != side(block, "+")
    losses = []
    for sign in "-+":
        names = given.names_of_a_loop()
        run(side(block, sign), names, page=name)
        if "loss" in names:
            assert names["loss"].isfinite()
            losses.append(names["loss"].item())
    if losses and "rand" not in block:  # nothing is drawn, so that both compute the same
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# The code in tables


TABLES = [
    ("docs/batching.md", "## Every way of batching"),
    ("docs/batching.md", "## Columns: which way to run them"),
    ("docs/choosing-a-table.md", "## Can I give the sizes myself?"),
    ("docs/choosing-a-table.md", "## Images beside videos"),
    ("docs/packing.md", "## Options"),
]


class Cells:
    """Runs the code of a table's cells, in the order in which they are read, and tries out what comes of it."""

    def __init__(self, names: dict[str, Any], calls: dict[str, str] | None = None) -> None:
        self.names = names
        self.calls = dict(calls or {})
        self.last = ""

    def run(self, code: str) -> None:
        """Run one piece of code: a statement, an expression, or another value for the last argument before it.

        `…` as first argument stands for those of the first call of that name.
        """
        if re.fullmatch(r'"\w+"', code):
            code = re.sub(r'"\w+"\)$', f"{code})", self.last)
        called = code.partition("(")[0]
        code = code.replace("(…", f"({self.calls.get(called, '…')}")
        statement = ast.parse(with_replacements(code)).body[0]
        if isinstance(statement, ast.Assign):
            run(code, self.names, page="cell")
            value = self.names[ast.unparse(statement.targets[0])]
        else:
            value = eval(with_replacements(code), self.names)
        if code.endswith(")"):
            self.calls.setdefault(called, code[len(called) + 1 : -1])
            self.last = code
        if re.fullmatch(r"[\w.]+", code):
            return  # a name that exists
        self.use(value)

    def use(self, value: Any) -> None:
        """Draw an epoch of a sampler, load a batch by a collator, read a row of a data set."""
        if isinstance(value, PlannedBatchSampler):
            assert value.plan(0).num_steps > 0
            assert len(list(value)) == len(value)
            if isinstance(value, BucketBatchSampler):
                self.load(value, BucketCollator(self.names["table"]))
            elif isinstance(value, PackBatchSampler):
                self.load(value, PackCollator(self.names["spec"]))
        elif isinstance(value, PadCollator):
            self.load(self.names["sampler"], value, dataset=self.names["audio"])
        elif isinstance(value, MediaCollator):
            value([self.names["ds"][0]])
        elif isinstance(value, StreamingBucketBatcher):
            assert next(iter(value)).batch["pixel_values"] is not None
        elif isinstance(value, (datasets.Dataset, datasets.IterableDataset)):
            assert {"bucket_id", "num_frames"} & set(next(iter(value)))
        elif isinstance(value, PackedBatch):
            self.names["batch"] = value
        elif isinstance(value, torch.Tensor):
            assert value.isfinite().all()
        else:
            known = (BucketColumns, hf_bucketing.BucketTable, hf_bucketing.OpenTable, Packing, dict)
            assert isinstance(value, known), f"no way to try out a {type(value).__name__}"

    def load(self, sampler: PlannedBatchSampler, collator: Any, *, dataset: Any = None) -> None:
        batches = DataLoader(dataset or self.names["ds"], batch_sampler=sampler, collate_fn=collator)
        for batch, _ in zip(batches, range(3), strict=False):
            assert batch


class RayDataset:
    """What Ray Data's `map_batches` does with a function."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.batch = dataset.with_format("numpy")[:]

    def map_batches(self, function: Any) -> dict[str, Any]:
        return function(self.batch)


@pytest.fixture
def names(given: Given) -> dict[str, Any]:
    """The names given, and what tables speak of beside them."""
    names = given.names_of_a_loop() | {"ds": given.ds}
    for module in (hf_bucketing, hf_bucketing.loaders, hf_bucketing.plans, hf_bucketing.streaming, datasets):
        public = getattr(module, "__all__", None) or ["Dataset", "IterableDataset"]
        names |= {name: getattr(module, name) for name in public}
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 9000, 40)
    audio = {"wave": [rng.standard_normal(n).astype(np.float32) for n in lengths], "name": [str(n) for n in lengths]}
    return {
        **names,
        "copy": copy,
        "torch": torch,
        "lengths": lengths,
        "audio": datasets.Dataset.from_dict(audio),
        "stream": names["ds"].to_iterable_dataset(),
        "ray_ds": RayDataset(names["ds"]),
    }


def add_packing_names(names: dict[str, Any]) -> dict[str, str]:
    """Add what the example of packs leaves behind; return the arguments of its calls, for which `…` stands."""
    names["fresh"] = copy.deepcopy(names["transformer"])
    packing = hf_bucketing.enable_packing(names["transformer"].train(), strip_length=4)
    names |= {"packing": packing, "timesteps": 1000 * names["sigmas"]}
    names["batch"] = packing.pack(names["latents"], timesteps=names["timesteps"], text=names["text"])
    names["prediction"] = hf_bucketing.packed_forward(names["transformer"], names["batch"])
    names["target"] = names["batch"].pack_like(names["noise"])
    names["masks"] = [torch.ones_like(latent[:1]) for latent in names["latents"]]
    return {
        "enable_packing": "copy.deepcopy(fresh), strip_length=4",
        "packing.pack": "latents, timesteps=timesteps, text=text",
        "packed_forward": "transformer, batch",
        "packed_mse": "prediction, target, batch.layout",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("page", "heading"), TABLES)
def test_every_cell_of_the_tables_runs(page: str, heading: str, names: dict[str, Any]) -> None:
    cells = Cells(names, add_packing_names(names) if page.endswith("packing.md") else None)
    whole = names["ds"]
    for row in PAGES[page].table(heading):
        for code in spans(row):
            if code.startswith(("--", "scripts/", "hf_bucketing ")):
                continue  # of commands, which test_commands.py parses
            if heading.startswith("## Columns"):  # the columns that a call is to make are not there yet
                absent = BucketColumns.output_columns
                absent += MediaMetadata("video").output_columns if "MediaMetadata" in code else ()
                names["ds"] = whole.remove_columns(list(absent))
                names["stream"] = names["ds"].to_iterable_dataset()
            try:
                cells.run(code)
            except Exception as error:
                raise AssertionError(f"`{code}` of {heading!r} does not run: {error!r}") from error


@pytest.mark.parametrize("code", ["BucketBatchSampler(…, tails=1)", "No such call", "3 + 4", 'PadCollator(["x"])'])
def test_a_cell_that_does_not_run_is_noticed(code: str, names: dict[str, Any]) -> None:
    cells = Cells(names)
    cells.run('BucketBatchSampler(ds["bucket_id"], table=table, batch_size=8)')
    with pytest.raises((AssertionError, TypeError, SyntaxError, hf_bucketing.BucketingError)):
        cells.run(code)
