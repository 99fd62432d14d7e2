"""The attacks of server_attack.py, small: what they are answered with, and what they leave behind."""

from __future__ import annotations

import resource

from engine_helpers import make
from server_attack import MIB, attack
from server_helpers import serving, until


def test_attacks_are_refused_and_leave_nothing_behind(tiny_llama):
    """An error for each element of these would be gigabytes, and a scan that begins anew at each quote hours."""
    with serving(make(tiny_llama), body_seconds=20) as server:
        assert server.complete("x").status_code == 200
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows = {row.name: row for row in attack(server.server.address, MIB, 30, 0.2)}
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024, "KiB"
        found = {name: set(row.statuses) for name, row in rows.items()}
        good = {name for name in found if name in ("a long field of a message",)}
        slow = {name for name in found if "slow clients" in name}
        long = {name for name in found if name in ("long headers", "trailers without end")}
        assert all(found[name] <= {200} for name in good)
        assert all(found[name] <= {431, 0} for name in long), "0: closed before all was sent"
        assert found["chunks of a byte"] <= {400, 0}
        assert found["gzip"] <= {415}
        for name in set(found) - good - slow - long - {"chunks of a byte", "gzip"}:
            assert found[name] <= {400}, name
        assert server.complete("x").status_code == 200
        server.idle()
        until(lambda: server.serving.room.used == 0)
        until(lambda: len(server.server.server_state.connections) <= 1)
        assert not server.serving.sockets
