"""``POST /v1/responses/compact``: a conversation in short, which the model itself writes (Open Responses)."""

from __future__ import annotations

from pydantic import ValidationError

from saccade.server.admission import Caller
from saccade.server.endpoint import JSON
from saccade.server.errors import ApiError, bad_request, from_validation
from saccade.server.generation import Generation
from saccade.server.params import refuse_unsupported
from saccade.server.protocol import Sampling
from saccade.server.responses import Responses
from saccade.server.responses_items import compaction_item
from saccade.server.responses_protocol import CompactRequest, ResponsesRequest
from saccade.server.serving import Serving

MOST_TOKENS = 1024
_ASK = (
    "Write a summary of our conversation so far, from which you can go on without it: what was asked, what was found "
    "and decided, names, numbers and open points. Write the summary alone."
)


class Compaction(Responses):
    """One request for a summary. It is not stored, and no response can go on from its id."""

    def __init__(self, serving: Serving, caller: Caller, body: CompactRequest) -> None:
        refuse_unsupported(body)
        given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
        if not given and body.previous_response_id is None:
            raise bad_request("there is nothing to compact; give input or previous_response_id", "input")
        same = {name: value for name in Sampling.model_fields if (value := getattr(body, name)) is not None}
        try:
            asked = ResponsesRequest.model_validate(
                {
                    **same,
                    "input": [*given, {"type": "message", "role": "user", "content": _ASK}],
                    "instructions": body.instructions,
                    "previous_response_id": body.previous_response_id,
                    "min_tokens": body.min_tokens or 1,
                    "max_output_tokens": body.max_output_tokens or MOST_TOKENS,
                    "store": False,
                }
            )
        except ValidationError as error:
            raise from_validation(error.errors()) from error
        super().__init__(serving, caller, asked)

    async def answer(self, generation: Generation) -> JSON:
        response = await super().answer(generation)
        summary = "".join(
            part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
        ).strip()
        if not summary:
            raise ApiError(500, "the model wrote no summary; try again, or start anew", "generation_failed")
        return {
            "id": self.id,
            "object": "response.compaction",
            "created_at": self.created,
            "output": [compaction_item(summary)],
            "usage": response["usage"],
        }
