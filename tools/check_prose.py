"""Finds banned words in the documentation, error messages, logs, help texts and module docstrings.

Docstrings and comments may not begin with a word that leaves their subject open, such as *what* or *those*.

Run ``python tools/check_prose.py`` from the repository root. It prints file:line, the phrase and its replacement, and exits with 1
if it found any. ``--write`` writes the list of this file into docs/glossary.md ("Words to avoid").
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_UNITS = "second|minute|sample|feature|row|rank|request|call|file|table|line|step|batch|worker"

BANNED: list[tuple[str, str, str]] = [
    (
        "at the door, two doors",
        r"\bat the door\b|\b(?:two|three|other|every|all) doors\b",
        "protocol, port or endpoint",
    ),
    ("is told", r"\b(?:is|are|was|were) told(?! apart)\b", "is notified, gets an error, or is reported"),
    ("who asks, who calls, who waits", r"\bwho (?:asks|calls|waits|wants)\b", "caller or client"),
    ("somebody", r"\bsomebody\b", "the client, process or rank that it is"),
    ("what waits", r"\bwhat waits\b", "queued requests"),
    ("a server less", r"\ba server less\b", "one server fewer, or scale-down"),
    ("is refused by name", r"\bis refused by name\b", "fails with an error that names it"),
    ("crowd", r"\bcrowds?\b(?! out)", "concurrent requests"),
    ("lookout", r"\blookouts?\b", "monitor or watcher"),
    ("patience", r"\bpatience\b", "timeout"),
    ("promise (of latency)", r"\bpromises?\b", "objective"),
    ("in the place of", r"\bin the place of\b", "instead of"),
    ("to be had", r"\bto be had\b", "available"),
    ("hand over", r"\bhand(?:s|ed)? over\b", "pass"),
    ("without a word", r"\bwithout a word\b", "without an error message"),
    ("does nothing here", r"\bdoes nothing here\b", "has no effect"),
    ("is not here", r"\b(?:is|are) not here\b", "recinfer lacks, or is missing"),
    ("not there any more", r"\bnot there any ?more\b", "was removed, or has ended"),
    ("told beside, is beside it", r"\btold beside\b|\bis beside it\b", "also reported"),
    (
        "requests a second, ids a sample",
        rf"\b(?:requests?|samples?|answers?|rows?|ids?|vectors?|bytes|lines?|one|two) an? (?:{_UNITS})\b",
        "requests per second, ids per sample",
    ),
]
"""Phrase, its regular expression, what to write instead: in pages, error messages, help texts and module docstrings."""

BANNED_IN_PAGES: list[tuple[str, str, str]] = [
    ("once a process", r"\bonce an? (?:process|place|table|version)\b", "once per process"),
    ("beside", r"\bbeside\b", "next to, or compared with"),
    ("anew", r"\banew\b", "again"),
    ("living replica", r"\bliving replicas?\b", "usable replica"),
    (
        "whoever calls, who reads",
        r"\bwho(?:ever)? (?:calls|sends|reads|looks|waits|wants)\b",
        "the caller, client or reader",
    ),
    ("give back, give out", r"\b(?:gives?|given|gave) (?:back|out)\b", "returns, frees, or sends"),
    ("by custom, by itself alone", r"\bby (?:custom|itself alone)\b", "by convention, or alone"),
    ("for good", r"\bfor good\b", "permanently"),
    ("made-up", r"\bmade[- ]up\b", "synthetic, or example"),
    (
        "N times faster, N times as many",
        r"\b\d+(?:\.\d+)? times (?:faster|slower|as (?:fast|many|much))\b",
        "N times the time, the rate or the bytes",
    ),
]
"""The same for pages alone."""

_VERB = "is|are|was|were|has|have|had|can|may|must|does|do|did|would|will"

OPENINGS: list[tuple[str, str, str]] = [
    ("What ..., That ..., Which ..., Whose ...", r"what|that|which|whose", "the noun that is meant"),
    ("Who ..., Whoever ...", r"who|whoever", "the caller, client, process or rank that it is"),
    ("It ..., Its ..., They ..., Their ...", r"it|its|they|them|their", "the noun that is meant"),
    ("Those ..., Such ..., Ours ..., Theirs ...", r"those|such|ours|theirs", "the noun that is meant"),
    ("This is ..., These are ...", rf"(?:this|these)(?= (?:{_VERB})\b)", "the noun that is meant"),
    ("So many ..., So much ...", r"so (?:many|much)", "the number and its unit"),
    (
        "One of ..., One that ...",
        r"one(?= (?:of|that|which|who|whose|with|without|more than|is|was|has)\b)",
        "a or an, and the noun",
    ),
    (
        "The one that ..., The others",
        r"the (?:ones|others|one(?= (?:that|which|who|of|with|in|on)\b))",
        "the noun that is meant",
    ),
    (
        "The same as ..., The same for ...",
        rf"the same(?= (?:as|of|for|by|from|with|without|in|on|to|{_VERB})\b|\W*$|[;:,])",
        "the noun that is meant",
    ),
    ("Of a ..., Of each ...", r"of", "the noun before *of*"),
    ("As :meth: ...", r"as(?! (?:in|long|soon)\b)", "a verb, then *like* or *see*"),
    ("Nothing ..., Everything ...", r"nothing|everything", "no or all, and the noun"),
    ("Else ...", r"else", "otherwise, or the condition"),
]
"""Words that may not begin a docstring or a comment, their regular expression, what to begin with instead."""

_OPENING = re.compile(
    "|".join(rf"(?P<r{i}>(?:{pattern})\b)" for i, (_, pattern, _) in enumerate(OPENINGS)), re.IGNORECASE
)

_STRING_OR_COMMENT = re.compile(
    r"""(?P<comment>\#[^\n]*)
    | \"{3}(?:[^"\\]|\\.|"(?!""))*"{3} | '{3}(?:[^'\\]|\\.|'(?!''))*'{3}
    | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'""",
    re.DOTALL | re.VERBOSE,
)
"""Comments of a module, and its strings, which may hold a ``#``; :mod:`tokenize` takes ten times as long."""

