"""One document, many questions: the text is read once, and each question costs its own tokens alone."""

import sys
from pathlib import Path

from saccade import LLM, SamplingParams

DOCUMENT = (
    "The harbour was quiet. The password of the lighthouse keeper is 7391-XKQ. The favourite dish of the baker is "
)
DOCUMENT += "lentil soup with mint. " + "Rain fell, and nobody spoke of the storm. " * 60
QUESTIONS = ["The password of the lighthouse keeper is", "The favourite dish of the baker is"]


def main(model: str = "retriever", document: str = "") -> None:
    text = Path(document).read_text(encoding="utf-8") if document else DOCUMENT
    params = SamplingParams(temperature=0, max_tokens=24, stop=[". ", "\n"])
    with LLM(model, policy="flexprefill(min_budget=256)+psa") as llm, llm.session() as session:
        read = llm.encode(text)
        session.complete(read, SamplingParams(max_tokens=1))  # reads the document by itself, so that it is kept whole
        for question in QUESTIONS:
            ids = [*read, *llm.encode(f"\n{question}", first=False)]
            answer = session.complete(ids, params)
            kept = answer.num_cached_tokens
            print(f"{question}{answer.outputs[0].text}   [{kept} of {len(ids)} tokens kept]")


if __name__ == "__main__":
    main(*sys.argv[1:])
