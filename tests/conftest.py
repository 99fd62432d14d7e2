"""Fixtures that several test files share: tiny random checkpoints, made once a session."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Tiny models gain nothing from threads, and on a busy machine waiting for them costs minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every selection is looked at before a kernel reads it; set it to 0 to see what that costs.
os.environ.setdefault("SACCADE_DEBUG", "1")

import pytest

if TYPE_CHECKING:
    from saccade import LLM


def pytest_configure(config: pytest.Config) -> None:
    """xdist's controller runs no test, and imports nothing that takes seconds."""
    if config.pluginmanager.hasplugin("dsession"):
        return
    # Else what is left when the interpreter ends looks like a leak of the kernels' module. Cleanups run backwards:
    # pytest's own, which collects garbage again and again, goes before.
    config.add_cleanup(gc.unfreeze)
    import torch

    if not torch.cuda.is_available():  # Triton's kernels run in its interpreter, which must be known before its import
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # until it is done: what is imported and collected is no garbage
    if not session.config.pluginmanager.hasplugin("dsession"):
        from saccade.methods.outside import load_outside

        load_outside()  # what tests hold of every method holds of saccade-contrib's, too


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end, so no collection of garbage need walk over it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A shell starts its background jobs with SIGINT ignored, which they and their children inherit: Ctrl-C of a test
    would reach nobody."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _unwritten_keys_are_nan() -> Iterator[None]:
    """``KVView.from_tensors`` pages into poisoned storage: what is behind the last key must never matter."""
    from kv_helpers import PoisonedStorage

    from saccade.kv import view

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "KVStorage", PoisonedStorage)
        yield


@pytest.fixture(autouse=True, scope="session")
def _auto_is_the_cpu() -> Iterator[None]:
    """Tests that want a GPU name it; the others mean the same on every machine."""
    from saccade.engine.settings import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "best_device", lambda: "cpu")
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama: 3 layers, 4 query heads over 2 KV heads of 16 channels (the C++ kernels serve them), room
    for 2048 positions, byte tokenizer."""
    from tiny_models import make_checkpoint

    return make_checkpoint("llama", tmp_path_factory.mktemp("tiny_llama"), max_position_embeddings=2048)


@pytest.fixture(scope="session")
def far_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_llama`` with room for 2^17 positions: a request that still runs when a test looks, on any machine."""
    from tiny_models import make_checkpoint

    return make_checkpoint("llama", tmp_path_factory.mktemp("far_llama"), max_position_embeddings=1 << 17)


@pytest.fixture(scope="session")
def odd_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 12 channels, which the reference alone serves, row by row."""
    from tiny_models import make_checkpoint

    settings = {"max_position_embeddings": 2048, "head_dim": 12}
    return make_checkpoint("llama", tmp_path_factory.mktemp("odd_llama"), **settings)


@pytest.fixture(scope="module")
def llm(tiny_llama) -> Iterator[LLM]:
    from engine_helpers import make

    engine = make(tiny_llama)
    yield engine
    assert engine.engine.pool.used_blocks == 0
    assert not engine.engine.busy


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from tiny_models import random_ids

    return [random_ids(length, seed=length) for length in (230, 300, 129, 257, 333)]


@pytest.fixture(scope="module")
def solo(llm, prompts) -> list[list[int]]:
    """Each policy's greedy tokens for its own prompt, run alone."""
    from engine_helpers import FIVE, GREEDY, tokens

    return [tokens(llm.generate(ids, GREEDY, policy=policy)[0]) for ids, policy in zip(prompts, FIVE)]


@pytest.fixture
def in_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has something happen in the middle of the engine's next pass, or its next of one phase, after two layers have
    stored their keys."""
    from saccade.engine.rows.attention import RowAttention

    before = {name: vars(RowAttention)[name] for name in ("run", "whole", "context")}
    real = before["run"]

    def arm(happens: Callable[[], None], phase: str | None = None) -> None:
        def run(self, layer, *rest):
            out = real(self, layer, *rest)
            if layer == 1 and phase in (None, *(rows.scheduled.phase for rows in self.rows)):
                for name, one in before.items():
                    monkeypatch.setattr(RowAttention, name, one)
                happens()
            return out

        monkeypatch.setattr(RowAttention, "run", run)
        monkeypatch.setattr(RowAttention, "whole", lambda self: None)  # one call of all layers has no middle
        monkeypatch.setattr(RowAttention, "context", property(lambda self: self))  # nor do joined rows tell of theirs

    return arm
