"""The project's own texts use the words of the field, one word per concept, in plain English.

Texts are comments, docstrings and messages of the package and the scripts, README.md, ARCHITECTURE.md, the
pages under docs/ and the notebooks' Markdown. Code in backquotes is not text; some patterns search all code instead.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

PYTHON = sorted([*(ROOT / "hf_bucketing").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.is_symlink()]
MARKDOWN = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *PAGES]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class Word(NamedTuple):
    """A word or phrase that the project does not use.

    Attributes:
        pattern (`str`): Regular expression, whose blanks match line breaks too; upper and lower case are the same.
        use (`str`): What to write instead.
        found (`str`): Example that it must find.
        passed (`str`): Example that it must not find.
        everywhere (`bool`): Whether to search all code, instead of texts alone.
    """

    pattern: str
    use: str
    found: str
    passed: str = "A plain sentence."
    everywhere: bool = False


WORDS = {
    # One word per concept.
    "stand-in": Word(
        r"stand[-_]?ins?(?![a-z])|\bstands? in for\b",
        "replacement",
        "Count stand-ins.",
        "stand in order",
        everywhere=True,
    ),
    "tail": Word(
        r"\b(?:tail=|tails=|TailPolicy|tail_policy)|(?<![\w.])tails?(?= (?:policy|policies|of a bucket|batch))",
        "remainder",
        'tail="short"',
        "output_tail=3",
        everywhere=True,
    ),
    "capacity": Word(
        r"(?<![\w-])capacity\b|--capacity\b", "max_tokens or max_cost", "a capacity of 9", "pack_capacity"
    ),
    "capacity=": Word(
        r"(?<![\w])capacity(?==[^=]|: int)", "max_tokens", "capacity=640", "pack_capacity=4", everywhere=True
    ),
    "multiple=": Word(r"(?<![\w])multiple(?==[^=])", "strip_length", "multiple=16", "multiples=3", everywhere=True),
    "center_crop": Word(r"\bcenter_crop\b", "random_crop=False", "center_crop=True", "central crop", everywhere=True),
    "world_size": Word(
        r"(?<![\w.])(?-i:world_size)\b(?!=[^,)\n]*num_processes)",
        "num_processes",
        "world_size=2",
        "split_dataset_by_node(stream, world_size=self.num_processes)",
        everywhere=True,
    ),
    "rank": Word(
        r"(?<!lora )(?<!adapter )(?<!adapters )\b(?:all|other|every|each|which|per|main) ranks?\b(?! of)|\brank 0\b",
        "process",
        "All ranks wait.",
        "The LoRA rank.",
    ),
    "document": Word(r"\bdocuments?\b(?! mask)", "segment", "Two documents in a pack.", "Documentation."),
    "in sync": Word(r"\bin sync\b", "lockstep", "Processes stay in sync.", "sync_gradients"),
    "width before height": Word(
        r"\((?:w|width), (?:h|height)\)", "(height, width)", "A size (w, h).", "A size (height, width)."
    ),
    "h/w": Word(r"\bh/w\b", "width ÷ height", "The ratio h/w.", "w / h"),
    "left out": Word(r"\bleft out\b", "dropped (samples) or omitted", "Rows are left out.", "What is left."),
    "turned away": Word(r"\bturned away\b", "rejected", "Small samples are turned away.", "Turned a way."),
    # Plain English.
    "whoever": Word(r"\bwho(?:so)?ever\b", "an ordinary subject", "whoever is killed"),
    "borne": Word(r"\bborne\b", "tolerated", "Errors that are borne.", "airborne"),
    "is told": Word(
        r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)", '"gets", "receives" or "is known"', "is told the size"
    ),
    "rides in": Word(r"\b(?:rid(?:e|es|ing)|rode) (?:in|on|with)\b", "carried in", "Text rides in strips."),
    "the house": Word(r"\bthe house\b", "package", "Errors of the house."),
    "rooms": Word(
        r"\brooms\b|\b(?:this|that|own|each|every|a) room\b", "modules or package", "All rooms.", "There is room."
    ),
    "floors": Word(
        r"\bfloors\b|\b(?:this|that|torch-free|upper|lower) floor\b", "layers", "The torch-free floors.", "np.floor"
    ),
    "way back": Word(r"\bway back\b", "never falls back", "There is no silent way back."),
    "go on": Word(
        r"\b(?:go|goes|going|gone|went) on\b(?! (?:the|a|an|its|top|disk|CPU|GPU|CUDA)\b)",
        "resume or continue",
        "It goes on exactly.",
        "Weights go on the GPU.",
    ),
    "half there": Word(r"\bhalf there\b", "partial", "None is half there."),
    "place of its own": Word(r"\bplaces? of (?:its|their) own\b", "separate", "It has a place of its own."),
    "what of it": Word(r"\bwhat of it\b", "a noun", "What of it is read."),
    "no array operation": Word(
        r"\bwhat no \w+ \w+ can do\b", "why it is plain Python", "what no array operation can do"
    ),
    "is no": Word(
        r"(?<!there )\b(?:is|are) no (?:file|folder|director(?:y|ies)|pipeline|image|video|number|size|prepared|"
        r"data|model|table|column|integer|text)s?\b",
        '"is not a …"',
        "thesis.txt is no folder.",
        "There is no file.",
    ),
    "help of": Word(
        r"help=\(?\s*[rf]?[\"'](?:Of|That|Which|By which|Whose)\b",
        "a noun phrase that makes sense alone",
        'add_argument("--beta", help="Of AdamW.")',
        'help="AdamW beta."',
        everywhere=True,
    ),
    "argument of": Word(
        r"^[ ]+`?\*{0,2}\w+`? \([^\n]*\): (?:Of|That|Which|By which|With which|Whose|On which|In which)\b",
        "a noun phrase that makes sense alone",
        "        seed (`int`): Of the draws.",
        "        seed (`int`): Seed of the draws.",
        everywhere=True,
    ),
}
LOOK_BEHIND = re.compile(r"(\(\?<[!=][^)]*\))|(?<!\[) (?!\])")


def compiled(pattern: str) -> re.Pattern[str]:
    """Let blanks match line breaks too, but in look-behinds, which have a fixed width."""
    spread = LOOK_BEHIND.sub(lambda match: match[1] or r"\s+", pattern)
    return re.compile(spread, re.IGNORECASE | re.MULTILINE)


PATTERNS = {name: compiled(word.pattern) for name, word in WORDS.items()}


class Text(NamedTuple):
    """A piece of a file, and the line at which it begins."""

    path: Path
    line: int
    text: str


def without_code(text: str) -> str:
    """Blank out what stands in backquotes, doctests and fenced blocks; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r"```.*?```|`[^`]*`|^\s*(?:>>>|\.\.\.) [^\n]*", blank, text, flags=re.DOTALL | re.MULTILINE)


