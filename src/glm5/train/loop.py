"""The training loop: `Trainer.step` is one update, `Trainer.run` is all of them with checkpoints, logs and resumption.

A step is: rows from the loader; per micro-batch a forward pass, its summed losses divided by the whole step's counts,
and a backward pass; then clip, update, router bias. Everything that a step depends on is in the checkpoint (weights,
optimizer, number of samples, random state), so a run that was killed ends in the same bytes as one that was not.
Sources: report sections 2.1 to 2.3. Read next: `optim`, `losses`, `checkpoint`.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glm5.data.loader import Batch, Loader
from glm5.model.glm5 import GLM5
from glm5.model.moe import Router
from glm5.model.trace import Aux
from glm5.model.weights import save_model
from glm5.train.checkpoint import CheckpointStore
from glm5.train.config import TrainConfig
from glm5.train.losses import language_model_loss, router_bias_update
from glm5.train.optim import MuonSplit, clip_grad_norm, first_nonfinite, parameter_roles
from glm5.train.random_state import capture_random_state, restore_random_state
from glm5.utils.errors import ConfigError, NumericalError
from glm5.utils.progress import Progress
from glm5.utils.runlog import RunLog

# Fields that a resumed run may change: they decide how long and how chatty, not what is computed.
MAY_DIFFER = ("train.log_every", "train.save_every", "train.keep")


@dataclass(frozen=True)
class Rows:
    """A micro-batch on the device. T queries, S = T + ahead slots; see `glm5.data.loader.Batch`."""

    ids_BS: Tensor
    document_BS: Tensor
    loss_BS: Tensor
    documents_BT: Tensor | None
    valid_BT: Tensor
    tokens: int

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Rows:
        first_BT = torch.from_numpy(batch.first_BT).long()
        valid_BT = first_BT <= torch.arange(batch.seq_len)
        # Rows of one document (and padding behind it, which no token sees) are plainly causal: the fused kernel's case.
        plain = bool((first_BT[valid_BT] == 0).all())
        return cls(
            torch.from_numpy(batch.ids_BS).to(device),
            torch.from_numpy(batch.document_BS).to(device),
            torch.from_numpy(batch.loss_BS).to(device),
            None if plain else first_BT.to(device),
            valid_BT.to(device),
            int(batch.targets(1)[1].sum()),
        )

    @property
    def input_BT(self) -> Tensor:
        return self.ids_BS[:, : self.valid_BT.shape[1]]

    def head(self, rows: int) -> Rows:
        """The first so many rows."""
        documents = None if self.documents_BT is None else self.documents_BT[:rows]
        return Rows(
            self.ids_BS[:rows], self.document_BS[:rows], self.loss_BS[:rows], documents, self.valid_BT[:rows], 0
        )


class Trainer:
    """One stage of training of one model, in one process.

    Args:
        config: the stage. model: trained in place. loader: its rows.
        directory: of the run: checkpoints, metrics, configuration.
        bytes_per_token: of the training text, to report bits per byte.

    A checkpoint that the directory already holds is resumed from, unless its configuration differs (an error).
    """

    def __init__(
        self,
        config: TrainConfig,
        model: GLM5,
        loader: Loader,
        directory: str | Path,
        *,
        bytes_per_token: float | None = None,
    ) -> None:
        if config.mtp_depths and not model.config.num_nextn_predict_layers:
            raise ConfigError("mtp_depths", config.mtp_depths, "this model has no MTP block: give 0")
        if config.mtp_depths >= loader.dataset.ahead:
            raise ConfigError("mtp_depths", config.mtp_depths, f"the dataset keeps {loader.dataset.ahead} tokens ahead")
        if config.trains_indexer and model.config.attention != "mla":
            raise ConfigError("stage", config.stage, "a GQA model has no indexer to train")
        self.config, self.model, self.loader = config, model, loader
        self.directory, self.bytes_per_token = Path(directory), bytes_per_token
        self.model.to(self._dtype()).train()
        for name, parameter in model.named_parameters():
            is_indexer = ".indexer." in name
            parameter.requires_grad_(config.trains_indexer if is_indexer else config.trains_model)
        roles = parameter_roles(model, model.config, split_heads=config.split_heads)
        self.schedule = config.lr.schedule(config.steps)
        self.optimizer = MuonSplit(
            roles, self.schedule.at(0), weight_decay=config.weight_decay, momentum=config.momentum
        )
        self.routers = [(name, m) for name, m in model.named_modules() if isinstance(m, Router)]
        self.store = CheckpointStore(self.directory / "checkpoints", config.keep)
        self.finished_steps = 0
        self.samples = 0
        self.tokens = 0

    def _dtype(self) -> torch.dtype:
        precision = self.config.precision
        if precision == "auto":
            precision = "bf16" if self.model.device.type == "cuda" else "fp32"
        return torch.bfloat16 if precision == "bf16" else torch.float32

    # ------------------------------------------------------------------ one update
    def step(self) -> dict[str, Any]:
        """One update; returns its metrics.

        Raises:
            NumericalError: a loss or gradient is not finite. The weights are still those of the step before.
        """
        config, began = self.config, time.perf_counter()
        count = config.batch.batch(self.samples)
        rows = [
            Rows.of(self.loader.batch(self.samples + i, min(config.micro_batch, count - i)), self.model.device)
            for i in range(0, count, config.micro_batch)
        ]
        tokens = sum(r.tokens for r in rows)
        queries = sum(int(r.valid_BT.sum()) for r in rows)
        self.optimizer.zero_grad(set_to_none=True)
        totals = _Totals(len(self.routers))
        for micro in rows:
            loss = self._losses(micro, tokens, queries, count, totals)
            if not math.isfinite(float(loss.detach())):
                raise NumericalError(
                    f"the loss of step {self.finished_steps} is {float(loss.detach())}; first bad tensor: "
                    f"{self._first_bad(micro)}"
                )
            loss.backward()
        norm = clip_grad_norm(self._trainable(), config.clip or math.inf)
        lr = self.schedule.at(self.finished_steps)
        measure = self.finished_steps % config.measure_every == 0
        self.optimizer.set_lr(lr)
        self.optimizer.step(measure=measure)
        if config.trains_model and config.bias_rate:
            self._balance(totals.loads)
        seconds = time.perf_counter() - began
        self.finished_steps += 1
        self.samples += count
        self.tokens += tokens
        metrics = {
            **totals.metrics(self.bytes_per_token),
            "lr": lr,
            "grad_norm": norm,
            "tokens": self.tokens,
            "tokens_per_second": tokens / seconds,
            "memory_mib": _memory_mib(self.model.device),
        }
        if measure:
            metrics["update_rms"] = dict(self.optimizer.update_rms)
            metrics["router_bias"] = self._bias_range()
            if not config.trains_indexer and self.model.config.attention == "mla":
                metrics.update(self.measure_attention(rows[0]))
        return metrics

    def _losses(self, rows: Rows, tokens: int, queries: int, sequences: int, totals: _Totals) -> Tensor:
        """The step's loss from one micro-batch: its sums over the whole step's counts."""
        config, model = self.config, self.model
        aux = Aux(indexer=config.trains_indexer, balance=config.trains_model, valid=rows.valid_BT)
        hidden = [
            model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=config.sparse, aux=aux),
        ]
        share = rows
        if config.mtp_depths:
            kept = max(1, round(config.mtp_share * len(rows.ids_BS)))
            share = rows.head(kept)
            aux.valid = share.valid_BT
            hidden += model.mtp_hidden(
                hidden[0][:kept],
                share.ids_BS,
                config.mtp_depths,
                documents=share.documents_BT,
                sparse=config.sparse,
                aux=aux,
            )
        loss = hidden[0].new_zeros((), dtype=torch.float32)
        if config.trains_model:
            lm = language_model_loss(
                hidden,
                model.lm_head.weight,
                rows.ids_BS,
                rows.document_BS,
                rows.loss_BS,
                mtp_weight=config.mtp_weight / config.mtp_share if config.mtp_depths else 0.0,
            )
            loss = loss + lm.loss_sum / tokens
            totals.add_lm(lm.ce_sums, lm.tokens)
            if aux.balance_losses:
                loss = loss + config.balance_weight * torch.stack(aux.balance_losses).sum() / sequences
        if config.trains_indexer:
            kls = torch.stack([x.kl for x in aux.indexer_losses])
            loss = loss + config.indexer_weight * kls.sum() / queries
            totals.add_indexer(aux, recall=not config.sparse)
        totals.add_loads(aux.loads)
        return loss

    def _balance(self, loads: list[Tensor]) -> None:
        for (_, router), load in zip(self.routers, loads, strict=True):
            router.e_score_correction_bias.copy_(
                router_bias_update(router.e_score_correction_bias, load, self.config.bias_rate)
            )

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    # ------------------------------------------------------------------ looking
    @torch.no_grad()
    def measure_attention(self, rows: Rows) -> dict[str, Any]:
        """Largest attention logit per layer, and the indexer's recall, in a dense pass over one micro-batch."""
        aux = Aux(indexer=True)
        self.model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=False, aux=aux)
        return _indexer_metrics(aux)

    def _bias_range(self) -> dict[str, float]:
        biases = torch.stack([r.e_score_correction_bias for _, r in self.routers]) if self.routers else torch.zeros(1)
        return {"min": float(biases.min()), "max": float(biases.max())}

    @torch.no_grad()
    def _first_bad(self, rows: Rows) -> str:
        """Which parameter, or which module's output in forward order, is the first that is not finite."""
        bad = first_nonfinite(self.model.named_parameters())
        if bad is not None:
            return f"parameter {bad}"
        found: list[str] = []

        def watch(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                tensors = output if isinstance(output, tuple) else (output,)
                if not found and first_nonfinite((name, t) for t in tensors if isinstance(t, Tensor)):
                    found.append(name)

            return hook

        hooks = [m.register_forward_hook(watch(n)) for n, m in self.model.named_modules() if n]
        try:
            self.model.hidden(rows.input_BT, documents=rows.documents_BT, sparse=self.config.sparse)
        finally:
            for hook in hooks:
                hook.remove()
        return f"output of {found[0]}" if found else "the loss itself (or a multi-token prediction depth)"

    # ------------------------------------------------------------------ state
    def save(self, store: CheckpointStore | None = None) -> Path:
        """Write a checkpoint of everything that the next step depends on."""
        random_tensors, random_state = capture_random_state()
        tensors = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.named_state(),
            "random": random_tensors,
        }
        state = {"samples": self.samples, "tokens": self.tokens, "random": random_state}
        return (store or self.store).save(self.finished_steps, tensors, state)

    def resume(self) -> list[str]:
        """Continue from the newest whole checkpoint, if there is one. Returns warnings about damaged ones."""
        found = self.store.load_newest(self.model.device)
        if found is None:
            return []
        self.model.load_state_dict(found.tensors["model"])
        self.optimizer.load_named_state(found.tensors["optimizer"])
        restore_random_state(found.tensors["random"], found.state["random"])
        self.finished_steps, self.samples, self.tokens = found.step, found.state["samples"], found.state["tokens"]
        return list(found.warnings)

    def export(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the model in the public layout, from the fp32 master weights where there are any."""
        masters = {
            n.removesuffix(".master"): t for n, t in self.optimizer.named_state().items() if n.endswith(".master")
        }
        if not masters:
            save_model(self.model, path, tokenizer=tokenizer)
            return
        full = GLM5(self.model.config.replace(dtype="float32"), seed=None)
        full.load_state_dict({n: masters.get(n, t).float() for n, t in self.model.state_dict().items()})
        save_model(full, path, tokenizer=tokenizer)

    # ------------------------------------------------------------------ all of it
    def run(
        self, *, resolved: Any = None, title: str | None = None, on_step: Callable[[Trainer], None] | None = None
    ) -> None:
        """Train to `config.steps`, from where the directory's newest checkpoint ended.

        Args:
            resolved: the dataclass to keep as the run's configuration; by default the stage's.
            title: of the progress display.
            on_step: called after each step (tests use it to interrupt).

        Raises:
            NumericalError: as `step`; the state before the bad step is kept under `failed/` and named.
            KeyboardInterrupt: after saving, when interrupted.
        """
        config = self.config
        with RunLog(self.directory) as log:
            log.save_config(config if resolved is None else resolved, may_differ=(*MAY_DIFFER, *_short(MAY_DIFFER)))
            warnings = self.resume()
            log.resume(self.finished_steps)
            log.save_environment()
            with Progress(title or config.stage, config.steps, start=self.finished_steps) as progress:
                for warning in warnings:
                    progress.note(f"warning: {warning}")
                if self.finished_steps:
                    progress.note(f"resumed after step {self.finished_steps} from {self.store.directory}")
                while self.finished_steps < config.steps:
                    try:
                        metrics = self.step()
                    except NumericalError as e:
                        place = self.save(CheckpointStore(self.directory / "failed", keep=1))
                        raise NumericalError(
                            e.what,
                            f"The state before that step is in {place}; lower the learning rate or remove the bad "
                            "data, and resume from the newest checkpoint",
                        ) from e
                    except KeyboardInterrupt:
                        # The gradients of a half-made step are dropped; the weights are whole only between updates.
                        progress.note(f"interrupted in step {self.finished_steps}; run the same command to resume")
                        raise
                    done = self.finished_steps
                    if done % config.log_every == 0 or done == config.steps:
                        log.log(done, **metrics)
                    progress.update(done, **_shown(metrics))
                    if done % config.save_every == 0 or done == config.steps:
                        log.sync()
                        self.save()
                    if on_step is not None:
                        on_step(self)
            log.finish(tokens=self.tokens, samples=self.samples)


def _short(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.removeprefix("train.") for name in names)


class _Totals:
    """Sums over the micro-batches of a step."""

    def __init__(self, routers: int) -> None:
        self.ce: Tensor | None = None
        self.ce_tokens: Tensor | None = None
        self.loads: list[Tensor] = []
        self.routers = routers
        self.indexer: dict[str, Any] | None = None

    def add_lm(self, ce_sums: Tensor, tokens: Tensor) -> None:
        self.ce = ce_sums if self.ce is None else self.ce + ce_sums
        self.ce_tokens = tokens if self.ce_tokens is None else self.ce_tokens + tokens

    def add_loads(self, loads: list[Tensor]) -> None:
        """Loads in the order of the layers; the MTP block's of all depths count as one router's."""
        if not loads:
            return
        own = loads[: self.routers]
        for extra in loads[self.routers :]:
            own[-1] = own[-1] + extra
        if len(own) < self.routers:  # MTP did not run: its router keeps its bias
            own += [torch.zeros_like(own[0])] * (self.routers - len(own))
        self.loads = own if not self.loads else [a + b for a, b in zip(self.loads, own, strict=True)]

    def add_indexer(self, aux: Aux, *, recall: bool) -> None:
        found = _indexer_metrics(aux, recall=recall)
        if self.indexer is None:
            self.indexer = found
        else:  # the last micro-batch's figures stand for the step's, maxima are kept
            found["attention_logit_max"] = max(found["attention_logit_max"], self.indexer["attention_logit_max"])
            self.indexer = found

    def metrics(self, bytes_per_token: float | None) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.ce is not None and self.ce_tokens is not None:
            losses = (self.ce / self.ce_tokens.clamp(min=1)).tolist()
            out["loss"] = losses[0]
            if bytes_per_token:
                out["bits_per_byte"] = losses[0] / math.log(2) / bytes_per_token
            out.update({f"mtp_loss_{d}": x for d, x in enumerate(losses[1:], 1)})
        if self.loads:
            share = torch.stack(self.loads).float()
            share = share / share.sum(-1, keepdim=True).clamp(min=1) * share.shape[-1]
            out["expert_load_max"] = float(share.max())  # 1 is perfect balance
            out["expert_load_min"] = float(share.min())
        if self.indexer is not None:
            out.update(self.indexer)
        return out


def _indexer_metrics(aux: Aux, *, recall: bool = True) -> dict[str, Any]:
    """`recall` is of the dense attention's mass; within a selected set it would be 1 by construction."""
    queries = sum(x.queries for x in aux.indexer_losses)
    maxima = torch.stack([x.logit_max_H.amax() for x in aux.indexer_losses])
    share = float(sum(x.recall_sum for x in aux.indexer_losses) / queries)
    return {
        "indexer_kl": float(aux.indexer_kl().detach() / queries),
        **({"indexer_recall": share} if recall else {}),
        "attention_logit_max": float(maxima.max()),
        "attention_logit_max_by_layer": [round(x, 3) for x in maxima.tolist()],
    }


def _shown(metrics: dict[str, Any]) -> dict[str, float]:
    names = ("loss", "bits_per_byte", "mtp_loss_1", "indexer_kl", "indexer_recall", "tokens_per_second")
    return {n: metrics[n] for n in names if n in metrics}


def _memory_mib(device: torch.device) -> float:
    """Peak memory: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
