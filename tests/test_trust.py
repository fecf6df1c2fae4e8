"""Files from elsewhere: a pickle planted in any place that is loaded is an error, and its code does not run."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from pyarrow import ArrowInvalid
from safetensors import SafetensorError
from torch.utils.data import DataLoader

from hf_bucketing import BucketBatchSampler, BucketColumns, BucketingError, BucketTable, LatentSpec, Size, map_columns
from hf_bucketing.buckets.open_table import open_table
from hf_bucketing.caching.store import TensorCache
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.data_lock import read_lock
from hf_bucketing.loaders import resume

REFUSALS: dict[str, tuple[type[Exception], str]] = {
    "custom_checkpoint_0.pkl": (BucketingError, "holds more than plain values and tensors"),
    "custom_checkpoint_1.pkl": (BucketingError, "holds more than plain values and tensors"),
    "model.safetensors": (SafetensorError, "header too large"),
    "optimizer.bin": (pickle.UnpicklingError, "Weights only load failed"),
    "random_states_0.pkl": (BucketingError, "holds more than plain values and tensors"),
    "window_random_0.json": (BucketingError, "does not hold random states"),
    "window_random_0.pkl": (BucketingError, "holds more than plain values and tensors"),
}
"""How each file of a checkpoint is refused that holds a pickle which makes an object."""

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128)))


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def plant(path: Path, target: Path, *, kind: str) -> None:
    """Replace a file by a pickle, plain or as torch writes it."""
    if kind == "plain":
        path.write_bytes(pickle.dumps(Bomb(target)))
    else:
        torch.save({"state": Bomb(target), "best": torch.zeros(2)}, path)


class Run:
    """A training run that stands inside a window of accumulation."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = BucketBatchSampler([0, 1] * 12, table=TABLE, batch_size=2)
        loader = DataLoader(np.arange(24), batch_sampler=sampler)
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self.accelerator.register_for_checkpointing(self.schedule)
        self.loader = resume(self.accelerator, loader)

    def draws(self) -> list[float]:
        return [random.random(), np.random.random(), float(torch.rand(()))]

    def train(self, steps: int) -> list[list[float]]:
        drawn = []
        for _ in zip(range(steps), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                drawn.append(self.draws())
                self.accelerator.backward(self.model(torch.ones(1, 2)).sum())
                self.optimizer.step()
                self.optimizer.zero_grad()
        return drawn


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Other tests do not start inside a window of accumulation."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    run = Run()
    run.train(3)
    run.accelerator.save_state(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_window_continues_with_its_random_states_from_plain_values(checkpoint: Path) -> None:
    window = json.loads((checkpoint / "window_random_0.json").read_text())
    assert window["version"] == 1
    drawn = []
    for _ in range(2):
        run = Run()
        run.accelerator.load_state(checkpoint)
        assert run.loader.step == 2
        drawn.append(run.train(2))
    assert drawn[0] == drawn[1]
    (checkpoint / "window_random_0.json").write_text(json.dumps({**window, "version": 0}))
    with pytest.raises(BucketingError, match=r"window_random_0\.json has version 0"):
        Run().accelerator.load_state(checkpoint)
    (checkpoint / "window_random_0.json").rename(checkpoint / "window_random_0.pkl")
    with pytest.raises(BucketingError, match=r"window_random_0\.pkl"):
        Run().accelerator.load_state(checkpoint)


@pytest.mark.parametrize("kind", ["plain", "torch"])
def test_no_file_of_a_checkpoint_can_run_code(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    Run().accelerator.load_state(checkpoint)
    files = sorted(path.name for path in checkpoint.iterdir())
    assert {*files, "window_random_0.pkl"} == set(REFUSALS)
    for name, (error, message) in REFUSALS.items():
        copy, target = tmp_path / f"planted {name}", tmp_path / f"{name} ran"
        shutil.copytree(checkpoint, copy)
        plant(copy / name, target, kind=kind)
        with pytest.raises(error, match=message):
            Run().accelerator.load_state(copy)
        assert not target.exists(), f"{name} was unpickled"


def read_rows_and_lock(folder: Path) -> None:
    """Read the rows of a prepared folder and their lock."""
    list(PreparedDataset.load(folder).dataset)
    read_lock(folder)


@pytest.mark.parametrize("kind", ["plain", "torch"])
def test_no_file_of_a_prepared_folder_a_cache_or_a_table_can_run_code(tmp_path: Path, kind: str) -> None:
    sizes = Dataset.from_dict({"width": [64, 128], "height": [64, 64], "num_frames": [1, 1], "video": ["a", "b"]})
    dataset = map_columns(sizes, BucketColumns(TABLE, SPEC))
    prepared = PreparedDataset(
        dataset=dataset, table=TABLE, open_table=open_table(SPEC), column="video", caption_column=None
    )
    prepared.save(tmp_path / "data")
    target = tmp_path / "ran"
    files = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert len(files) >= 4
    for name in files:
        shutil.copytree(tmp_path / "data", tmp_path / name)
        plant(tmp_path / name / name, target, kind=kind)
        with pytest.raises((OSError, ArrowInvalid, BucketingError) if name.endswith(".arrow") else UnicodeDecodeError):
            read_rows_and_lock(tmp_path / name)
        assert not target.exists(), f"{name} was unpickled"
    cache = TensorCache(tmp_path / "cache")
    cache.write("abcd", {"latents": torch.zeros(2)}, about={})
    plant(Path(cache.path("abcd")), target, kind=kind)
    with pytest.raises(BucketingError, match="cannot be read"):
        cache.read("abcd")
    plant(tmp_path / "table.json", target, kind=kind)
    with pytest.raises(BucketingError, match="Expected a table"):
        BucketTable.from_json((tmp_path / "table.json").read_bytes().decode("latin-1"))
    assert not target.exists()
