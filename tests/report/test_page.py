"""The report as a page: it holds everything itself, says what the JSON says, and is whole in a browser."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketTable, LatentSpec, Size, open_table
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.report import Beside, MemoryRow, SizeColumns, bucket_page, make_report, render_page
from hf_bucketing.report.charts import Line, bar_chart, histogram_chart, line_chart
from hf_bucketing.report.page import Charts, Gallery, Page, Paragraphs, Picture, Section, Table
from hf_bucketing.report.samples import RANDOM_SAMPLES, Histogram
from hf_bucketing.report.verdict import choose_way
from tests.browser import look_at
from tests.conftest import run_script_here
from tests.report.test_report import SAMPLES, SPEC, TABLE, TWO


class Parsed(HTMLParser):
    """What tests ask of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words: list[str] = []
        self._tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("src", "href", "data", "poster", "srcset") if values.get(name)]
        if tag == "img":
            assert values["alt"]
            self.images.append(values["alt"])
        if tag == "svg":
            assert values["aria-label"]
        if tag == "caption":
            self._table: list[list[str]] = []
        if tag == "tr":
            self._table.append([])
        if tag in ("td", "th"):
            self._table[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._tags and self._tags.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" in self._tags or "script" in self._tags:
            return
        if self._tags[-1:] == ["caption"]:
            self.tables[data] = self._table
        elif {"td", "th"} & {*self._tags[-3:]}:
            self._table[-1][-1] += data.strip("\n")
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check_complete(text: str) -> Parsed:
    """Check that a page asks nothing of any host and that its contents lead to its sections."""
    page = Parsed(text)
    outside = [link for link in page.links if not link.startswith(("#", "data:"))]
    assert not outside
    assert "url(" not in text
    assert "@import" not in text
    inside = [link[1:] for link in page.links if link.startswith("#")]
    assert inside
    assert set(inside) == {*page.ids}
    assert len(page.ids) == len({*page.ids})
    return page


def test_the_page_says_what_the_report_says() -> None:
    report = make_report(SAMPLES, TABLE, spec=SPEC, config=TWO)
    files = {row: f"clip-{row}.mp4" for row in range(17)}
    parts = {"weights": 3 * 2**30, "vae": 0, "context": 2**30}
    memory = [MemoryRow(settings="LoRA", parts=parts, fits={"in 4 GiB": "tight"})]
    beside = Beside(name="clips", assignment="Assigned.", files=files, model="tiny, 2 × 64×64", memory=memory)
    text = render_page(bucket_page(report, beside))
    page = check_complete(text)
    assert page.text.index(str(choose_way(report))) < page.text.index("Overview"), "the page begins with its verdict"
    assert '<span class="mark fair">tight</span>' in text
    buckets = page.tables["Buckets in use, the fullest first"]
    assert buckets[1][:5] == ["64×64", "0", "1.000", "7", "100.0%"]
    assert buckets[2][:5] == ["32×64", "1", "2.000", "4", "80.0%"]
    assert [row[0] for row in page.tables["1 buckets without a sample"][1:]] == ["9×32×64"]
    rejected = {row[0]: row for row in page.tables["Rejected rows by reason"][1:]}
    assert {label: int(row[1]) for label, row in rejected.items()} == report.buckets.rejections
    assert "clip-13.mp4 (32×32)" in rejected["too_small"][3]
    assert "--max_upscale 2 (keeps 1)" in rejected["too_small"][4]
    assert rejected["unreadable"][3] == "clip-15.mp4 (no size)"
    ways = {row[0]: row for row in page.tables["The same in numbers"][1:]}
    for strategy in report.strategies:
        assert int(ways[strategy.name][1]) == strategy.kept
        assert int(ways[strategy.name][3]) == strategy.num_steps
        assert ways[strategy.name][-1] == f"{strategy.efficiency:.1%}"
    head, row = page.tables["GiB by kind at the highest moment of that step"]
    assert head == ["settings", "weights", "context", "total", "in 4 GiB"]
    assert row == ["LoRA", "3", "1", "4", "tight"]
    assert "tiny, 2 × 64×64" in page.text


@pytest.mark.cases(fast=("few rows",), slow=("*",))
@pytest.mark.parametrize(
    ("sides", "used"), [([64], 1), ([64, 64, 64, 32, 1], 1), ([8, 9], 0), ([-1, -1], 0)],
    ids=["one row", "few rows", "all too small", "all unreadable"],
)  # fmt: skip
def test_a_page_of_few_rows_or_none_that_can_be_trained_on_is_whole(sides: list[int], used: int) -> None:
    frames = [1 if side > 0 else -1 for side in sides]
    report = make_report(SizeColumns(frames, sides, sides), TABLE, spec=SPEC, config=TWO)
    files = {row: f"{row}.png" for row in range(len(sides))}
    page = check_complete(render_page(bucket_page(report, Beside(name="few", assignment="", files=files))))
    assert len(page.tables.get("Buckets in use, the fullest first", [[]])) - 1 == used
    assert ("nothing can be trained in buckets of this table" in page.text) == (used == 0)


def test_the_worst_crops_are_those_that_keep_least_of_their_frame() -> None:
    crops = make_report(SAMPLES, TABLE, spec=SPEC, config=TWO).worst_crops
    assert [(crop.bucket_id, crop.row) for crop in crops] == [(1, 7), (1, 8), (1, 9), (2, 11)]
    assert crops[0].kept_area == pytest.approx(0.8)
    assert crops[0].box() == pytest.approx((0.1, 0, 0.8, 1))
    assert crops[3].kept_frames == 0.5
    squares = make_report(SizeColumns([1] * 9, [64] * 9, [64] * 9), TABLE, spec=SPEC, config=TWO)
    assert squares.worst_crops == ()


def test_random_samples_have_a_bucket_and_depend_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[int]:
        sides = [64] * 50 + [8] * 50
        config = replace(TWO, seed=seed)
        report = make_report(SizeColumns([1] * 100, sides, sides), TABLE, spec=SPEC, config=config)
        return [sample.row for sample in report.random_samples]

    assert drawn(0) == drawn(0) == sorted({*drawn(0)})
    assert drawn(0) != drawn(1)
    assert len(drawn(1)) == RANDOM_SAMPLES
    assert max(drawn(0) + drawn(1)) < 50


def test_durations_are_those_of_videos_alone() -> None:
    sizes = SizeColumns([32, 16, 1, 9], [64] * 4, [64] * 4, [16.0, 16.0, 0.0, 18.0])
    durations = make_report(sizes, TABLE, spec=SPEC, config=TWO).durations
    assert durations is not None
    assert sum(map(sum, durations.counts.values())) == 3
    assert (durations.edges[0], durations.edges[-1]) == pytest.approx((0.5 / 1.05, 2 * 1.05))
    assert make_report(sizes._replace(fps=None), TABLE, spec=SPEC, config=TWO).durations is None


def test_texts_are_escaped_wherever_they_stand() -> None:
    name = """<b> & "ü" '--max_upscale'"""
    uri = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
    picture = Picture(source=uri, width=1, height=1, alt=name, name=name, lines=[name], box=(0, 0, 1, 1))
    line = Line(name, np.arange(3.0), np.array([1.0, math.nan, 2.0]))
    chart = line_chart([line], title=name, alt=name, x_label=name, y_label=name, note=name)
    blocks = [
        Paragraphs(texts=[name], warning=True),
        Table(title=name, head=(name, name), rows=[(name, name)], texts=(1,), note=name),
        Gallery(title=name, pictures=[picture]),
        Charts(charts=[chart]),
    ]
    text = render_page(Page(title=name, subtitle=name, sections=[Section(name="a", title=name, blocks=blocks)]))
    assert "<b>" not in text
    page = check_complete(text)
    assert page.images == [name]
    assert page.tables[name][1] == [name, name]


def test_labels_are_texts_and_numbers_in_them_stay_as_they_are() -> None:
    text = r"$x_1$ costs 0.125 <i> & 1.0"
    bars = bar_chart([(text, (0.25,), text)], title="t", alt="a", x_label=text)
    assert unescape(str(bars.svg)).count(f">{text}</text>") == 3
    assert ">0.1</text>" in bars.svg
    assert bars.svg == bars.svg, "the same bytes each time"


def test_charts_take_fonts_and_colours_from_the_page_and_need_no_names_in_it() -> None:
    line = Line("a", np.arange(3.0), np.arange(3.0), 1, "dots")
    svg = line_chart([line, line._replace(style="faint")], title="t", alt="a", x_label="x", y_label="y").svg
    assert "var(--c1)" in svg
    assert not re.search(r"#[0-9a-f]{6}|font|\bid=|href|url", str(svg))


def paths_of(svg: str) -> list[list[tuple[float, ...]]]:
    """Return the points of the paths of a chart that are of its series, not of its grid."""
    paths = re.findall(r'd="([^"]*)" style="[^"]*var\(--c', svg)
    return [[tuple(map(float, point.split())) for point in re.findall(r"[ML] ([\d. ]+)", path)] for path in paths]


def test_values_below_zero_lie_inside_a_chart_and_infinite_ones_have_no_bar() -> None:
    line = Line("a", np.array([1.0, 2.0]), np.array([-3.0, -1.0]))
    ((first, second),) = paths_of(str(line_chart([line], title="t", alt="a", x_label="x", y_label="y").svg))
    assert 0 < second[1] < first[1] < 240
    (bar,) = paths_of(str(bar_chart([("a", (math.inf,), "inf"), ("b", (2.0,), "2")], title="t", x_label="x").svg))
    assert max(x for x, _ in bar) - min(x for x, _ in bar) > 100


def test_bars_beyond_three_times_a_limit_are_cut() -> None:
    bars = [("a", (5.0, 100.0), "105"), ("b", (1.0, 2.0), "3")]
    svg = str(bar_chart(bars, title="t", x_label="x", parts=("p", "q"), limit=(2.0, "2 GiB")).svg)
    of_p, of_p_too, of_q, of_q_too = [[x for x, _ in bar] for bar in paths_of(svg)]
    assert (max(of_q) - min(of_p)) == pytest.approx(2 * (max(of_q_too) - min(of_p_too)), abs=0.2), "6 and 3"
    assert ">105</text>" in svg
    assert ">2 GiB</text>" in svg


def save_images(folder: Path) -> Path:
    """Prepare three images: a wide one, one that is no image, and one that every bucket would enlarge."""
    folder.mkdir()
    Image.fromarray(np.full((40, 100, 3), 200, np.uint8)).save(folder / "a<b> & ü.png")
    Image.fromarray(np.full((8, 8, 3), 90, np.uint8)).save(folder / "small.png")
    (folder / "broken.png").write_bytes(b"no image")
    files = ["a<b> & ü.png", "broken.png", "small.png"]
    captions = [["A <wide> one", "another"], ["broken"], ["small"]]
    sizes = {"width": [100, 100, 8], "height": [40, 40, 8]}
    rows = Dataset.from_dict({"image": files, "text": captions, **sizes})
    table = BucketTable(sizes=(Size(1, 64, 64), Size(1, 32, 64)))
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
    data = PreparedDataset(
        dataset=rows, table=table, open_table=open_table(spec), column="image", caption_column="text", root=str(folder)
    )
    data.save(folder / "prepared")
    return folder / "prepared"


def test_the_script_shows_frames_and_names_files_that_cannot_be_read(tmp_path: Path) -> None:
    prepared = save_images(tmp_path / "images")
    written = ("--html", tmp_path / "page.html", "--json", tmp_path / "report.json")
    run_script_here("report_buckets.py", prepared, "--num_processes", 1, "--batch_size", 1, *written)
    page = check_complete((tmp_path / "page.html").read_text())
    name = "a<b> & ü.png"
    of_frame = f"Frame of {name} with the part marked that its bucket keeps."
    assert page.images == [f"{name} as the model sees it.", of_frame]
    assert "“A <wide> one” 40×100 → 32×64, keeps 80.0%" in page.text
    assert page.text.count("broken.png could not be shown") == 2
    report = json.loads((tmp_path / "report.json").read_text())
    buckets = {int(row[1]): int(row[3]) for row in page.tables["Buckets in use, the fullest first"][1:]}
    entries = {bucket["bucket_id"]: bucket["num_samples"] for bucket in report["buckets"]["buckets"]}
    assert buckets == {bucket: count for bucket, count in entries.items() if count}
    ways = [row[0:2] for row in page.tables["The same in numbers"][1:]]
    assert ways == [[strategy["name"], str(strategy["kept"])] for strategy in report["strategies"]]
    assert [reason["examples"] for reason in report["rejected"]] == [[2]]


def test_what_does_not_occur_is_not_shown() -> None:
    """No group or kind without a sample in a legend, and no empty section."""
    sizes = Histogram(edges=(1.0, 2.0, 4.0), counts={"with a bucket": (3, 1), "rejected": (0, 0)})
    chart = histogram_chart(sizes, title="a", x_label="x", y_label="y")
    assert chart.legend == (("with a bucket (4)", "s0"),)
    assert "--c1" not in chart.svg
    marked = histogram_chart(sizes, title="a", x_label="x", y_label="y", marks={"empty": [], "used": [1.5, 3.0]})
    assert marked.legend == (("with a bucket (4)", "s0"), ("used (2)", "s5"))
    assert [len(path) for path in paths_of(str(marked.svg))[1:]] == [2, 2]
    rejected = Histogram(edges=(1.0, 2.0, 4.0), counts={"with a bucket": (0, 0), "rejected": (0, 2)})
    assert histogram_chart(rejected, title="a", x_label="x", y_label="y").legend == (("rejected (2)", "s1"),)
    kinds = bar_chart([("a", (0.0, 2.0, 0.0), "2")], title="a", x_label="x", parts=("full", "short", "mixed"))
    assert kinds.legend == (("short", "s1"),)
    blocks = {"one": [Paragraphs(texts=["p"])], "two": []}
    sections = [Section(name=name, title=name, blocks=content) for name, content in blocks.items()]
    page = Parsed(render_page(Page(title="t", subtitle="", sections=sections)))
    assert "one" in page.ids
    assert "two" not in page.ids
    assert "#two" not in page.links


NAMES = dict.fromkeys(range(10_000), "a.mp4")


def test_histograms_beside_each_other_mean_different_things_by_different_colours() -> None:
    page = bucket_page(
        make_report(SAMPLES, TABLE, spec=SPEC, config=TWO), Beside(name="clips", assignment="", files=NAMES)
    )
    (charts,) = next(section for section in page.sections if section.name == "data").blocks
    meanings: dict[str, set[str]] = {}
    for chart in charts.charts:
        for name, colour in chart.legend:
            meanings.setdefault(colour, set()).add(name.partition(" (")[0])
    assert {"s0", "s2", "s3"} <= set(meanings)
    assert all(len(names) == 1 for names in meanings.values())


@pytest.mark.slow
def test_the_page_is_whole_in_a_browser(prepared_dir: Path, pipeline_dir: Path, tmp_path: Path, browser) -> None:
    for name, folder in {"videos": prepared_dir, "images": save_images(tmp_path / "images")}.items():
        page = tmp_path / f"{name}.html"
        named = ("--pretrained_model_name_or_path", pipeline_dir) if name == "videos" else ()
        flags = ("--num_processes", 1, "--batch_size", 2, "--compare", "all", "--html", page)
        run_script_here("report_buckets.py", folder, *flags, *named)
        assert page.stat().st_size < 3_000_000
        assert not any(look_at(browser, page.as_uri())), name
    assert "tiny-wan on one GPU" in (tmp_path / "videos.html").read_text()
    unknown = ("--html", tmp_path / "page.html", "--pretrained_model_name_or_path", tmp_path / "none")
    assert run_script_here("report_buckets.py", prepared_dir, *unknown, check=False).returncode == 1


@pytest.mark.slow
def test_a_click_on_a_head_sorts_the_table_by_its_numbers(tmp_path: Path, browser) -> None:
    table = Table(title="t", head=("name", "count"), rows=[("a", "1,000"), ("b", "30"), ("c", "–"), ("d", "200")])
    page = Page(title="t", subtitle="", sections=[Section(name="s", title="t", blocks=[table])])
    (tmp_path / "t.html").write_text(render_page(page), encoding="utf-8")
    view = browser.new_page()
    view.goto((tmp_path / "t.html").as_uri())
    for order in ("cbda", "adbc"):
        view.click("thead th:nth-child(2) button")
        assert "".join(view.eval_on_selector_all("tbody th", "all => all.map(one => one.textContent)")) == order
    view.close()
