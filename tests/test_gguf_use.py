"""What people do with a GGUF file beside generating: what it is, who it is, sessions, a server, measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny, write
from server_helpers import serving
from test_cli import run
from tiny_models import random_ids

from saccade import LLM, SamplingParams
from saccade.errors import RequestError
from saccade.models.facts import facts_of
from saccade.models.folders import checkpoint_folder
from saccade.models.loader import load_model
from saccade.server.engines import about_llm

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
FIRST, SECOND = random_ids(40, seed=1), random_ids(12, seed=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "saccade"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of Llama's shape, and one that runs by modules."""
    folder = tmp_path_factory.mktemp("files")
    return {
        family: write(tiny(family, folder / family), folder / f"{family}.gguf", Kind.Q4_0, others={"attn_v": Kind.Q8_0})
        for family in ("llama", "gemma3_text")
    }


def test_info_says_what_a_file_is(made, capsys):
    for family, layers in (("llama", 3), ("gemma3_text", 6)):
        file = made[family]
        facts = facts_of(checkpoint_folder(file))
        model = load_model(checkpoint_folder(file))
        spec = model.spec
        assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (layers, 4, 2, 16)
        assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (layers, 4, 2, 16)
        assert facts.context == spec.max_position
        assert facts.windows == sum(window is not None for window in spec.windows)
        assert facts.dtype == str(spec.dtype).removeprefix("torch.")
        assert facts.token_bytes == 2 * layers * 2 * 16 * 2
        assert facts.own_loop == (family == "llama")
        assert list(facts.formats) == ["Q4_0", "Q8_0", "F32"]
        assert 0.9 * file.stat().st_size < facts.weight_bytes + 20_000 < 1.2 * file.stat().st_size
        code, out, err = run(capsys, "info", str(file))
        assert (code, err) == (0, "")
        for part in (
            str(file),
            family,
            "Q4_0",
            "BPE over bytes, words cut as default",
            "a chat template",
            "fits beside",
        ):
            assert part in " ".join(out.split()), part
    code, out, _ = run(capsys, "info", str(made["llama"]), "--json")
    said = json.loads(out)
    assert (said["architecture"], said["parameters"], said["tokens_that_fit"]) == (
        "llama",
        facts_of(checkpoint_folder(made["llama"])).parameters,
        256,
    )


def test_a_server_names_a_file_without_where_it_lies(made):
    with LLM(made["llama"], kv_memory="4MiB", max_model_len=64) as llm:
        assert about_llm(llm).name == "llama.gguf"


def test_memory_that_is_short_is_said(made, capsys, monkeypatch):
    facts = facts_of(checkpoint_folder(made["llama"]))
    free = 300 * 2**20 + facts.weight_bytes
    for more, said in ((100 * facts.token_bytes, "100 tokens of its 256 fit"), (-1, "the weights and a token need")):
        monkeypatch.setattr("saccade.cli.info.available_bytes", lambda more=more: free + more)
        assert said in " ".join(run(capsys, "info", str(made["llama"]))[1].split())


def test_info_of_what_does_not_load_is_one_line(made, capsys, tmp_path):
    (broken := tmp_path / "broken.gguf").write_bytes(made["llama"].read_bytes()[:-900])
    for wrong, message in ((broken, "is cut off"), (tmp_path / "none.gguf", "there is no file")):
        code, out, err = run(capsys, "info", str(wrong))
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err


def test_doctor_names_what_loads(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    loads = json.loads(out)["models"]
    assert code == 0
    assert {"llama", "gemma3", "gpt-oss"} <= set(loads["GGUF files of"].split(", "))
    assert {"Q4_K", "Q6_K", "MXFP4", "BF16"} <= set(loads["GGUF files in"].split(", "))


def test_identity_is_the_files_content(made, tmp_path):
    """Its name, place and parts are nothing of it; another type of one matrix is another model."""
    checkpoint = tiny("llama", tmp_path / "made")

    def identity(file: Path) -> str:
        return load_model(checkpoint_folder(file), dtype="float32").identity.digest

    one = identity(write(checkpoint, tmp_path / "one.gguf", Kind.Q4_0))
    again = write(checkpoint, tmp_path / "again.gguf", Kind.Q4_0)
    assert identity(again) == one
    again.rename(tmp_path / "moved.gguf")
    assert identity(tmp_path / "moved.gguf") == one
    write(checkpoint, tmp_path / "parts.gguf", Kind.Q4_0, split=9)
    assert identity(sorted(tmp_path.glob("parts-*"))[1]) == one
    data = bytearray((tmp_path / "one.gguf").read_bytes())
    data[-2000] ^= 1  # in the middle of a matrix
    (tmp_path / "other.gguf").write_bytes(data)
    assert identity(tmp_path / "other.gguf") != one
    assert identity(write(checkpoint, tmp_path / "mixed.gguf", Kind.Q4_0, others={"output": Kind.Q5_0})) != one


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_sessions_go_on_with_the_same_file_alone(family, made, tmp_path):
    with LLM(made[family], dtype="float32", kv_memory="4MiB") as llm:
        session = llm.session()
        session.generate(FIRST, GREEDY)
        session.save(tmp_path / "kept")
        expected = session.generate(SECOND, GREEDY).outputs[0].token_ids
    (moved := tmp_path / "moved.gguf").write_bytes(made[family].read_bytes())
    with LLM(moved, dtype="float32", kv_memory="4MiB") as llm:
        restored = llm.restore(tmp_path / "kept")
        assert restored.generate(SECOND, GREEDY).outputs[0].token_ids == expected
    other = write(tiny(family, tmp_path / "made"), tmp_path / "other.gguf", Kind.Q8_0)
    with LLM(other, dtype="float32", kv_memory="4MiB") as llm, pytest.raises(RequestError, match="recompute=True"):
        llm.restore(tmp_path / "kept")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_server_serves_a_file(family, made):
    with LLM(made[family], dtype="float32", kv_memory="4MiB") as llm:
        expected = llm.generate([FIRST], GREEDY)[0].outputs[0].text
    with serving(LLM(made[family], dtype="float32", kv_memory="4MiB")) as server:
        answer = server.complete(FIRST, max_tokens=5, temperature=0, ignore_eos=True)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == expected
        said = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
        assert said.status_code == 200


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", ["generate", "ttft"])
def test_measurements_of_a_file(kind, family, made, tmp_path, capsys, monkeypatch):
    """Its own products are timed, whichever way they run; transformers' row is refused, as it does not run blocks."""
    monkeypatch.setattr("saccade.bench.limits.measure", lambda *args: {"read_gbps": 0.5})
    args = ["bench", kind, "--model", str(made[family]), "--contexts", "150", "--dtype", "float32", "--json"]
    rest = ["--tokens", "3"] if kind == "generate" else ["--repeats", "1"]
    code, _, err = run(
        capsys, *args, str(tmp_path / "rows.json"), "--methods", "dense;lfps" if kind == "generate" else "dense", *rest
    )
    assert (code, err) == (0, err)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["method"] for row in rows] == (["dense", "lfps"] if kind == "generate" else ["dense"])
    assert all(row["linear_ms" if kind == "generate" else "linear_s"] > 0 for row in rows)
    code, _, err = run(capsys, *args, str(tmp_path / "no.json"), "--methods", "transformers", *rest)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "transformers does not run the blocks of" in err
