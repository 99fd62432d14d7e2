"""Pictures of the documentation are those that ``tools/pictures.py`` draws from the data."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
assert SPEC is not None
assert SPEC.loader is not None
pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)


def test_drawn_pictures_are_up_to_date():
    pages = " ".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md"))
    for name, drawn in pictures.pictures().items():
        assert (ROOT / "docs/images" / name).read_text(encoding="utf-8") == drawn, "python tools/pictures.py"
        assert f"](images/{name})" in pages


def test_a_line_has_the_points_of_its_rows():
    row = {"method": "m", "kind": "method", "protocol": "B", "matched": True}
    rows = [{**row, "keys": 0.25, "difference": -0.01}, {**row, "keys": 0.05, "difference": -0.2}]
    rows += [{**row, "method": "other", "keys": 0.1, "difference": 0.0}, {**rows[0], "matched": False}]
    rows.append({**rows[0], "protocol": "D"})
    assert list(pictures.lines({"rows": rows})) == [("m", "method", [(0.05, 20.0), (0.25, 1.0)])]
    assert pictures.spread([5.0, 5.0, 40.0], 10) == [5.0, 15.0, 40.0]
