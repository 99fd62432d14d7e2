"""The text of Excel files (XLSX: ECMA-376, part 1, 18)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from xml.etree import ElementTree

from saccade.documents.parts import Parts, attribute, local
from saccade.documents.tidy import tidied

MOST_EMPTY = 32  # cells that are left empty between two of a row
_COLUMN = re.compile(r"[A-Z]{1,3}")
_DATES = frozenset((*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)))  # of the formats built in
_QUOTED = re.compile(r'"[^"]*"|\\.|\[[^\]]*\]')  # of a format's code: what stands there as it is


def sheets_text(parts: Parts, main: str) -> str:
    """Sheets under their names, a line a row, cells apart by tabs: values as they were calculated last, dates as
    2026-11-28."""
    book, related = parts.tree(main), parts.related(main)
    stored = {kind: part for kind, part in related.values() if part in parts.names}
    shared = [_runs(one) for one in parts.tree(stored["sharedStrings"])] if "sharedStrings" in stored else []
    dates = _date_styles(parts.tree(stored["styles"])) if "styles" in stored else []
    settings = book.find("{*}workbookPr")
    since = datetime(1899, 12, 30)
    if settings is not None and attribute(settings, "date1904") in ("1", "true"):
        since = datetime(1904, 1, 1)
    out = []
    for one in book.iterfind("{*}sheets/{*}sheet"):
        name = next((value for key, value in one.attrib.items() if key.endswith("relationships}id")), "")
        kind, part = related.get(name, ("", ""))
        if kind == "worksheet" and part in parts.names:
            rows = "\n".join(_rows(parts, parts.tree(part), shared, dates, since))
            if rows.strip():
                out.append(f"{attribute(one, 'name') or 'Sheet'}\n\n{rows}")
    return tidied("\n\n".join(out))


def _rows(
    parts: Parts, sheet: ElementTree.Element, shared: list[str], dates: list[bool], since: datetime
) -> Iterator[str]:
    for row in sheet.iterfind("{*}sheetData/{*}row"):
        line, at = list[str](), -1
        for cell in row:
            place = _column(attribute(cell, "r") or "", at)
            line.append("\t" * min(max(0, place - max(at, 0)), MOST_EMPTY) + _value(cell, shared, dates, since))
            parts.count(len(line[-1]))
            at = place
        if any(line):
            yield "".join(line)


def _column(name: str, before: int) -> int:
    """The number of the column in a cell's name, or the next one."""
    found, number = _COLUMN.match(name), 0
    for letter in found[0] if found else "":
        number = 26 * number + ord(letter) - 64
    return number - 1 if number else before + 1


def _value(cell: ElementTree.Element, shared: list[str], dates: list[bool], since: datetime) -> str:
    kind = attribute(cell, "t") or "n"
    if kind == "inlineStr":
        return _one_line("".join(_runs(one) for one in cell.iterfind("{*}is")))
    text = cell.findtext("{*}v", "")
    if kind == "s":
        return _one_line(shared[int(text)]) if text.isdecimal() and len(text) < 10 and int(text) < len(shared) else ""
    if kind == "b":
        return {"0": "FALSE", "1": "TRUE"}.get(text, text)
    style = attribute(cell, "s") or ""
    if kind == "n" and style.isdecimal() and len(style) < 10 and int(style) < len(dates) and dates[int(style)]:
        return _date(text, since)
    return _one_line(text)


def _date(text: str, since: datetime) -> str:
    try:
        days = float(text)
        when = since + timedelta(seconds=round(86400 * days))
    except (ValueError, OverflowError):
        return text
    if 0 <= days < 1:
        return when.strftime("%H:%M:%S")
    return when.strftime("%Y-%m-%d" if days == int(days) else "%Y-%m-%d %H:%M:%S")


def _date_styles(styles: ElementTree.Element) -> list[bool]:
    """For each style of cells whether its numbers are dates."""
    codes = {attribute(one, "numFmtId"): attribute(one, "formatCode") or "" for one in styles.iterfind(".//{*}numFmt")}
    found = []
    for one in styles.iterfind("{*}cellXfs/{*}xf"):
        number = attribute(one, "numFmtId") or "0"
        code = codes.get(number)
        plain = "" if code is None else _QUOTED.sub("", code).lower()
        found.append(
            (number.isdecimal() and int(number[:9]) in _DATES) if code is None else bool(set("ymdhs") & set(plain))
        )
    return found


def _runs(one: ElementTree.Element) -> str:
    """The text of a shared string, without how Japanese is read."""
    out, stack = list[str](), [one]
    while stack:
        now = stack.pop()
        if local(now.tag) == "t":
            out.append(now.text or "")
        elif local(now.tag) != "rPh":
            stack += reversed(now)
    return "".join(out)


def _one_line(text: str) -> str:
    return " ".join(text.split())
