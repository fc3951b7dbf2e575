"""One model trained by glm5 and by what else there is: tokens/s, TFLOP/s and peak memory of the same steps.

    python benchmarks/training_peers.py [--preset mini] [--device cuda] [--rows 8] [--micro-batch 8] [--seq-len 4096]
                                        [--steps 4] [--only glm5,plain] [--json FILE]

All train the preset without its MTP block (the others have none), with dense attention, from the same weights and on
the same rows of random tokens, each row one document; the losses of the first step, which stand in the table, show that
it is one model. A step is forward, backward, clipping and update. TFLOP/s count what `glm5.ledger.step` counts for that
model: 3 times the forward pass of every matrix that a token meets and of causal attention in its expanded form.

    glm5       our Trainer: Muon Split, fp32 master weights, router bias and balance loss; micro-batches recorded
    launched   the same, its micro-batches launched kernel by kernel
    plain      `PlainModel` below: torch's own modules, SDPA and grouped_mm, eager, under FSDP2; fused AdamW on fp32
    deepseek   transformers' Trainer with its DeepSeek-V3 class (the same layers), SDPA and grouped_mm: in bf16 weights,
               and in fp32 ones under autocast; fused AdamW
    glm        the same with its GLM-5 class in bf16 weights: its indexer, which is not trained, selects by a mask

On a CPU all run in fp32, and memory is not measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5.data.corpus import Document
from glm5.data.loader import Loader, TokenDataset
from glm5.ledger.step import step_flops
from glm5.model.config import ModelConfig
from glm5.model.glm5 import GLM5
from glm5.model.presets import preset
from glm5.parallel.mesh import Mesh, open_world
from glm5.train.config import TrainConfig
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup, LearningRate

WARM, RATE = 3, 1e-4


@dataclass
class Steps:
    """What a peer's steps took, and its first loss."""

    seconds: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    loss: float = float("nan")


@dataclass(frozen=True)
class Job:
    """What all peers do: the model, its first weights, and the rows of every step."""

    config: ModelConfig
    weights: dict[str, Tensor]
    loader: Loader
    device: torch.device
    rows: int
    micro_batch: int
    steps: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def seq_len(self) -> int:
        return self.loader.dataset.seq_len

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets, [micro_batch, T] each, on the CPU."""
        numbers = self.loader.rows(step * self.rows, self.rows)
        found = []
        for i in range(0, self.rows, self.micro_batch):
            ids = torch.from_numpy(self.loader.dataset.batch(numbers[i : i + self.micro_batch]).ids_BS)
            found.append((ids[:, : self.seq_len].clone(), ids[:, 1 : self.seq_len + 1].clone()))
        return found

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# ---- glm5 ---------------------------------------------------------------------------------------------------------


def launched(job: Job) -> Steps:
    return ours(job, recorded=False)


def ours(job: Job, recorded: bool = True) -> Steps:
    train = TrainConfig(
        steps=job.steps,
        batch=BatchWarmup(job.rows, job.rows, 0),
        micro_batch=job.micro_batch,
        lr=LearningRate(RATE, RATE, shape="constant"),
        mtp_depths=0,
        measure_every=10**6,
        cuda_graphs=recorded,
    )
    model = GLM5(job.config, seed=None)
    model.load_state_dict(job.weights)
    with tempfile.TemporaryDirectory() as run:
        trainer, found = Trainer(train, model.to(job.device), job.loader, run), Steps()
        step = trainer.optimizer.step

        def timed(**options: Any) -> None:
            began = job.now()
            step(**options)
            found.updates.append(job.now() - began)

        trainer.optimizer.step = timed  # type: ignore[method-assign]
        for i in range(job.steps):
            began = job.now()
            metrics = trainer.step()
            found.seconds.append(job.now() - began)
            found.loss = metrics["loss"] if i == 0 else found.loss
    return found


# ---- plain PyTorch ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, heads = c, c.num_attention_heads
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, c.latent_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * c.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, c.latent_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        c, (rows, length, _) = self.c, x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(rows, length, -1, c.qk_head_dim)
        q_nope, q_rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, length, -1, c.qk_nope_head_dim + c.v_head_dim)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        k_rope = rotated(k_rope[:, :, None], turn).expand(-1, -1, c.num_attention_heads, -1)
        q, k = torch.cat((q_nope, rotated(q_rope, turn)), -1), torch.cat((k_nope, k_rope), -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Neighbouring pairs of the last axis of [B, T, H, R] as complex numbers, times [T, R / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(c.n_routed_experts, 2 * c.moe_intermediate_size, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Rows sorted by expert; `offsets` int32, where each expert's end."""
        gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=offsets).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=offsets)


