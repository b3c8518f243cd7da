"""The reader of guides, the comparison, and what can be seen on every page without typing a
command."""

from __future__ import annotations

import argparse
import ast
import json
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

from tests.docs.check import PAGES, check_page, main, page_of
from tests.docs.pages import PageError, elide, first_difference, inline_commands, read_page
from zero_trial.cli.main import build_parser
from zero_trial.ds_config.keys_running import ZERO_POLICIES
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import RECIPES

PAGE = """# A page

<!-- docs-check:
first mkdir made
file made/a.txt
-->
```text
7
```

<!-- docs-check: needs network: git -->
```console
$ cat made/a.txt \\
    made/a.txt
7
...
$ git clone there
$ true

```
"""


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "\n    zero-trial run x.yaml\n",
        "\n    $ ls\n",
        "```\nls\n```\n",
        "```python\na b\n```\n",
        "```json\n{1}\n```\n",
        "```yaml\na: [\n```\n",
        "```sh\nls\n",
        "<!-- docs-check: skip -->\n```sh\nls\n```\n",
        "<!-- docs-check: needs network -->\nText.\n",
    ],
)
def test_what_would_not_be_checked_is_refused(tmp_path: Path, text: str):
    with pytest.raises(PageError, match=r"page\.md:\d"):
        read_page(page(tmp_path, text))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("done    26 s · loss 5.625", "done 3.1 s · loss 1.1", True),
        ("saved   step-000020  42.3 KiB", "saved   step-000020  1.2 MiB", True),
        ("saved   step-000020  42.3 KiB", "saved   step-000040  42.3 KiB", False),
        ("2 ranks · ZeRO-2", "2 ranks · ZeRO-3", False),
        ("exit code 1", "exit code 2", False),
        ("2 cores", "64 cores", True),
        ("[2026-11-22T21:01:58.670738Z] d06b7975 x", "[2026-01-02T21:01:58.1Z] 00001111 x", True),
        ("checkpoint 6fbd5f42-57d1-43ac-a8fa-427c9be89cde", "checkpoint 00000000-57d1-43ac-a8fa-427c9be89cdf", True),
        ("27.5k tok/s  error +0.0 %", "998 tok/s  error -3.5 %", True),
        ("deadbeef", "feedbeef", False),
        ("best 0.0155601", "best 0.00895948", True),
    ],
)
def test_times_sizes_and_fractions_are_not_compared(one: str, other: str, same: bool):
    assert (elide(one) == elide(other)) is same


@pytest.mark.parametrize(
    ("shown", "printed", "difference"),
    [
        (["a", "b"], ["a", "", "b"], None),
        (["a"], ["a", "b"], ("", "b")),
        (["a", "b"], ["a"], ("b", "")),
        (["a", "..."], ["a", "b", "c"], None),
        (["...", "c"], ["a", "b", "c"], None),
        (["a", "...", "c", "d"], ["a", "c", "b", "c", "d"], None),
        (["a", "...", "d"], ["a", "b", "c"], ("d", "b")),
        (["a ... z"], ["a or b or z"], None),
        (["a … z"], ["a or b"], ("a … z", "a or b")),
        (["a.c"], ["abc"], ("a.c", "abc")),
    ],
)
def test_where_output_differs(shown: list[str], printed: list[str], difference: tuple[str, str] | None):
    assert first_difference(shown, printed) == difference


def test_a_page_is_typed_in_a_folder_and_a_shell_of_its_own(tmp_path: Path):
    """One shell for the page: variables stay. What differs, fails or should have failed is named
    with its line."""
    text = (
        PAGE
        + "```sh\nword=here  # stays\nfalse\n```\n\n```console\n$ echo $word; ls model_defs\n...\ngpt\n...\n$ echo b\na\n```\n"
        + "<!-- docs-check: fails . -->\n```sh\ntrue\n```\n<!-- docs-check: run -->\n```python\nprint(1)\n```\n"
    )
    report = check_page(page(tmp_path, text))
    assert (report.typed, report.programs, report.left) == (7, 1, {"network": 1})
    assert [fault.partition("\n")[0].partition("page.md:")[2] for fault in report.faults] == [
        "23: $ false",
        "31: $ echo b",
        "36: $ true",
    ]
    assert "expected  a\n    got       b" in report.faults[1]


