"""Renderings side by side, guidance, and what is refused, in hf_bucketing sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from diffusers import WanPipeline
from PIL import Image

from hf_bucketing.adapters.kinds import adapters_of
from hf_bucketing.adapters.lora import add_lora, save_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.commands import sample
from hf_bucketing.errors import FlagError
from tests.conftest import run_script_here

HEIGHT, WIDTH = 32, 48
COMMON = ("--height", HEIGHT, "--width", WIDTH, "--max_sequence_length", 32, "--guidance_scale", 3)


@pytest.fixture(scope="module")
def adapter(pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    PartialState()  # the main process writes
    folder, pipeline = tmp_path_factory.mktemp("adapter"), WanPipeline.from_pretrained(pipeline_dir)
    torch.manual_seed(0)
    add_lora(pipeline, AdapterConfig(lora_rank=2))
    for value in adapters_of(pipeline.transformer).values():
        torch.nn.init.normal_(value, std=0.3)
    save_lora(pipeline, folder)
    return folder


@pytest.fixture
def sampled(pipeline_dir: Path, tmp_path: Path):
    """Render with the script, and return the picture."""

    def sample(*flags: object) -> np.ndarray:
        run_script_here("sample_video.py", pipeline_dir, *COMMON, *flags, "--output", tmp_path / "out.png")
        return np.asarray(Image.open(tmp_path / "out.png")).astype(int)

    return sample


@pytest.mark.slow
def test_a_grid_holds_what_is_rendered_alone(sampled, adapter: Path) -> None:
    grid = sampled(
        *("--prompt", "red", "a blue square", "--seed", 0, 1, "--num_inference_steps", 1, 2),
        *("--adapter", f"{adapter}=2", "--strength", 0.5, "--compare_base"),
    )
    assert grid.shape == (24 + 4 * (24 + HEIGHT), 4 * WIDTH, 3)

    def cell(row: int, column: int) -> np.ndarray:
        top, left = 24 + row * (24 + HEIGHT) + 24, column * WIDTH
        return grid[top : top + HEIGHT, left : left + WIDTH]

    first = ("--prompt", "red", "--seed", 1, "--num_inference_steps", 2)
    assert np.array_equal(cell(1, 1), sampled(*first))
    second = ("--prompt", "a blue square", "--seed", 0, "--num_inference_steps", 1, "--adapter", adapter)
    assert np.array_equal(cell(2, 2), sampled(*second))
    cells = [cell(row, column) for row in range(4) for column in range(4)]
    assert len({picture.tobytes() for picture in cells}) == len(cells)


def test_a_negative_prompt_steers_also_with_a_build_for_cuda_without_a_driver(
    sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    flags = ("--prompt", "red", "--num_inference_steps", 2)
    assert np.array_equal(sampled(*flags), sampled(*flags, "--negative_prompt", ""))
    assert np.abs(sampled(*flags, "--negative_prompt", "a dog") - sampled(*flags)).max() > 0


QWEN = dict.fromkeys(("prompt", "negative_prompt", "true_cfg_scale", "guidance_scale"), False)
WAN = dict.fromkeys(("prompt", "negative_prompt", "guidance_scale"), False)
GUIDER = dict.fromkeys(("prompt", "negative_prompt"), False)


@pytest.mark.parametrize(
    ("parameters", "words", "given"),
    [
        (WAN, "", {"guidance_scale": 1.0}),
        (WAN, "--guidance_scale 5 --negative_prompt dark", {"guidance_scale": 5.0, "negative_prompt": "dark"}),
        (QWEN, "", {"guidance_scale": 1.0}),
        (QWEN, "--true_cfg_scale 4", {"guidance_scale": 1.0, "true_cfg_scale": 4.0, "negative_prompt": ""}),
        (QWEN, "--true_cfg_scale 1", {"guidance_scale": 1.0, "true_cfg_scale": 1.0}),
        (GUIDER, "--negative_prompt dark", {"negative_prompt": "dark"}),
        (WAN, "--negative_prompt dark", "no effect without guidance; give --guidance_scale above 1"),
        (QWEN, "--guidance_scale 5 --negative_prompt dark", "no effect without guidance; give --true_cfg_scale above"),
        (WAN, "--true_cfg_scale 4", "Omit --true_cfg_scale: a Pipeline takes none"),
        (GUIDER, "--guidance_scale 5", "Omit --guidance_scale: a Pipeline takes none"),
        ({"prompt": False}, "--negative_prompt dark", "Omit --negative_prompt: a Pipeline takes none"),
    ],
)
def test_guidance_is_what_the_call_of_the_pipeline_takes(
    parameters: dict[str, bool], words: str, given: dict[str, Any] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = sample.make_parser().parse_args(["p", "--output", "a.png", *words.split()])
    if isinstance(given, str):
        with pytest.raises(FlagError, match=given):
            sample.guidance_of(args, parameters, "Pipeline")
    else:
        assert sample.guidance_of(args, parameters, "Pipeline") == given


def test_a_length_of_prompts_that_the_pipeline_does_not_take_is_refused(tiny_folder, tmp_path: Path) -> None:
    flags = ("--output", tmp_path / "a.png", "--max_sequence_length", 64)
    result = run_script_here("sample_video.py", tiny_folder("qwen-image-2.1"), *flags, check=False)
    assert result.returncode == 2
    assert "Omit --max_sequence_length: a QwenImage21Pipeline takes none" in result.stderr


def test_a_strength_without_adapters_is_refused(pipeline_dir: Path, tmp_path: Path) -> None:
    for flags in (("--strength", 0.5), ("--compare_base",)):
        result = run_script_here("sample_video.py", pipeline_dir, "--output", tmp_path / "a.png", *flags, check=False)
        assert result.returncode == 2
        assert "there is no --adapter" in result.stderr
