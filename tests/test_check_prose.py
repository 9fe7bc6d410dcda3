"""tools/check_prose.py finds banned phrases, and leaves ordinary English alone."""

from pathlib import Path

import pytest

from tools.check_prose import (
    BANNED,
    BANNED_IN_PAGES,
    OPENINGS,
    check,
    find,
    find_openings,
    user_strings,
    with_words_to_avoid,
)


@pytest.mark.parametrize(
    "text",
    [
        "Every ranker is told.",
        "what\nwaits goes first",
        "30 s of patience",
        "A crowd of callers",
        "somebody else",
        "It is not\nhere",
    ],
)
def test_banned_phrases_are_found(text: str) -> None:
    assert list(find(text))


@pytest.mark.parametrize(
    "text", ["The two are told apart by name.", "It crowds out others.", "Next door.", "What a call returns"]
)
def test_ordinary_english_passes(text: str) -> None:
    assert not list(find(text))


def test_some_phrases_are_banned_in_pages_alone(tmp_path: Path) -> None:
    text = "It is made anew, beside others.\n"
    assert not list(find(text))
    assert [phrase for _, phrase, _ in find(text, page=True)] == ["beside", "anew"]
    (tmp_path / "docs").mkdir()
    tmp_path.joinpath("docs/made.md").write_text(text)
    assert len(check(tmp_path)) == 2
    tmp_path.joinpath(".gitignore").write_text("/docs/made.md\n")
    assert not check(tmp_path)


def test_strings_that_a_user_reads_are_checked() -> None:
    source = '"""Doc."""\nx = "not shown"\noption(help="Help.")\nraise ValueError(f"Bad {x}.")\nlog.info("Said.")\n'
    assert {text for _, text in user_strings(source)} == {"Doc.", "Help.", "Bad ", ".", "Said."}


@pytest.mark.parametrize(
    "text",
    [
        "What a rank sends.",
        "Those of a small request are there for a moment.",
        "It is over.",
        "Its own group.",
        "So many rows.",
        "Of a call that is over.",
        "of the hash",
        "One of many answers is sent.",
        "One that is gone.",
        "As :meth:`find`, for one row.",
        "The same\n    for rows on other hosts.",
        "The same.",
        "The others are vectors.",
        "This is a riddle.",
        "Which rank it is.",
        "Nothing to clear.",
        "else the copy waits",
    ],
)
def test_docstrings_and_comments_may_not_open_without_a_subject(text: str) -> None:
    comment = "\n".join(f"# {line}" for line in text.split("\n"))
    for source in (
        f'"""{text}"""\n',
        f'def f():\n    """{text}"""\n',
        f'class A:\n    """{text}"""\n',
        f'class A:\n    x = 1\n    """{text}"""\n',
        f"x = 1\n{comment}\n",
        f"x = 1  # {' '.join(text.split())}\n",
    ):
        assert len(list(find_openings(source))) == 1, source


@pytest.mark.parametrize(
    "text",
    [
        "One rank of the group.",
        "One request per module: what follows is not checked.",
        "Rows that it holds.",
        "This rank's rows.",
        "These three lists have one length.",
        "As in TorchRec, a rank may hold no rows.",
        "The same rows on another device.",
        "The one call over all ranks.",
        "Whether the cache holds a row.",
        "Offsets of the bags.",
        "Items without an id.",
        "A call. It is over.",
        "type: ignore",
    ],
)
def test_docstrings_and_comments_with_a_subject_pass(text: str) -> None:
    assert not list(find_openings(f'"""{text}"""\nx = 1  # {text}\n'))


def test_a_comment_of_several_lines_has_one_opening() -> None:
    assert not list(find_openings("x = 1\n# A rank sends\n# what it holds.\n"))
    assert [line for line, *_ in find_openings("x = 1  # a rank\n# what it holds\n")] == [2]


def test_first_sentences_hold_no_banned_phrase(tmp_path: Path) -> None:
    (tmp_path / "recinfer").mkdir()
    module = tmp_path / "recinfer/module.py"
    module.write_text('def f():\n    """Tell a crowd. Patience is not checked here."""\n    # Those of a call.\n')
    assert check(tmp_path) == [
        "recinfer/module.py:2: 'crowd': write concurrent requests",
        "recinfer/module.py:3: 'Those of a call.': begin with the noun that is meant",
    ]


def test_a_problem_names_file_line_and_replacement(tmp_path: Path) -> None:
    tmp_path.joinpath("README.md").write_text("Fine.\nEvery ranker is told.\n")
    assert check(tmp_path) == ["README.md:2: 'is told': write is notified, gets an error, or is reported"]


def test_glossary_lists_the_banned_words(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/glossary.md"
    page.write_text(
        "# Glossary\n\n## Words to avoid\n\n| instead of | write | where |\n|---|---|---|\n| old | new | x |\n"
    )
    assert "Words to avoid" in check(tmp_path)[0]
    page.write_text(with_words_to_avoid(page.read_text()))
    assert not check(tmp_path)
    assert page.read_text().count("\n| ") == 1 + len(BANNED) + len(BANNED_IN_PAGES) + len(OPENINGS)


def test_every_opening_of_the_list_is_found() -> None:
    for shown, _, _ in OPENINGS:
        for phrase in shown.split(", "):
            assert list(find_openings(f"# {phrase}\n")), phrase


def test_every_phrase_of_the_list_is_found() -> None:
    for shown, _, _ in BANNED + BANNED_IN_PAGES:
        for phrase in shown.split(" (")[0].split(", "):
            assert list(find(f"It {phrase} so.".replace("N ", "3 "), page=True)), phrase
