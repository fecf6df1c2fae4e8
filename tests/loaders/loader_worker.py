"""A small training run for tests of loading in real processes: `accelerate launch loader_worker.py …`."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object, set_seed
from datasets import IterableDataset
from torch.utils.data import DataLoader

from hf_bucketing import BucketTable, MediaError, Size
from hf_bucketing.loaders import (
    BucketBatchSampler,
    FaultRule,
    PackBatchSampler,
    ResumableLoader,
    resume,
    worker_options,
)
from hf_bucketing.losses import global_mean
from hf_bucketing.randomness import ROW
from hf_bucketing.streaming import BucketGrouping, PackGrouping, ResumableStream, StreamingBucketBatcher
from hf_bucketing.streaming.grouping import Grouping

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(9, 64, 64)))
IDS = np.array([0, 1, 2, 1, -1] * 9 + [2, 2])
NUM_ROWS = len(IDS)


def make_sampler(kind: str, *, rows: int = NUM_ROWS):
    """Make a sampler of the first rows."""
    ids = IDS[:rows]
    if kind == "bucket":
        return BucketBatchSampler(ids, table=TABLE, batch_size=4)
    return PackBatchSampler(np.where(ids < 0, 0, 10 + 7 * np.arange(rows) % 50), max_tokens=90, strip_length=1)


def collate(rows: list[int], *, fault: str | None) -> torch.Tensor:
    """Make a batch; with a fault, the worker that meets row 30 dies or hangs."""
    if fault is not None and 30 in rows:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    return torch.tensor(rows)


class Run(NamedTuple):
    """All that a training script holds."""

    accelerator: Accelerator
    loader: ResumableLoader
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    timeout_once_started: float | None = None

    @classmethod
    def start(
        cls, *, kind="bucket", stateful=False, accumulation=1, dropout=0.5, num_workers=0, persistent=False,
        fault=None, timeout=0, timeout_once_started=None, rows=NUM_ROWS,
    ) -> Run:  # fmt: skip
        accelerator = Accelerator(
            gradient_accumulation_steps=accumulation,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful),
        )
        set_seed(0)
        # One parameter: DDP orders several anew after its first backward, and sums of three processes with them.
        model = torch.nn.Sequential(torch.nn.Dropout(dropout), torch.nn.Linear(3, 1, bias=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(
            range(rows),
            batch_sampler=make_sampler(kind, rows=rows),
            collate_fn=partial(collate, fault=fault),
            timeout=timeout,
            persistent_workers=persistent,
            **worker_options(num_workers),
        )
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        set_seed(0, device_specific=True)
        return cls(accelerator, resume(accelerator, loader), model, optimizer, timeout_once_started)

    def lines(self, *, epochs: int):
        """Train; yield (epoch, step, rows, loss) of this process for each batch, after its step."""
        for epoch in range(self.loader.epoch, epochs):
            self.loader.set_epoch(epoch)
            for rows in self.loader:
                self.shorten_timeout()
                with self.accelerator.accumulate(self.model):
                    features = torch.stack([rows.float(), rows.sin(), torch.ones(len(rows))], 1) / len(IDS)
                    losses = (self.model(features).squeeze(1) - rows.cos()) ** 2
                    self.accelerator.backward(
                        global_mean(losses, accelerator=self.accelerator, total=self.loader.samples_in_window)
                    )
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield [epoch, self.loader.step - 1, rows.tolist(), losses.detach().sum().item()]

    def shorten_timeout(self) -> None:
        """Replace the loader's timeout when both workers have made a batch, so that a slow start never exceeds it."""
        if self.timeout_once_started is not None and self.loader.step == 2:
            self.loader.base_dataloader._iterator._timeout = self.timeout_once_started

    def stop_workers(self) -> None:
        """Stop the workers now: garbage collection ends their queues first, and waits five seconds for each."""
        self.loader.base_dataloader._iterator = None


