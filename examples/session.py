"""A conversation: turns share one context, each under a policy of its own, streamed."""

import sys

from saccade import LLM, SamplingParams

TURNS = [
    ("The secret password of the lighthouse keeper is 7391-XKQ. " + "Boats came and went. " * 80, "flexprefill"),
    ("The secret password of the lighthouse keeper is", "psa"),
    ("The secret password of the lighthouse", "dense"),
]


def main(model: str = "retriever") -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(model) as llm, llm.session() as session:
        for message, policy in TURNS:
            print(f"> {message[:60]}   ({policy})")
            for step in session.stream_chat(message, params, policy=policy):
                print(step.new_text, end="", flush=True)
            print()
        print(f"{len(session.messages) // 2} turns, {len(session.token_ids)} tokens of context")


if __name__ == "__main__":
    main(*sys.argv[1:])
