"""Files are written whole or not at all, wherever the package writes."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

import saccade
from saccade.errors import RequestError
from saccade.files import write_text, written_whole


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    file = tmp_path / "new" / ("n" * 250)  # its folder is made; a longer name aside would not fit
    write_text(file, "one\n")
    file.chmod(0o640)

    def stops():
        with written_whole(file) as aside:
            aside.write_text("half")
            raise InterruptedError

    with pytest.raises(RequestError):
        stops()
    assert file.read_text() == "one\n"
    write_text(file, "two\n")
    assert file.read_text() == "two\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(file.parent.iterdir()) == [file]


def test_links_stay_links_and_devices_devices(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "y")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "y"
    write_text(Path(os.devnull), "z")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_what_the_system_refuses_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below", tmp_path / ("n" * 300), tmp_path):
        with pytest.raises(RequestError, match="cannot be written: ") as caught:
            write_text(path, "x", "report file")
        assert str(caught.value).startswith("report file ")
    if Path("/dev/full").exists():
        with pytest.raises(RequestError, match="No space left on device"):
            write_text(Path("/dev/full"), "x")


def test_nothing_else_writes_files():
    """One helper: a second way would leave half a file behind a full disk."""
    opens = r"open\((?!os\.devnull)[^)]*[\"'][wx]"
    writes = re.compile(r"\.write_(text|bytes)\(|\.savefig\(|save_file\(|json\.dump\(|" + opens)
    allowed = {"files.py", "samples.py", "calibration.py", "plots.py", "inspect.py", "records.py"}  # aside
    allowed |= {"cache.py", "cached.py", "fetching.py", "gguf_folder.py"}  # a folder aside
    package = Path(saccade.__file__).parent
    found = {file.name for file in package.rglob("*.py") if writes.search(file.read_text(encoding="utf-8"))}
    assert found <= allowed
