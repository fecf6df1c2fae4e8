"""What README.md shows runs as it stands, on small stand-ins for data sets and for what comes from the hub.

Python blocks run one after the other, as in a notebook; the code in its tables runs on what they leave behind; every
call of a script is parsed by that script.
"""

from __future__ import annotations

import argparse
import ast
import copy
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import hf_bucketing
import hf_bucketing.loaders
import hf_bucketing.streaming
from hf_bucketing.columns import BucketColumns, MediaMetadata
from hf_bucketing.columns.preparation import SourceConfig
from hf_bucketing.columns.source_lists import NOT_FLAGS, sources_from
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.loaders import (
    BucketBatchSampler,
    BucketCollator,
    PackBatchSampler,
    PackCollator,
    PadCollator,
    PlannedBatchSampler,
)
from hf_bucketing.loaders.collators import MediaCollator
from hf_bucketing.streaming import StreamingBucketBatcher
from hf_bucketing.training.script_settings import settings_of_scripts
from tests.conftest import ROOT, run_script_here

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TEXT = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
REPLACEMENTS = {
    '"clips"': 'f"{MEDIA}/videos"',
    '"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"': "WAN",
    '"Lightricks/LTX-Video"': "LTX",
    "tokens=[8190, 32760]": "tokens=[60, 110]",
    "frames=[1, 17, 49, 81]": "frames=[1, 9, 17]",
    "batch_size=8": "batch_size=2",
    "num_proc=8": "num_proc=2",
}


def with_replacements(code: str) -> str:
    for original, replacement in REPLACEMENTS.items():
        code = code.replace(original, replacement)
    return code


@pytest.fixture(scope="module")
def states(media_dir: Path, pipeline_dirs: dict[str, Path]) -> list[dict[str, Any]]:
    """The names after each block, all of them run in one scope."""
    names: dict[str, Any] = {"__name__": "__main__", "MEDIA": media_dir}
    names |= {"WAN": str(pipeline_dirs["wan"]), "LTX": str(pipeline_dirs["ltx"])}
    states = []
    for block in BLOCKS:
        if "range(loader.epoch" in block:
            names["sampler"].set_epoch(0)
        exec(compile(with_replacements(block), "README.md", "exec"), names)
        states.append(dict(names))
    return states


def test_every_replacement_replaces_something() -> None:
    assert not [original for original in REPLACEMENTS if original not in README]


def state_after(states: list[dict[str, Any]], text: str) -> dict[str, Any]:
    (position,) = [position for position, block in enumerate(BLOCKS) if text in block]
    return states[position]


def test_the_blocks_do_what_they_say(states: list[dict[str, Any]]) -> None:
    buckets = state_after(states, "BucketBatchSampler(ds[")
    assert buckets["sampler"].plan(0).kept == 14
    shape = tuple(buckets["batch"]["pixel_values"].shape)
    assert shape[2:] == buckets["table"].size(buckets["batch"]["bucket_id"])
    resumed = state_after(states, "import resume")
    assert (resumed["loader"].epoch, resumed["loader"].step) == (2, 0)
    packed = state_after(states, "disable_packing(")
    assert [output.shape for output in packed["outputs"]] == [latent.shape for latent in packed["latents"]]
    assert packed["loss"].isfinite()
    own = state_after(states, "global_mean(")
    assert own["losses"].isfinite().all()
    assert own["text"].mask is not None
    weights = own["recipe"].transformer.state_dict()
    fresh = type(own["recipe"]).load(own["LTX"]).transformer.state_dict()
    assert any(not torch.equal(weights[name], fresh[name]) for name in fresh), "it has trained"


