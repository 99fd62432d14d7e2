"""A server through langchain: start `saccade serve` first, and pip install langchain-openai."""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

PROMPT = "The secret password of the lighthouse keeper is 7391-XKQ. " + "Rain fell on the town. " * 40
PROMPT += "The secret password of the lighthouse keeper is"


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]


def main(url: str = "http://localhost:8000/v1", key: str = "none", model: str = "retriever") -> None:
    asked = {"model": model, "base_url": url, "api_key": key, "temperature": 0}
    for policy in ("dense", "psa"):
        chat = ChatOpenAI(max_tokens=9, extra_body={"policy": policy}, **asked)
        answer = chat.invoke(PROMPT)
        print(f"{policy}: {answer.content!r}, {answer.usage_metadata['output_tokens']} tokens")
    print(f"streamed: {''.join(part.content for part in chat.stream(PROMPT))!r}")
    colour = ChatOpenAI(max_tokens=100, **asked).with_structured_output(Colour).invoke("Which colour?")
    print(f"structured: {colour.name in ('red', 'green', 'blue')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
