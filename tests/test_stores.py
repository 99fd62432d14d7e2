"""What a BlockStore promises, by the store of files and by the one in memory that tests plant faults in."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_store import MemoryStore

from saccade import records
from saccade.errors import RequestError, SaccadeError
from saccade.machine import folder_and_size
from saccade.records import Record, decode_record, encode_record, read_record, write_record
from saccade.sessions.shared_store import SharedFileStore
from saccade.sessions.stores import BlockStore, FileStore


@pytest.fixture(params=[FileStore, SharedFileStore, MemoryStore])
def store(request, tmp_path) -> BlockStore:
    return MemoryStore() if request.param is MemoryStore else request.param(tmp_path / "store")


def test_the_protocol(store):
    assert (store.get("a/b"), store.exists("a/b"), list(store.list())) == (None, False, [])
    store.delete("a/b")
    store.put("a/b", b"one")
    store.put("a/b", b"two2")
    store.put("c", b"")
    got = store.get("a/b")
    assert bytes(got) == b"two2"
    got[:] = b"mine"  # the caller's own
    assert bytes(store.get("a/b")) == b"two2"
    entries = {entry.key: entry for entry in store.list()}
    assert {key: entry.size for key, entry in entries.items()} == {"a/b": 4, "c": 0}
    assert entries["a/b"].used >= entries["c"].used - 1
    store.delete("a/b")
    assert (store.get("a/b"), store.exists("c")) == (None, True)
    store.close()
    with pytest.raises(SaccadeError):
        store.get("c")


def test_files_are_whole_the_owners_and_one_processes(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    store = FileStore(folder)
    store.put("a/b", b"one")
    (folder / "a" / ".0123.part").write_bytes(b"half")  # of a process that was killed
    (folder / "a" / "Notes.txt").write_bytes(b"a stranger's")
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder / "a", folder / "a/b")] == [0o700, 0o700, 0o600]
    with pytest.raises(RequestError, match=f"in use by another process \\({os.getpid()}\\); end it, or give another"):
        FileStore(folder)
    code = "import sys; from saccade.sessions.stores import FileStore; FileStore(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert (other.returncode, "is in use by another process" in other.stderr) == (1, True)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RequestError, match="No space left"):
            store.put("a/b", b"two")
    assert bytes(store.get("a/b")) == b"one"
    store.close()
    again = FileStore(folder)
    assert [entry.key for entry in again.list()] == ["a/b"]
    assert sorted(one.name for one in (folder / "a").iterdir()) == ["Notes.txt", "b"]
    for key in ("../x", "a/../b", "A/b", "a/b/c", "", "lock", ".a"):
        with pytest.raises(SaccadeError, match="key="):
            again.put(key, b"")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RequestError, match="cannot hold sessions"):
        FileStore(tmp_path / "file")


def test_records_as_bytes(tmp_path, monkeypatch):
    tensors = {
        "bf16": torch.randn(3, 4).to(torch.bfloat16),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3),
        "turned": torch.randn(4, 5).T,
        "flags": torch.tensor([True, False]),
    }
    record = Record("thing", {"a": [1, None]}, tensors)
    content = encode_record(record)
    again = decode_record(bytearray(content), "thing", "it")
    assert (again.data, again.damaged, again.seal) == (record.data, [], record.seal)
    for name, tensor in tensors.items():
        assert torch.equal(again.tensors[name], tensor)
        assert again.tensors[name].dtype == tensor.dtype
    (tmp_path / "file").write_bytes(content)
    assert read_record(tmp_path / "file", "thing").seal == record.seal
    flips, refusals = 0, set()
    for at in range(len(content)):  # every byte
        torn = bytearray(content)
        torn[at] ^= 1
        try:
            found = decode_record(torn, "thing", "it")
        except RequestError as error:
            refusals.add(str(error)[:6])
            continue
        assert found.damaged or all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
        flips += bool(found.damaged)
    assert flips
    assert refusals == {"it is "}
    for length in range(0, len(content), 7):
        try:
            found = decode_record(bytearray(content[:length]), "thing", "it")
        except RequestError:
            continue
        assert found.damaged
    with monkeypatch.context() as patch:  # as older builds wrote
        patch.setattr(records, "VERSION", 1)
        patch.setattr(records, "_of_tensor", lambda tensor, _, real=records._of_tensor: real(tensor, 1))
        write_record(tmp_path / "old", record)
    assert read_record(tmp_path / "old", "thing").damaged == []


@pytest.mark.parametrize(
    ("given", "folder", "size"),
    [("~/x:20GiB", "~/x", 20 * 2**30), ("/a/b", "/a/b", 2**34), ("C:/x", "C:/x", 2**34), ("a:b", "a:b", 2**34)],
)
def test_a_folder_and_a_size(given, folder, size):
    assert folder_and_size(given, "session_dir", "16GiB") == (Path(folder).expanduser(), size)


@pytest.mark.parametrize("given", ["", ":3GiB", "x:0", 7, None, "a\0b", "x:3 apples", "~nobody-of-that-name/x"])
def test_what_is_no_folder_and_size(given):
    with pytest.raises(SaccadeError, match=r"session_dir=.*must be a folder"):
        folder_and_size(given, "session_dir", "16GiB")


@pytest.mark.parametrize("point", ["open", "fsync", "replace", "mkdir"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, point):
    store = FileStore(tmp_path / "store")
    store.put("a/head", b"before")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path if point in ("replace", "mkdir") else os, point, full)
    with pytest.raises(RequestError, match=r"a/head cannot be written: No space left.*9.8 KiB are to be written"):
        store.put("a/head", bytes(10_000))
    monkeypatch.undo()
    assert bytes(store.get("a/head")) == b"before"
    assert [one.name for one in (tmp_path / "store" / "a").iterdir()] == ["head"]
    store.close()


@pytest.mark.parametrize("kind", [FileStore, SharedFileStore])
def test_a_group_that_is_a_link_reaches_nothing_outside(tmp_path, kind):
    outside, folder = tmp_path / "outside", tmp_path / "store"
    outside.mkdir()
    for name in ("head", "0000000000-ab", f".{'0' * 16}.part", "notes"):
        (outside / name).write_bytes(b"mine")
    before = sorted(one.name for one in outside.iterdir())
    store = kind(folder)
    own = next(folder.glob("process.*"), folder)
    (own / "s1").symlink_to(outside)
    (folder / "process.77").symlink_to(tmp_path)
    store.close()
    store = kind(folder)
    assert list(store.list()) == []
    assert not store.exists("s1/head")
    assert store.get("s1/head") is None
    store.delete("s1/head")
    with pytest.raises(RequestError, match="is a link to another folder"):
        store.put("s1/head", b"theirs")
    if kind is SharedFileStore:
        assert not store.forget("s1/head")
        assert not store.forget("outside/head")
        assert store.last_written("outside/head") is None
    store.close()
    assert sorted(one.name for one in outside.iterdir()) == before
    assert all(one.read_bytes() == b"mine" for one in outside.iterdir())
