"""Clients that users have, against ``saccade serve`` with the built-in model: ``make conformance``.

openai-python and anthropic with strict validation, openai-node, litellm, langchain-openai, schemathesis over our
schema, locust. They live in an environment of their own, whose requirements may exclude those of the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from response_events import follow
from server_page import a_server

ROOT = Path(__file__).parent.parent
SECRET = "7391-XKQ"


def run(*command: str, **environment: str) -> str:
    """What a command prints. AssertionError with it where the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def openai_python(url: str) -> str:
    from openai import NotFoundError, OpenAI

    prompt = (
        f"The secret password of the keeper is {SECRET}. Rain fell on the town. The secret password of the keeper is"
    )
    with OpenAI(base_url=url + "/v1", api_key="none", _strict_response_validation=True, max_retries=0) as client:
        model, asked = client.models.list().data[0].id, {"temperature": 0, "seed": 1}
        messages = [{"role": "user", "content": prompt}]
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=9, logprobs=True, **asked)
        assert SECRET in whole.choices[0].message.content
        chunks = list(client.chat.completions.create(
            model=model, messages=messages, max_tokens=9, stream=True, stream_options={"include_usage": True}, **asked
        ))  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices].count("length") == 1
        # With echo and logprobs together the first token has none, null as OpenAI sends it, which its own types refuse.
        client.completions.create(model=model, prompt=prompt, max_tokens=9, logprobs=2, **asked)
        done = client.completions.create(model=model, prompt=prompt, max_tokens=9, n=2, echo=True, **asked)
        assert SECRET in done.choices[1].text[len(prompt) :]
        response = client.responses.create(model=model, input=prompt, max_output_tokens=9, temperature=0)
        assert response.output_text == text
        assert client.responses.retrieve(response.id).output_text == text
        more = client.responses.create(
            model=model, input="And?", previous_response_id=response.id, max_output_tokens=4, temperature=0
        )
        assert more.usage.input_tokens > response.usage.input_tokens
        code = None
        try:
            client.models.retrieve("another")
        except NotFoundError as error:
            code = error.code
        assert code == "model_not_found"
    return "chats, completions, responses, streams and errors as its types have them"


def open_responses(url: str) -> str:
    """What a stream of each kind tells, event by event."""
    schema = {"type": "json_schema", "name": "c", "schema": {"enum": ["red", "blue"]}}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["x"]}}}}
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    turns.append({"role": "user", "content": [{"type": "input_text", "text": "and?"}]})
    asked = [
        {"input": "hello", "max_output_tokens": 5},
        {"input": turns, "instructions": "be brief", "max_output_tokens": 5},
        {"input": "Which colour?", "text": {"format": schema}, "max_output_tokens": 60},
        {"input": "call it", "tools": [tool], "tool_choice": {"type": "function", "name": "f"}},
    ]
    told, last = 0, len(asked)
    for body in asked:
        with httpx.stream("POST", url + "/v1/responses", json={**body, "stream": True}, timeout=300) as answer:
            if answer.status_code == 400 and "tools" in body:  # the built-in model's template knows none
                last -= 1
                continue
            assert answer.status_code == 200, answer.read()
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        told += len(lines)
        assert follow([line if line == "[DONE]" else json.loads(line) for line in lines])["output"]
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]
    refused = httpx.post(url + "/v1/responses", json={"input": image}, timeout=60)
    assert refused.status_code == 400, refused.text
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    return f"{told} events of {last} streams in order and complete; an image is refused"


def anthropic_python(url: str) -> str:
    from anthropic import Anthropic, BadRequestError

    prompt = (
        f"The secret password of the keeper is {SECRET}. Rain fell on the town. The secret password of the keeper is"
    )
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": prompt}], "extra_body": {"temperature": 0}}
    with Anthropic(base_url=url, api_key="none", _strict_response_validation=True, max_retries=0) as client:
        model = httpx.get(url + "/v1/models").json()["data"][0]["id"]
        whole = client.messages.create(model=model, **asked)
        assert SECRET in whole.content[0].text
        with client.messages.stream(model=model, **asked) as stream:
            assert len(list(stream)) > 5
            assert stream.get_final_message().content[0].text == whole.content[0].text
        used = whole.usage
        counted = client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens
        assert counted == used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        kind = None
        try:
            client.messages.create(model=model, max_tokens=1, messages=[{"role": "user", "content": [image]}])
        except BadRequestError as error:
            kind = error.body["error"]["type"]
        assert kind == "invalid_request_error"
    return "messages, streams, counts and errors as its types have them"


def openai_node(url: str) -> str:
    folder = ROOT / "build/node"
    folder.mkdir(parents=True, exist_ok=True)
    run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), "openai")
    script = folder / "client.mjs"  # node looks for packages beside the script
    script.write_bytes((ROOT / "examples/server_client.mjs").read_bytes())
    said = run("node", str(script), url + "/v1")
    assert said.count(SECRET) == 4, said
    assert "error 404 model_not_found" in said, said
    return "completions, a chat, a streamed response, an error"


def example(name: str) -> Callable[[str], str]:
    def client(url: str) -> str:
        said = run(
            sys.executable, str(ROOT / f"examples/server_{name}.py"), url + "/v1", LITELLM_LOCAL_MODEL_COST_MAP="1"
        )
        assert said.count(SECRET) == 3, said
        return said.strip().replace("\n", "; ")

    return client


def schemathesis(url: str) -> str:
    """Requests made from our schema: no 5xx, nothing that the schema does not have."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    count = os.environ.get("EXAMPLES", "60")
    said = run(
        str(Path(sys.executable).parent / "schemathesis"), "run", url + "/openapi.json", "--checks", checks,
        "--max-examples", count, "--workers", "1", "--request-timeout", "60", "--phases", "examples,coverage,fuzzing",
        "--seed", "1", "--no-color",
    )  # fmt: skip
    lines = [line.strip() for line in said.splitlines()]
    return "; ".join(line for line in lines if "generated" in line or "Test cases" in line or "passed" in line)


def locust(url: str) -> str:
    said = run(
        sys.executable, "-m", "locust", "-f", str(ROOT / "examples/server_locust.py"), "--host", url, "--headless",
        "-u", "8", "-r", "8", "-t", "20s", "--only-summary", "--exit-code-on-error", "1", "--json",
    )  # fmt: skip
    found = {one["name"]: one for one in json.loads(said[said.index("[") :])}
    assert {"short", "stream"} <= set(found), found
    assert all(one["num_failures"] == 0 for one in found.values()), found
    return ", ".join(f"{one['num_requests']} {name}" for name, one in sorted(found.items())) + ", no failure"


CLIENTS = {
    "openai-python": openai_python,
    "anthropic": anthropic_python,
    "Open Responses": open_responses,
    "openai-node": openai_node,
    "litellm": example("litellm"),
    "langchain-openai": example("langchain"),
    "schemathesis": schemathesis,
    "locust": locust,
}


def main(*names: str) -> int:
    failed = 0
    with a_server() as url:
        for name in names or CLIENTS:
            try:
                print(f"{name}: {CLIENTS[name](url)}", flush=True)
            except Exception as error:
                failed += 1
                print(f"{name} FAILED: {type(error).__name__}: {error} {error.__cause__ or ''}", flush=True)
            assert httpx.get(url + "/health").status_code == 200
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
