"""Sessions under attack: ``make storm-sessions``.

    PYTHONPATH=tests python -m storm.sessions --kills 200 --rounds 100000

*Kills*: a process that lets a few named sessions talk is killed (SIGKILL) in a random moment, again and again, over one
folder of files. The next one restores them all. What a session restores must be one of the states that it went through,
no older than the last one whose save was known to be done; its next answer must be that of a session that was never
saved, to the last bit of its log-probabilities, or the note says what is computed again. So must its answer to an
earlier turn that is edited; of a model whose layers keep a state no more than what lies behind a snapshot is computed
again for it, and the report says so.

*Rounds*: a session of a random policy and length is saved, one of its records is torn, flipped, lost, put in the place
of another (of another session, model or policy, or of an older save), and it is restored. Keys, values and method
states must be those of the session that stayed, bit for bit; what is refused must be refused by a sentence that names
it. Where something is computed again, that holds of the keys and values that were kept. Every twentieth next answer is
compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SACCADE_DEBUG", "0")

import torch
from memory_store import FAULTS, MemoryStore
from storm.callers import AGAIN
from tiny_models import make_checkpoint, random_ids

from saccade import LLM, SamplingParams
from saccade.errors import RequestError
from saccade.kv import sequence_states
from saccade.methods import state as states
from saccade.methods.policy import Policy
from saccade.models.families import FAMILIES
from saccade.sessions.durable import DurableSessions

SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)"
POLICIES = (
    "dense",
    "topk(k=12)",
    "cis(k=8, sinks=2, local=4)",
    "h2o(budget=24)",
    "snapkv(capacity=70)",
    f"{SPARSE}+psa(epsilon=0.4, block_size=16, microbatch=1)",
    f"{SPARSE}+lfps(k=8, blocks=2, least=8, history=keep)",
    "loopserve",
)
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
SEGMENT, TALKS, TURNS = 16, 4, 6
EVERY = 40  # tokens between the snapshots of layers that keep a state
ROUNDING = 2e-5  # of a sum of log-probabilities, where chunks begin elsewhere
NAMED = ("the session 'talk'", "the saved session is damaged", "another model", "prefill_chunk=")


KV_DTYPE = "STORM_KV_DTYPE"  # the environment's, which killed processes have, too
FAMILY = "STORM_FAMILY"


def keeps() -> bool:
    """Whether layers of the model keep a state."""
    return FAMILIES[os.environ.get(FAMILY, "llama")].keeping is not None


def small_model(folder: Path, **sizes: Any) -> Path:
    family = os.environ.get(FAMILY, "llama")
    if (keeping := FAMILIES[family].keeping) is not None:
        sizes["layer_types"] = [keeping.kinds[0], "full_attention"]
        sequence_states.EVERY = EVERY
    return make_checkpoint(family, folder, num_hidden_layers=2, max_position_embeddings=2048, **sizes)


def open_llm(folder: Path, **options: Any) -> LLM:
    llm = LLM(
        folder,
        dtype="float32",
        kv_memory="4MiB",
        prefill_chunk=32,
        kv_dtype=os.environ.get(KV_DTYPE, "auto"),
        **{"enable_prefix_caching": False, **options},
    )
    if llm.sessions is not None:
        llm.sessions.segments.size = SEGMENT
    return llm


def turn(talk: int, number: int) -> list[int]:
    return random_ids(7 + (13 * talk + 29 * number) % 40, seed=1000 * talk + number)


def answer(session: Any, ids: list[int], edited: bool = False) -> tuple[list[int], float]:
    """To a turn; ``edited``: to the whole of what was said, otherwise said before."""
    output = (session.complete if edited else session.generate)(ids, GREEDY)
    assert output.error is None, output.error
    again, said = output.report["recomputed_tokens"], any(AGAIN in one for one in output.report["notes"])
    assert bool(again) == said, (again, output.report["notes"])
    near = session.note is not None or session.policy != Policy()  # sparse decode goes on from the ends of turns alone
    assert not edited or again <= EVERY or near, again
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


def alike(one: tuple[list[int], float], other: tuple[list[int], float], close: bool = False) -> bool:
    """To the last bit, but for chunks that begin elsewhere, if ``close``."""
    return one == other or (close and keeps() and one[0] == other[0] and abs(one[1] - other[1]) < ROUNDING)


def edit(ids: list[int]) -> list[int]:
    return ids[: len(ids) * 2 // 3] + random_ids(9, seed=len(ids))


# Kills


def talks(folder: Path, store: Path, log: Path) -> None:
    """What is killed: go on with every session, for ever. ``log``: turns whose save is known to be done."""
    llm = open_llm(folder, session_dir=store)
    sessions = {talk: llm.session(POLICIES[talk % len(POLICIES)], name=f"talk {talk}") for talk in range(TALKS)}
    rng = random.Random(os.getpid())
    with open(log, "a", encoding="utf-8") as known:
        while True:
            talk = rng.randrange(TALKS)
            session, done = sessions[talk], turns_of(talk, sessions[talk].token_ids)
            if done == TURNS:
                session.close()
                llm.sessions.forget(f"talk {talk}")
                sessions[talk] = llm.session(POLICIES[talk % len(POLICIES)], name=f"talk {talk}")
                known.write(json.dumps([talk, 0]) + "\n")
            else:
                answer(session, turn(talk, done))
                if rng.random() < 0.3:
                    llm.sessions.flush()
                    known.write(json.dumps([talk, done + 1]) + "\n")
            known.flush()


def turns_of(talk: int, ids: list[int]) -> int:
    """After how many turns a session of these tokens stands; the lengths are the workload's own."""
    length, done = 0, 0
    while length < len(ids):
        length += len(turn(talk, done)) + GREEDY.max_tokens
        done += 1
    assert length == len(ids), f"talk {talk}: {len(ids)} tokens are no state that it went through"
    return done


