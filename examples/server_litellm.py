"""A server through litellm: start `saccade serve` first, and pip install litellm."""

import sys

import litellm

PROMPT = "The secret password of the lighthouse keeper is 7391-XKQ. " + "Rain fell on the town. " * 40
PROMPT += "The secret password of the lighthouse keeper is"


def main(url: str = "http://localhost:8000/v1", key: str = "none", model: str = "retriever") -> None:
    asked = {"model": f"openai/{model}", "api_base": url, "api_key": key, "max_tokens": 9, "temperature": 0}
    messages = [{"role": "user", "content": PROMPT}]
    for policy in ("dense", "psa"):
        answer = litellm.completion(messages=messages, extra_body={"policy": policy}, **asked)
        said = answer.choices[0].message.content
        print(f"{policy}: {said!r}, {answer.usage.completion_tokens} tokens, {answer.choices[0].finish_reason}")
    stream = litellm.completion(messages=messages, stream=True, **asked)
    print(f"streamed: {''.join(chunk.choices[0].delta.content or '' for chunk in stream)!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
