"""The control plane, with SGLang's names as slime's rollouts and its weight updates call them, and vLLM's as aliases.

Health, cache, abort, pause, weights, memory, and what the server is. Read next: `app`.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

import glm5
from glm5.serve.client import MEMORY_TAGS, PauseMode, WeightGroup, WeightUpdate
from glm5.serve.http import info
from glm5.serve.http.bodies import Body, Name
from glm5.serve.http.errors import ApiError, Json
from glm5.serve.http.server import Server
from glm5.utils.errors import UserError

# SGLang's and vLLM's words for the ways to pause.
PAUSES: dict[str, PauseMode] = {
    "abort": "abort",
    "retract": "retract",
    "in_place": "keep",
    "keep": "keep",
    "wait": "wait",
}
GROUP = "weight_update_group"  # of weights, where a body names none
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class AbortBody(Body):
    """Which requests to end."""

    rid: Name | None = None
    abort_all: bool | None = None


class PauseBody(Body):
    """How to pause."""

    mode: Literal["abort", "retract", "in_place", "keep", "wait"] | None = None


class UpdateBody(Body):
    """What every update of the weights says."""

    load_format: Name | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: Name | None = None

    def common(self) -> dict[str, Any]:
        return {
            "load_format": self.load_format,
            "flush_cache": self.flush_cache is not False,
            "weight_version": self.weight_version,
        }


class DiskBody(UpdateBody):
    """Weights from a checkpoint's directory."""

    model_path: Path


class TensorBody(UpdateBody):
    """Weights in the body: base64 of safetensors files, one a tensor-parallel rank."""

    serialized_named_tensors: Annotated[list[str], Field(min_length=1, max_length=1024)]


class DistributedBody(UpdateBody):
    """Weights over a process group."""

    names: Annotated[list[Name], Field(min_length=1)]
    dtypes: list[Name]
    shapes: list[list[Count]]
    group_name: Name | None = None


class GroupBody(Body):
    """A process group for weights."""

    master_address: Annotated[str, Field(min_length=1, max_length=256)]
    master_port: Port
    rank_offset: Count
    world_size: Annotated[int, Field(ge=1, le=2**20)]
    group_name: Name | None = None
    backend: Name | None = None


class GroupNameBody(Body):
    """The name of a process group."""

    group_name: Name | None = None


class MemoryBody(Body):
    """Which memory; None is all."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class CheckBody(Body):
    """What to do with the weights."""

    action: Literal["checksum"] | None = None


def routes(server: Server) -> APIRouter:
    """The routes of this page."""
    router = APIRouter()
    for add in (_health, _requests, _weights, _memory, _about):
        add(router, server)
    return router


def _health(router: APIRouter, server: Server) -> None:
    @router.get("/ping")
    @router.get("/health")
    async def health() -> Response:
        """200 while requests are accepted; 503 while starting, draining, or after a failure."""
        server.check_alive()
        return Json({"status": "ok"})

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """200 if the engine made a step within the time limit (while paused: if it still listens)."""
        server.check_alive()
        if not await server.backend.probe(server.options.probe_timeout_s):
            raise ApiError(503, f"no step within {server.options.probe_timeout_s:g} s", code="stuck")
        return Json({"status": "ok"})


def _requests(router: APIRouter, server: Server) -> None:
    backend = server.backend

    @router.get("/flush_cache", response_class=PlainTextResponse)
    @router.post("/flush_cache", response_class=PlainTextResponse)
    @router.post("/reset_prefix_cache", response_class=PlainTextResponse)
    async def flush_cache() -> Response:
        """Forget every cached prefix; 400 while requests run."""
        if not await backend.flush():
            raise ApiError(400, "requests are under way, so the cache was not flushed. Abort them, or wait")
        return PlainTextResponse("Cache flushed.\n")

    @router.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        """End a request by its `rid`, or all; unknown ones are no error."""
        if not body.abort_all and not body.rid:
            raise ApiError(400, "give rid, or abort_all: true", param="rid")
        await server.abort(None if body.abort_all else body.rid)
        return Json({"success": True})

    @router.post("/pause_generation")
    async def pause_generation(body: PauseBody | None = None) -> Response:
        """Stop making steps; requests are still accepted, and wait."""
        await backend.pause(PAUSES[(body and body.mode) or "abort"])
        return Json({"status": "ok", "message": "Generation paused."})

    @router.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] | None = None, body: PauseBody | None = None) -> Response:
        """`/pause_generation` under vLLM's name: the mode in the query, as vLLM has it, or in the body."""
        await backend.pause(PAUSES[mode or (body and body.mode) or "abort"])
        return Json({"status": "paused"})

    @router.post("/continue_generation")
    @router.post("/resume")
    async def continue_generation() -> Response:
        """Make steps again."""
        await backend.resume()
        return Json({"status": "ok", "message": "Generation continued."})

    @router.get("/is_paused")
    async def is_paused() -> Response:
        """Whether it is paused."""
        return Json({"is_paused": backend.paused})


