"""Turns of sessions that break in one place and are asked again: every place, layer and phase, without threads.

    PYTHONPATH=tests python -m storm.breaks 5000

A case is a session of a few turns under one policy. Before and within a turn its keys are dropped, it is saved and
restored, preempted, cancelled, or shares steps with another request over a small pool; another turn is begun and left;
one or two calls of the places in ``storm.faults`` fail, before or after they did their work; tokens are drafted. What
must hold: a turn that fails names its exception, and asked again it gives the tokens and log-probabilities of a session
that nothing ever happened to (over codes of 8 bits to rounding, where a few stored values took the neighbouring code);
tokens, keys and states of a session stand at one length; nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SACCADE_DEBUG", "1")

import pytest
import torch
from drafters import Erring, draft_by
from kv_helpers import check_blocks
from storm.callers import AGAIN, runs
from storm.faults import KINDS, Plant
from tiny_models import make_checkpoint, random_ids
from torch import Tensor

from saccade import LLM, SamplingParams
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.engine.request import Request
from saccade.kv.format import KVFormat
from saccade.kv.row_formats import format_called
from saccade.kv.states import StatePool
from saccade.methods.policy import Policy
from saccade.models.families import FAMILIES

SPARSE = "xattention(threshold=0.5, stride=4, block_size=32)"
POLICIES = (  # sparse at 40 tokens; those that keep a state come twice where an option changes what it is
    "h2o(budget=16)",
    "h2o(budget=0.3, heavy=0.8, unit=q_head)",
    "lfps(k=8, blocks=2, least=1, block_size=4)",
    "lfps(k=8, blocks=2, least=1, block_size=4, history=keep, running_means=true)",
    f"{SPARSE}+lfps(k=8, blocks=0, least=1, rest=none)",
    "auto(least=1, method=lfps)",
    "cis(k=6, sinks=1, local=3, s=4)",
    "cis(k=6, sinks=1, local=3, s=4, unit=kv_head, tau=0.0, by=key)",
    "snapkv(capacity=20, window=8, kernel=3)",
    "adakv(capacity=20, window=8, kernel=3)",
    "rocketkv(capacity=24, window=8, kernel=3, keys=10)",
    "hshare(heavy=8, sinks=1, local=3, rows=8, source=prompt)",
    "double_sparsity(k=8, source=prompt, dense_layers=0)",
    "infinigen(skew=off, query=own, dense_layers=0)",
    "magicpig(bits=4, tables=10, local=4, dense_every=0)",
    "vattention(epsilon=0.3, sinks=2, local=6, heavy=6, block_size=8)",
    "loopserve(alpha=0.7, budget=10, first=0, n_d=2, min_rows=1)",
    "twilight(p=0.6, base=16, dense_layers=0, block_size=8)",
    "lossless(draft=lfps(k=8, blocks=2, least=1, block_size=4), tokens=2)",
    "lossless(draft=h2o(budget=16), tokens=3)",
    "quest(budget=16, block_size=8, dense_layers=0)",
    "arkvale(budget=24, block_size=8, sinks=1, window=1)",
    f"{SPARSE}+psa(epsilon=0.4, block_size=16, microbatch=1)",
    f"{SPARSE}+h2o(budget=16)",
    f"{SPARSE}+snapkv(capacity=20, window=8, kernel=3)+psaw(phi=0.7, start_layer=1)",
    "topk(k=8)",
)
CHUNK, SIZE, LAYERS, HEAD_DIM = 32, 16, 2, 16
ROUNDING = 2e-5  # of a sum of log-probabilities: products of a prefill that was cut short have fewer rows
MOVED = 0.02  # of the same, where that took a value over the middle between two codes of 8 bits
MOST_MOVED = 4  # values of a session's first layer that has some
ROOM = 12  # blocks of a layer: a session and a part of another request
STATES = 9  # of layers that keep one: snapshots go, and a quarter of so much memory has room for two


@dataclass(frozen=True)
class Turn:
    """Tokens that follow the first ``keep`` of those before, or all of them (None): an edit, as chats have it."""

    ids: list[int]
    params: SamplingParams
    keep: int | None = None


@dataclass
class Script:
    """Turns under a policy, what a session that nothing happens to answers (tokens and the sum of their
    log-probabilities), its tokens before each turn and after the last, and how often a turn called each place."""

    policy: Policy
    turns: list[Turn] = field(default_factory=list)
    answers: list[tuple[list[int], float]] = field(default_factory=list)
    stored: list[list[Tensor]] = field(default_factory=list)  # after each turn, see stored
    contexts: list[list[int]] = field(default_factory=list)
    calls: list[Counter[str]] = field(default_factory=list)


class Bench:
    """An engine with a small pool, whose sessions follow scripts."""

    def __init__(self, folder: Path, states: int = 0, kv_dtype: str = "auto", **options: Any) -> None:
        """``states``: bytes of one, of a model whose layers keep some."""
        options |= {"dtype": "float32", "prefill_chunk": CHUNK, "block_size": SIZE, "threads": 1, "kv_dtype": kv_dtype}
        rows, layers = format_called(kv_dtype, torch.float32, "cpu"), 1 if states else LAYERS
        room = ROOM * layers * KVFormat(torch.float32, 2, HEAD_DIM, SIZE, rows, rows).block_bytes + STATES * states
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr("saccade.pools.StatePool", lambda format, slots, device: StatePool(format, STATES, device))
            warnings.simplefilter("ignore", UserWarning)  # max_requests is lowered
            self.llm = LLM(folder, kv_memory=room, **{"enable_prefix_caching": False, **options})
        self.engine = self.llm.engine
        self.plant = Plant(self.llm.model.runner)

    def script(self, text: str, seed: int) -> Script:
        rng, script = random.Random(f"{text} {seed}"), Script(Policy.parse(text))
        session = self.engine.sessions.open()
        sequence = self.engine.sessions[session]
        for length in (rng.randint(8, 70), rng.randint(1, 40), rng.randint(1, 40)):
            params = SamplingParams(temperature=0, max_tokens=rng.randint(2, 6), ignore_eos=True, logprobs=0)
            said = len(sequence.tokens)
            keep = rng.choice((None, None, said, said * 8 // 10, said * 3 // 10)) if said else None
            script.turns.append(Turn(random_ids(length, rng.randint(0, 10**6)), params, keep))
            script.contexts.append(list(sequence.tokens))
            self.plant.reset()
            with self.plant.grown():
                request = self.ask(script, len(script.turns) - 1, session)
                while not request.finished:
                    self.engine.step()
            assert request.error is None, (text, request.error)
            script.calls.append(self.plant.calls)
            script.answers.append((request.final_ids, request.cumulative_logprob))
            script.stored.append(stored(sequence))
        script.contexts.append(list(sequence.tokens))
        self.engine.sessions.forget(session)
        return script

    def ask(self, script: Script, at: int, session: int) -> Request:
        """A turn, of which the engine hears as servers tell it."""
        turn, whole = script.turns[at], script.turns[at].keep is not None
        ids = script.contexts[at][: turn.keep] + turn.ids if whole else turn.ids
        return self.engine.receive(
            AddRequest(new_request_id(), ids, turn.params, script.policy, session=session, whole=whole)
        )


@dataclass
class Case:
    """One session through a script, disturbed as ``rng`` says. ``wrong``: what does not hold."""

    bench: Bench
    script: Script
    rng: random.Random
    counts: Counter[str]
    wrong: list[str] = field(default_factory=list)

    def run(self) -> None:
        engine, rng = self.bench.engine, self.rng
        self.number = engine.sessions.open()
        drafts = rng.random() < 0.3 and not self.script.policy.text.startswith("lossless")
        draft_by(engine, Erring(self.script.contexts) if drafts else None)
        try:
            for at in range(len(self.script.turns)):
                for attempt in range(rng.choice((0, 1, 1, 2)), -1, -1):
                    if self._turn(at, disturbed=attempt > 0):
                        break
                else:
                    return
        finally:
            draft_by(engine, None)
            engine.sessions.forget(self.number)
            for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
                engine.cancel(request)
            if engine.prefixes is not None:
                engine.prefixes.clear()
            check_blocks(engine.pool, [])
            assert engine.pool.used_blocks == 0
            assert engine.pool.states is None or engine.pool.states.used == 0
            assert not engine.worker.memories

    def _turn(self, at: int, disturbed: bool) -> bool:
        """Whether the turn has ended, with the right answer or a wrong one."""
        engine, rng, plant, script = self.bench.engine, self.rng, self.bench.plant, self.script
        turn, said = script.turns[at], []
        if rng.random() < 0.2:
            self._left(at)
            said.append("after another turn was left")
        sequence = engine.sessions[self.number]
        if rng.random() < 0.5:
            sequence.drop_kv()
            said.append("dropped")
        if rng.random() < 0.15:
            saved = engine.sessions.save(self.number)
            engine.sessions.forget(self.number)
            self.number, _ = engine.sessions.restore(saved, [], False)
            sequence = engine.sessions[self.number]
            said.append("restored")
        faults, acts = {}, {}
        if disturbed:
            for _ in range(rng.choice((1, 1, 2))):
                place = rng.choice(sorted(script.calls[at]))
                number = rng.randint(1, (2 if at else 1) * script.calls[at][place])
                faults[place] = number, rng.random() < 0.5, rng.choice(KINDS)
            if rng.random() < 0.25:
                acts[rng.randint(1, 8)] = rng.choice(("preempt", "cancel", "cancel"))
        plant.reset(faults)
        with plant.grown():
            request = self.bench.ask(script, at, self.number)
            if rng.random() < 0.2:
                engine.add(script.contexts[-1][:60], turn.params, script.policy)
                said.append("in company")
            steps = 0
            while not request.finished:
                try:
                    engine.step()
                except Exception as error:  # which would end all that run
                    engine.abandon(str(error))
                    self.wrong.append(f"{script.policy.text}, turn {at}: a step raised {error}")
                steps += 1
                if acts.get(steps) == "cancel":
                    engine.cancel(request)
                elif acts.get(steps) == "preempt" and request in engine.scheduler.running:
                    engine.scheduler.preempt(request)
                    said.append(f"preempted after {steps}")
        said += plant.fired
        plant.reset()
        while engine.busy:
            engine.step()  # the company
        where = f"{script.policy.text}, turn {at}, {', '.join(said) or 'as it was'}"
        memory = sequence.memories[sequence.id]
        if not memory.kv.length == sequence.computed <= sequence.reached <= len(sequence.tokens):
            self.wrong.append(f"{where}: {memory.kv.length} keys, {sequence.computed}, {sequence.reached} tokens")
        if request.finish_reason == "cancelled":
            self.counts["cancelled"] += 1
        elif request.error is not None:
            self.counts["failed"] += 1
            if "planted" not in request.error:
                self.wrong.append(f"{where}: {request.error}")
        else:
            self.counts["answered"] += 1
            report = request.report
            if (report.recomputed_tokens > 0) != any(AGAIN in note for note in report.as_dict()["notes"]):
                self.wrong.append(f"{where}: {report.recomputed_tokens} tokens computed again in silence")
            self.counts["computed again"] += report.recomputed_tokens > 0
            self.counts["drafted"] += report.drafted_tokens > 0
            got, want = (request.final_ids, request.cumulative_logprob), script.answers[at]
            rounding = MOVED if 0 < moved(stored(sequence), script.stored[at]) <= MOST_MOVED else ROUNDING
            if got[0] != want[0] or abs(got[1] - want[1]) > rounding:
                self.wrong.append(f"{where}: {got} instead of {want}")
            return True
        if sequence.tokens != script.contexts[at]:
            self.wrong.append(f"{where}: the session has other tokens than before")
        if not disturbed and not plant.fired:
            self.wrong.append(f"{where}: it ended with {request.error or request.finish_reason}")
        return False

    def _left(self, at: int) -> None:
        """Another turn is begun, which may cut the session, and is left or breaks."""
        engine, rng, plant, script = self.bench.engine, self.rng, self.bench.plant, self.script
        context, params = script.contexts[at], replace(script.turns[at].params, max_tokens=50)
        ids = context[: rng.randint(0, len(context))] + random_ids(rng.randint(1, 50), rng.randint(0, 999))
        place = rng.choice(sorted(script.calls[at]))
        plant.reset({place: (rng.randint(1, 2 * script.calls[at][place]), rng.random() < 0.5, RuntimeError)})
        steps = rng.randint(0, 8)
        with plant.grown():
            request = engine.receive(
                AddRequest(new_request_id(), ids, params, script.policy, session=self.number, whole=True)
            )
            while not request.finished and steps:
                engine.step()
                steps -= 1
        engine.cancel(request)
        plant.reset()
        if engine.sessions[self.number].tokens != context:
            self.wrong.append(f"{script.policy.text}, turn {at}: a turn that was left changed the session's tokens")


def stored(sequence: Any) -> list[Tensor]:
    """Keys and values of all layers as they lie, copied, where they are codes of 8 bits; else nothing."""
    kv = sequence.memories[sequence.id].kv
    views = [kv.view(layer) for layer in range(kv.layers)] if kv.pool.format.k.coded else []
    return [part for view in views for part in view.stored()]


def moved(ours: list[Tensor], theirs: list[Tensor]) -> int:
    """How many codes, or scales, are other ones where the first are: later layers compute of what was read there, so
    that a sixteenth of theirs may be, too. Beyond counting where one is not its neighbour."""
    if any(one.shape != other.shape for one, other in zip(ours, theirs)):
        return MOST_MOVED + 1
    apart = [(one.int() - other.int()).abs() for one, other in zip(ours, theirs)]
    counts = [int((one > 0).sum()) for one in apart]
    if any(int(one.max()) > 1 or 16 * count > one.numel() for count, one in zip(counts, apart)):
        return MOST_MOVED + 1
    return next((count for count in counts if count), 0)


def breaks(
    count: int,
    seed: int = 0,
    policies: tuple[str, ...] = POLICIES,
    each: int = 3,
    family: str = "llama",
    kv_dtype: str = "auto",
) -> tuple[Counter[str], list[str]]:
    """Run ``count`` cases over ``each`` scripts of every policy that a model of ``family`` runs: what became of turns,
    and what was wrong."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "head_dim": HEAD_DIM, "max_position_embeddings": 512}
        states = 0
        if (keeping := FAMILIES[family].keeping) is not None:
            sizes["layer_types"] = [keeping.kinds[0], "full_attention"]
            with LLM(make_checkpoint(family, Path(folder) / "probe", **sizes), dtype="float32") as probe:
                states = probe.pool.states.format.nbytes
                policies = tuple(one for one in policies if runs(probe, one))
        checkpoint = make_checkpoint(family, Path(folder) / "model", **sizes)
        benches = [Bench(checkpoint, states, kv_dtype, enable_prefix_caching=cached) for cached in (False, True)]
        scripts = [benches[0].script(policy, seed + number) for policy in policies for number in range(each)]
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            case = Case(rng.choice(benches), scripts[number % len(scripts)], rng, counts)
            case.run()
            wrong += [f"case {number}: {one}" for one in case.wrong]
        for bench in benches:
            bench.llm.close()
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="llama", help="of tests/tiny_models.py")
    parser.add_argument("--kv-dtype", default="auto", help="of all engines: auto, bf16, fp8 or int8")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts, wrong = breaks(chosen.cases, chosen.seed, family=chosen.family, kv_dtype=chosen.kv_dtype)
    print(f"{chosen.cases} cases in {time.perf_counter() - began:.0f} s, seed {chosen.seed}: {dict(counts)}")
    sys.exit("\n".join([f"{len(wrong)} wrong", *wrong[:20]]) if wrong else None)


if __name__ == "__main__":
    main()