def check_every_step(output: Path, **options: Any) -> None:
    """Save after every batch, before the first and after each epoch; from each, repeat the rest to the last bit.

    In a window of gradient accumulation, that is from its start.
    """
    whole = Run.start(**options)
    folders = {0: output / "0"}
    whole.accelerator.save_state(str(folders[0]))
    lines, ends = [], []
    for epoch in (1, 2):
        for line in whole.lines(epochs=epoch):
            lines.append(line)
            folders[len(lines)] = output / str(len(lines))
            whole.accelerator.save_state(str(folders[len(lines)]))
        ends.append(len(lines))
        folders[-len(lines)] = output / f"end-{epoch}"
        whole.accelerator.save_state(str(folders[-len(lines)]))
    assert len(lines) >= 8
    whole.stop_workers()
    for saved, folder in folders.items():
        run = Run.start(**options)
        run.accelerator.load_state(str(folder))
        rest = list(run.lines(epochs=2))
        run.stop_workers()
        finished, window = abs(saved), options.get("accumulation", 1)
        inside = 0 if finished in ends else (finished - max([0, *(end for end in ends if end < finished)])) % window
        wanted = lines[finished - inside :]
        differences = [pair for pair in zip(rest, wanted, strict=True) if pair[0] != pair[1]]
        assert not differences, (options, saved, differences[0])