def table_under(heading: str) -> list[str]:
    """Return the rows of the table in a section."""
    section = README.split(f"\n{heading}\n")[1].split("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, heading
    return rows[2:]


TABLES = {
    heading: table_under(heading)
    for heading in ("### Every way of batching", "### Images beside videos", "## Columns: which way to run them")
}


class Cells:
    """Runs the code of a table's cells, in the order in which they are read, and tries out what comes of it."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.calls: dict[str, str] = {}
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
            exec(compile(with_replacements(code), "README.md", "exec"), self.names)
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
        else:
            known = (BucketColumns, hf_bucketing.BucketTable, hf_bucketing.OpenTable, dict)
            assert isinstance(value, known), f"no way to try out a {type(value).__name__}"

    def load(self, sampler: PlannedBatchSampler, collator: Any, *, dataset: Any = None) -> None:
        batches = DataLoader(dataset or self.names["ds"], batch_sampler=sampler, collate_fn=collator)
        for batch, _ in zip(batches, range(3), strict=False):
            assert batch


class RayDataset:
    """What Ray Data's `map_batches` does with a function; tests/test_ray.py runs it in Ray."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.batch = dataset.with_format("numpy")[:]

    def map_batches(self, function: Any) -> dict[str, Any]:
        return function(self.batch)


@pytest.fixture
def names(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The names after the first block, and what tables speak of beside them."""
    names = copy.copy(state_after(states, "BucketBatchSampler(ds["))
    for module in (hf_bucketing, hf_bucketing.loaders, hf_bucketing.streaming, datasets):
        public = getattr(module, "__all__", None) or ["Dataset", "IterableDataset"]
        names |= {name: getattr(module, name) for name in public}
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 9000, 40)
    audio = {"wave": [rng.standard_normal(n).astype(np.float32) for n in lengths], "name": [str(n) for n in lengths]}
    return {
        **names,
        "lengths": lengths,
        "audio": datasets.Dataset.from_dict(audio),
        "stream": names["ds"].to_iterable_dataset(),
        "ray_ds": RayDataset(names["ds"]),
    }


def spans(text: str) -> list[str]:
    """Return the code in a text, without line breaks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


@pytest.mark.parametrize("heading", TABLES)
def test_every_cell_of_the_tables_runs(heading: str, names: dict[str, Any]) -> None:
    cells = Cells(names)
    whole = names["ds"]
    for row in TABLES[heading]:
        for code in spans(row):
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


class ParsedError(Exception):
    """A script's parser has taken its arguments."""


def parse(script: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Parse arguments by a script's own parser, and return it; the script goes no further."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_only(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = original(self, args, namespace)
        if not isinstance(self, FlagParser):  # the one that looks for --config
            return found, unknown
        assert not unknown, f"{script} does not know {unknown}"
        raise ParsedError(self)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
        with pytest.raises(ParsedError) as parsed:
            run_script_here(script, *arguments)
    return parsed.value.args[0]


def script_calls() -> list[tuple[str, list[str]]]:
    """Return every call of a script with arguments: in bash blocks, and in the text."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [span for span in spans(TEXT) if re.search(r"scripts/\w+\.py ", span)]
    calls = [re.search(r"scripts/(\w+\.py) (.*)", line) for line in lines]
    return [(call[1], shlex.split(call[2], comments=True)) for call in calls if call]


@pytest.fixture
def files_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The YAML files that README shows, in the working directory."""
    monkeypatch.chdir(tmp_path)
    files = []
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", README, re.DOTALL):
        files.append(tmp_path / name)
        files[-1].write_text(text)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.yaml").write_text(files[0].read_text())  # as a run leaves it
    return files


def test_files_of_settings_list_sources(files_of_settings: list[Path]) -> None:
    (file,) = files_of_settings
    parser = FlagParser(None)
    parser.add_settings(SourceConfig, skip=NOT_FLAGS, several=["dataset"])
    parser.add_config("prepare_dataset", others=settings_of_scripts)
    first, second = sources_from(parser.parse_args(["--config", str(file)]))
    assert (first.dataset, first.target_fps, first.repeats) == ("clips", 16.0, 1.0)
    assert (second.dataset, second.target_fps, second.repeats) == ("faces.parquet", 8.0, 2.0)
    assert first.table.bucket_tokens == second.table.bucket_tokens == [8190, 18480]


@pytest.mark.usefixtures("files_of_settings")
def test_every_call_of_a_script_is_understood_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script_calls()
    assert {script for script, _ in calls} >= {
        *("prepare_dataset.py", "train_text_to_video.py", "sample_video.py", "cache_latents.py", "report_buckets.py"),
        "report_training.py",
    }
    for script, arguments in calls:
        parse(script, arguments, monkeypatch)


@pytest.mark.usefixtures("files_of_settings")
def test_every_flag_that_the_text_names_is_one_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = [parse(script, arguments, monkeypatch) for script, arguments in dict(script_calls()).items()]
    known = {option for parser in parsers for option in parser._option_string_actions}
    known |= {"--cpu", "--multi_gpu", "--num_processes"}  # accelerate launch
    named = [flag for span in spans(TEXT) for flag in re.findall(r"(?<!\S)--\w+", span)]
    assert len(named) > 15
    assert not [flag for flag in named if flag not in known]


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 5
    for link in links:
        assert (ROOT / link).exists(), link
