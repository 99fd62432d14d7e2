"""Whatever comes over the wire: no 5xx, no traceback, nothing left behind, and good requests are answered."""

from __future__ import annotations

import gc
import threading
from functools import partial
from urllib.parse import quote

import pytest
from server_fuzz import KEYS, a_server, fuzz, speaks


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nothing_that_comes_breaks_a_server():
    with a_server() as server:
        statuses = fuzz(server.server.address, 2400, seed=2, change=partial(speaks, server))
        assert statuses[200] > 20, statuses
        assert statuses[400] > 300
        assert {401, 403, 404, 405, 413, 415} & set(statuses)
        server.idle()
        gc.collect()
        assert not server.server.server_state.connections
        assert threading.active_count() < 20
        assert server.llm.sessions.counts["failed"] == 0, server.llm.sessions.last_error
        assert server.llm.sessions.counts["saves"] > 5
        for owner, name in list(server.serving.sessions._held):
            headers = {"authorization": f"Bearer {KEYS[owner]}"}
            server.client.delete(f"/v1/sessions/{quote(name, safe='')}", headers=headers)
        server.complete([5])
        sessions = len(server.llm.engine.sessions)
        assert sessions == len(server.serving.sessions)
        if not sessions:
            assert server.llm.pool.used_blocks == 0
