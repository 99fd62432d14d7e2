"""``saccade generate``: one prompt, answered or completed as one watches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli.inputs import Part, gather, refuse_too_long, write_json
from saccade.cli.options import FIRST, LAST, POLICY, load_model, takes_engine
from saccade.cli.sampling import takes_sampling
from saccade.cli.streaming import as_dict, hint, show_stream, summary
from saccade.errors import RequestError
from saccade.machine import check_writable

if TYPE_CHECKING:
    from saccade.engine.sampling.params import SamplingParams
    from saccade.engine.settings.config import EngineConfig
    from saccade.llm import LLM


@takes_sampling()
@takes_engine()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; after --prompt-file, what follows the document.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", "-f", help="Document before the prompt; - is standard input."),
    ] = None,
    policy: Annotated[str, POLICY] = "dense",
    first: Annotated[int | None, FIRST] = None,
    last: Annotated[int | None, LAST] = None,
    report: Annotated[Path | None, typer.Option(help="Write what was really done to this JSON file.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it stands, without the model's chat template.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer alone.")] = False,
    *,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Answer a prompt; tokens are printed as they come.

    A model with a chat template is asked through it, as a user's message; others, and --raw, complete the text.
    The document may come from a file or a pipe and the question as the argument:
    saccade generate -f book.txt "The password is" --policy "flexprefill+psa"
    cat book.txt | saccade generate "The password is"
    """
    document, asked_after = gather(prompt, prompt_file)
    part = Part(first, last)
    if document is None and part != Part():
        raise RequestError("--first and --last take a part of a document; give one with -f FILE, or leave them out")
    check_writable(report)
    from saccade.methods.policy import Policy

    chosen = Policy.parse(policy)
    llm = load_model(config, quiet=quiet)
    if document is not None:
        document = part.of(document, llm.tokenizer)
        refuse_too_long(document, "the document", llm)
    text = "\n".join(one for one in (document, asked_after) if one is not None)
    asked = not raw and llm.tokenizer.has_chat_template
    steps = llm.stream(_message(llm, text) if asked else text, params, policy=chosen)
    outcome = show_stream(llm, steps, quiet)
    if report is not None:
        write_json(report, {"model": config.model, "chat_template": asked, "text": outcome.text, **as_dict(outcome)})
    if not quiet:
        summary(outcome)
        hint(str(config.model), outcome.text)
    if outcome.error is not None:
        print(f"saccade: error: the request failed: {outcome.error}", file=sys.stderr)
        raise typer.Exit(1)


def _message(llm: LLM, text: str) -> list[int]:
    """``text`` as a user's message, in the model's chat template."""
    try:
        ids: list[int] = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return ids
    except RequestError as error:
        raise RequestError(f"{error}; --raw completes the prompt without it") from error
