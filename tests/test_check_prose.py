"""tools/check_prose.py finds banned phrases, and leaves ordinary English alone."""

from pathlib import Path

import pytest

from tools.check_prose import BANNED, BANNED_IN_PAGES, check, find, user_strings, with_words_to_avoid


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
    assert page.read_text().count("\n| ") == 1 + len(BANNED) + len(BANNED_IN_PAGES)


def test_every_phrase_of_the_list_is_found() -> None:
    for shown, _, _ in BANNED + BANNED_IN_PAGES:
        for phrase in shown.split(" (")[0].split(", "):
            assert list(find(f"It {phrase} so.".replace("N ", "3 "), page=True)), phrase
