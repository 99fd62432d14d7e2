"""tools/carry_model.py: a file cut into parts and put together again, in any order and however often it is ended."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

TOOL = Path(__file__).parent.parent / "tools" / "carry_model.py"


@pytest.fixture(scope="module")
def carry() -> ModuleType:
    spec = importlib.util.spec_from_file_location("carry_model", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """2,500 bytes, so that the last of three parts of 1,000 is shorter."""
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(1).bytes(2500))
    return path


def test_parts_are_small_and_listed(carry, file, tmp_path):
    listing = json.loads(carry.cut(file, tmp_path / "parts", 1000).read_text())
    assert [part["bytes"] for part in listing["parts"]] == [1000, 1000, 500]
    assert b"".join((tmp_path / "parts" / part["file"]).read_bytes() for part in listing["parts"]) == file.read_bytes()
    assert carry.MOST == 40_000_000
    for wrong in (0, carry.MOST + 1):
        with pytest.raises(carry.CarryError, match=f"not {wrong}"):
            carry.cut(file, tmp_path / "parts", wrong)


def test_a_cut_goes_on_where_it_was_ended(carry, file, tmp_path):
    carry.cut(file, tmp_path / "parts", 600)
    listing = carry.cut(file, tmp_path / "parts", 1000)
    assert len(list((tmp_path / "parts").iterdir())) == 4  # three parts and their list: an earlier cut's are gone
    kept = tmp_path / "parts" / "model.gguf.000"
    written = kept.stat().st_mtime_ns
    (tmp_path / "parts" / "model.gguf.001").write_bytes(b"half")
    assert carry.cut(file, tmp_path / "parts", 1000) == listing
    assert kept.stat().st_mtime_ns == written
    assert carry.join(listing, tmp_path / "whole") == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_come_one_a_call_in_any_order_and_go_again(carry, file, tmp_path, order):
    listing = carry.cut(file, tmp_path / "parts", 1000)
    sent, whole = tmp_path / "sent", tmp_path / "there" / "model.gguf"
    for place, part in enumerate(order):
        shutil.rmtree(sent, ignore_errors=True)
        sent.mkdir()
        for name in (listing.name, f"model.gguf.{part:03d}"):
            shutil.copy(tmp_path / "parts" / name, sent)
        missing = carry.join(sent / listing.name, whole)
        assert missing == [f"model.gguf.{other:03d}" for other in sorted(order[place + 1 :])]
        assert whole.exists() == (place == 2)
    assert whole.read_bytes() == file.read_bytes()
    assert list(whole.parent.iterdir()) == [whole]
    assert carry.join(sent / listing.name, whole) == []


def test_a_part_that_was_harmed_is_refused_and_the_rest_stays(carry, file, tmp_path):
    listing = carry.cut(file, tmp_path / "parts", 1000)
    part, right = tmp_path / "parts" / "model.gguf.001", b""
    right = part.read_bytes()
    for wrong in (right[:-1], right[:-1] + bytes([right[-1] ^ 1]), b""):
        part.write_bytes(wrong)
        with pytest.raises(carry.CarryError, match=r"model\.gguf\.001 is not what was cut"):
            carry.join(listing, tmp_path / "whole")
        assert not (tmp_path / "whole").exists()
    (tmp_path / "parts" / "model.gguf.000").unlink()  # which is in
    part.write_bytes(right)
    assert carry.join(listing, tmp_path / "whole") == []
    assert (tmp_path / "whole").read_bytes() == file.read_bytes()


def test_what_changes_between_two_calls_is_found_at_the_end(carry, file, tmp_path):
    listing = carry.cut(file, tmp_path / "parts", 1000)
    last = tmp_path / "parts" / "model.gguf.002"
    data = last.read_bytes()
    last.unlink()
    assert carry.join(listing, tmp_path / "whole") == ["model.gguf.002"]
    joining = tmp_path / "whole.joining"
    harmed = bytearray(joining.read_bytes())
    harmed[1500] ^= 1
    joining.write_bytes(harmed)
    last.write_bytes(data)
    with pytest.raises(carry.CarryError, match=r"was changed; send again: model\.gguf\.001$"):
        carry.join(listing, tmp_path / "whole")
    assert carry.join(listing, tmp_path / "whole") == []
    assert (tmp_path / "whole").read_bytes() == file.read_bytes()


def test_another_file_of_the_same_name_starts_anew(carry, file, tmp_path):
    listing = carry.cut(file, tmp_path / "parts", 1000)
    (tmp_path / "parts" / "model.gguf.002").unlink()
    carry.join(listing, tmp_path / "whole")
    file.write_bytes(file.read_bytes()[::-1])
    assert carry.join(carry.cut(file, tmp_path / "parts", 1000), tmp_path / "whole") == []
    assert (tmp_path / "whole").read_bytes() == file.read_bytes()


def test_the_command_says_what_is_missing_and_ends_with_it(file, tmp_path):
    def call(*arguments: object) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-I", str(TOOL), *map(str, arguments)], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert call("cut", file, parts, "--most", "1000") == (0, f"{parts}/model.gguf.json: 3 parts\n", "")
    held = (parts / "model.gguf.001").rename(tmp_path / "held")
    code, out, _ = call("join", parts / "model.gguf.json", whole)
    assert (code, out) == (1, f"{whole}: 2 of 3 parts; missing: model.gguf.001\n")
    held.rename(parts / "model.gguf.001")
    assert call("join", parts / "model.gguf.json", whole) == (0, f"{whole}: 3 of 3 parts\n", "")
    for arguments in (("cut", tmp_path / "absent", parts), ("join", tmp_path / "absent.json", whole)):
        code, _, err = call(*arguments)
        assert (code, len(err.splitlines())) == (2, 1)