_SENTENCE = re.compile(r"(?<=[.;])\s")

_TABLE = re.compile(r"(## Words to avoid\n.*?\n\|---\|---\|---\|\n).*", re.DOTALL)

_SHOWS = {"error", "exception", "info", "note", "show", "warning"}
"""Methods of loggers and of :class:`recinfer.cli.console.Output` that print their arguments."""

_EXEMPT = {"docs/glossary.md"}


def _compiled(words: list[tuple[str, str, str]]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), instead) for _, pattern, instead in words]


_EVERYWHERE = _compiled(BANNED)
_PAGES = _EVERYWHERE + _compiled(BANNED_IN_PAGES)


def find(text: str, first_line: int = 1, *, page: bool = False) -> Iterator[tuple[int, str, str]]:
    """Gives line number, phrase and replacement for each banned phrase in ``text``; a phrase may span two lines."""
    for pattern, instead in _PAGES if page else _EVERYWHERE:
        for match in pattern.finditer(text):
            yield first_line + text.count("\n", 0, match.start()), " ".join(match.group().split()), instead


@functools.lru_cache(maxsize=1)
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """The module and all nodes below it; two checks read each module one after the other."""
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:  # which grows; ast.walk() takes three times as long
        for field in node._fields:
            value = getattr(node, field)
            if isinstance(value, list):
                nodes += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return tuple(nodes)


