"""What is fuzzed: each kind makes one thing that may be wrong and uses it."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.values import NAMES, spoilt, spoilt_bytes, spoilt_tree, value
from method_matrix import MATRIX
from tiny_models import make_checkpoint

from saccade import LLM, SamplingParams
from saccade.engine.settings.config import EngineConfig
from saccade.errors import RequestError
from saccade.methods.policy import Policy
from saccade.methods.registry import KNOWN
from saccade.outputs import RequestOutput

POLICIES = [
    *(policy.text for case in MATRIX for policy in case.methods()),
    "dense",
    "flexprefill+psa(epsilon=0.98)",
    "prefill=xattention, decode=topk(k=16)",
]
PARAMS = [one.name for one in dataclasses.fields(SamplingParams)]
SETTINGS = [one.name for one in dataclasses.fields(EngineConfig)]
FEW = SamplingParams(temperature=0, max_tokens=2)


class Kinds:
    """``folder`` is empty and may be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = make_checkpoint(
            "llama", folder / "sound", num_hidden_layers=2, hidden_size=16, intermediate_size=16, rope_theta=1000.0
        )
        self.llm = self.load(self.checkpoint)
        self.files = {file.name: file.read_bytes() for file in self.checkpoint.iterdir()}
        self.all: dict[str, tuple[float, Callable[[random.Random], Any]]] = {  # share, and one try
            "policies": (0.4, self.policy),
            "parameters": (0.25, self.params),
            "prompts": (0.12, self.prompt),
            "settings": (0.12, self.setting),
            "checkpoints": (0.05, self.spoilt_checkpoint),
        }

    def load(self, folder: Path | str, **settings: Any) -> LLM:
        return LLM(
            folder,
            **{"enable_prefix_caching": False, "kv_memory": "256KiB", "max_model_len": 64, "threads": 1, **settings},
        )

    def close(self) -> None:
        self.llm.close()

    def policy(self, rng: random.Random) -> Any:
        way = rng.random()
        if way < 0.6:
            chosen: Any = spoilt(rng, rng.choice(POLICIES))
        elif way < 0.85:
            name = rng.choice(sorted(KNOWN))
            fields = [one.name for one in dataclasses.fields(KNOWN[name])]
            options = {one: value(rng) for one in rng.sample(fields, min(len(fields), rng.randint(0, 3)))}
            if rng.random() < 0.5:
                chosen = KNOWN[name](**options)
            else:
                chosen = f"{name}({', '.join(f'{key}={one!r}' for key, one in options.items() if _prints(one))})"
        elif way < 0.95:
            chosen = {rng.choice(("prefill", "decode", "window", "freeze", *NAMES)): value(rng) for _ in range(2)}
        else:
            chosen = value(rng)
        policy = Policy.parse(chosen)
        assert Policy.parse(policy.text) == policy, policy.text
        if rng.random() < 0.3:
            self._run(lambda: self.llm.generate(_ids(rng), FEW, policy=policy))

    def params(self, rng: random.Random) -> Any:
        sound = {
            "temperature": rng.choice((0, 0.7, 1)),
            "top_k": rng.choice((0, 5)),
            "top_p": rng.choice((1.0, 0.5)),
            "max_tokens": rng.choice((None, 1, 5)),
            "seed": rng.randint(0, 5),
            "stop": rng.choice((None, "a", ["b", "cd"])),
            "n": rng.choice((1, 1, 2)),
        }
        given = {name: one for name, one in sound.items() if rng.random() < 0.5}
        given |= {name: value(rng) for name in rng.sample(PARAMS, rng.randint(0, 2))}
        params = SamplingParams(**given)
        if rng.random() < 0.5 and params.n < 4:
            self._run(lambda: self.llm.generate(_ids(rng), params))

    def prompt(self, rng: random.Random) -> Any:
        way = rng.random()
        prompt = value(rng) if way < 0.5 else [value(rng) for _ in range(rng.randint(0, 4))]
        if way > 0.8:
            prompt = spoilt(rng, rng.choice(("the password is", "<user>hello<assistant>", "x" * 30)))
        message = {"role": rng.choice(("user", "system", "other")), "content": prompt}
        if rng.random() < 0.5:
            message = rng.choice((spoilt_tree(rng, message), value(rng)))
        ways: list[Callable[[], Any]] = [
            lambda: self.llm.generate(prompt, FEW),
            lambda: self.llm.generate({rng.choice(("prompt", "prompt_token_ids", "p")): prompt}, FEW),
            lambda: list(self.llm.stream(prompt, FEW)),
            lambda: self.llm.chat([message], FEW),
            lambda: self.llm.chat(value(rng), FEW),
            lambda: self.llm.chat([message], FEW, chat_template_kwargs=value(rng)),
            lambda: self._in_session(lambda session: session.generate(prompt, FEW)),
            lambda: self._in_session(lambda session: session.complete(prompt, FEW, keep=value(rng), decoded=1)),
            lambda: self._in_session(lambda session: session.chat(value(rng), FEW)),
            lambda: self.llm.generate(_ids(rng), value(rng), policy="dense"),
        ]
        self._run(rng.choice(ways))

    def _in_session(self, say: Callable[[Any], Any]) -> Any:
        with self.llm.session() as session:
            return say(session)

    def setting(self, rng: random.Random) -> Any:
        names = rng.sample(SETTINGS, rng.randint(1, 3))
        given = {name: value(rng) for name in names if name != "model"}
        if "model" in names:
            given["model"] = spoilt(rng, rng.choice((str(self.checkpoint), "retrieve", "a/b"))) + "?"
        config = EngineConfig.of(**given)
        if rng.random() < 0.5 and "model" not in given:
            llm = LLM(self.checkpoint, **{"enable_prefix_caching": False, "kv_memory": "256KiB", **given})
            try:
                self._run(lambda: llm.generate(_ids(rng), FEW))
            finally:
                llm.close()
        return config

    def spoilt_checkpoint(self, rng: random.Random) -> Any:
        """One file of a checkpoint changed, as a tree where it is JSON, or byte by byte."""
        name = rng.choice(sorted(self.files) + ["config.json", "model.safetensors"] * 2)
        data, target = self.files[name], self.folder / "spoilt"
        way = rng.random()
        if name.endswith(".json") and way < 0.8:
            changed = json.dumps(spoilt_tree(rng, json.loads(data))).encode()
        elif name.endswith(".json") and way < 0.9:
            changed = spoilt(rng, data.decode()).encode("utf-8", "surrogatepass")
        elif name.endswith(".safetensors") and way < 0.6:
            size = struct.unpack("<Q", data[:8])[0]
            head = json.dumps(spoilt_tree(rng, json.loads(data[8 : 8 + size]))).encode()
            changed = struct.pack("<Q", len(head)) + head + data[8 + size :]
        else:
            changed = spoilt_bytes(rng, data)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for other, content in self.files.items():
            (target / other).write_bytes(changed if other == name else content)
        (target / "kept").write_text(name)
        llm = self.load(target)
        try:
            self._run(lambda: llm.generate(_ids(rng), FEW))
            if llm.tokenizer.available:
                self._run(lambda: llm.generate("abc", FEW))
        finally:
            llm.close()

    def _run(self, call: Callable[[], Any]) -> None:
        """``call``, whose requests may end with an error of ours and with no other."""
        outputs = call()
        for one in outputs if isinstance(outputs, list) else [outputs]:
            error = one.error if isinstance(one, RequestOutput) else None
            if error is not None:
                if "not finite" not in error and "SaccadeError" not in error and "RequestError" not in error:
                    raise AssertionError(f"a request failed: {error}")
                raise RequestError(error)


def _prints(one: Any) -> bool:
    try:
        repr(one)
    except ValueError:  # a number of too many digits
        return False
    return True


def _ids(rng: random.Random) -> list[int]:
    return [rng.randint(0, 255) for _ in range(rng.choice((1, 8, 40)))]