def texts_of_python(path: Path) -> Iterator[Text]:
    """Yield comments, neighbouring ones together, and strings of more than a word."""
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            if comments and token.start[0] > comments[-1][0] + 1:
                yield joined(path, comments)
                comments = []
            comments.append((token.start[0], token.string.lstrip("# ")))
        elif token.type == tokenize.STRING and " " in token.string:
            yield Text(path, token.start[0], without_code(token.string))
    if comments:
        yield joined(path, comments)


def joined(path: Path, comments: list[tuple[int, str]]) -> Text:
    return Text(path, comments[0][0], without_code("\n".join(comment for _, comment in comments)))


def texts_of_notebook(path: Path) -> Iterator[Text]:
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "markdown":
            yield Text(path, number, without_code("".join(cell["source"])))


@cache
def texts() -> list[Text]:
    """Return all prose; the line of a notebook's text is the number of its cell."""
    return [
        *(text for path in PYTHON for text in texts_of_python(path)),
        *(Text(path, 1, without_code(path.read_text())) for path in MARKDOWN),
        *(text for path in NOTEBOOKS for text in texts_of_notebook(path)),
    ]


@cache
def sources() -> list[Text]:
    """Return all code and prose together."""
    notebooks = [
        Text(path, number, "".join(cell["source"]))
        for path in NOTEBOOKS
        for number, cell in enumerate(json.loads(path.read_text())["cells"])
    ]
    return [*(Text(path, 1, path.read_text()) for path in [*PYTHON, *MARKDOWN]), *notebooks]


@pytest.mark.slow
def test_forbidden_words_are_not_used() -> None:
    hits = []
    for name, word in WORDS.items():
        for path, line, text in sources() if word.everywhere else texts():
            for match in PATTERNS[name].finditer(text):
                number = line + text.count("\n", 0, match.start())
                place = f"{path.relative_to(ROOT)}:{number}"
                hits.append(f"{place}: {' '.join(match[0].split())} (write {word.use} instead)")
    assert not hits, "\n".join(hits)


def test_each_pattern_finds_its_example_and_no_more() -> None:
    for name, word in WORDS.items():
        assert PATTERNS[name].search(word.found), name
        assert PATTERNS[name].search(word.found.replace(" ", "\n")) or word.everywhere, name
        assert not PATTERNS[name].search(word.passed), name


def test_text_in_backquotes_and_doctests_is_code() -> None:
    text = without_code("whoever `borne`\n>>> tail = 3\n```\nthe house\n```\nend")
    assert text.split() == ["whoever", "end"]
    assert text.count("\n") == 5


# How a docstring begins. A function does something; a module or a class is something.
FRAGMENT = re.compile(r"(?:Of|Which|Where|Whose|That|By which|With which)\b")
NOT_IMPERATIVE = re.compile(rf"{FRAGMENT.pattern}|(?:What|How|Whether|When|Why|A|An|The|Is|Are)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and text of each docstring, and whether a function other than a property has it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
                is_value = any(name.endswith(("property", ".setter")) for name in decorators)
                is_action = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_value
                yield getattr(node, "lineno", 1), text, is_action


@pytest.mark.slow
def test_docstrings_open_in_plain_english() -> None:
    hits: dict[bool, list[str]] = {True: [], False: []}
    for path in PYTHON:
        for line, text, is_action in docstrings(path):
            if (NOT_IMPERATIVE if is_action else FRAGMENT).match(text):
                hits[is_action].append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not hits[True], "open with an imperative sentence:\n" + "\n".join(hits[True])
    assert not hits[False], "open with a noun phrase that makes sense alone:\n" + "\n".join(hits[False])
