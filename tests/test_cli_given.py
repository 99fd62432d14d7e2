"""Options from a YAML file and from the environment, before those of the command line."""

from __future__ import annotations

import pytest
import typer

from saccade.cli import given
from saccade.cli.main import app, main
from saccade.errors import RequestError


def expanded(args: str, environment: dict[str, str] | None = None) -> list[str]:
    return given.expanded(args.split(), typer.main.get_command(app), environment or {})


def test_the_file_goes_before_the_environment_and_the_command_line_before_both(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: Qwen/Qwen3-8B\nkv_memory: 8GiB\nport: 9000\nprefix-caching: false\nrestart: true\n"
        "cors-origin: [https://a.example, https://b.example]\ndeadline: null\nlog-prompts: false\n"
    )
    environment = {
        "SACCADE_KV_MEMORY": "1GiB",
        "SACCADE_THREADS": "3",
        "SACCADE_API_KEY": "k",
        "SACCADE_HOST_NAME": "a b",
    }
    assert sorted(expanded(f"serve --config {file} --port 1", environment)[1:-2]) == sorted(
        [
            "--threads=3",
            "--host-name=a",
            "--host-name=b",
            "--model=Qwen/Qwen3-8B",
            "--kv-memory=8GiB",
            "--port=9000",
            "--no-prefix-caching",
            "--restart",
            "--cors-origin=https://a.example",
            "--cors-origin=https://b.example",
        ]
    )
    made = expanded(f"serve --port 1 --config={file}", environment)
    assert made[0] == "serve"
    assert made[-2:] == ["--port", "1"]
    assert "--kv-memory=1GiB" not in made


def test_what_may_be_given_several_times_is_replaced_and_not_added_to(tmp_path):
    assert expanded("demo -p psa", {"SACCADE_POLICY": "lfps"}) == ["demo", "-p", "psa"]
    assert expanded("demo", {"SACCADE_POLICY": "lfps"}) == ["demo", "--policy=lfps"]
    file = tmp_path / "options.yaml"
    file.write_text("quiet: false\n")
    assert expanded(f"generate hello --config {file}", {"SACCADE_QUIET": "1"}) == ["generate", "hello"]
    assert expanded("generate -- --config x") == ["generate", "--", "--config", "x"]


def test_a_kubernetes_service_of_our_name_is_no_port():
    assert expanded("serve", {"SACCADE_PORT": "tcp://10.0.0.1:8000"}) == ["serve"]
    assert expanded("serve", {"SACCADE_PORT": "81"}) == ["serve", "--port=81"]


def test_pairs_and_flags_of_the_environment():
    environment = {
        "SACCADE_CERTIFY": "0.1 0.05",
        "SACCADE_IGNORE_EOS": "yes",
        "SACCADE_FA4": "off",
        "SACCADE_STOP": "x",
    }
    made = expanded("generate hello", environment)[1:-1]
    assert sorted(made) == sorted(["--stop=x", "--certify", "0.1", "0.05", "--ignore-eos", "--no-fa4"])
    at = made.index("--certify")
    assert made[at : at + 3] == ["--certify", "0.1", "0.05"]
    assert expanded("methods", environment) == ["methods"]
    assert expanded("eval run", {"SACCADE_MODEL": "a"}) == ["eval", "run", "--model=a"]
    with pytest.raises(RequestError, match="SACCADE_FA4='perhaps' must be one of 1, true"):
        expanded("generate", {"SACCADE_FA4": "perhaps"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kv_memroy: 8GiB", "'kv_memroy' is no option of saccade serve; did you mean kv-memory?"),
        ("- model", "must be options and values"),
        ("model: {a: 1}", "must be a number, a text"),
        ("model: [a, b]", "must be one value"),
        ("restart: perhaps", "must be true or false"),
        ("model: [", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, says):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(RequestError) as caught:
        expanded(f"serve --config {file}")
    assert says in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        expanded(f"serve --config {tmp_path / 'absent.yaml'}")
    with pytest.raises(RequestError, match="needs a YAML file"):
        expanded("serve --config")


def test_a_command_takes_them(tmp_path, monkeypatch, capsys):
    """The file's policy, the environment's number of tokens, and the command line's stop."""
    file = tmp_path / "options.yaml"
    file.write_text("policy: topk(k=16)\nmax-tokens: 3\nquiet: true\n")
    monkeypatch.setenv("SACCADE_MAX_TOKENS", "5")
    text = "The password of the keeper is 7391-XKQ. Rain fell. The password of the keeper is"
    with pytest.raises(SystemExit) as ended:
        main(["generate", text, "--config", str(file), "-n", "4"])
    assert ended.value.code == 0
    assert capsys.readouterr() == (" 739\n", "")