def test_commands_in_running_text_exist():
    """Each ``zero-trial`` in backticks names a verb, its subcommand, and options that it has."""
    wrong, whole = [], build_parser()
    for path in PAGES:
        read_page(path)  # all of its commands can be checked
        for line, words in inline_commands(path):
            parser = whole
            while words and (children := _children(parser)) and words[0] in children:
                parser = children[words.pop(0)]
            known = {option for action in parser._actions for option in action.option_strings}
            unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
            if unknown or (
                _children(parser) and words and not words[0].isupper() and words[0] not in ("...", "--help")
            ):
                wrong.append(f"{path.name}:{line}: zero-trial {' '.join(words)}")
    assert wrong == []


@pytest.mark.parametrize("name", ["determined.md", "moving_from_deepspeedtrial.md"])
def test_the_names_of_this_package_exist(name: str) -> None:
    text = (PAGES[0].parent / "docs/guide" / name).read_text()
    # the last imports Lightning; tests/exactness/test_lightning.py uses it
    apart = {"zero_trial.run", "zero_trial.as_determined", "zero_trial.lightning"}
    dotted = set(re.findall(r"zero_trial(?:\.\w+)+", text)) - apart
    dotted |= {f"zero_trial.{imported}" for imported in re.findall(r"from zero_trial import (\w+)", text)}
    dotted |= {f"zero_trial.ZeroTrialContext.{method}" for method in re.findall(r"context\.(\w+)\(", text) if method}
    assert len(dotted) > 3
    for path in sorted(dotted - {"zero_trial.ZeroTrialContext.get_hparams"}):
        pkgutil.resolve_name(path)


def test_what_the_guide_to_pipelines_names_exists() -> None:
    root = PAGES[0].parent
    text = (root / "docs/guide/pipeline.md").read_text(encoding="utf-8")
    for written in re.findall(r'`(?:\{)?("schedule": [^`]*)`', text):
        words = json.loads("{" + written.replace(": v", ": 3") + "}")
        assert words["schedule"] in RECIPES
        try:
            read_ds_config({"pipeline": words, "zero_optimization": {"stage": 3}})
        except ConfigError as error:
            raise AssertionError(written) from error
    named = re.findall(r"^\| [0-3][^|]*\| `(\w+)`", text, re.MULTILINE)
    assert set(named) == set(ZERO_POLICIES) - {"auto"}
    for path in re.findall(r"(?:experiments|model_defs)/[\w/.]+", text):
        assert (root / path).exists(), path


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    page, package = next(path for path in PAGES if path.stem == "troubleshooting"), PAGES[0].parent / "zero_trial"
    nodes = (node for path in package.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    messages = re.findall(r"^\| `(.+?)` \|", page.read_text(), re.MULTILINE)
    parts = {part.strip() for message in messages for part in message.split("...")}
    assert len(messages) > 30
    assert [part for part in parts if not any(part in text for text in texts)] == []


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def test_a_page_is_named_by_its_path_or_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    guide = next(page for page in PAGES if page.name == "offload.md")
    assert page_of("offload") == page_of("offload.md") == page_of(str(guide)) == guide
    with pytest.raises(PageError, match="2 pages"):
        page_of("README")
    assert main(["nowhere"]) == 2
    assert "nowhere: 0 pages" in capsys.readouterr().err
    # keys in tables of the site are broken between words
    hook = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "site.py"))["on_page_content"]
    page = '<p>a_b</p><table><td id="x_y"><code>a.max_c</code> 0.9 of d_e</td></table>'
    assert hook(page) == '<p>a_b</p><table><td id="x_y"><code>a.<wbr>max_<wbr>c</code> 0.9 of d_<wbr>e</td></table>'
