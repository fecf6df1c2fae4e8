"""Every kind of adapter, and optimizers, give with sharded weights what they give under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_bucketing.adapters.files import LORA_WEIGHTS, PEFT_FILES
from hf_bucketing.runs.review import losses_of
from tests.placement.test_sharding import ADAPTERS, DDP, LOADED_ONCE, PACKS, SAVE, SHARDED_STATE, train_all

DORA = PACKS | {"adapter": "dora"}
LOHA = ADAPTERS | {"adapter": "loha", "lora_rank_pattern": "to_q=1"}
LOKR = PACKS | {"adapter": "lokr"}
RATIO = ADAPTERS | {"lora_plus_ratio": 4.0, "lora_rslora": True, "lora_alpha_pattern": "to_q=8"}
MUON = {"optimizer": "torch.optim:Muon" if hasattr(torch.optim, "Muon") else "torch.optim:Adam", "train_batch_size": 2}

RUNS = {
    "dora_ddp": (DDP, None, DORA),
    "dora_sharded": (LOADED_ONCE, 3, DORA | SAVE),
    "loha_ddp": (DDP, None, LOHA),
    "loha_sharded": (SHARDED_STATE, 3, LOHA | SAVE),
    "lokr_ddp": (DDP, None, LOKR),
    "lokr_sharded": (LOADED_ONCE, 3, LOKR | SAVE),
    "lora_ddp": (DDP, None, RATIO),
    "lora_sharded": (LOADED_ONCE, 3, RATIO | SAVE),
    "muon_ddp": (DDP, None, MUON),
    "muon_sharded": (LOADED_ONCE, 3, MUON | SAVE),
}
KINDS = ("dora", "loha", "lokr", "lora")


@pytest.fixture(scope="module")
def runs(pipeline_dir: Path, prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    train_all(RUNS, folder, pipeline_dir, prepared_dir, num_processes=2)
    return folder


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, "muon"])
def test_sharded_and_resumed_runs_have_the_losses_of_ddp(name: str, runs: Path) -> None:
    expected = losses_of(runs / f"{name}_ddp")
    assert len(expected) == 4
    assert losses_of(runs / f"{name}_sharded") == pytest.approx(expected, abs=1e-4)


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_sharded_adapters_of_each_kind_make_the_same_file_as_ddp(name: str, runs: Path) -> None:
    file = PEFT_FILES[0] if name in ("loha", "lokr") else LORA_WEIGHTS
    expected, found = (load_file(runs / f"{name}_{way}" / file) for way in ("ddp", "sharded"))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.allclose(value, found[key], atol=1e-4), key
