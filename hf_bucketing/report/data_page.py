"""The rows of a data set as a page: what a model will see of each, and what changed since an earlier one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from .data_rows import RowTexts
from .page import Block, Facts, Page, Paragraphs, RowList, Section
from .text import percent

_ROWS_OF_A_SCRIPT = 1000

FILTERS = ("bucket", "rejected", "source", "change")
"""What readers can filter rows by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A row of a page.

    Attributes:
        number (`int`, *optional*): Its number; None for a row of an earlier data set.
        texts (mapping of `str` to sequence of `str`): What [`describe_row`] says of it.
        filters (mapping of `str` to `str`): Its value of each of `FILTERS`, `""` where it has none.
        differences (sequence of `str`): In what it differs from an earlier data set.
        pictures (sequence of tuples): What each picture is, its file, width and height in pixels.
        fault (`str`): Why it has no picture, if its files cannot be read.
    """

    number: int | None
    texts: RowTexts
    filters: dict[str, str]
    differences: Sequence[str] = ()
    pictures: Sequence[tuple[str, str, int, int]] = ()
    fault: str = ""


def write_rows(rows: Sequence[DataRow], folder: Path) -> None:
    """Write rows into the scripts that [`data_page`] names, from which a page reads them without a server."""
    for number, name in enumerate(_scripts(rows)):
        part = rows[number * _ROWS_OF_A_SCRIPT : (number + 1) * _ROWS_OF_A_SCRIPT]
        lines = ",\n".join(json.dumps(asdict(row)) for row in part)
        (folder / name).write_text(f"rows.push(\n{lines}\n)\n", encoding="utf-8")


def data_page(
    rows: Sequence[DataRow],
    *,
    name: str,
    folder: str,
    num_rows: int,
    kept_area: float,
    changes: str,
    cached: str = "",
) -> Page:
    """Lay out a page of rows.

    Args:
        rows (sequence of [`DataRow`]): Rows that are shown.
        name (`str`): Name of the data set.
        folder (`str`): Name of the folder beside the page that holds the scripts and pictures.
        num_rows (`int`): Rows of the data set.
        kept_area (`float`): Mean kept area of all that have a bucket, NaN if none has one.
        changes (`str`): Sentence on what changed since an earlier data set; `""` without one.
        cached (`str`): What a cache holds of the rows; `""` without one.
    """
    present = [row for row in rows if row.number is not None]
    counts = {filter: Counter(row.filters[filter] for row in rows if row.filters[filter]) for filter in FILTERS}
    facts = [
        ("rows", f"{num_rows:,}"),
        ("rows shown", f"{len(present):,}"),
        ("of them rejected", f"{counts['rejected'].total():,}"),
        ("of them with pictures", f"{sum(bool(row.pictures) for row in present):,}"),
        ("kept area, mean", percent(kept_area)),
    ]
    if cached:
        facts.append(("cached", cached))
    if changes:
        facts.append(("changes shown", f"{counts['change'].total():,}"))
    texts = [
        "Pictures are cut as the model will see them in buckets, with the crop in the centre; with random crops, "
        "training moves it along the side that is cut. Packs take samples whole. Rejected rows are shown whole."
    ]
    if len(present) < num_rows:
        texts.append(
            f"Of {num_rows:,} rows, {len(present):,} are shown: those that changed, and others spread evenly "
            "(--max_rows)."
        )
    url = quote(folder)
    row_list = RowList(
        scripts=[f"{url}/{script}" for script in _scripts(rows)],
        pictures=url,
        filters={filter: _in_order(values) for filter, values in counts.items() if values},
    )
    overview: list[Block] = [Facts(facts=facts), Paragraphs(texts=texts)]
    sections = [
        Section(name="overview", title="Overview", blocks=overview),
        Section(name="changes", title="Changes", blocks=[Paragraphs(texts=[changes])] if changes else []),
        Section(name="list", title="Rows", blocks=[row_list]),
    ]
    return Page(title="The data", subtitle=f"{name}: what a model will see of each row.", sections=sections)


def _in_order(values: Counter[str]) -> list[str]:
    """Return values from the most frequent one on."""
    return [value for value, _ in values.most_common()]


def _scripts(rows: Sequence[DataRow]) -> list[str]:
    return [f"rows-{number}.js" for number in range(max(1, -(-len(rows) // _ROWS_OF_A_SCRIPT)))]
