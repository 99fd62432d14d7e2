"""A server whose engine shares its model out between processes: the loss of one is told by its name, and is no good
end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import fork_server
import pytest
from server_helpers import FAR, error, parsed, serving, until

from saccade.cli.main import main
from saccade.engine.settings.config import EngineConfig
from saccade.errors import EngineLost
from saccade.server import engine_launch
from saccade.server.engine_client import EngineProcess


def ranks_of(pid: int) -> list[int]:
    """Processes that the engine's process has started."""
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_to_all_that_ask(far_llama, monkeypatch, how):
    """To what runs, to later requests, by /health and as the server ends."""
    monkeypatch.setattr(engine_launch, "subprocess", fork_server.SUBPROCESS)
    config = EngineConfig.of(
        model=far_llama, dtype="float32", device="cpu", threads=1, kv_memory="32MiB", tensor_parallel_size=2
    )
    with serving(EngineProcess(config, "error")) as server:
        (rank,) = ranks_of(server.serving.engine.process.pid)
        with server.client.stream("POST", "/v1/completions", json={"prompt": "x", **FAR, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(lines)
            os.kill(rank, how)
            events = parsed(iter([first, *lines]))
        assert events[-2]["error"]["code"] == "engine_lost"
        assert "rank 1 of 2" in events[-2]["error"]["message"]
        until(lambda: server.client.get("/health").json()["status"] == "broken")
        assert "rank 1 of 2" in server.client.get("/health").json()["error"]
        refused = server.complete("x")
        assert error(refused)[:2] == (503, "engine_lost")
        assert "rank 1 of 2" in refused.json()["error"]["message"]
        assert not Path(f"/proc/{rank}").exists()
    assert "rank 1 of 2" in server.server.lost


def test_a_server_that_has_lost_its_engine_ends_with_exit_code_1(monkeypatch, capsys):
    """Not 0, by which a supervisor takes it for one that was told to end, nor 2, which is bad input."""

    def run(engine, settings):
        raise EngineLost("this server ended without its engine: rank 1 of 2 hangs")

    class Engine:
        note = None

        def __init__(self, *given) -> None:
            pass

    monkeypatch.setattr("saccade.server.run.serve", run)
    monkeypatch.setattr("saccade.server.logs.log_to_stderr", lambda level: None)  # later tests would write to it
    monkeypatch.setattr("saccade.server.engine_client.EngineProcess", Engine)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "reference", "--device", "cpu"])
    assert ended.value.code == 1
    assert "rank 1 of 2 hangs" in capsys.readouterr().err
