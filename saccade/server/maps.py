"""``POST /v1/selection_maps``: what each head read for an answer, over the attention it would have paid when dense."""

from __future__ import annotations

from typing import Any

from saccade.engine.messages import MapOrder
from saccade.engine.sampling.params import SamplingParams
from saccade.server.admission import Caller
from saccade.server.errors import ApiError, bad_request
from saccade.server.generation import Ask, Generation
from saccade.server.protocol import SelectionMapRequest
from saccade.server.serving import Serving
from saccade.server.usage import usage

MOST_HEADS = 64  # of all layers of one map: a few megabytes

JSON = dict[str, Any]


class SelectionMap:
    """One map: the prompt is computed anew, and answered greedily. While it is, recorded steps are launched kernel by
    kernel and the other requests take longer; so prompts are no longer than the server allows, and one is made at a
    time."""

    def __init__(self, serving: Serving, caller: Caller, body: SelectionMapRequest) -> None:
        self.serving, self.caller, self.body = serving, caller, body

    async def answer(self) -> JSON:
        serving, body = self.serving, self.body
        model, most = serving.model(body.model), serving.config.selection_maps
        if not most:
            raise ApiError(403, "this server makes no selection maps; see --selection-maps", "maps_not_allowed")
        policy = await serving.policy(self.caller, body.policy)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give a prompt or messages, and not both", "prompt")
        if body.prompt is not None:
            prompt = await serving.encode(body.prompt)
        else:
            messages, variables = await serving.conversation(body.messages or []), body.chat_template_kwargs or {}
            prompt = await serving.template(messages, True, variables, body.allow_control_tokens)
        if len(prompt) > most:
            raise bad_request(
                f"the prompt has {len(prompt)} tokens, and this server makes maps of {most} at most; shorten it, or "
                "start the server with another --selection-maps",
                "prompt" if body.prompt is not None else "messages",
                "context_length_exceeded",
            )
        serving.check_length(prompt, body.max_tokens, "max_tokens")
        params = SamplingParams(temperature=0.0, max_tokens=body.max_tokens)
        ask = Ask([prompt], params, policy, map_order=MapOrder(self._layers(), body.pixels))
        if serving.mapping:
            raise ApiError(
                429, "another selection map is being made; try again later", "rate_limit_exceeded",
                headers={"retry-after": "2"},
            )  # fmt: skip
        serving.mapping = True
        generation = Generation(serving, self.caller, ask)
        try:
            (outcome,) = await (await generation.start()).all()
        finally:
            serving.mapping = False
            generation.close()
        return {
            "object": "selection_map",
            "model": model,
            "text": outcome.text,
            **(outcome.selection_map or {}),
            "usage": usage([outcome], len(prompt), generation.tokens, 1, policy.text),
        }

    def _layers(self) -> tuple[int, ...]:
        about, asked = self.serving.about, self.body.layers
        most = max(1, MOST_HEADS // about.heads)
        if asked is None:
            return tuple(range(min(about.layers, most)))
        layers = tuple(sorted(set(asked)))
        if not layers or layers[0] < 0 or layers[-1] >= about.layers or len(layers) > most:
            raise bad_request(f"layers must be 1 to {most} of those from 0 to {about.layers - 1}", "layers")
        return layers
