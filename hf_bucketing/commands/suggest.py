r"""Suggest runs that fit: bucket table, buckets or packs, tokens per step, memory options, and how long they take.

%(prog)s --dataset demo/media --pretrained_model_name_or_path demo/tiny-wan --target_fps 8 \
    --gpu_memory 24 --output_dir demo/suggested

Headers are read once, no weight is loaded, and no GPU is needed. The best three runs are written as config files,
which the commands prepare, cache and train take with --config.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import BucketingError
from ..columns.settings import SourceConfig, TableConfig
from ..command_line.flags import FlagParser, from_flags
from ..files import check_folder_writable, check_writable, complete_file
from ..settings import marked

if TYPE_CHECKING:
    from ..columns import PreparedDataset
    from ..planner.components import Components
    from ..planner.rows import DataRows
    from ..planner.settings import MachineConfig
    from ..planner.suggestion import Suggestion
    from ..planner.ways import Way


def make_parser() -> FlagParser:
    from ..planner.gpus import TimeConfig
    from ..planner.settings import MachineConfig, PlanConfig
    from ..settings import names_of
    from .script_settings import SUGGESTED, settings_of_scripts

    parser = FlagParser(__doc__)
    parser.add_argument(
        "--pretrained_model_name_or_path",
        required=True,
        help="Diffusers pipeline, on the hub or in a folder; only its configuration is read.",
    )
    parser.add_argument("--num_proc", type=int, help="Processes that read file headers (default: this one).")
    parser.add_argument(
        "--streaming", action="store_true", help="Read only the first rows, and suggest a streamed run."
    )
    parser.add_argument(
        "--cost_model",
        help="Seconds of tokens as a run measured them: its cost_model.json, in place of a GPU's speed.",
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="Folder for the config files.")
    parser.add_argument("--html", type=Path, help="HTML file for the runs as a page that holds everything itself.")
    parser.add_settings(MachineConfig)
    parser.add_settings(TimeConfig)
    parser.add_settings(SourceConfig, several=["dataset"], skip=sorted({*names_of(TableConfig)} - {"num_buckets"}))
    parser.add_settings(PlanConfig, skip=sorted(SUGGESTED))
    parser.add_config("suggest_run", others=settings_of_scripts)
    return parser


def read_prepared(
    args: argparse.Namespace, folder: str, components: "Components"
) -> tuple["DataRows", "list[Way]", "PreparedDataset | None"]:
    """Return the rows of a prepared folder, or the first of its stream, its ways, and the data set if it is cached."""
    from ..columns import PreparedDataset
    from ..columns.prepared_stream import PreparedStream, holds_stream
    from ..configuration.prepared import check_same_settings
    from ..planner.rows import DataRows
    from ..planner.ways import ways_of
    from ..settings import settings_in

    if args.num_buckets is not None:
        raise BucketingError(f"Omit `num_buckets`: {folder} holds the table of its rows.")
    stream = PreparedStream.load(folder) if holds_stream(folder) else None
    prepared: Any = stream or PreparedDataset.load(folder)
    flags = {
        setting.name: value
        for setting in settings_in(SourceConfig)  # those of tables are no flags here
        if setting.name != "dataset" and (value := getattr(args, setting.name, setting.default)) != setting.default
    }
    check_same_settings(args.config, folder, settings=prepared.settings, flags=flags)
    if prepared.spec != components.spec:
        raise BucketingError(f"{folder} was prepared for {prepared.spec}, and the model has {components.spec}.")
    cache = None
    if stream is not None:
        rows = DataRows.of_stream(stream.read_first(), rules=stream.condition_rules)
    elif args.streaming:
        raise BucketingError(f"Omit `streaming`: {folder} holds rows, which are all known.")
    else:
        rows, cache = DataRows.of_prepared(prepared), prepared.cache
    tables = {"table of the folder": (None, prepared.table)}
    ways = [*ways_of(tables, rows.sizes, spec=prepared.spec, assigned=rows.assigned)]
    ways = [way for way in ways if cache is None or way.batching == cache.batching]
    return rows, ways, None if cache is None else prepared


def sources_of(args: argparse.Namespace) -> list[SourceConfig]:
    """Return the sources that the flags name, with any bucket table, as one is suggested."""
    from ..columns.source_lists import sources_from

    if args.clips is not None and args.clips != "scenes" and args.clip_frames is None:
        raise BucketingError(
            "Give `clip_frames` with `clips`: the bucket table, whose frames it follows, is suggested."
        )
    if args.num_buckets is not None and args.streaming:
        raise BucketingError(f"Omit `num_buckets`: {marked(TableConfig, 'needs_rows')['num_buckets']}.")
    table = {"buckets": "1,1", "bucket_frames": [1], "num_buckets": None}
    return sources_from({**vars(args), **table}, args.config)


def read_sources(
    args: argparse.Namespace, configs: list[SourceConfig], components: "Components"
) -> tuple["DataRows", "list[Way]", list[SourceConfig]]:
    """Read the headers of sources, or the first rows of streams, and return their rows and ways to batch them."""
    from ..columns.preparation import prepare
    from ..columns.prepared_stream import prepare_stream
    from ..planner.rows import DataRows
    from ..planner.ways import tables_of, ways_of

    height, width = components.spec.multiples
    of_any_size = TableConfig(buckets=f"{height},{width};{height},{3 * width};{3 * height},{width}", bucket_frames=[1])
    sources = [replace(source, table=of_any_size) for source in configs]
    common: dict[str, Any] = {
        "spec": components.spec,
        "native_sizes": components.recipe.native_sizes,
        "conditions": components.recipe.conditions,
        "taken": components.recipe.reference_rule(components.settings),
        "audio": components.audio,
    }
    if args.streaming:
        stream, columns = prepare_stream(sources, **common)
        rows = DataRows.of_stream(columns, rules=stream.condition_rules)
    else:
        rows = DataRows.of_prepared(prepare(sources, num_proc=args.num_proc, overwrite=True, **common))
    readable = rows.sizes.select(rows.readable.nonzero()[0])
    tables, rule = {}, sources[0].rule
    for name, settings in tables_of(components, readable, num_buckets=args.num_buckets).items():
        try:
            tables[name] = (
                settings,
                settings.make(
                    components.spec, native_sizes=components.recipe.native_sizes, samples=readable, rule=rule
                ),
            )
        except BucketingError as error:
            print(f"No table of {name}: {error}")
    return rows, [*ways_of(tables, rows.sizes, spec=components.spec, rule=rule)], sources


class Suggested(NamedTuple):
    """A suggestion, and what it was made for."""

    suggestion: "Suggestion"
    machine: "MachineConfig"
    rows: "DataRows"
    data: list[SourceConfig] | str


def suggest(args: argparse.Namespace) -> Suggested:
    """Read the headers of the data, and plan all runs."""
    sources = sources_of(args)  # a wrong flag ends the script before the slow imports

    from ..buckets.cost import read_cost_fit
    from ..columns.prepared import MANIFEST
    from ..planner.components import read_components
    from ..planner.gpus import TimeConfig
    from ..planner.settings import MachineConfig
    from ..planner.suggestion import Suggester
    from ..planner.time import Speed, StepSeconds
    from ..settings import changed
    from ..training.data_changes import sequence_length
    from .script_settings import plan_of_flags

    measured = None if args.cost_model is None else StepSeconds.measured(read_cost_fit(args.cost_model))
    machine = from_flags(MachineConfig, args, cpus=args.cpus or os.cpu_count())
    base = plan_of_flags(args, mixed_precision=args.mixed_precision or "bf16")
    speed = Speed.of(from_flags(TimeConfig, args), gpu_memory=machine.gpu_memory)
    components = read_components(
        args.pretrained_model_name_or_path,
        trained=base.run.trained_component,
        transformer_file=base.run.transformer_file,
    )
    data: Any
    if args.dataset and len(args.dataset) == 1 and (Path(args.dataset[0]) / MANIFEST).is_file():
        data = args.dataset[0]
        rows, ways, cached = read_prepared(args, data, components)
        if cached is not None:
            length = sequence_length(
                base.run.max_sequence_length, cached, folder=data, model=args.pretrained_model_name_or_path
            )
            base = changed(base, cached="all", max_sequence_length=length)
    else:
        rows, ways, data = read_sources(args, sources, components)
    suggester = Suggester(components, rows, machine=machine, base=base, speed=speed, measured=measured)
    return Suggested(suggester.suggest(ways), machine, rows, data)


def main(args: argparse.Namespace) -> None:
    check_folder_writable(args.output_dir)
    check_writable(args.html)
    suggested = suggest(args)
    suggestion, machine, rows, data = suggested

    from .suggested import describe_suggestion, write_suggestion

    print(describe_suggestion(suggestion, machine=machine, price_per_hour=args.price_per_hour))
    for note in rows.notes:
        print(note)
    name = args.pretrained_model_name_or_path
    files = write_suggestion(suggestion, args.output_dir, model=name, data=data, machine=machine, rows=rows)
    if args.html is not None:
        write_page(suggested, args)
    print(f"Settings, with their commands: {', '.join(map(str, files))}")


def write_page(suggested: Suggested, args: argparse.Namespace) -> None:
    """Write the runs as a page."""
    from ..report.page import render_page
    from .suggested import suggestion_page

    suggestion, machine, rows, data = suggested
    name = f"{args.pretrained_model_name_or_path} on "
    name += data if isinstance(data, str) else ", ".join(source.dataset for source in data)
    page = suggestion_page(suggestion, rows, name=name, machine=machine, price_per_hour=args.price_per_hour)
    with complete_file(args.html) as partial:
        partial.write_text(render_page(page), encoding="utf-8")
    print(f"Page: {args.html}")
