"""A server's policies side by side, through openai-python: start `saccade serve` first, and pip install openai."""

import sys

from openai import OpenAI

POLICIES = ["dense", "streaming(window=256)", "topk(k=64)"]
FACT = "The secret password of the lighthouse keeper is 7391-XKQ. "
PROMPT = FACT + "Rain fell, and nobody spoke of the storm. " * 40 + "The secret password of the lighthouse keeper is"


def main(url: str = "http://localhost:8000/v1", key: str = "none") -> None:
    with OpenAI(base_url=url, api_key=key) as client:
        model = client.models.list().data[0].id
        for policy in POLICIES:
            stream = client.completions.create(
                model=model,
                prompt=PROMPT,
                max_tokens=9,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"policy": policy},
            )
            text, usage = "", None
            for chunk in stream:
                text += chunk.choices[0].text if chunk.choices else ""
                usage = chunk.usage or usage
            read = usage.saccade["density"]
            print(f"{policy:24} {text!r:14} prefill {read['prefill']:6.1%}  decode {read['decode'] or 0:6.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
