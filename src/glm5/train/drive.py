"""The loop around steps that pre-training, fine-tuning and reinforcement learning share.

    resume -> step, log, show, checkpoint, step, ... -> the run's end, or a stop between two steps

What a step is, and what a checkpoint holds, is the `Stepper`'s: `loop.Trainer`, and `glm5.posttrain.learner.Learner`.
Read next: either of them, `stopping`, `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from glm5.train.checkpoint import CheckpointStore
from glm5.train.ranks import Ranks, SilentLog
from glm5.train.stopping import stop_requests
from glm5.utils.errors import NumericalError, UserError
from glm5.utils.progress import Progress
from glm5.utils.runlog import RunLog, keep_config

# A rank that takes so many times the median for the same product is worth a warning.
STRAGGLER = 1.5
Asked = Callable[[], bool]


class Stepper(Protocol):
    """What is driven.

    Attributes:
        directory: of the run. store: its checkpoints. finished_steps: how many steps are done.
        ranks: the processes that train together, each of which drives its own stepper.
    """

    directory: Path
    store: CheckpointStore
    ranks: Ranks
    finished_steps: int

    def resume(self) -> list[str]:
        """Go on from the newest whole checkpoint, or begin. Returns warnings about damaged ones."""
        ...

    def opening(self) -> dict[str, Any]:
        """Metrics of a run that begins, before its first step; may be none."""
        ...

    def advance(self, stop: Asked) -> dict[str, Any] | None:
        """One step; its metrics. None: `stop` said that a stop was requested, and there was no step.

        Raises:
            NumericalError: something is not finite.
        """
        ...

    def bad_weight(self) -> str | None:
        """What is not finite and must not go into a checkpoint, or None."""
        ...

    def save(self, store: CheckpointStore | None = None) -> Path:
        """Write a checkpoint, by default into `store` of this stepper."""
        ...

    def another_store(self, directory: Path) -> CheckpointStore:
        """For a state that is no checkpoint to go on from."""
        ...

    def shown(self, metrics: dict[str, Any]) -> dict[str, float]:
        """The metrics that a person who waits wants to see."""
        ...

    def summary(self) -> dict[str, Any]:
        """The closing figures of a run."""
        ...


def drive(
    it: Stepper,
    steps: int,
    *,
    resolved: Any,
    may_differ: Collection[str],
    title: str,
    save_every: int,
    log_every: int = 1,
    on_step: Callable[[], None] | None = None,
) -> None:
    """Drive a stepper to `steps` steps, from where the directory's newest checkpoint ended.

    Args:
        resolved: the dataclass to keep as the run's configuration. may_differ: fields that a resumed run may change.
        title: of the progress display. save_every, log_every: steps between checkpoints and between lines.
        on_step: called after each step (tests use it to interrupt).

    Raises:
        NumericalError: as `advance`, or a weight is not finite when it is to be saved. The state is kept under
            `failed/`, and the message names it; checkpoints hold finite weights only.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; the step was finished and saved. A second one stops at once.
    """
    ranks = it.ranks
    with ranks.on_main(lambda: RunLog(it.directory)) or SilentLog() as log:
        begun = bool(it.store.list())
        ranks.on_main(lambda: keep_config(it.directory, resolved, begun=begun, may_differ=set(may_differ)))
        warnings = it.resume()
        log.resume(it.finished_steps if begun else -1)
        log.save_environment()
        with (
            Progress(title, steps, start=it.finished_steps, console=ranks.console()) as progress,
            stop_requests(progress.note) as stop_requested,
        ):
            for warning in warnings:
                progress.note(f"warning: {warning}")
            if begun:
                progress.note(f"resumed after step {it.finished_steps} from {it.store.directory}")
            elif opening := it.opening():
                log.log(0, **opening)
            while it.finished_steps < steps:
                try:
                    metrics = it.advance(stop_requested)
                except NumericalError as e:
                    raise _failed(it, e) from e
                done = it.finished_steps
                if metrics is not None:
                    if done % log_every == 0 or done == steps:
                        log.log(done, **metrics)
                    progress.update(done, **it.shown(metrics))
                    if metrics.get("slowest_pace", 1.0) > STRAGGLER:
                        rank, pace = metrics["slowest_rank"], metrics["slowest_pace"]
                        progress.note(f"warning: rank {rank} computes {pace:.1f} times as slowly as the others")
                stopping = ranks.any(stop_requested())
                if done % save_every == 0 or done == steps or stopping:
                    # An expert that no token visited hurts no loss.
                    said = ranks.first(it.bad_weight())
                    if said is not None:
                        raise _failed(it, NumericalError(f"{said} is not finite after step {done}"))
                    log.sync()
                    ranks.at(done - 1, "3 checkpoint")
                    it.save()
                if stopping:
                    progress.note(f"stopped after step {done}, which is saved; the same command goes on from it")
                    break
                if on_step is not None:
                    on_step()
        it.store.wait()
        ranks.at(-1, "4 end")
        if it.finished_steps >= steps:
            log.finish(**it.summary())
        # Also in the last step or its save: what follows the stage is not to begin.
        if ranks.any(stop_requested()):
            raise KeyboardInterrupt


def _failed(it: Stepper, error: NumericalError) -> NumericalError:
    """The error of a bad step, after keeping the state that it left."""
    advice = "lower the learning rate or remove the bad data, and start again in another directory"
    try:
        it.store.wait()  # the checkpoint before is not to be lost
        store = it.another_store(it.directory / "failed" / f"step-{it.finished_steps}")
        place = it.save(store)
        store.wait()
    except UserError as e:
        return NumericalError(error.what, f"The state could not be saved ({e.what}); {advice}")
    return NumericalError(error.what, f"The state is kept in {place}; {advice}")
