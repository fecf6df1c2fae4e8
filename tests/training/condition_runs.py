"""Short runs on a few videos and images: prepared as rows, as a stream, and cached, in buckets and in packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from accelerate import Accelerator

from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.batching.streamed import make_streamed_data, open_stream
from hf_bucketing.loaders.resume import resume
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training import TrainingConfig
from tests.conftest import run_script_here
from tests.training.training_cases import in_process

MODES = ("bucket", "pack", "cached", "stream", "streamed-packs")
each_mode = pytest.mark.parametrize("mode", MODES)


class ConditionRuns(NamedTuple):
    """Folders of prepared rows, of a stream and of cached packs, and the settings of runs on them.

    Attributes:
        folder: Folder of the folders `prepared`, `stream` and `cached`.
        pipeline: Folder of the pipeline.
        common: Settings of all runs.
        bucket: Settings of buckets.
        pack: Settings of packs.
    """

    folder: Path
    pipeline: Path
    common: Mapping[str, Any]
    bucket: Mapping[str, Any]
    pack: Mapping[str, Any]

    def settings(self, mode: str, output: Path, **settings: Any) -> TrainingConfig:
        """Return the settings of a run of a mode."""
        of_mode: dict[str, Any] = {"streaming": True} if "stream" in mode else {}
        of_mode |= (
            self.bucket if mode in ("bucket", "stream") else {"batching": "pack", "strip_length": 16, **self.pack}
        )
        data = "stream" if "stream" in mode else "cached" if mode == "cached" else "prepared"
        return in_process(self.pipeline, self.folder / data, output, **{**self.common, **of_mode, **settings})

    def data(self, config: TrainingConfig) -> Any:
        """Return the data of a run."""
        spec, tokens = recipe_of(str(self.pipeline)).read_spec(str(self.pipeline)), ModelTokens(width=96)
        if config.stream.streaming:
            return make_streamed_data(config, spec, tokens, opened=open_stream(config, Accelerator(cpu=True)))
        return make_data(config, spec, tokens)

    def prepare(self, sources: Sequence[Path], *, bucket_frames: str = "1,5,9") -> None:
        """Prepare sources as rows and as a stream."""
        for output, flags in {"prepared": {}, "stream": {"streaming": True}}.items():
            run_script_here(
                "prepare_dataset.py",
                "--dataset",
                *sources,
                pretrained_model_name_or_path=self.pipeline,
                output_dir=self.folder / output,
                target_fps=8,
                bucket_frames=bucket_frames,
                buckets="64,96;64,64",
                **flags,
            )

    def cache(self, output: str = "cached", **flags: Any) -> None:
        """Cache the rows for packs, with texts as long as those of runs."""
        if "max_sequence_length" in self.common:
            flags = {"max_sequence_length": self.common["max_sequence_length"], **flags}
        run_script_here(
            "cache_latents.py",
            dataset_dir=self.folder / "prepared",
            pretrained_model_name_or_path=self.pipeline,
            cache_dir=self.folder / "cache",
            output_dir=self.folder / output,
            **{"batching": "pack", **flags},
        )


def loader_of(data: Any) -> Any:
    """Return the loader of data as a loop draws from it."""
    accelerator = Accelerator(cpu=True)
    return resume(accelerator, accelerator.prepare(data.loader) if hasattr(data, "dataset") else data.loader)
