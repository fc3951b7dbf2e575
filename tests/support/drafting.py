"""A model whose drafts are often right, prompts for it, and decoding without a cache to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from support.tiny import tiny_config, tiny_model

TOPK = tiny_config().index_topk


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(6, 320, (length,), generator=torch.Generator().manual_seed(seed))


def agreeable(seed: int, scale: float = 0.05, **changes: object) -> GLM5:
    """A model whose drafts are often right: what a layer adds is small beside the embedding, and the MTP block passes
    the embedding on with little of the hidden state, so that both predict from nearly the same state."""
    model = tiny_model(seed, **changes)
    with torch.no_grad():
        mtp, width = model.mtp, model.config.hidden_size
        mtp.eh_proj.weight.copy_(torch.cat((torch.eye(width), 0.03 * mtp.eh_proj.weight[:, width:]), dim=1))
        mtp.enorm.weight.fill_(0.3)
        mtp.shared_head.norm.weight.copy_(model.model.norm.weight)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(scale)
    return model


@torch.no_grad()
def greedy_without_cache(model: GLM5, ids: Tensor, n: int) -> list[int]:
    ids = ids[None]
    for _ in range(n):
        ids = torch.cat((ids, model(ids, logits_to_keep=1).logits.argmax(-1)), dim=1)
    return ids[0, -n:].tolist()
