"""`/tokenize` and `/detokenize`, and the list of models. Read next: `app`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from glm5.serve.http.bodies import Body, Id, Name
from glm5.serve.http.chat import TemplateArguments
from glm5.serve.http.errors import ApiError, Json
from glm5.serve.http.server import Server, prepared
from glm5.text.chat import render
from glm5.text.messages import messages_from_openai, tools_from_openai


class TokenizeBody(Body):
    """The body of `/tokenize`: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: Name | None = None
    tokens: list[Id]
    skip_special_tokens: bool | None = None


def routes(server: Server) -> APIRouter:
    """The routes of this page."""
    router = APIRouter()
    backend = server.backend
    tokenizer = backend.tokenizer

    def ids_of(body: TokenizeBody) -> list[int]:
        if body.messages is None:
            prefix = () if body.add_special_tokens is False else tokenizer.prefix_ids
            return [*prefix, *tokenizer.encode(body.prompt or "")]
        template = body.chat_template_kwargs or TemplateArguments()
        rendered = render(
            tokenizer,
            messages_from_openai(body.messages),
            tools_from_openai(body.tools),
            enable_thinking=template.enable_thinking is not False,
            clear_thinking=template.clear_thinking is not False,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        return list(rendered.ids)

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(body: TokenizeBody, http: HttpRequest) -> Response:
        """The ids of a text, which opens with `[gMASK]<sop>` unless `add_special_tokens` is false, or of messages."""
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        ids = await prepared(http, lambda: ids_of(body))
        told: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": backend.context}
        if body.return_token_strs:
            told["token_strs"] = [tokenizer.decode([id]) for id in ids]
        return Json(told)

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(body: DetokenizeBody, http: HttpRequest) -> Response:
        """The text of ids, under vLLM's name for it and SGLang's."""
        server.check_model(body.model)
        skip = body.skip_special_tokens is True
        text = await prepared(http, lambda: tokenizer.decode(body.tokens, skip_control=skip))
        return Json({"prompt": text, "text": text})

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": server.started,
            "owned_by": "glm5",
            "root": backend.model_name,
            "max_model_len": backend.context,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The model, under each of its names."""
        return Json({"object": "list", "data": [card(name) for name in server.names]})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One model."""
        return Json(card(server.check_model(model)))

    return router