def user_strings(source: str) -> Iterator[tuple[int, str]]:
    """Gives first line and text of the module docstring and of strings that a user reads: ``help=``, errors, logs, output."""
    tree, *nodes = _nodes(source)
    assert isinstance(tree, ast.Module)
    roots: list[ast.AST] = []
    if ast.get_docstring(tree) is not None:
        roots.append(tree.body[0])
    for node in nodes:
        if isinstance(node, ast.Raise):
            roots.append(node)
        elif isinstance(node, ast.keyword) and node.arg in ("help", "show_default", "epilog"):
            roots.append(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHOWS:
            roots += node.args
    for root in roots:
        for node in ast.walk(root):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Gives line and text of every docstring, also of attributes, and of every comment; adjacent comment lines are one."""
    for node in _nodes(source):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()
    last, line, counted = -1, 1, 0
    for found in _STRING_OR_COMMENT.finditer(source):
        if not found["comment"]:
            continue
        line, counted = line + source.count("\n", counted, found.start()), found.start()
        alone = not source[source.rfind("\n", 0, counted) + 1 : counted].strip()
        if not alone or line != last + 1:
            yield line, found["comment"].lstrip("#: ")
        last = line if alone else -1


def find_openings(source: str) -> Iterator[tuple[int, str, str]]:
    """Gives line number, phrase and what to do for the docstrings and comments of a module.

    The first sentence may neither begin with one of :data:`OPENINGS` nor hold a phrase of :data:`BANNED`.
    """
    for line, text in openings(source):
        first = _SENTENCE.split(" ".join(text.split()), 1)[0]
        match = _OPENING.match(first)
        if match is not None:
            assert match.lastgroup is not None
            yield line, " ".join(first.split()[:4]), f"begin with {OPENINGS[int(match.lastgroup[1:])][2]}"
        for _, phrase, instead in find(first):
            yield line, phrase, f"write {instead}"


def with_words_to_avoid(page: str) -> str:
    """The glossary ``page`` with its table of words to avoid made from the lists above."""
    listed = [
        (BANNED, "everywhere"),
        (BANNED_IN_PAGES, "on pages"),
        (OPENINGS, "at the start of a docstring or comment"),
    ]
    rows = [f"| {phrase} | {instead} | {where} |\n" for words, where in listed for phrase, _, instead in words]
    return _TABLE.sub(lambda head: head.group(1) + "".join(rows), page)


def check(root: Path) -> list[str]:
    """One line for each banned phrase in the repository at ``root``."""
    ignored = root / ".gitignore"  # it lists the pages that are made from the code, whose sources are checked instead
    generated = {line.lstrip("/") for line in ignored.read_text().split()} if ignored.exists() else set()
    pages = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    sources = [*sorted((root / "recinfer").rglob("*.md")), *sorted((root / "proto").rglob("*.proto"))]
    problems = []
    for path in pages + sources:
        name = path.relative_to(root).as_posix()
        if path.exists() and name not in _EXEMPT | generated:
            problems += [
                f"{name}:{n}: {phrase!r}: write {how}"
                for n, phrase, how in find(path.read_text(), page=path not in sources)
            ]
    for path in sorted((root / "recinfer").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        source = path.read_text()
        for line, text in user_strings(source):
            problems += [f"{name}:{n}: {phrase!r}: write {how}" for n, phrase, how in find(text, line)]
        if not path.stem.endswith("_pb2"):
            problems += [f"{name}:{n}: {phrase!r}: {todo}" for n, phrase, todo in find_openings(source)]
    glossary = root / "docs/glossary.md"
    if glossary.exists() and with_words_to_avoid(glossary.read_text()) != glossary.read_text():
        problems.append('docs/glossary.md: "Words to avoid" is not this list; run python tools/check_prose.py --write')
    return problems


if __name__ == "__main__":
    root = Path(__file__).parent.parent
    if "--write" in sys.argv:
        page = root / "docs/glossary.md"
        page.write_text(with_words_to_avoid(page.read_text()))
    found = check(root)
    print("\n".join(found) or "check_prose: no banned words")
    sys.exit(bool(found))
