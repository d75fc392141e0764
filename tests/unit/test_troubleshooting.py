"""docs/troubleshooting.md has a row for each line that the shim prints, and no other row.

What to do where one of these fails: python tests/bench/messages.py
"""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from kit.harness import REPO
from kit.pages import messages
from shim.core import report
from shim.engine import fatal

HOW = "\n`python tests/bench/messages.py` renews rows of reworded lines, and prints missing ones.\n"


def test_each_line_that_the_shim_prints_has_a_row():
    missing = messages.missing()
    assert not missing, (
        f"docs/troubleshooting.md lacks {len(missing)}:\n" + "\n".join(missing) + HOW
    )


def test_each_row_is_a_line_that_the_shim_prints():
    left = messages.left_over()
    assert not left, (
        f"docs/troubleshooting.md has {len(left)} that the code does not print:\n"
        + "\n".join(left)
        + HOW
    )


def test_each_row_names_the_modules_that_print_it():
    wrong = messages.misattributed()
    assert not wrong, "docs/troubleshooting.md names other modules:\n" + "\n".join(wrong) + HOW


def test_no_line_has_two_rows_and_each_is_complete():
    assert not [
        text for text, times in Counter(t for t, _ in messages.on_page()).items() if times > 1
    ]
    rows = [line for line in messages.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(messages.on_page()), "a row that cannot be read"
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        assert messages.HOLE not in cells[2:] and all(cells), row


@pytest.mark.parametrize("path", sorted((REPO / "shim").rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_prints_by_a_name_that_is_not_looked_for(path):
    """`from report import line` would hide a message from the page."""
    imported = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(("report", "fatal"))
        for alias in node.names
    }
    assert not imported & {"line", "once", "line_nowait", "debug", "contained", "failed", "die"}


CODE = """
def f(why, n):
    report.line(f"{n} of {why!r}" " are gone")
    told = "one" if n else f"{n} two"
    report.once(told)
    report.mark_failed("stall", "three")
    with report.contained("four"):
        fatal.die(70, "five: " + "; ".join(why))
    status, reason = 1, "six"
    fatal.die(status, reason)
    seven = f"seven {n}"
    report.debug("; ".join([seven, *why]))
    eight(n, "eight")


def eight(n, text):
    report.line(text)
"""


def found(tmp_path, monkeypatch, code):
    monkeypatch.setattr(messages, "REPO", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(code)
    return list(messages._messages(path))


def test_messages_are_found_by_their_constant_parts(tmp_path, monkeypatch):
    assert sorted(found(tmp_path, monkeypatch, CODE)) == sorted(
        [
            "… of … are gone",
            "one",
            "… two",
            "… failed: three",
            "four: …",
            "five: …",
            "six",
            "seven …; …",
            "eight",
        ]
    )


def test_a_message_that_cannot_be_seen_is_an_error_that_says_where(tmp_path, monkeypatch):
    with pytest.raises(LookupError, match=r"module\.py:2: what `text` holds"):
        found(tmp_path, monkeypatch, "for text in texts:\n    report.line(text)\n")


def test_a_reworded_message_keeps_its_row_and_its_names(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("| `memory: <9 GiB>, is short` | old | what | to do |\n")
    monkeypatch.setattr(messages, "PAGE", page)
    monkeypatch.setattr(messages, "in_code", lambda: {"memory: … is in short supply": {"new"}})
    assert messages.left_over() == ["memory: …, is short"]
    assert messages.renewed() == "| `memory: <9 GiB> is in short supply` | new | what | to do |\n"


def test_each_function_that_prints_is_there():
    """Renaming one would silently take its messages off the page."""
    modules = {"report": report, "fatal": fatal}
    named = [name.split(".") for name in messages.SINKS if name.split(".")[0] in modules]
    assert len(named) > 5
    for module, function in named:
        assert callable(getattr(modules[module], function))
