"""Processes on machines with disks of their own: they agree, or the run ends with the reason."""

from __future__ import annotations

import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.loaders import processes
from hf_bucketing.runs.review import losses_of
from tests.conftest import ROOT, TRAINING_SCRIPT, launch_flags
from tests.processes import launched_environments, run_forked

TWO = SimpleNamespace(num_processes=2, is_main_process=True, wait_for_everyone=lambda: None)


def test_a_different_value_is_named_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"rows": "5", "table": "a"}
    monkeypatch.setattr(processes, "gather_object", lambda mine: [*mine, theirs])
    processes.check_same(TWO, theirs, what="rows", advice="copy them")
    with pytest.raises(BucketingError, match=r"Processes 0 and 1 have different data: rows 4 and 5. If .* copy them"):
        processes.check_same(TWO, {**theirs, "rows": "4"}, what="data", advice="copy them")


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_another_process_does_not_see_is_refused(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "gather_object", lambda mine: [*mine, shared])
    monkeypatch.setattr(processes, "broadcast_object_list", lambda values: values)
    if shared:
        processes.check_shared(TWO, tmp_path, advice="share it")
    else:
        with pytest.raises(BucketingError, match=r"Process 1 does not see .*; share it"):
            processes.check_shared(TWO, tmp_path, advice="share it")
    assert not list(tmp_path.iterdir())


def on_two_machines(
    *args: object, script: Path = TRAINING_SCRIPT, **folders: tuple[Path, Path]
) -> list[tuple[int, str]]:
    """Return the exit code and the output of each machine, given the value of each flag on the two.

    The processes have the environment that `accelerate launch --num_machines 2` gives the one process of a machine.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, _ = launched_environments(launch_flags(2), 2)
    common = {**os.environ, **first, "ACCELERATE_USE_CPU": "true", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "1"}

    def run_machine(rank: int) -> tuple[int, str]:
        flags = [part for name, values in folders.items() for part in (f"--{name}", values[rank])]
        environment = {**common, "RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
        done = run_forked([script, *args, *flags], [environment], check=False)
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(2) as machines:
        return list(machines.map(run_machine, range(2)))


@pytest.mark.slow
def test_two_machines_train_as_one_run_and_refuse_to_differ(
    pipeline_dirs: dict[str, Path], prepared_dir: Path, tmp_path: Path
) -> None:
    common = (
        "--pretrained_model_name_or_path",
        pipeline_dirs["wan"],
        "--max_sequence_length",
        32,
        "--report_to",
        "none",
    )
    flags = (*common, "--train_batch_size", 2, "--max_train_steps", 2, "--dataloader_num_workers", 0)
    copied = shutil.copytree(prepared_dir, tmp_path / "copied")
    one, two = tmp_path / "one", tmp_path / "two"
    done = on_two_machines(*flags, dataset_dir=(prepared_dir, copied), output_dir=(one, one))
    assert [code for code, _ in done] == [0, 0], done
    assert len(losses_of(one)) == 2
    flags = (*flags, "--checkpointing_steps", 1)
    ended = on_two_machines(*flags, dataset_dir=(prepared_dir, copied), output_dir=(one, two))
    assert all(code and "Process 1 does not see" in text for code, text in ended), ended


@pytest.mark.slow
def test_two_machines_encode_into_one_cache_or_none(
    pipeline_dirs: dict[str, Path], prepared_dir: Path, tmp_path: Path
) -> None:
    flags = ("--pretrained_model_name_or_path", pipeline_dirs["wan"], "--dataset_dir", prepared_dir)
    caches, outputs = ((tmp_path / f"{name} 0", tmp_path / f"{name} 1") for name in ("cache", "cached"))
    script = ROOT / "scripts" / "cache_latents.py"
    ended = on_two_machines(*flags, script=script, cache_dir=caches, output_dir=outputs)
    assert all(code and "--cache_dir on a disk that all machines share" in text for code, text in ended), ended
    done = on_two_machines(*flags, script=script, cache_dir=(caches[0],) * 2, output_dir=outputs)
    assert [code for code, _ in done] == [0, 0], done
    assert PreparedDataset.load(outputs[0]).cache is not None
