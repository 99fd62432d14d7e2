"""The application: which path is answered by what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from saccade import __version__
from saccade.errors import SaccadeError
from saccade.server import tokens
from saccade.server.admission import Caller
from saccade.server.anthropic import Messages
from saccade.server.anthropic_protocol import CountRequest, MessagesRequest
from saccade.server.bodies import JSONRoute
from saccade.server.chat import Chat
from saccade.server.completions import Completion
from saccade.server.endpoint import Endpoint
from saccade.server.errors import ApiError, from_saccade, from_validation, is_anthropic
from saccade.server.events import EventStream, JSONAnswer, attend
from saccade.server.gate import Gate
from saccade.server.generation import Generation
from saccade.server.logs import logger
from saccade.server.maps import SelectionMap
from saccade.server.page import page
from saccade.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DocumentRequest,
    Sampling,
    SelectionMapRequest,
    TokenizeRequest,
)
from saccade.server.responses import Responses
from saccade.server.responses_compact import Compaction
from saccade.server.responses_protocol import CompactRequest, ResponsesRequest
from saccade.server.responses_socket import ROUTE, ResponsesSocket
from saccade.server.serving import Serving

B = TypeVar("B", bound=Sampling)

_ANTHROPIC_HEADERS = ("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")
_SAID = {404: "there is no such path", 405: "this path does not know that method"}


def make_app(serving: Serving) -> ASGIApp:
    """An ASGI application that serves one model. Its end closes the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await serving.engine.start()
        yield
        serving.end_all()
        serving.close()

    app = FastAPI(
        title="Saccade", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.router.route_class = JSONRoute
    app.state.serving = serving
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    _errors(app)
    _completions(app, serving)
    _models(app, serving)
    _state(app, serving)
    if serving.config.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(serving.config.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-session-id", "x-request-id", *_ANTHROPIC_HEADERS],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    return Gate(app, serving)


def _schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema, with the errors that are really sent in place of its own."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        text = {"type": ["string", "null"]}
        error = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
        inner = {"type": "object", "properties": error, "required": list(error)}
        whole = {"type": "object", "properties": {"error": inner}, "required": ["error"]}
        schema["components"]["schemas"]["Error"] = whole
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        kind = {"type": "object", "properties": {"type": {"type": "string"}, "message": {"type": "string"}}}
        theirs = {"type": "object", "properties": {"type": {"const": "error"}, "error": kind}, "required": ["error"]}
        for path, operations in schema["paths"].items():
            told = {"application/json": {"schema": theirs}} if is_anthropic(path) else content
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"description": "what went wrong", "content": told}
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            streamed: dict[str, Any] = {"text/event-stream": {}}  # a body of events, whose form OpenAPI 3.1 cannot say
            schema["paths"][path]["post"]["responses"]["200"]["content"] |= streamed
        for unused in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(unused, None)
        app.openapi_schema = schema
    return app.openapi_schema


def _errors(app: FastAPI) -> None:
    """Every failure in the form that its path's clients know."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        status, body = error.encoded(request.scope["path"])
        return Response(body, status, error.headers, "application/json")

    @app.exception_handler(SaccadeError)
    async def saccade_error(request: Request, error: SaccadeError) -> Response:
        return await api_error(request, from_saccade(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client is gone; the log and the metrics see it

    @app.exception_handler(Exception)
    async def mistake(request: Request, error: Exception) -> Response:  # it is raised on, to the gate, which logs it
        return await api_error(request, ApiError(500, "the server failed to answer", "internal_error"))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return await api_error(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        said = _SAID.get(error.status_code, "the body cannot be read as JSON")
        if allowed := (error.headers or {}).get("Allow"):
            said += f"; it knows {allowed}"
        code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "invalid_json")
        return await api_error(request, ApiError(error.status_code, said, code, headers=error.headers))


def _completions(app: FastAPI, serving: Serving) -> None:
    async def respond(request: Request, body: B, kind: Callable[[Serving, Caller, B], Endpoint]) -> Response:
        """Check, admit, and answer at once or as a stream. A client that goes away ends what it asked for."""
        caller: Caller = request.state.caller
        header = request.headers.get("x-session-id")
        if header is not None and body.session_id is None:
            body.session_id = header
        job = await serving.parse(len(await request.body()), lambda: kind(serving, caller, body))

        async def begin() -> tuple[Generation, Any]:
            generation = await Generation(serving, caller, await job.ask()).start()
            try:
                if not body.stream:
                    answer: Any = await job.answer(generation)
                    generation.close()
                    return generation, answer
                # Until there is something to say, what fails still has a status of its own.
                return generation, await generation.first(serving.config.ping_seconds)
            except BaseException:
                generation.close()
                raise

        generation, result = await attend(request, begin())
        if serving.config.log_prompts:
            logger.info("asked", extra={"fields": {"request_id": caller.request_id, "body": body.model_dump()}})
        if not body.stream:
            return JSONAnswer(result)
        return EventStream(job.stream(generation, result), serving.config.ping_seconds, generation.close, job.ping)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await respond(request, body, Chat)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await respond(request, body, Completion)

    @app.post("/v1/responses")
    async def respond_to(request: Request, body: ResponsesRequest) -> Response:
        return await respond(request, body, Responses)

    @app.websocket(ROUTE)
    async def respond_over_socket(socket: WebSocket) -> None:
        await ResponsesSocket(serving, socket).run()

    @app.post("/v1/responses/compact")
    async def compact(request: Request, body: CompactRequest) -> Response:
        return await respond(request, body, Compaction)

    @app.post("/v1/messages")
    async def message(request: Request, body: MessagesRequest) -> Response:
        return await respond(request, body, Messages)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest) -> Response:
        caller: Caller = request.state.caller
        job = await serving.parse(len(await request.body()), lambda: Messages(serving, caller, body))
        return JSONAnswer(await job.count())

    @app.post("/v1/documents")
    async def document(request: Request, body: DocumentRequest) -> Response:
        return Response(await attend(request, serving.documents.text(body)), media_type="application/json")

    @app.post("/v1/selection_maps")
    async def selection_map(request: Request, body: SelectionMapRequest) -> Response:
        return JSONAnswer(await attend(request, SelectionMap(serving, request.state.caller, body).answer()))

    @app.get("/v1/responses/{response_id}")
    async def response(request: Request, response_id: str) -> Response:
        return JSONAnswer(serving.responses.get(request.state.caller, response_id).response)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        items = serving.responses.get(request.state.caller, response_id).input
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return JSONAnswer({"object": "list", "data": items, "has_more": False, **ends})

    @app.delete("/v1/responses/{response_id}")
    async def forget_response(request: Request, response_id: str) -> Response:
        serving.responses.forget(request.state.caller, response_id)
        return JSONAnswer({"id": response_id, "object": "response", "deleted": True})

    @app.delete("/v1/sessions/{name}")
    async def forget(request: Request, name: str) -> Response:
        serving.sessions.check(name)
        if not await serving.sessions.forget(request.state.caller, name):
            raise ApiError(404, "there is no such session", "session_not_found", "session_id")
        return JSONAnswer({"id": name, "object": "session", "deleted": True})


def _models(app: FastAPI, serving: Serving) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": serving.created,
            "owned_by": "saccade",
            "root": serving.names[0],
            "parent": None,
            "max_model_len": serving.about.limits.max_model_len,
            "policy": serving.about.policy.text,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONAnswer({"object": "list", "data": [card(name) for name in serving.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONAnswer(card(serving.model(name)))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        return JSONAnswer(await tokens.tokenize(serving, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        return JSONAnswer(await tokens.detokenize(serving, body))


def _state(app: FastAPI, serving: Serving) -> None:
    @app.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return page()

    @app.get("/health")
    async def health() -> Response:
        state, why = serving.engine.state, serving.engine.trouble
        return JSONAnswer({"status": state} | ({} if why is None else {"error": why}), 200 if state == "ok" else 503)

    @app.get("/ready")
    async def ready() -> Response:
        state = "ending" if serving.admission.draining else serving.engine.state
        return JSONAnswer({"status": "ready" if serving.ready else state}, 200 if serving.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(serving.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/requests")
    async def requests(request: Request) -> Response:
        return JSONAnswer(await serving.insight.requests(serving, request.state.caller))

    @app.get("/version")
    async def version() -> Response:
        return JSONAnswer({"version": __version__})
