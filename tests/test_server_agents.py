"""Agents in long conversations: what they say again is read from the cache, though their system prompts begin otherwise
at each call."""

from __future__ import annotations

import pytest
from agents import agents, play
from chat_templates import TEMPLATES
from engine_helpers import make
from server_helpers import serving
from tiny_models import make_checkpoint

anthropic = pytest.importorskip("anthropic")
CODER, READER = "coder", "reader"
SPARSE = {"policy": "flexprefill+psa"}  # whole chunks of its prefill are shared
LONG = [pytest.mark.thorough, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "turns", "letters", "more"),
    [
        (CODER, 8, 1_500, {}),
        (READER, 8, 1_500, {}),
        (CODER, 5, 1_500, SPARSE),
        pytest.param(CODER, 30, 95_000, {}, marks=LONG),
        pytest.param(READER, 30, 95_000, {}, marks=LONG),
    ],
)
def test_an_agent_reads_what_it_said_before_from_the_cache(tmp_path, name, turns, letters, more):
    [agent] = [one for one in agents() if one.name == name]
    layers = 1 if turns == 30 else 2  # the cache is looked at, not the answers
    model = make_checkpoint(
        "llama", tmp_path / "model", max_position_embeddings=2 * letters + 4096, num_hidden_layers=layers
    )
    (model / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    chunk = 64 if letters < 10_000 else 2048
    llm = make(model, (2 * letters + 4096) // 8, chunk=chunk, enable_prefix_caching=True, max_token_gap=None)
    size, streamed = llm.pool.format.block_size, []
    with (
        serving(llm, names=("tiny",), tool_parser="hermes", reasoning_parser="qwen3") as server,
        anthropic.Anthropic(
            base_url=server.url, api_key="none", _strict_response_validation=True, max_retries=0, timeout=600
        ) as client,
    ):

        def ask(fields):
            forced = {"structured_outputs": fields.pop("structured_outputs"), "temperature": 1.0, **more}
            streamed.append(len(streamed) % 2 == 1)
            if not streamed[-1]:
                return client.messages.create(model="tiny", **fields, extra_body=forced).model_dump(exclude_none=True)
            with client.messages.stream(model="tiny", **fields, extra_body=forced) as stream:
                return stream.get_final_message().model_dump(exclude_none=True)

        played = play(agent, ask, turns, letters)
        server.idle()
    print(
        f"{agent.name}: {turns} turns to {played.prompts[-1]} tokens, {100 * played.share:.2f} % of prompt tokens read "
        f"from the cache; {100 * played.best:.2f} % had been in an earlier prompt"
    )
    # All but the block that changes, and the rest of a block of keys or of a chunk, is there. 80: the block's marks,
    # and how the template begins an answer.
    for before, read in zip(played.prompts, played.read[1:]):
        assert read > before - len(agent.head) - 80 - (chunk if more else size)
    if turns == 30:
        assert played.prompts[-1] > 95_000
        assert played.share >= 0.95
