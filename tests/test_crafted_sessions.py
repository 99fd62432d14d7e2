"""Session files whose checksums are right and whose content is not: each is refused by one sentence that says why, or
its keys are computed again and a note says so; nothing is left of it, and nothing is half restored."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from engine_helpers import make
from memory_store import MemoryStore
from tiny_models import VOCAB, random_ids
from tiny_models import one_thread as one_thread

from saccade import SamplingParams
from saccade.errors import RequestError, SaccadeError
from saccade.methods import state as states
from saccade.methods.state import _KINDS, MethodState
from saccade.records import Record, decode_record, encode_record, read_record, write_record
from saccade.session import RECORD
from saccade.sessions.durable import DurableSessions
from saccade.sessions.heads import HEAD

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
FIRST, SECOND = random_ids(70, seed=1), random_ids(12, seed=2)
POLICIES = (
    "dense",
    "flexprefill(gamma=0.5, block_size=64, min_budget=0)+quest(budget=32, dense_layers=0)",
    "lfps(k=16, blocks=2, least=16, history=keep)",
    "cis(k=16, sinks=2, local=8)",
    "h2o(budget=48)",
    "rocketkv(capacity=48, window=16, kernel=9, keys=24)",
    "twilight(dense_upto=0, p=0.8, base=48, dense_layers=0)",
    "hshare(heavy=16, sinks=4, local=8, source=prompt, rows=8)",
    "magicpig(dense_upto=0, bits=4, tables=8, local=8, dense_every=0)",
    "vattention(follow=8, heavy=16, sinks=4, local=16)",
    "loopserve(first=1, n_d=2)",
    "auto(least=10, method=lfps)",
)
WRONG = (None, True, -7, 10**30, 1.5, float("nan"), "\ud800", "x", [], [None], {}, {"tensor": "nowhere"})
MOST = 2  # elements of a list that are changed each
STEP = 24  # of so many crafted ones the suite takes one; of those under dense, one in three
OWN = "memory", "states/", "summary"  # what methods have of their own


def places(value, path=()):
    """The path of every part of plain data; of long lists the first few."""
    yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list):
        for at, part in enumerate(value[:MOST]):
            yield from places(part, (*path, at))


def put(data, path, change):
    """A copy of ``data`` with ``change`` of the part at ``path``."""
    whole = [copy.deepcopy(data)]
    place, *rest = (0, *path)
    holder = whole
    while rest:
        holder, place = holder[place], rest.pop(0)
    change(holder, place)
    return whole[0]


def odd_data(data, wrong):
    """What makes ``data`` with one part gone, twice there, or another; and what it is called."""
    for number, path in enumerate(places(data)):
        if path:
            yield partial(put, data, path, lambda holder, place: holder.pop(place)), f"without {path}"
        for value in (wrong[number % len(wrong)], wrong[(number * 5 + 3) % len(wrong)]):
            change = partial(_set, value=value)
            yield partial(put, data, path, change), f"{path}={value}"
        if path and isinstance(path[-1], int):
            twice = lambda holder, place: holder.insert(place, copy.deepcopy(holder[place]))  # noqa: E731
            yield partial(put, data, path, twice), f"{path} twice"


def _set(holder, place, value):
    holder[place] = value


def crafted(record, step, only=()):
    """One in ``step`` of the records like this one with something wrong in it; ``only`` where the name has one of
    these."""
    made = [
        (lambda make=make: Record(record.kind, make(), record.tensors), what)
        for make, what in odd_data(record.data, WRONG)
    ]
    made += [
        (lambda make=make: Record(record.kind, record.data, make()), what) for make, what in odd_tensors(record.tensors)
    ]
    made = [one for one in made if not only or any(part in one[1] for part in only)]
    assert len(made) > 3 * step
    return [(make(), what) for make, what in made[step // 2 :: step]]


def odd_tensors(tensors):
    """What makes ``tensors`` with one gone, of another type or shape, or with values out of every range."""
    for name, tensor in tensors.items():
        yield lambda name=name: {key: part for key, part in tensors.items() if key != name}, f"without {name}"
        others = [tensor.reshape(-1)[:-1], tensor[None], tensor.reshape(-1), tensor.to(torch.int16)]
        others += [tensor.to(torch.float64) if tensor.dtype != torch.float64 else tensor.float()]
        others += [torch.cat([tensor, tensor]), tensor[:0]] if tensor.dim() else []
        if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel():
            for value in (-9, torch.iinfo(tensor.dtype).max, 100 * VOCAB if tensor.itemsize > 1 else 3):
                others.append(tensor.clone())
                others[-1].view(-1)[0] = value
        for number, other in enumerate(others):
            if other.dtype != tensor.dtype or other.shape != tensor.shape or not torch.equal(other, tensor):
                yield lambda name=name, other=other: {**tensors, name: other.contiguous()}, f"{name} {number}"


def held_to(seen: Counter, llm, restore, what: str) -> None:
    """Restore what was crafted, and look at what came of it."""
    try:
        session = restore()
    except RequestError as error:
        said = str(error)
        assert said, what
        assert "\n" not in said, what
        assert len(said) < 1200, (what, said)
        assert "Error" not in said, (what, said)
        seen["refused"] += 1
    else:
        ids = session.token_ids
        assert all(0 <= one < VOCAB for one in ids), what
        assert session.note is None or "computed again" in session.note or session.note == "x", what
        output = session.generate(SECOND, SHORT)
        assert output.error is None, (what, output.error)
        seen["computed again" if session.note else "taken"] += 1
        session.close()
    assert not llm.engine.sessions, what
    assert llm.pool.used_blocks == 0, what


@pytest.fixture(scope="module")
def saved(llm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    records = {}
    for number, policy in enumerate(POLICIES):
        with llm.session(policy=policy) as session:
            session.generate(FIRST, SHORT)
            session.save(folder / str(number))
        records[policy] = read_record(folder / str(number), RECORD)
    return records


def check_files(llm, record, path, step):
    """Restore crafted files of one record; what all have in common is looked at under dense."""
    seen, dense = Counter(), record.data["policy"] == "dense"
    for one, what in crafted(record, 1 if step == 1 else 3 if dense else step, () if dense else OWN):
        path.write_bytes(encode_record(one))
        held_to(seen, llm, lambda: llm.restore(path), what)
    assert not dense or seen["refused"] > 30, seen


@pytest.mark.parametrize("policy", POLICIES)
def test_crafted_files_are_refused_or_computed_again(llm, saved, tmp_path, policy):
    check_files(llm, saved[policy], tmp_path / "crafted", STEP)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_every_crafted_file_is_refused_or_computed_again(llm, saved, tmp_path, policy):
    check_files(llm, saved[policy], tmp_path / "crafted", 1)


def test_crafted_heads_and_segments_are_refused_or_computed_again(tiny_llama):
    store, seen = MemoryStore(), Counter()
    first = make(tiny_llama, session_store=store)
    first.sessions.segments.size = 32
    with first.session("dense", name="talk") as session:
        session.generate(FIRST, SHORT)
    first.close()
    whole = dict(store.content)
    store = MemoryStore()
    llm = make(tiny_llama, session_store=store)
    for key, content in whole.items():
        kind = HEAD if key.endswith("head") else "saccade session segment"
        record = decode_record(content, kind, key)
        for one, what in crafted(record, 8):
            store.content = {**whole, key: encode_record(one)}
            llm.sessions = DurableSessions(store, llm.loop, segment=32)
            listed = llm.sessions.stored()
            assert len(listed) == 1
            held_to(seen, llm, lambda: llm.session(name="talk"), f"{key}: {what}")
            llm.sessions.flush()
    assert seen["refused"] > 10, seen
    assert seen["computed again"] > 5, seen
    llm.close()


def test_token_ids_are_of_the_vocabulary(llm, saved, tmp_path):
    record = saved["dense"]
    for wrong in (VOCAB, -1, 2**40):
        ids = record.tensors["tokens"].clone()
        ids[5] = wrong
        write_record(tmp_path / "talk", Record(RECORD, record.data, {**record.tensors, "tokens": ids}))
        for recompute in (False, True):
            with pytest.raises(
                RequestError, match=f"token 5 of the saved session is {wrong}, .* from 0 to {VOCAB - 1}"
            ):
                llm.restore(tmp_path / "talk", recompute=recompute)


def test_records_with_the_wrong_inside_are_refused(tmp_path):
    """What lies below a record's data: its own description, and tensors that share bytes or are no truth values."""
    good = encode_record(Record("thing", {}, {"a": torch.arange(4), "b": torch.tensor([True, False])}))
    assert decode_record(good, "thing", "it").damaged == []
    import json

    length = int.from_bytes(good[:8], "little")
    header, parts = json.loads(good[8 : 8 + length]), bytearray(good[8 + length :])
    where = header["b"]["data_offsets"][0]
    parts[where] = 7
    from saccade.records import _digest, checksum

    body = json.loads(header["__metadata__"]["saccade.record"])
    body["checksums"]["b"] = checksum(bytes(parts[where : where + 2]), "torch.bool [2]")

    def decoded(body, header=header, parts=parts):
        text = body if isinstance(body, str) else json.dumps(body)
        meta = {"saccade.record": text, "checksum": _digest(text.encode())}
        head = json.dumps({**header, "__metadata__": meta}).encode()
        return decode_record(len(head).to_bytes(8, "little") + head + bytes(parts), "thing", "it")

    assert decoded(body).damaged == ["b"]
    odd = [
        [],
        None,
        5,
        "[" * 100_000,
        {},
        *({**body, key: value} for key in body for value in WRONG if key != "data" and value != {}),
    ]
    odd.pop()  # checksums of other parts: those are missing, and damaged
    for one in odd:
        with pytest.raises(RequestError, match="it is"):
            decoded(one)
    for value in (*WRONG, {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 32]}):
        assert "a" in decoded(body, {**header, "a": value}).damaged
    shared = {**header, "a": {**header["a"], "data_offsets": [where, where + 32]}}
    with pytest.raises(RequestError, match=r"overlap|damaged"):
        decoded(body, {**shared, "b": {**header["b"], "data_offsets": [where, where + 2]}}, parts + bytes(64))


def test_every_state_says_what_it_takes_for_granted():
    own = {name: kind for name, kind in _KINDS.items() if kind.__module__.startswith("saccade.")}
    plain = [name for name, kind in own.items() if kind.fit is MethodState.fit]
    # Those hold other states alone, or are a base.
    assert sorted(plain) == ["Drafted", "Evicting", "TurnBefore"]


def test_states_that_are_right_fit(llm, saved):
    for policy, record in saved.items():
        for name in ("states", "tails", "gone", "watched"):
            parts = {key.removeprefix(f"{name}/"): one for key, one in record.tensors.items() if key.startswith(name)}
            assert len(states.load(parts, record.data["engine"]["memory"][name])) == 3, policy
    assert issubclass(RequestError, SaccadeError)
