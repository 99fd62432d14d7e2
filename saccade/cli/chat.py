"""``saccade chat``: a conversation at a terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.options import FIRST, LAST, POLICY, load_model, takes_engine
from saccade.cli.sampling import takes_sampling
from saccade.cli.sessions import held, older_file, path_of
from saccade.cli.streaming import hint, show_stream
from saccade.errors import RequestError, SaccadeError

if TYPE_CHECKING:
    from saccade.cli.conversation import Conversation
    from saccade.engine.sampling.params import SamplingParams
    from saccade.engine.settings.config import EngineConfig


@takes_sampling(max_tokens=2048)
@takes_engine()
def chat(
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", "-f", help="Document to talk about, in any format that it is likely to have."),
    ] = None,
    policy: Annotated[str | None, POLICY] = None,
    first: Annotated[int | None, FIRST] = None,
    last: Annotated[int | None, LAST] = None,
    session: Annotated[
        str | None,
        typer.Option(help="Keep the conversation under this name: go on from it, and save it behind every answer."),
    ] = None,
    *,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Talk in turns; keys and values are kept, so a turn computes only what it adds.

    Commands: /load, /policy, /report, /reset, /help, /quit. Ctrl-C stops an answer, which stands as far as it came,
    Ctrl-D ends. At a terminal a document is read while one types, Alt-Enter begins a new line, and what is pasted may
    have many.
    """
    from saccade.cli.conversation import Conversation, Part
    from saccade.cli.progress import waiting
    from saccade.methods.policy import Policy

    chosen, part = None if policy is None else Policy.parse(policy), Part(first, last)
    if prompt_file is None and part != Part():
        raise RequestError("--first and --last take a part of a document; give one with -f FILE, or leave them out")
    if prompt_file is not None and not prompt_file.exists():
        raise RequestError(f"prompt file {prompt_file} does not exist")
    path = None if session is None else path_of(session)
    if path is not None:
        config = replace(config, session_dir=path)
    with nullcontext() if path is None else held(path):
        llm, model = load_model(config), str(config.model)
        older = None if path is None else older_file(path)
        at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        conversation = Conversation(llm, chosen, params, _note, session, older, ahead=at_terminal)
        if prompt_file is not None:
            if conversation.policy.deferred and not llm.engine.automatic.is_timed:
                _note("timing what pays on this machine, this once; --policy dense does without")
                with waiting("timing"):
                    llm.engine.automatic.offer()  # nothing runs yet
            conversation.load(prompt_file, part)
        read = terminal_reader(list(conversation.commands), conversation.reading) if at_terminal else _read_line
        if at_terminal:
            under = conversation.policy.text
            _note(f"{model} under {under}. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.")
        talk(conversation, read, model)
        conversation.end()
        llm.close()
        if older is not None and conversation.is_saved:
            older.unlink(missing_ok=True)


def talk(conversation: Conversation, read: Callable[[], str | None], model: str) -> None:
    """Read and answer until ``read`` gives None. An interrupt stops one answer; an error leaves all as it was."""
    hinted = False
    while True:
        try:
            line = read()
        except KeyboardInterrupt:  # what was typed is dropped
            continue
        if line is None:
            return
        line = line.strip()
        if not line:
            continue
        try:
            if line.startswith("/") and not line.startswith("//"):
                if not conversation.command(line):
                    return
                continue
            said = line.removeprefix("/") if line.startswith("//") else line
            stopper = Stopper(conversation)
            outcome = show_stream(conversation.llm, conversation.say(said), stop=stopper)
            if outcome.error is not None:
                print(f"saccade: error: the turn failed: {outcome.error}", file=sys.stderr)
            elif stopper.stopped:
                _note("stopped; what was said stays")
            elif outcome.finish_reason == "length":
                cut = f"the answer was cut after {outcome.report['output_tokens']:,} tokens"
                _note(f"{cut}; -n allows more, and 'go on' has it continued")
            elif not hinted:
                hinted = hint(model, outcome.text)
        except KeyboardInterrupt:
            print(flush=True)
            _note("stopped; this turn is forgotten")
        except SaccadeError as error:  # the conversation goes on as it was before this turn
            print(f"saccade: error: {error}", file=sys.stderr)


class Stopper:
    """Ends an answer at the user's wish."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.stopped = conversation, False

    def __call__(self) -> bool:
        self.stopped = self.conversation.session.stop()
        return self.stopped


def terminal_reader(commands: list[str], reading: Callable[[], str] = str) -> Callable[[], str | None]:
    """Reads messages with line editing, history and completion of commands. Enter sends; Alt-Enter, and line breaks of
    what is pasted, do not. Above stands what ``reading`` says, as long as it says anything."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def message() -> str:
        said = reading()
        return f"{said}\n> " if said else "> "

    completer = WordCompleter([f"/{name}" for name in (*commands, "quit")], sentence=True)
    session: PromptSession[str] = PromptSession(
        message,
        multiline=True,
        key_bindings=keys,
        completer=completer,
        complete_while_typing=False,
        prompt_continuation="  ",
    )

    def read() -> str | None:
        try:
            return session.prompt(refresh_interval=0.5 if reading() else 0)
        except EOFError:
            return None

    return read


def _read_line() -> str | None:
    try:
        return sys.stdin.readline() or None
    except UnicodeDecodeError as error:
        raise RequestError("standard input is not UTF-8 text; convert it first, for example with iconv") from error


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