def kills(count: int, seed: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = small_model(Path(scratch) / "model")
        store, log = Path(scratch) / "store", Path(scratch) / "log"
        log.touch()
        stayed = open_llm(folder)
        right = {}  # by talk: tokens after each turn, the answer to each, and to an edit of what was said before it
        for talk in range(TALKS):
            states_of, answers, edits = [[]], [], [None]
            with stayed.session(POLICIES[talk % len(POLICIES)]) as session:
                for number in range(TURNS + 1):
                    answers.append(answer(session, turn(talk, number)))
                    states_of.append(session.token_ids)
            for done in range(1, TURNS + 1):
                with stayed.session(POLICIES[talk % len(POLICIES)]) as session:
                    for number in range(done):
                        answer(session, turn(talk, number))
                    edits.append(answer(session, edit(session.token_ids), edited=True))
            right[talk] = states_of, answers, edits
        stayed.close()
        for number in range(count):
            child = os.fork()
            if child == 0:
                try:
                    signal.alarm(60)
                    talks(folder, store, log)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            time.sleep(0.15 + rng.random() ** 2 * 1.5)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"the process ended by itself, with {status}"
            known = {}
            for line in log.read_text().splitlines():
                try:
                    talk, done = json.loads(line)
                except ValueError:  # the line that was being written
                    continue
                known[talk] = done
            looked = os.fork()
            if looked == 0:
                code = 1
                try:
                    code = look(folder, store, right, known, Path(scratch) / "seen")
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            _, status = os.waitpid(looked, 0)
            assert status == 0, f"kill {number} (seed {seed}): something wrong was read"
            found, stands = json.loads((Path(scratch) / "seen").read_text())
            seen.update(found)
            known = dict(enumerate(stands))
            log.write_text("".join(json.dumps(one) + "\n" for one in known.items()))
            seen["kills"] += 1
            if sys.stdout.isatty() or seen["kills"] % 20 == 0:
                print(f"{number + 1} kills: {dict(seen)}", flush=True)
    return seen


def look(folder: Path, store: Path, right: dict[int, Any], known: dict[int, int], into: Path) -> int:
    """Restore every session from a copy of what the killed process left, and let it go on."""
    import shutil

    seen: Counter[str] = Counter()
    stands: list[int] = []  # turns of each
    rng = random.Random(os.getpid())
    copy = store.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    llm = open_llm(folder, session_dir=copy)
    for talk, (states_of, answers, edits) in right.items():
        with llm.session(POLICIES[talk % len(POLICIES)], name=f"talk {talk}") as session:
            ids = session.token_ids
            done = states_of.index(ids)  # ValueError: it never was like this
            assert done >= known.get(talk, 0) or done == 0, (talk, done, known)  # 0: it was about to begin anew
            stands.append(done)
            seen["restored" if done else "empty"] += 1
            if session.note is not None:
                seen["recomputed"] += 1
                assert "computed again" in session.note
            if done and rng.random() < 0.5:
                seen["edited"] += 1
                assert alike(answer(session, edit(ids), edited=True), edits[done], close=True), (talk, done)
                continue
            told = session.note is not None
            assert alike(answer(session, turn(talk, done)), answers[done], close=told), (talk, done, session.note)
    assert llm.sessions.counts["refused"] == 0
    llm.close()
    into.write_text(json.dumps([seen, stands]))
    return 0


# Rounds


class Talk:
    """What was saved of one policy: records, the session's bits, and its next answer."""

    def __init__(self, llm: LLM, policy: str, rng: random.Random) -> None:
        store = llm.sessions.store
        self.policy = policy
        session = llm.session(policy, name="talk")
        for _ in range(rng.randrange(1, 4)):
            answer(session, random_ids(rng.randrange(5, 60), seed=rng.randrange(10**6)))
            llm.sessions.flush()
        self.bits, self.tokens, self.snapshots = bits(llm, session), session.token_ids, snapshots(llm, session)
        self.next = random_ids(20, seed=7)
        self.content, self.past = dict(store.content), list(store.past)
        self.answer = answer(session, self.next)
        session.close()
        llm.sessions.forget("talk")


def bits(llm: LLM, session: Any) -> list[Any]:
    """All that the session is."""
    memory, views = session.sequence.memories[session.sequence.id], range(llm.engine.layers)
    kept = [states.save(getattr(memory, name)) for name in ("states", "tails", "gone", "watched")]
    rows = [tensor for layer in views for tensor in (memory.kv.view(layer).keys(), memory.kv.view(layer).values())]
    own = {} if memory.kept is None else memory.kept.save(memory.kv.length) or {}
    return [session.token_ids, [one.tobytes() for one in map(_array, rows)], *map(_plain, [*kept, (own, None)])]


def snapshots(llm: LLM, session: Any) -> dict[int, Any]:
    """The states that layers can go back to, by their tokens."""
    kept = session.sequence.memories[session.sequence.id].kept
    return {} if kept is None else {length: _plain((kept.save(length), None)) for length in kept.snapshots}


def _array(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().numpy()


def _plain(saved: Any) -> Any:
    tensors, data = saved
    return {name: (str(one.dtype), list(one.shape), _array(one).tobytes()) for name, one in tensors.items()}, data


def rounds(count: int, seed: int) -> Counter[str]:
    """Save, harm, restore. AssertionError for what was read wrongly, or refused without a name."""
    seen: Counter[str] = Counter()
    rng = random.Random(seed)
    logging.getLogger("saccade").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        folder, twin = small_model(Path(scratch) / "model"), small_model(Path(scratch) / "twin", seed=5)
        store = MemoryStore()
        llm, other = open_llm(folder, session_store=store), open_llm(twin, session_store=MemoryStore())
        foreign = Talk(other, "dense", rng)  # under the same name, of another model
        made: list[Talk] = []
        number, printed = 0, time.monotonic()
        while seen["rounds"] < count:
            number += 1
            if time.monotonic() > printed + 60:
                printed = time.monotonic()
                print(f"{seen['rounds']} rounds", flush=True)
            if len(made) < 40 or number % 500 == 0:
                store.content = {}
                reopened(llm)
                made = [*made[-60:], Talk(llm, rng.choice(POLICIES), rng)]
                if len(made) < 40:
                    continue
            one = rng.choice(made)
            fault = rng.choice(("none", "other model", "other policy", *FAULTS, *FAULTS))
            store.content, store.past = dict(one.content), list(one.past)
            if fault == "other model":
                store.content.update(some(foreign.content, rng))
            elif fault == "other policy":
                strange = rng.choice([talk for talk in made if talk.policy != one.policy] or made)
                mixed = some(strange.content, rng)
                store.content.update(mixed)
            elif fault == "foreign":
                strange = rng.choice(made)
                renamed = {f"x{key[1:]}": content for key, content in strange.content.items()}
                store.content.update(renamed)
            if fault in FAULTS:
                keys = sorted(key for key in store.content if key.startswith("s"))
                if not store.harm(rng.choice(keys), fault, rng):
                    continue
            if rng.random() < 0.1:
                reopened(llm)
                store.content = saved_again(llm, store)
            seen["rounds"] += 1
            reopened(llm)
            try:
                session = llm.session(name="talk")
            except RequestError as error:
                named(str(error))
                seen[f"{fault}: refused"] += 1
                continue
            check(llm, session, [one, *made, foreign], fault, seen, rng)
            session.close()
        assert llm.pool.used_blocks == 0
        assert llm.pool.states is None or llm.pool.states.used == 0
        assert not llm.engine.sessions
    return seen


def named(refusal: str) -> None:
    assert any(name in refusal for name in NAMED), refusal


def reopened(llm: LLM) -> None:
    """The store as a new process opens it."""
    llm.sessions.flush()
    llm.sessions = DurableSessions(llm.sessions.store, llm.loop, segment=SEGMENT)


def some(content: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """All of a session's records, or its head alone, or one of its segments."""
    chosen = rng.randrange(3)
    heads = {key: part for key, part in content.items() if key.endswith("/head")}
    if chosen == 0:
        return dict(content)
    if chosen == 1 or len(heads) == len(content):
        return heads
    key = rng.choice([key for key in content if key not in heads])
    return {key: content[key]}


def saved_again(llm: LLM, store: MemoryStore) -> dict[str, bytes]:
    """What is there after a restore and one more save, as far as it can be restored."""
    try:
        session = llm.session(name="talk")
    except RequestError:
        return store.content
    session._ended()
    session.close()
    return store.content


def beginning(kept: bytes, whole: bytes, heads: int = 2) -> bool:
    """Whether rows [heads, tokens, head_dim] are the first ones of the whole."""
    own, all_ = len(kept) // heads, len(whole) // heads
    return all(whole[head * all_ : head * all_ + own] == kept[head * own : (head + 1) * own] for head in range(heads))


def check(llm: LLM, session: Any, known: list[Talk], fault: str, seen: Counter[str], rng: random.Random) -> None:
    ids = session.token_ids
    if not ids:  # no head: no session
        assert fault in ("missing", "foreign", "stale", "swapped", "torn", "flipped"), fault
        seen[f"{fault}: empty"] += 1
        return
    same = [talk for talk in known if talk.tokens == ids]
    if not same:  # the head of an earlier save: a state that it went through
        assert fault == "stale", f"{fault}: tokens that nobody said"
        seen["stale: earlier"] += 1
        return
    if session.note is None:
        whole = bits(llm, session)
        same = [talk for talk in same if talk.bits == whole]
        assert same, f"{fault}: keys, values or states that nobody saved"
        seen[f"{fault}: whole"] += 1
        there = snapshots(llm, session)
        seen["older snapshots"] += len(there) - (session.sequence.computed in there)
        assert any(there.items() <= talk.snapshots.items() for talk in same), f"{fault}: states that nobody saved"
    else:
        assert "computed again" in session.note
        kept, stop = bits(llm, session)[1], session.sequence.computed
        format = llm.pool.format  # keys as values, whatever they are stored as
        assert len(kept[0]) == format.kv_heads * format.head_dim * format.dtype.itemsize * stop
        assert any(all(map(beginning, kept, talk.bits[1])) for talk in same), fault
        seen[f"{fault}: recomputed"] += 1
        seen["of them from a part"] += stop > 0
    if rng.random() < 0.05:
        told = session.note is not None
        said = answer(session, same[0].next)
        assert any(alike(said, talk.answer, close=told) for talk in same), f"{fault}: another answer; {session.note}"
        seen["answers compared"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--family", default="llama", help="of tests/tiny_models.py")
    options = parser.parse_args()
    os.environ[KV_DTYPE], os.environ[FAMILY] = options.kv_dtype, options.family
    torch.set_num_threads(1)
    logging.getLogger("saccade").setLevel(logging.ERROR)
    for what, run, count in (("kills", kills, options.kills), ("rounds", rounds, options.rounds)):
        if count:
            began = time.perf_counter()
            seen = run(count, options.seed)
            print(f"{what}, in {time.perf_counter() - began:.0f} s, seed {options.seed}: nothing wrong was read")
            for name, times in sorted(seen.items()):
                print(f"  {name:28} {times}")


if __name__ == "__main__":
    main()
