"""What the learner takes from the store, and what becomes of the rest: checked at the moment of consumption.

A group is settled as a whole, by the report's rules (section 4.1): samples whose oldest token is too old are stale;
those that failed for reasons not their own leave; then, if more than half of the group is there, advantages are made of
what is left, each sample once, and valid samples are repeated until the group is full; else the group is dropped. A
group of equal rewards teaches nothing. Time in the queue counts, since the bound is checked here and not when a sample
arrives. Read next: `advantage`, `store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm5.posttrain.advantage import Baseline, group_advantages, repair
from glm5.posttrain.outcome import State, reward_of, state_of_failure
from glm5.posttrain.store import Sample, Store
from glm5.utils.errors import ConfigError


@dataclass(frozen=True)
class Taken:
    """A sample to train on. copies: how often it is there; advantage: of all its drawn tokens."""

    sample: Sample
    advantage: float
    copies: int


@dataclass
class Settled:
    """Groups that were settled.

    Args:
        taken: to train on, by group, and open until an update has read them. closed: the final state of every other
            sample. dropped: the groups of which nothing was taken.
    """

    taken: list[list[Taken]] = field(default_factory=list)
    closed: dict[str, State] = field(default_factory=dict)
    dropped: list[Sequence[Sample]] = field(default_factory=list)

    @property
    def trained(self) -> dict[str, State]:
        """What to close when the update has been made."""
        return {one.sample.id: State.TRAINED for group in self.taken for one in group}


def settle(group: Sequence[Sample], version: int, max_staleness: int, baseline: Baseline = "mean") -> Settled:
    """What becomes of a group that nobody runs for any more.

    Args:
        group: all of its samples, closed ones too: they count in its size.
        version: of the weights that will be trained. max_staleness: a sample is stale whose oldest version is more than
            so many before it; exactly so many is not.

    Raises:
        ConfigError: `max_staleness` is negative, or a sample still runs.
    """
    if max_staleness < 0:
        raise ConfigError("max_staleness", max_staleness, "must be at least 0")
    running = next((s for s in group if s.status == "running"), None)
    if running is not None:
        raise ConfigError("group", running.group, f"sample {running.id!r} still runs")
    made = Settled()
    valid: list[bool] = []
    for sample in group:
        good = False
        if sample.state is None and sample.outcome is not None:
            if sample.outcome.leaves_group:
                made.closed[sample.id] = state_of_failure(sample.outcome)
            elif version - (sample.oldest or 0) > max_staleness:
                made.closed[sample.id] = State.STALE
            else:
                good = True
        valid.append(good)
    left = [sample for sample, good in zip(group, valid, strict=True) if good]
    repaired = repair(valid)
    if repaired.dropped:
        return _closed(made, group, left, State.GROUP_DROPPED)
    rewards = [reward for s in left if s.outcome and (reward := reward_of(s.outcome, s.reward)) is not None]
    if all(reward == rewards[0] for reward in rewards):
        return _closed(made, group, left, State.ZERO_VARIANCE)
    advantages = dict(zip(repaired.unique, group_advantages(rewards, baseline), strict=True))
    made.taken.append([Taken(group[i], advantages[i], repaired.members.count(i)) for i in repaired.unique])
    return made


def _closed(made: Settled, group: Sequence[Sample], left: Sequence[Sample], state: State) -> Settled:
    made.closed |= {sample.id: state for sample in left}
    made.dropped.append(group)
    return made


def take(
    store: Store,
    groups: int,
    version: int,
    max_staleness: int,
    baseline: Baseline = "mean",
    *,
    step: int | None = None,
) -> Settled:
    """Settle groups in the order of their start until `groups` of them are taken, or none is ready; what is of no use
    is closed in the store at once. What was taken stays open: give `Settled.trained` to `Store.close_samples` when the
    update is made. Whoever dies between the two takes the same groups again.

    Args:
        step: number of the update that will read them. If `groups` of them are there, they are written down as its
            own (`Store.plan`); an update that has a plan gets those groups and no others.

    Returns:
        up to `groups` groups; fewer if no more are ready.
    """
    made = Settled()
    if step is not None and (planned := store.planned(step)):
        for group in planned:
            made.taken += settle(group, version, max_staleness, baseline).taken
        return made
    names: set[str] = set()
    while len(made.taken) < groups:
        # Others deliver meanwhile: a group that was started earlier may be ready only now.
        ready = [group for group in store.ready(len(names) + 1) if group[0].group not in names]
        if not ready:
            return made
        one = settle(ready[0], version, max_staleness, baseline)
        names.update(ready[0][0].group for _ in one.taken)
        if one.closed:
            store.close_samples(one.closed)
        made.closed |= one.closed
        made.taken += one.taken
        made.dropped += one.dropped
    if step is not None:
        store.plan(step, [group[0].sample.group for group in made.taken])
    return made
