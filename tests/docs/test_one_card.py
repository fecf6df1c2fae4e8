"""The commands of the page of one card, with small random weights and generated clips in place of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from tests.docs.pages import PAGES, run_call
from tests.docs.test_model_pages import FASTER, on_small_weights

PAGE = PAGES["docs/one-card.md"]
ON_A_CPU = {
    "suggest": ["--gpu_memory", 1, "--device", "cpu", "--mixed_precision", "no", "--target_fps", 8],
    **FASTER,
}


@pytest.mark.every
def test_the_commands_of_the_page_train_and_render(
    media_dir: Path, pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers": str(pipeline_dir), "clips": str(media_dir)}
    plan, *calls = PAGE.calls()
    assert plan[0] == "plan", "which the benchmark of plans runs"
    for script, arguments in calls:
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
        run_call(script, *on_small_weights(arguments, names), *ON_A_CPU.get(script, []))
    assert {script for script, _ in calls} >= {"suggest", "cache", "sample"}
    (copied,) = [command for command in PAGE.commands() if command.startswith("cp ")]
    assert Path(copied.split()[1]).is_file()
    assert Path("dog.mp4").stat().st_size > 0
