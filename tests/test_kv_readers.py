"""Pools of keys and values have readers: nothing else takes a row's numbers from their memory
(docs/adding-a-kv-format.md)."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What reads a pool by pointer in a kernel: an access at it, or an address made of it.
BY_POINTER = re.compile(r"tl\.(?:load|store)\(\s*(?:\w+_)?pool\b|\b(?:\w+_)?pool \+ |\b[kv]_pool\[")
OF_CPP = {"calls.h", "row_codes.h", "key_rows.h", "bindings_attention.cpp"}


def test_kernels_read_pools_by_load_keys_and_load_values_alone():
    found = {
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (ROOT / "saccade").rglob("*.py")
        if path.name not in ("readers.py", "gluon_readers.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BY_POINTER.search(line)
    }
    assert not found
    readers = (ROOT / "saccade/ops/triton/readers.py").read_text(encoding="utf-8")
    assert len(BY_POINTER.findall(readers)) >= 4  # else the pattern finds nothing


def test_cpp_reads_pools_in_its_readers_alone():
    files = [path for path in (ROOT / "csrc").iterdir() if path.suffix in (".h", ".cpp")]
    named = {path.name for path in files if re.search(r"\b[kv]_pool\b", path.read_text(encoding="utf-8"))}
    assert named == OF_CPP
    assert len(files) > 80


def test_the_four_files_of_a_format_are_named_and_name_int8():
    page = (ROOT / "docs/adding-a-kv-format.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    assert len(files) == 4
    for name in files:
        assert "int8" in (ROOT / name).read_text(encoding="utf-8"), name
    others = {
        str(path.relative_to(ROOT))
        for folder, kind in (("saccade", "*.py"), ("csrc", "*.h"), ("csrc", "*.cpp"))
        for path in (ROOT / folder).rglob(kind)
        if re.search(r"(?<!MATMUL_)INT8\b|Int8Rows|RowFormat::int8|encode_int8", path.read_text(encoding="utf-8"))
    }
    assert others <= set(files)
