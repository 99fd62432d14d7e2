"""Open Responses' public compliance run against ``saccade serve``: ``make compliance SUITE=folder``.

``SUITE``: a checkout of openresponses/openresponses with its packages installed (``bun install``, or zod alone). None
of it is part of this repository. Its tests want a model that calls a function when it is given one, so a small one
learns that first, in a minute. Images are refused in the specification's form; every other test must pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from server_page import a_server
from test_server_structured import template_with_tools
from tiny_models import make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}</tool_call>'
SAID = "Hello to you."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
            "required": ["location"],
        },
    },
}
ASKED = ("What's the weather like in San Francisco?", "Say hello.", "And tomorrow?")
IMAGE = "image-input"


def teach(folder: Path) -> None:
    """Have a tiny checkpoint call its tool where it is given one, and greet where it is not."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for parameter in model.parameters():  # its own weights are too large to learn from
        torch.nn.init.normal_(parameter, 0, 0.05) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    batches = [batch(tokenizer, [TOOL], CALL), batch(tokenizer, None, SAID)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(600):
        losses = [model(input_ids=ids, labels=labels).loss for ids, labels in batches]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        if all(loss.item() < 0.004 for loss in losses):
            break
    model.save_pretrained(folder)
    defaults = folder / "generation_config.json"
    defaults.write_text(json.dumps({**json.loads(defaults.read_text()), "temperature": 0.0}))  # the suite gives none


def batch(tokenizer: Any, tools: list[Any] | None, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of ``answer`` to every question, padded at the end."""
    rows = []
    for text in ASKED:
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
        asked, said = (tokenizer(one, add_special_tokens=False)["input_ids"] for one in (prompt, answer + "<eos>"))
        rows.append((torch.tensor(asked + said), torch.tensor([-100] * len(asked) + said)))
    ids, labels = zip(*rows)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def run(suite: Path, url: str, bun: str) -> dict[str, list[str]]:
    """The tests that failed, each with what was wrong."""
    command = [bun, "run", "bin/compliance-test.ts", "--base-url", f"{url}/v1", "--api-key", "none", "--json"]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True, timeout=300)
    assert done.stdout.lstrip().startswith("{"), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    for one in found["results"]:
        print(f"{one['status']:8} {one['id']}")
    return {one["id"]: one.get("errors", []) for one in found["results"] if one["status"] == "failed"}


def main(suite: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint("llama", Path(folder) / "caller", max_position_embeddings=4096)
        template_with_tools(checkpoint)
        teach(checkpoint)
        with a_server(
            "--model", str(checkpoint), "--served-model-name", "gpt-4o-mini", "--tool-parser", "hermes"
        ) as url:
            failed = run(suite, url, os.environ.get("BUN", "bun"))
    [refused] = failed.pop(IMAGE)
    assert "unsupported_content" in refused, refused
    assert not failed, failed


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
