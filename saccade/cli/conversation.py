"""What ``saccade chat`` talks to: turns of a session with documents, commands, and a history that is cut to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.cli.ahead import Ahead
from saccade.cli.inputs import WHOLE, Part, has_room, read_text, refuse_too_long, room_of
from saccade.cli.progress import waiting
from saccade.errors import RequestError
from saccade.machine import show_bytes
from saccade.methods.policy import Policy

if TYPE_CHECKING:
    from saccade.engine.messages import AddRequest, RequestOutcome, StepOutput
    from saccade.engine.sampling.params import SamplingParams
    from saccade.llm import LLM

PINNED = "document"  # marks messages that hold documents: these are dropped by /reset alone
HELP = """\
/load FILE    read a document; it goes before your next message and stays until /reset
/policy TEXT  answer under another policy from now on; without TEXT, say which one holds
/report       what the last answer really read, and what it cost
/reset        forget everything said and loaded
/help         this
/quit         end (so does Ctrl-D)
A message that begins with // is sent with one / less."""


class Conversation:
    """Turns over one session. ``note`` says something to the user. Turns that fail leave it as it was.

    With ``name`` it goes on from what the model's ``session_dir`` holds under it, and is saved there behind every
    answer; ``policy`` None is then the saved one's, else ``auto``. ``older``: a file of an earlier version to go on
    from. ``ahead``: documents are read while the user types.
    """

    def __init__(
        self,
        llm: LLM,
        policy: Policy | None,
        params: SamplingParams,
        note: Callable[[str], None],
        name: str | None = None,
        older: Path | None = None,
        ahead: bool = False,
    ) -> None:
        if not llm.tokenizer.has_chat_template:
            raise RequestError("this model has no chat template; saccade generate completes plain prompts with it")
        self.llm, self.params, self.note, self.name = llm, params, note, name
        try:
            self._open(policy, older)
        except RequestError as error:
            if name is None or "recompute" not in str(error):
                raise
            # The command line has no such option.
            why = str(error).partition("; ")[0]
            raise RequestError(f"{why}; use that, another --session, or saccade sessions --remove {name}") from error
        if self.session.messages:
            turns, length = len(self.session.messages) // 2, len(self.session.token_ids)
            note(
                f"going on from {turns} turns, {length:,} tokens"
                + (f"; {self.session.note}" if self.session.note else "")
            )
        self.policy = self.session.policy
        self.documents: list[str] = []  # that go with the next message
        self._reads_ahead, self._ahead = ahead, list[Ahead]()
        self._told: str | None = None  # of what could not be saved
        self.last: RequestOutcome | None = None
        self.commands: dict[str, Callable[[str], None]] = {
            "load": lambda name: self.load(Path(name).expanduser()) if name else self.note("/load needs a file"),
            "policy": self._set_policy,
            "report": self._report,
            "reset": self._reset,
            "help": lambda _: self.note(HELP),
        }

    def _open(self, policy: Policy | None, older: Path | None) -> None:
        """What is stored under the name, or a new session."""
        if older is not None and older.is_file():
            self.session = self.llm.restore(older, policy)
            self.session.name = self.name
        else:
            chosen = "auto" if policy is None and not self._is_stored() else policy
            self.session = self.llm.session(chosen, name=self.name)

    def command(self, line: str) -> bool:
        """Obey a line that is a command; False for ``/quit``."""
        name, _, rest = line.removeprefix("/").partition(" ")
        if name in ("quit", "exit"):
            return False
        if name in self.commands:
            self.commands[name](rest.strip())
            return True
        close = get_close_matches(name, self.commands, n=1)
        raise RequestError(f"/{name} is no command; " + (f"did you mean /{close[0]}?" if close else "try /help"))

    def say(self, text: str) -> Iterator[StepOutput]:
        """Send a message with what was loaded before it, and give the answer step by step. Leaving early stops the
        answer, and the turn was never said."""
        turn: dict[str, Any] = {"role": "user", "content": "\n\n".join([*self.documents, text])}
        if self.documents:
            turn[PINNED] = True
        self._await_documents()
        dropped = self.make_room(turn)
        if dropped:
            self.note(f"the context is full: the oldest {dropped} of the turns were dropped")
        for step in self.session.stream_chat(turn, self.params, policy=self.policy):
            if step.outcome is not None:
                self.last = step.outcome
                if step.outcome.error is None:
                    self.documents = []
            yield step
        self.saved(wait=False)

    @property
    def is_saved(self) -> bool:
        """Whether an answer of this process is in the folder."""
        return self.llm.sessions is not None and self.llm.sessions.counts["saves"] > 0

    def saved(self, wait: bool = True) -> None:
        """Tell what could not be saved, once; with ``wait``, of the last answer too."""
        stored = self.llm.sessions
        if self.name is None or stored is None:
            return
        if wait:
            stored.flush()
        if stored.last_error is not None and stored.last_error != self._told:
            self._told = stored.last_error
            self.note(f"warning: {self._told}")

    def make_room(self, turn: dict[str, Any]) -> int:
        """Drop the oldest turns without documents until ``turn`` and its answer fit; returns how many. RequestError
        where what cannot be dropped is too long."""
        messages = self.session.messages
        room = room_of(self.llm)
        answer = min(self.params.max_tokens or room, max(1, room // 4))
        dropped = 0
        while (length := self._length([*messages, turn])) + answer > room:
            oldest = next((at for at in range(0, len(messages), 2) if not messages[at].get(PINNED)), None)
            if oldest is None:
                if length >= room:
                    raise RequestError(
                        f"the message and its documents have {length:,} tokens, but {has_room(self.llm)}; "
                        "shorten them, or forget documents with /reset"
                    )
                break
            del messages[oldest : oldest + 2]
            dropped += 1
        return dropped

    def load(self, path: Path, part: Part = WHOLE) -> None:
        """Read a document, or a part of it, for the next message. RequestError, at once, for one that is too long."""
        with waiting(f"opening {path}"):  # a long PDF takes seconds, and so does a long text
            text = read_text(path)
            if not text.strip():
                raise RequestError(f"{path} is empty; give a document with some text")
            text = part.of(text, self.llm.tokenizer)
            refuse_too_long(text, str(path), self.llm)
            count = len(self.llm.tokenizer.encode(text, add_special_tokens=False))
        self.documents.append(text.removesuffix("\n"))
        try:
            self.make_room({"role": "user", "content": "\n\n".join(self.documents)})
        except RequestError:
            self.documents.pop()
            raise
        self.note(f"{path}: {count:,} tokens; they go before your next message")
        if self._reads_ahead:
            self._read_ahead()

    def reading(self) -> str:
        """How far documents are read that are read while the user types; nothing where none is."""
        return next((said for one in self._ahead if (said := one.said())), "")

    def end(self) -> None:
        """Give up what is read, and tell what could not be saved."""
        for one in self._ahead:
            one.stop()
        self.saved()

    def _read_ahead(self) -> None:
        if self.policy.decode.evicts:
            self.note(f"it is read with your message, for '{self.policy.decode.text}' keeps what that asks about")
            return
        before, session, policy = list(self._ahead), self.session, self.policy
        beginning = "\n\n".join(self.documents)

        def request() -> AddRequest | None:
            for one in before:
                one.wait()
            return session.ahead(beginning, policy)

        self._ahead = [*(one for one in before if not one.over), Ahead(self.llm, request, session.was_read)]

    def _await_documents(self) -> None:
        """Until they are read, where that has begun."""
        for one in self._ahead:
            one.wait()
        self._ahead = []

    def _length(self, messages: list[dict[str, Any]]) -> int:
        return len(self.llm.tokenizer.apply_chat_template(messages))

    def _is_stored(self) -> bool:
        return self.name is not None and self.llm.sessions is not None and self.llm.sessions.has(self.name)

    def _set_policy(self, text: str) -> None:
        if text:
            chosen = Policy.parse(text)
            self.llm.engine.checks.policy(chosen)
            self.policy = self.session.policy = chosen
        self.note(f"policy: {self.policy.text}")

    def _reset(self, _: str) -> None:
        for one in self._ahead:
            one.stop()
        self.session.close()
        if self.name is not None and self.llm.sessions is not None:
            self.llm.sessions.forget(self.name)
        self.session = self.llm.session(self.policy, name=self.name)
        self.documents, self.last = [], None
        self.note("forgotten: what was said and loaded")

    def _report(self, _: str) -> None:
        if self.last is None:
            self.note("nothing was answered yet")
            return
        report = self.last.report
        kept = f"{report['cached_tokens']:,} of them ({show_bytes(report['cached_bytes'])}) kept from before"
        cached = f", {kept}" if report["cached_tokens"] else ""
        self.note(f"{report['prompt_tokens']:,} tokens before the answer{cached}; [{self.last.finish_reason}]")
        for phase in ("prefill", "decode"):
            stats = report[phase]
            if stats["tokens"]:
                read = "nothing read" if stats["density"] is None else f"density {stats['density']:.3f}"
                self.note(
                    f"{phase}: {stats['tokens']:,} tokens by {stats['policy']}, {read}, "
                    f"{stats['keys_attended']:,} of {stats['keys_causal']:,} keys, {stats['seconds']:.2f} s"
                )
        for said in report["notes"]:
            self.note(said)
        stored = self.llm.cache_report()["sessions"]
        if stored is not None:
            read, written = show_bytes(stored["bytes_read"]), show_bytes(stored["bytes_written"])
            self.note(f"session: {show_bytes(stored['bytes'])} stored, {written} written, {read} read since the start")
