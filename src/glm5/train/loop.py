"""The training loop: `Trainer.step` is one update, `Trainer.run` is all of them with checkpoints, logs and resumption.

A step is: rows from the loader; per micro-batch a forward pass, its summed losses divided by the whole step's counts,
and a backward pass; then clip, update, router bias. Everything that a step depends on is in the checkpoint (weights,
optimizer, number of samples, random state), so a run that was killed ends in the same bytes as one that was not.
Sources: report sections 2.1 to 2.3. Read next: `drive`, `rows`, `optim`, `losses`, `state`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glm5.data.balance import in_turn
from glm5.data.loader import Loader
from glm5.ledger.compute import training_cost
from glm5.model.glm5 import GLM5
from glm5.model.moe import Router
from glm5.model.trace import Aux
from glm5.model.weights import save_model
from glm5.parallel.mesh import World
from glm5.train.checkpoint import CheckpointStore
from glm5.train.config import TrainConfig
from glm5.train.drive import drive
from glm5.train.estimate import count_parameters
from glm5.train.groups import Groups
from glm5.train.losses import router_bias_update
from glm5.train.meter import Meter, memory_mib
from glm5.train.objective import Objective
from glm5.train.optim import MuonSplit, clip_grad_norm, first_nonfinite, parameter_roles
from glm5.train.profiles import Profiles
from glm5.train.random_state import seed_random_state
from glm5.train.ranks import PipelineOptions, Ranks, check_batch
from glm5.train.recorded import MicroBatches, records
from glm5.train.recorder import CudaRecorder
from glm5.train.rows import Rows, check_stage
from glm5.train.state import TrainState
from glm5.train.totals import Counts, IndexerFigures, Totals
from glm5.utils.errors import NumericalError

if TYPE_CHECKING:
    from glm5.parallel.pipeline.engine import Pipeline

log = logging.getLogger(__name__)

# Fields that a resumed run may change: they decide how chatty and how safe it is, not what is computed.
MAY_DIFFER = {"log_every", "save_every", "keep", "profile", "cuda_graphs"}


class Trainer:
    """One stage of training of one model.

    Args:
        config: the stage. model: trained in place. loader: its rows.
        directory: of the run: checkpoints, metrics, configuration.
        world: the ranks that train together, each with the same arguments; None is one process. The model comes whole
            to every rank, and is placed as the world's mesh says.
        pipeline: how its stages run, where the mesh has several. gather_once, prefetch, by_heads: see `Ranks`.

    A checkpoint that the directory already holds is resumed from, unless its configuration differs (an error).

    Raises:
        ConfigError, DataError: as `check_stage`.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: GLM5,
        loader: Loader,
        directory: str | Path,
        world: World | None = None,
        pipeline: PipelineOptions | None = None,
        gather_once: bool = False,
        prefetch: int = 1,
        by_heads: bool = True,
    ) -> None:
        check_stage(config, model.config, loader.dataset)
        self.ranks = Ranks(world, gather_once=gather_once, prefetch=prefetch, by_heads=by_heads)
        if world is not None:
            check_batch(config, world.mesh)
        self.config, self.model, self.loader, self.directory = config, model, loader, Path(directory)
        self.parameters = count_parameters(model)
        given = {name: p.detach() for name, p in model.named_parameters()}
        self.model.to(self._dtype()).train()
        for name, parameter in model.named_parameters():
            is_indexer = ".indexer." in name
            parameter.requires_grad_(config.trains_indexer if is_indexer else config.trains_model)
        self.pipeline = self.ranks.place(model, pipeline or PipelineOptions())
        if self.pipeline is not None:  # the other stages' parameters are not kept
            self.model = next(iter(self.pipeline.stages.values()))
        roles = parameter_roles(self._parts, model.config, split_heads=config.split_heads)
        rate = config.lr.at(0, config.steps)
        self.holdings = self.ranks.holdings([role.parameter for role in roles])
        self.recorder = self._recorder()
        self.optimizer = MuonSplit(
            roles,
            rate,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            holdings=self.holdings,
            recorder=self.recorder,
        )
        # Weights that were given in fp32 lose no digit where the model runs in bf16: not those that train (their master
        # copies), nor those that rest.
        resting: dict[str, Tensor] = {}
        for role in roles:
            p, exact = role.parameter, given[role.name]
            if p.dtype != exact.dtype == torch.float32:
                if p.requires_grad:
                    master = exact if self.holdings is None else self.holdings.laid_out(exact, p)
                    self.optimizer.state[p]["master"] = master
                else:  # whole on the main rank, which exports them; a mark on the others
                    resting[role.name] = exact.cpu() if self.ranks.main else exact.new_empty(0)
        self.state = TrainState(self.model, self.pipeline, self.ranks, self.optimizer, resting)
        self.cost = training_cost(model.config, config.sparse)
        self.routers = [m for m in self._parts.modules() if isinstance(m, Router)]
        self.tokens = 0
        self._set_out()

    def go_on(self, config: TrainConfig, loader: Loader, directory: str | Path) -> None:
        """Take up another stage with the model and the optimizer as they are: other rows, rates and steps, a directory
        of its own. A checkpoint that it holds is resumed from.

        Raises:
            ConfigError: as `check_stage` and `TrainConfig.check_follows`.
        """
        config.check_follows(self.config)
        check_stage(config, self.model.config, loader.dataset)
        if self.ranks.world is not None:
            check_batch(config, self.ranks.world.mesh)
        self.config, self.loader, self.directory = config, loader, Path(directory)
        self.optimizer.zero_grad(set_to_none=True)  # what no longer trains has no gradient
        self._set_out()

    def _set_out(self) -> None:
        """What belongs to a stage and its directory."""
        self.meter = Meter(self.config, self.model.config, self.ranks, self.model.device, self._dtype())
        self.profiles = Profiles(self.directory, self.ranks, self.config.profile)
        self.recorder = self.recorder or self._recorder()
        recorder = self.recorder if self.config.cuda_graphs and records(self.config, self.ranks) else None
        self.recorded = None if recorder is None else MicroBatches(self.model, recorder)
        if self.config.cuda_graphs and recorder is None and self.ranks.main:
            log.warning(
                "train.cuda_graphs: no micro-batch of this stage is recorded; that takes pre-training on packed rows, "
                "and GPUs that hold the whole model each"
            )
        self.store = self.ranks.store(self.directory / "checkpoints", self.config.keep, self.state.places)
        self.finished_steps = 0
        self.samples = 0
        self._ahead: tuple[int, int, list[Rows]] | None = None  # first sample, count, and the rows that were read
        grouped = self.config.context_groups
        self.groups = Groups(grouped, self.loader.dataset, self.cost, self.ranks, self._parts) if grouped else None

    def _recorder(self) -> CudaRecorder | None:
        return CudaRecorder() if self.config.cuda_graphs and self.model.device.type == "cuda" else None

    @property
    def _parts(self) -> Any:
        """What this process holds of the model, a GLM5 or a Pipeline: both name it as the whole model does."""
        return self.model if self.pipeline is None else self.pipeline

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
        with self.profiles.tracing(self.finished_steps + 1):
            return self._step()

    def _step(self) -> dict[str, Any]:
        config, began = self.config, time.perf_counter()
        measure = self.finished_steps % config.measure_every == 0
        with self.meter.watching(self.pipeline, measure):
            totals, counts, rows, norm, lr = self._update(measure)
        found = totals.metrics(self.loader.dataset.bytes_per_token, recall=not config.sparse)  # waits for the device
        seconds = time.perf_counter() - began
        self.finished_steps += 1
        self.samples += counts.rows
        self.tokens += counts.tokens
        metrics = {
            **found,
            "lr": lr,
            "grad_norm": norm,
            "tokens": self.tokens,
            "tokens_per_second": counts.tokens / seconds,
            **self.meter.speed(counts, seconds),
            **({} if self.groups is None else self.groups.figures(self.samples - counts.rows)),
            "memory_mib": float(
                self.ranks.largest(torch.tensor(memory_mib(self.model.device), device=self.ranks.device))
            ),
        }
        if measure:
            metrics["update_rms"] = dict(self.optimizer.update_rms)
            metrics["router_bias"] = self._bias_range()
            parameters = [p for _, p in self._parts.named_parameters()]
            metrics.update(self.meter.costs(seconds, parameters, self.optimizer.named_state().values()))
            metrics.update(self.ranks.pace())
            if self.model.config.attention == "mla" and config.stage != "warmup" and self.pipeline is None:
                # What a stage measures on its way stands: in the sparse one, of the selected positions.
                metrics = {**self.measure_attention(rows[0]), **metrics}
        return metrics

    def _update(self, measure: bool) -> tuple[Totals, Counts, list[Rows], float, float]:
        """The update itself: its sums and counts, this rank's rows, the gradient's norm and the learning rate."""
        config = self.config
        count = config.batch.batch(self.samples)
        self.ranks.at(self.finished_steps, "0 rows")
        rows = self._rows(self.samples, count)
        self.ranks.at(self.finished_steps, "1 forward and backward")
        held = torch.stack([r.counts(self.model.config.index_topk) for r in rows]).sum(0)
        tokens, queries, pairs, selected = self.ranks.sum(held).tolist()
        mtp_rows = max(1, round(config.mtp_share * count)) if config.mtp_depths else 0
        counts = Counts(count, mtp_rows, max(1, tokens), queries, pairs, selected)
        if self.recorded is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.recorded.zero_grad(p for _, p in self._trainable())
        if self.pipeline is None:
            totals, bad = self._in_turn(rows, counts)
        else:
            totals, bad = self._in_stages(self.pipeline, rows, counts)
        if self.ranks.any(bad is not None):
            raise self._bad_loss(bad, rows)
        self.ranks.at(self.finished_steps, "2 update")
        norm = self._clip()
        lr = config.lr.at(self.finished_steps, config.steps)
        self.optimizer.set_lr(lr)
        self.optimizer.step(measure=measure)
        totals.over(self.ranks)
        if config.trains_model and (rate := config.bias_rate_at(self.tokens)):
            self._balance(totals.own_loads, rate)
        if self.finished_steps + 1 < config.steps:  # the next step's rows are read while the device is busy
            coming = (self.samples + count, config.batch.batch(self.samples + count))
            self._ahead = (*coming, self._rows(*coming))
        return totals, counts, rows, norm, lr

    def _in_turn(self, rows: list[Rows], counts: Counts) -> tuple[Totals, tuple[float, int] | None]:
        """Every micro-batch forward and backward; the sums, and the first loss that was not finite with its number."""
        totals = Totals(len(self.routers), self.model.config.num_hidden_layers)
        objective = Objective(self.config, self.ranks, self.tokens, counts, totals)
        losses = []
        for i, micro in enumerate(rows):
            self.ranks.before(i, len(rows), self.model)
            first = i * self.config.micro_batch  # of this rank's rows of the step
            if self.recorded is not None:
                losses.append(self.recorded.run(objective, micro, first))
                continue
            loss = objective.of(self.model, micro, first)
            loss.backward()
            losses.append(loss.detach())
        self.ranks.after(self.model)
        # Looked at once all is under way: a look waits for the device, which then waits for the host.
        found = torch.stack(losses).tolist()
        return totals, next(((loss, i) for i, loss in enumerate(found) if not math.isfinite(loss)), None)

    def _in_stages(
        self, pipeline: Pipeline, rows: list[Rows], counts: Counts
    ) -> tuple[Totals, tuple[float, int] | None]:
        """The same, of this rank's stages of a pipeline."""
        from glm5.train.piped import StageTotals, run_stages

        totals = StageTotals(pipeline, self.model.config)
        loss = run_stages(pipeline, Objective(self.config, self.ranks, self.tokens, counts, totals), rows, totals)
        return totals, None if math.isfinite(loss) else (loss, 0)

    def _rows(self, first: int, count: int) -> list[Rows]:
        """This rank's micro-batches of a step of so many rows, from this sample on."""
        if self._ahead is not None and self._ahead[:2] == (first, count):
            return self._ahead[2]
        size, dataset, device = self.config.micro_batch, self.loader.dataset, self.model.device
        numbers = self.loader.rows(first, count)
        if self.groups is not None:
            return self.groups.rows(first, numbers, device)
        if self.config.by_work:
            numbers = numbers[in_turn(dataset.work(numbers, self.cost), self.ranks.count("dp"))]
        numbers = self.ranks.share(numbers)
        batches = [dataset.batch(numbers[i : i + size]) for i in range(0, len(numbers), size)]
        if device.type == "cuda" and self.config.mtp_share == 1:  # which otherwise takes rows by their place
            batches = [b.whole_first() for b in batches]
        return [self.ranks.shared(Rows.of(b, device), b, self.cost) for b in batches]

    def _clip(self) -> float:
        """The gradients' global norm, after scaling them down to `clip`."""
        try:
            return clip_grad_norm(self._trainable(), self.config.clip or math.inf, self.holdings)
        except NumericalError as e:  # on all ranks; some only know that it was another
            own = None if "another rank" in e.what else e.what
            raise NumericalError(self.ranks.first(own) or e.what, e.mend) from None

    def _bad_loss(self, bad: tuple[float, int] | None, rows: list[Rows]) -> NumericalError:
        """The error of a loss that is not finite, here or on another rank; all ranks look for its place together."""
        # In one micro-batch, the first that was bad anywhere: ranks may share its rows, and others' with others.
        at = torch.tensor(-len(rows) if bad is None else -bad[1], device=self.ranks.device)
        place = self._first_bad(rows[-int(self.ranks.largest(at))])
        loss = self.ranks.first(bad and f"the loss of step {self.finished_steps} is {bad[0]}")
        return NumericalError(f"{loss}; first bad tensor: {place}")

    def _balance(self, loads: list[Tensor], rate: float) -> None:
        # Without loads no router ran: a dense trunk whose MTP block does not train.
        for router, load in zip(self.routers if loads else [], loads, strict=True):
            router.e_score_correction_bias.copy_(router_bias_update(router.e_score_correction_bias, load, rate))

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self._parts.named_parameters() if p.requires_grad]

    # ------------------------------------------------------------------ looking
    @torch.no_grad()
    def measure_attention(self, rows: Rows) -> dict[str, Any]:
        """Largest attention logit per layer, and the indexer's recall, in a dense pass over one micro-batch."""
        aux = Aux(indexer=True)
        self.model.hidden(rows.input_BT, documents=rows.documents_BT, cache=rows.held, sparse=False, aux=aux)
        found = IndexerFigures(self.model.config.num_hidden_layers)
        found.add(aux.indexer_losses)
        everyone = Totals(0, 0)
        everyone.indexers = found
        everyone.over(self.ranks)
        return found.metrics()

    def _bias_range(self) -> dict[str, float]:
        biases = [r.e_score_correction_bias for r in self.routers]
        ends = [torch.stack((bias.max(), -bias.min())) for bias in biases]
        none = torch.full((2,), -math.inf, device=self.ranks.device)  # a stage without routers
        most, least = self.ranks.largest(torch.stack(ends).amax(0) if ends else none).tolist()
        return {"min": -least, "max": most} if most > -math.inf else {"min": 0.0, "max": 0.0}

    @torch.no_grad()
    def _first_bad(self, rows: Rows) -> str:
        """Which parameter, or which module's output in forward order, is the first that is not finite, and where."""
        bad = first_nonfinite((n, self.ranks.local(p)) for n, p in self._parts.named_parameters())
        said = self.ranks.first(bad and f"parameter {bad}")
        if said is not None:
            return said
        if self.pipeline is not None:
            return "not a parameter"
        found: list[str] = []

        def watch(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                tensors = output if isinstance(output, tuple) else (output,)
                if not found and first_nonfinite((name, t) for t in tensors if isinstance(t, Tensor)):
                    found.append(name)

            return hook

        hooks = [m.register_forward_hook(watch(n)) for n, m in self.model.named_modules() if n]
        try:
            self.model.hidden(rows.input_BT, documents=rows.documents_BT, cache=rows.held, sparse=self.config.sparse)
        finally:
            for hook in hooks:
                hook.remove()
        place = self.ranks.first(f"output of {found[0]}" if found else None)
        return place or "the loss itself (or a multi-token prediction depth)"

    # ------------------------------------------------------------------ state
    def save(self, store: CheckpointStore | None = None) -> Path:
        """Write a checkpoint of everything that the next step depends on."""
        tensors, state = self.state.capture()
        state |= {"samples": self.samples, "tokens": self.tokens}
        return (store or self.store).save(self.finished_steps, tensors, state)

    def resume(self) -> list[str]:
        """Continue from the newest whole checkpoint, or seed a fresh run. Returns warnings about damaged ones."""
        found = self.store.load_newest(self.model.device)
        if found is None:
            seed_random_state(self.config.seed)
            return []
        self.state.restore(found, self.config.seed)
        self.finished_steps, self.samples, self.tokens = found.step, found.state["samples"], found.state["tokens"]
        return list(found.warnings)

    def fp32_model(self) -> GLM5:
        """See `TrainState.whole_model`."""
        return self.state.whole_model()

    def export(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the model in the public layout, in fp32, over what an earlier start of the run exported there."""
        model = self.fp32_model()
        self.ranks.on_main(lambda: save_model(model, path, tokenizer=tokenizer, overwrite=True))

    # ------------------------------------------------------------------ all of it
    def run(
        self,
        *,
        resolved: Any = None,
        may_differ: Collection[str] = (),
        title: str | None = None,
        on_step: Callable[[Trainer], None] | None = None,
    ) -> None:
        """Train to `config.steps`, from where the directory's newest checkpoint ended.

        Args:
            resolved: the dataclass to keep as the run's configuration; by default the stage's.
            may_differ: names of fields of it that a resumed run may change, beside `MAY_DIFFER`.
            title: of the progress display.
            on_step: called after each step (tests use it to interrupt).

        Raises:
            NumericalError, KeyboardInterrupt: as `drive`.
        """
        config = self.config
        drive(
            self,
            config.steps,
            resolved=config if resolved is None else resolved,
            may_differ={*MAY_DIFFER, *may_differ},
            title=title or config.stage,
            save_every=config.save_every,
            log_every=config.log_every,
            on_step=None if on_step is None else lambda: on_step(self),
        )

    def opening(self) -> dict[str, Any]:
        """Nothing is measured before the first step."""
        return {}

    def advance(self, stop: Callable[[], bool]) -> dict[str, Any]:
        """`step`, which waits for nobody."""
        return self.step()

    def bad_weight(self) -> str | None:
        """The first parameter of this rank that is not finite."""
        bad = first_nonfinite((n, self.ranks.local(p)) for n, p in self._trainable())
        return bad and f"parameter {bad}"

    def another_store(self, directory: Path) -> CheckpointStore:
        """For one checkpoint elsewhere."""
        return self.ranks.store(directory, 1, self.state.places)

    def shown(self, metrics: dict[str, Any]) -> dict[str, float]:
        """What a person who waits sees."""
        names = ("loss", "bits_per_byte", "mtp_loss_1", "indexer_kl", "indexer_recall", "tokens_per_second")
        return {n: metrics[n] for n in names if n in metrics}

    def summary(self) -> dict[str, Any]:
        """What a finished run read."""
        return {"tokens": self.tokens, "samples": self.samples}
