"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Any

from saccade.server.errors import bad_request
from saccade.server.protocol import DetokenizeRequest, TokenizeRequest
from saccade.server.serving import Serving

JSON = dict[str, Any]


async def tokenize(serving: Serving, body: TokenizeRequest) -> JSON:
    """Token ids of a prompt or a conversation."""
    serving.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give a prompt or messages, and not both", "prompt")
    if body.prompt is not None:
        tokens = await serving.encode(body.prompt, body.add_special_tokens is not False)
    else:
        variables = dict(body.chat_template_kwargs or {})
        if body.tools:
            variables["tools"] = body.tools
        messages = await serving.conversation(body.messages or [])
        goes_on, control = bool(body.continue_final_message), body.allow_control_tokens
        if goes_on and body.add_generation_prompt:
            raise bad_request("continue_final_message and add_generation_prompt exclude each other", "messages")
        generate = body.add_generation_prompt is not False and not goes_on
        tokens = await serving.template(messages, generate, variables, control, goes_on)
    decode = serving.tokenizer.decode
    texts = None
    if body.return_token_strs:
        texts = await serving.off_loop(
            len(tokens), lambda: [decode([token], skip_special_tokens=False) for token in tokens]
        )
    return {
        "count": len(tokens),
        "max_model_len": serving.about.limits.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }


async def detokenize(serving: Serving, body: DetokenizeRequest) -> JSON:
    """The text of tokens, special ones included."""
    serving.model(body.model)
    most = serving.about.limits.vocab_size
    for token in body.tokens:
        if not 0 <= token < most:
            raise bad_request(f"token id {str(token)[:40]} is not an integer from 0 to {most - 1}", "tokens")
    decode = serving.tokenizer.decode
    text = await serving.off_loop(len(body.tokens), lambda: decode(body.tokens, skip_special_tokens=False))
    return {"prompt": text}