def stream_rows(shard: list[int], shards: list[int], total: int, without_headers: tuple[int, ...] = ()):
    """Yield rows of three buckets; one in ten is rejected, and the first shard is longer than the others.

    The files of some have no header that can be read.
    """
    for number in shard:
        for index in range(total):
            if number == (0 if index < total // 3 else index % shards[0]):
                frames, height, width = TABLE.size(index % 3)
                bucket, tokens = index % 3, (16, 32, 48)[index % 3]
                if index % 10 == 9 or index in without_headers:
                    frames, bucket, tokens = -1, -1, 0
                yield {ROW: index, "bucket_id": bucket, "num_tokens": tokens, "num_frames": frames,
                       "height": height, "width": width,
                       "rejection": "unreadable" if index in without_headers else "none"}  # fmt: skip


def collate_rows(rows) -> dict[str, list]:
    """Return the rows' numbers."""
    columns = {"index": ROW, "bucket_id": "bucket_id", "num_tokens": "num_tokens"}
    return {name: [row[column] for row in rows] for name, column in columns.items()}


def collate_readable(rows, broken: tuple[int, ...]) -> dict[str, list]:
    """Return the rows' numbers, or raise for the first one that is broken."""
    for row in rows:
        if row[ROW] in broken:
            raise MediaError(f"{row[ROW]}.mp4 is broken.")
    return collate_rows(rows)


def check_stream(
    output: Path,
    *,
    num_workers: int,
    shards: int = 6,
    total: int = 90,
    grouping: str = "bucket",
    broken: int = 0,
    resumes: int | None = None,
) -> None:
    """Read two epochs of a stream on all processes, saving at every step; from some or all, repeat the rest.

    Of the `broken` rows, which later ones replace, half have no header.
    """
    groupings: dict[str, Grouping] = {
        "bucket": BucketGrouping(table=TABLE, batch_size=4),
        "pack": PackGrouping(max_tokens=120, strip_length=1, open_packs=3),
    }
    unreadable = np.random.default_rng(7).choice([i for i in range(total) if i % 10 != 9], broken, replace=False)
    headers, bodies = (tuple(map(int, half)) for half in (unreadable[: broken // 2], unreadable[broken // 2 :]))
    log = output / "unreadable.jsonl"

    def start() -> tuple[Accelerator, ResumableStream]:
        accelerator = Accelerator()
        dataset = IterableDataset.from_generator(
            partial(stream_rows, total=total, without_headers=headers),
            gen_kwargs={"shard": list(range(shards)), "shards": [shards] * shards},
        )
        stream = StreamingBucketBatcher(
            dataset,
            groupings[grouping],
            collate_fn=partial(collate_readable, broken=bodies),
            faults=FaultRule(on_error="replace", max_errors=5, max_error_share=0.2).log(log) if broken else None,
            snapshot_every=8,
        )
        return accelerator, resume(accelerator, stream.make_loader(**worker_options(num_workers)))

    accelerator, whole = start()
    lines = []
    for epoch in range(2):
        for batch in whole:
            assert accelerator.gradient_state.end_of_dataloader == whole.end_of_dataloader
            planned = batch.get("planned_index", batch["index"])
            lines.append([epoch, batch["index"], planned, batch["weight"].tolist()])
            accelerator.save_state(str(output / str(len(lines))))
        assert whole.end_of_dataloader
        assert sum(gather_object([whole.unreadable])) == broken
    gathered = gather_object([lines])
    assert len(set(map(len, gathered))) == 1, "equal steps"
    readable = [index for index in range(total) if index % 10 != 9 and index not in unreadable]
    for epoch in range(2):
        mine = [line for process in gathered for line in process if line[0] == epoch and line[3][0]]
        assert sorted(index for _, rows, _, _ in mine for index in rows) == readable, "each row once"
        replaced = [old for _, *pair, _ in mine for new, old in zip(*pair, strict=True) if new != old]
        assert len(replaced) == len(set(replaced)) > len(bodies) / 2 or not broken
        assert set(replaced) <= set(bodies)
    if broken:
        logged = [(line["epoch"], line["index"]) for line in map(json.loads, log.read_text().splitlines())]
        assert sorted(logged) == [(epoch, index) for epoch in range(2) for index in sorted(unreadable)]
    repeats = any(not line[3][0] for process in gathered for line in process)
    assert repeats == (accelerator.num_processes > 1), "some process has less to read"
    accelerator.wait_for_everyone()  # what is resumed is logged again
    for saved in range(1, len(lines) + 1, 1 if resumes is None else len(lines) // resumes):
        accelerator, again = start()
        accelerator.load_state(str(output / str(saved)))
        rest = [
            [epoch, batch["index"], batch.get("planned_index", batch["index"]), batch["weight"].tolist()]
            for epoch in range(again.epoch, 2)
            for batch in again
        ]
        assert rest == lines[saved:], (saved, rest[:2], lines[saved : saved + 2])


def train(output: Path, *, epochs: int, save_every: int, kill_at: int, **options: Any) -> None:
    """Train as a script does, from the newest checkpoint; the last process may be killed after `kill_at` batches."""
    run = Run.start(**options)
    index = run.accelerator.process_index
    checkpoints = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    if checkpoints:
        run.accelerator.load_state(str(checkpoints[-1]))
    count = int(checkpoints[-1].name.partition("-")[2]) if checkpoints else 0
    with (output / f"log-{index}.jsonl").open("a") as log:
        for line in run.lines(epochs=epochs):
            log.write(json.dumps(line) + "\n")
            log.flush()
            count += 1
            if count == kill_at and index == run.accelerator.num_processes - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if save_every and count % save_every == 0:
                partial = output / "partial"
                run.accelerator.save_state(str(partial))
                run.accelerator.wait_for_everyone()
                if run.accelerator.is_main_process:
                    partial.rename(output / f"checkpoint-{count}")
                run.accelerator.wait_for_everyone()
    accelerator = run.accelerator
    del run  # DDP must go before its process group, as in `Trained.release`, or a process may hang at its end
    accelerator.free_memory()
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["every_step", "stream", "train"])
    parser.add_argument("output", type=Path)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    random.seed(0)
    if args.mode == "train":
        train(args.output, **args.options)
    else:
        for number, options in enumerate(args.options):
            check = check_stream if args.mode == "stream" else check_every_step
            check(args.output / str(number), **options)


if __name__ == "__main__":
    main()