def _weights(router: APIRouter, server: Server) -> None:
    backend = server.backend

    async def update(body: UpdateBody, made: WeightUpdate) -> Response:
        if body.abort_all_requests:
            await backend.abort(None)
        try:
            await backend.update_weights(made)
        except UserError as error:
            return Json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = f"The weights are of version {backend.weight_version}."
        return Json({"success": True, "message": message, "num_paused_requests": 0})

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: DiskBody) -> Response:
        """Load a checkpoint, MTP block included, into the running engine."""
        return await update(body, WeightUpdate("disk", path=body.model_path, **body.common()))

    @router.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(body: TensorBody) -> Response:
        """Take weights from the body. Only safetensors: unpickling would run whatever code a sender put there."""
        try:
            tensors = tuple(base64.b64decode(one, validate=True) for one in body.serialized_named_tensors)
        except (binascii.Error, ValueError):
            raise ApiError(400, "serialized_named_tensors: not base64", param="serialized_named_tensors") from None
        return await update(body, WeightUpdate("tensor", tensors=tensors, **body.common()))

    @router.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(body: DistributedBody) -> Response:
        """Receive weights over a process group that was joined before."""
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise ApiError(400, "names, dtypes and shapes differ in length. Give one of each a tensor", param="names")
        if any(math.prod(shape) > 2**40 for shape in body.shapes):
            raise ApiError(400, "shapes: a tensor of more than 2**40 numbers", param="shapes")
        made = WeightUpdate(
            "distributed",
            names=tuple(body.names),
            dtypes=tuple(body.dtypes),
            shapes=tuple(map(tuple, body.shapes)),
            group_name=body.group_name or GROUP,
            **body.common(),
        )
        return await update(body, made)

    @router.post("/init_weights_update_group")
    async def init_weights_update_group(body: GroupBody) -> Response:
        """Join the process group over which weights will come."""
        if not 0 < body.rank_offset < body.world_size:  # else it would wait for others in vain, and all with it
            message = f"rank_offset={body.rank_offset} must lie in [1, {body.world_size}): rank 0 is the sender's"
            raise ApiError(400, message, param="rank_offset")
        group = WeightGroup(
            body.master_address,
            body.master_port,
            body.rank_offset,
            body.world_size,
            body.group_name or GROUP,
            body.backend or "nccl",
        )
        await backend.join_group(group)
        return Json({"success": True, "message": f"Joined {group.group_name}."})

    @router.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(body: GroupNameBody) -> Response:
        """Leave the process group."""
        await backend.leave_group(body.group_name or GROUP)
        return Json({"success": True, "message": f"Left {body.group_name or GROUP}."})

    @router.post("/weights_checker")
    @router.post("/weight_checker")
    async def weights_checker(body: CheckBody) -> Response:
        """SHA-256 of every parameter by its public name, MTP block included."""
        sums = await backend.checksum()
        return Json({"success": True, "message": "", "checksums": sums, "weight_version": backend.weight_version})

    @router.get("/get_weight_version")
    @router.get("/weight_version")
    async def get_weight_version() -> Response:
        """The name of the weights that run."""
        return Json({"weight_version": backend.weight_version})


def _memory(router: APIRouter, server: Server) -> None:
    backend = server.backend

    @router.post("/release_memory_occupation")
    async def release_memory_occupation(body: MemoryBody | None = None) -> Response:
        """Give memory back until it is resumed; 400 while requests run."""
        await backend.release_memory(tuple((body and body.tags) or MEMORY_TAGS))
        return Json({"success": True})

    @router.post("/resume_memory_occupation")
    async def resume_memory_occupation(body: MemoryBody | None = None) -> Response:
        """Take the memory again."""
        await backend.resume_memory(tuple((body and body.tags) or MEMORY_TAGS))
        return Json({"success": True})


def _about(router: APIRouter, server: Server) -> None:
    backend = server.backend

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        """The engine's settings, under its own names and SGLang's, and what it does now."""
        return Json(await info.server_info(server))

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        """The model in short."""
        about = {"model_path": backend.model_name, "tokenizer_path": backend.model_name, "is_generation": True}
        return Json({**about, "weight_version": backend.weight_version})

    @router.get("/v1/loads")
    @router.get("/get_load")
    async def loads() -> Response:
        """How busy it is: slime aborts until `num_total_reqs` is 0."""
        return Json({"version": glm5.__version__, "dp_rank_count": 1, "loads": [info.load(server)]})

    @router.get("/version")
    async def version() -> Response:
        """The version of glm5."""
        return Json({"version": glm5.__version__})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
