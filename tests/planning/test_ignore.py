"""The patterns of .detignore."""

from __future__ import annotations

import pytest

from zero_trial.planning.context_folder import ALWAYS, Ignore, read_pattern

PATHS = [
    "a.pt",
    "data/a.pt",
    "data/deep/a.pt",
    "data",
    "src/data",
    "src/data.py",
    "keep.pt",
    "#x",
    "a b",
    "x[1]",
    "xa",
    "xb",
    "logs/1/a",
]


def test_the_last_pattern_decides():
    ignore = Ignore.of(["*.pt", "!keep.pt", "/data/"])
    assert ignore.ignores("a.pt", folder=False) and not ignore.ignores("keep.pt", folder=False)
    assert ignore.ignores("data", folder=True) and not ignore.ignores("data", folder=False)
    assert not ignore.ignores("src/data", folder=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "line",
    [
        "*.pt",
        "data",
        "data/",
        "/data",
        "data/*",
        "data/**",
        "**/a.pt",
        "data/**/a.pt",
        "x[ab]",
        "x[!a]",
        "\\#x",
        "a b",
        "?a",
        "d*a",
    ],
)
def test_against_the_library_that_determined_uses(line: str):
    pathspec = pytest.importorskip("pathspec")
    theirs = pathspec.PathSpec.from_lines("gitwildmatch", [line])
    ours = Ignore.of([line])
    for path in PATHS:
        for folder in (False, True):
            if (path, line) == ("data", "data/**") and folder:
                continue  # everything in it is left out, so it does not matter whether it is itself
            expected = theirs.match_file(path + "/" * folder) or theirs.match_file(path)
            parents = ["/".join(path.split("/")[:end]) for end in range(1, path.count("/") + 1)]
            found = ours.ignores(path, folder) or any(ours.ignores(parent, folder=True) for parent in parents)
            assert found == expected, (path, folder)


@pytest.mark.parametrize("line", ["", "   ", "# a comment", "/", "\n"])
def test_what_is_no_pattern(line: str):
    assert read_pattern(line) is None


def test_the_list_of_what_is_always_left_out():
    constants = pytest.importorskip("determined.common.constants")
    assert sorted(ALWAYS) == sorted(constants.DEFAULT_DETIGNORE)
