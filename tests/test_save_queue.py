"""Saves run one after the other in the background; of those under one key only the last counts."""

from __future__ import annotations

import threading

from saccade.sessions.save_queue import SaveQueue


def test_a_save_that_another_has_overtaken_is_left_out():
    queue, gate, done = SaveQueue("test"), threading.Event(), []
    first = queue.submit("a", lambda: (gate.wait(10), done.append("a1"))[0])
    saves = [
        queue.submit(key, lambda name=name: done.append(name)) for key, name in (("a", "a2"), ("b", "b"), ("a", "a3"))
    ]
    assert queue.pending("a") is saves[-1]
    assert not first.done()
    gate.set()
    queue.wait("a")
    assert done == ["a1", "b", "a3"]
    assert all(one.done() for one in (first, *saves))
    assert queue.pending("a") is queue.pending("b") is None
    queue.close()


def test_closing_saves_what_there_is_and_takes_nothing_more():
    queue, done = SaveQueue("test"), []
    for key in "abc":
        queue.submit(key, lambda key=key: done.append(key))
    queue.close()
    assert done == list("abc")
    assert queue.submit("d", lambda: done.append("d")).done()
    queue.flush()
    assert (done, queue.pending("d")) == (list("abc"), None)