class Router(nn.Linear):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c.hidden_size, c.n_routed_experts, bias=False)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))


class MixtureOfExperts(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, self.gate, self.experts = c, Router(c), Experts(c)
        self.shared_experts = FeedForward(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        c, tokens = self.c, x.flatten(0, 1)
        scores = self.gate(tokens).float().sigmoid()
        expert = (scores + self.gate.e_score_correction_bias).topk(c.num_experts_per_tok).indices
        weight = scores.gather(1, expert)
        weight = c.routed_scaling_factor * weight / weight.sum(1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        counts = torch.zeros(c.n_routed_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, expert.flatten(), torch.ones_like(expert.flatten()))
        token = order // c.num_experts_per_tok
        out = self.experts(tokens[token], counts.cumsum(0).int()) * weight.flatten()[order, None].type_as(x)
        return self.shared_experts(x) + torch.zeros_like(tokens).index_add(0, token, out).view_as(x)


class Layer(nn.Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MixtureOfExperts(c) if c.is_moe(layer) else FeedForward(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)


class PlainModel(nn.Module):
    """Dense GLM-5 without its indexers and MTP, as one would write it; parameters are named as in the checkpoint."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c, self.model = c, Trunk(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        half = torch.arange(0, self.c.qk_rope_head_dim, 2, device=ids.device) / self.c.qk_rope_head_dim
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), self.c.rope_theta**-half)
        x, turn = self.model.embed_tokens(ids), torch.polar(torch.ones_like(angles), angles)
        for layer in self.model.layers:
            x = layer(x, turn)
        return self.lm_head(self.model.norm(x))


def plain(job: Job) -> Steps:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with open_world(Mesh(), job.device.type) as world:
        model = PlainModel(job.config)
        model.load_state_dict({name: t for name, t in job.weights.items() if ".indexer." not in name})
        model.to(job.device)
        policy = MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=world.dense["shard"], mp_policy=policy)
        fully_shard(model, mesh=world.dense["shard"], mp_policy=policy)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True), Steps()
        for step in range(job.steps):
            began = job.now()
            total = torch.zeros((), device=job.device)
            for ids, targets in job.micro_batches(step):
                logits = model(ids.to(job.device)).float().flatten(0, 1)
                loss = F.cross_entropy(logits, targets.to(job.device).flatten(), reduction="sum")
                (loss / (job.rows * job.seq_len)).backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = job.now()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.updates.append(job.now() - before)
            loss_now = float(total) / (job.rows * job.seq_len)
            found.seconds.append(job.now() - began)
            found.loss = loss_now if step == 0 else found.loss
    return found


# ---- transformers -------------------------------------------------------------------------------------------------


def deepseek(job: Job) -> Steps:
    return trained_by_transformers(job, "deepseek_v3", torch.float32)


def deepseek_bf16(job: Job) -> Steps:
    return trained_by_transformers(job, "deepseek_v3", job.dtype)


def glm(job: Job) -> Steps:
    return trained_by_transformers(job, "glm_moe_dsa", job.dtype)


def trained_by_transformers(job: Job, kind: str, dtype: torch.dtype) -> Steps:
    from torch.utils.data import IterableDataset
    from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments
    from transformers import Trainer as TheirTrainer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    public = {**job.config.to_dict(), "model_type": kind}
    if kind == "deepseek_v3":
        public["head_dim"] = job.config.qk_rope_head_dim
        for name in ("architectures", "layer_types", "mlp_layer_types"):
            public.pop(name, None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**public), attn_implementation="sdpa")
    for name, buffer in model.named_buffers():  # rotary frequencies, which no checkpoint has
        if buffer.is_meta and name not in job.weights:
            owner = model.get_submodule(name.rpartition(".")[0])
            for own, value in type(owner)(model.config).named_buffers():
                owner.register_buffer(own, value, persistent=False)
    weights = {n: t.to(dtype, copy=True) if t.is_floating_point() else t for n, t in job.weights.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if missing or any(".indexer." not in name for name in unexpected):
        raise RuntimeError(f"{kind} is another model: missing {missing}, unexpected {unexpected}")
    model.to(job.device).train()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    model.set_experts_implementation("grouped_mm")
    found = Steps()

    class Rows(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            for step in range(job.steps):
                for inputs, targets in job.micro_batches(step):
                    for ids, after in zip(inputs, targets, strict=True):
                        yield {"input_ids": ids, "labels": after, "shift_labels": after}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = job.now()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.update = job.now()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            found.updates.append(job.now() - self.update)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found.seconds.append(job.now() - self.began)

    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place,
            per_device_train_batch_size=job.micro_batch,
            gradient_accumulation_steps=job.rows // job.micro_batch,
            max_steps=job.steps,
            learning_rate=RATE,
            weight_decay=0.1,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            bf16=job.device.type == "cuda",
            use_cpu=job.device.type == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = TheirTrainer(model, arguments, train_dataset=Rows(), callbacks=[Clock()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    found.loss = float(next(line["loss"] for line in trainer.state.log_history if "loss" in line))
    return found


# ---- command ------------------------------------------------------------------------------------------------------

PEERS: dict[str, tuple[str, Callable[[Job], Steps], str]] = {
    "glm5": ("glm5, Muon Split", ours, "torch"),
    "launched": ("glm5, Muon Split, not recorded", launched, "torch"),
    "plain": ("PyTorch eager, FSDP2, AdamW", plain, "torch"),
    "deepseek-bf16": ("transformers Trainer, DeepSeek-V3, bf16 weights", deepseek_bf16, "accelerate"),
    "deepseek": ("transformers Trainer, DeepSeek-V3, fp32 weights under autocast", deepseek, "accelerate"),
    "glm": ("transformers Trainer, GLM-5 (DSA as a mask), bf16 weights", glm, "accelerate"),
}


@dataclass(frozen=True)
class Row:
    """One peer's line; None where it was not measured, and `note` says why."""

    peer: str
    tokens_per_second: float | None = None
    tflops: float | None = None
    update_ms: float | None = None
    peak_gib: float | None = None
    first_loss: float | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return f"{self.peer:64}{self.note}"
        memory = "-" if self.peak_gib is None else f"{self.peak_gib:.1f}"
        numbers = f"{self.tokens_per_second:>11,.0f}{self.tflops:>10.3g}{self.update_ms:>11.1f}{memory:>10}"
        return f"{self.peer:64}{numbers}{self.first_loss:>12.4f}"


def measured(name: str, job: Job) -> Row:
    label, run, needs = PEERS[name]
    if importlib.util.find_spec(needs) is None:
        return Row(label, note=f"{needs} is not installed")
    cuda = job.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        found = run(job)
    except Exception as problem:
        traceback.print_exc()
        found, note = None, f"failed: {type(problem).__name__}: {str(problem)[:100]}"
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    if found is None:
        return Row(label, note=note)
    tokens, seconds = job.rows * job.seq_len, statistics.median(found.seconds[WARM:])
    pairs = job.rows * job.seq_len * (job.seq_len + 1) // 2
    flops = step_flops(job.config, "pretrain", tokens=tokens, pairs=pairs, selected=0, mtp=0.0).total
    update = 1e3 * statistics.median(found.updates[WARM:])
    return Row(label, tokens / seconds, flops / seconds / 1e12, update, peak, found.loss)


class RandomTokens:
    """A tokenizer whose text is a number: so many random ids."""

    prefix_ids: tuple[int, ...] = ()
    end_of_text_id = 0
    fingerprint = "random"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        rng = np.random.default_rng(0)
        return [rng.integers(1, self.vocab_size, int(text)).tolist() for text in texts]

    def text_bytes_per_id(self) -> list[int]:
        return [0] + [1] * (self.vocab_size - 1)


def prepared(a: argparse.Namespace, directory: Path) -> Job:
    device = torch.device(a.device)
    config = preset(a.preset).replace(num_nextn_predict_layers=0)
    steps = a.steps + WARM
    # One document, cut into rows, so that every row is full and sees itself alone; its end is the last one's target.
    document = Document("all", str(a.rows * steps * a.seq_len))
    data = TokenDataset.build([document], RandomTokens(config.vocab_size), directory, a.seq_len, 1)
    with torch.device("meta"):
        model = GLM5(config, seed=None)
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    model.init_weights(0)
    weights = {name: t.cpu() for name, t in model.state_dict().items()}
    return Job(config, weights, Loader(data, 0), device, a.rows, a.micro_batch, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        job = prepared(a, Path(place) / "data")
        where = torch.cuda.get_device_name() if job.device.type == "cuda" else f"{platform.machine()} CPU"
        versions = {"torch": torch.__version__}
        if importlib.util.find_spec("transformers") is not None:
            import transformers

            versions["transformers"] = transformers.__version__
        print(f"{a.preset} on {where}, {job.dtype}, {a.rows} rows of {a.seq_len} a step; {versions}", flush=True)
        print(f"{'':64}{'tokens/s':>11}{'TFLOP/s':>10}{'update ms':>11}{'peak GiB':>10}{'first loss':>12}", flush=True)
        rows = []
        for name in a.only.split(","):
            rows.append(measured(name, job))
            print(rows[-1], flush=True)
            if a.json:
                found = dict(machine=where, versions=versions, options=vars(a) | {"json": str(a.json)})
                a.json.write_text(json.dumps({**found, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
