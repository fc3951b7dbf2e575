"""`/server_info`: what the engine says of itself, and the same under the names of SGLang's server arguments.

Programs that drive an engine read its sizes, limits and speculation there: slime compares them with what it would have
started, routers ask for `dp_size`, benchmarks for `internal_states[0]`. With several workers each has an entry under
`prefill` or `decode`, as SGLang's router gives them, and the first that answers speaks for all at the top.
Read next: `control`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import glm5
from glm5.serve.http.server import Server
from glm5.serve.pages import PAGE_SIZE

# SGLang's names for settings of `EngineConfig` that mean the same.
SAME = {
    "chunk": "chunked_prefill_size",
    "max_batched_tokens": "max_prefill_tokens",
    "max_running": "max_running_requests",
    "invariant": "enable_deterministic_inference",
}


async def server_info(server: Server) -> dict[str, Any]:
    """JSON values by name."""
    backend, told = server.backend, await server.backend.info()
    workers = {role: told[role] for role in ("prefill", "decode") if isinstance(told.get(role), list)}
    if not workers:
        return {**_one(server, told, "null"), "internal_states": [_state(server, told)]}
    each = {
        role: [{**_one(server, info, role if workers["prefill"] else "null")} for info in infos]
        for role, infos in workers.items()
    }
    first = each["decode"][0] if each["decode"] else {}
    about = {"weight_version": backend.weight_version, "internal_states": [_state(server, first)]}
    return {**first, **each, **about}


def load(server: Server) -> dict[str, Any]:
    """How busy it is."""
    s = server.backend.stats()
    return {
        "dp_rank": 0,
        "num_running_reqs": s.running,
        "num_waiting_reqs": s.waiting,
        "num_total_reqs": s.running + s.waiting,
        "token_usage": s.cache_usage,
        "free_tokens": s.free_tokens,
        "cache_hit_rate": s.prefix_hits / s.prefix_queries if s.prefix_queries else 0.0,
        "steps": s.steps,
    }


def _state(server: Server, info: Mapping[str, Any]) -> dict[str, Any]:
    """What goes on now."""
    return {
        **load(server),
        "last_gen_throughput": server.metrics.pace.tokens_per_second,
        "avg_spec_accept_length": info.get("accept_length"),
        "effective_max_running_requests_per_dp": info.get("max_running"),
    }


def _one(server: Server, info: Mapping[str, Any], role: str) -> dict[str, Any]:
    """One engine's own words and SGLang's."""
    backend, options = server.backend, server.options
    drafts, pages = info.get("drafts", 0), info.get("pages", 0)
    return {
        **info,
        **{theirs: info[ours] for ours, theirs in SAME.items() if ours in info},
        "model_path": backend.model_name,
        "tokenizer_path": backend.model_name,
        "served_model_name": server.names[0],
        "host": options.host,
        "port": options.port,
        "status": "ready" if backend.failure is None else "failed",
        "context_length": backend.context,
        "max_req_input_len": backend.context - 1,
        "max_total_num_tokens": pages * PAGE_SIZE,
        "page_size": PAGE_SIZE,
        "tp_size": info.get("tp", 1),
        "dp_size": info.get("dp", 1),
        "ep_size": info.get("ep", 1),
        "pp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "disable_radix_cache": False,
        "disable_overlap_schedule": not info.get("overlap", True),
        "disable_cuda_graph": not info.get("cuda_graphs", True),
        "enable_memory_saver": True,
        "speculative_algorithm": "EAGLE" if drafts else None,
        "speculative_num_steps": drafts or None,
        "speculative_eagle_topk": 1 if drafts else None,
        "speculative_num_draft_tokens": drafts + 1 if drafts else None,
        "disaggregation_mode": role,
        "weight_version": backend.weight_version,
        "version": glm5.__version__,
    }
