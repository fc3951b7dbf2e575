"""What `glm5 watch` shows of an asynchronous run beside its curves: queues, engines and tasks, by their last figures.

Read next: `glm5.posttrain.agent`, which writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5.utils.progress import format_seconds

LOST = ("stale", "zero_variance", "group_dropped", "environment_failed", "cancelled")


def agents(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a subject; none where the run is no asynchronous one.

    Args:
        records: of the run log, oldest first.
    """
    last: dict[str, Any] = {}
    for record in records:
        last |= record
    if "staleness" not in last:
        return []
    gone = {name: sum(r.get(f"samples/{name}", 0) for r in records) for name in LOST}
    trained = sum(r.get("samples/trained", 0) for r in records)
    told = [f"{trained:,} trained", *(f"{n:,} {name.replace('_', ' ')}" for name, n in gone.items() if n)]
    spread = "  ".join(f"{distance}: {count}" for distance, count in last["staleness"].items())
    lines = [
        f"samples   {', '.join(told)}",
        f"staleness {spread}  (versions behind: samples of the last step)",
        f"queue     {last['queue/ready']:,} groups are ready; taken after {format_seconds(last['queue/age_mean'])}, at"
        f" most {format_seconds(last['queue/age_max'])}",
        f"idle      trainer {last['idle/trainer']:.0%}" + _share(last, "engine/idle", ", engines {:.0%}"),
        f"masked    {last.get('is_masked_positive', 0):.2%} of tokens to be raised,"
        f" {last.get('is_masked_negative', 0):.2%} of those to be lowered",
    ]
    if "engine/routable" in last:
        lines.append(
            f"engines   {last['engine/routable']:.0f} of {last['engine/count']:.0f} healthy"
            + _share(last, "engine/prefix_hit_rate", ", prefix hits {:.0%}")
            + _share(last, "engine/spec_accept_length", ", accept length {:.2f}")
            + _share(last, "time/weight_sync", ", push {:.2f} s")
        )
    for name, task in last.get("rollouts", {}).get("tasks", {}).items():
        lines.append(
            f"task      {name}: {task['share']:.0%} of samples (target {task['target']:.0%}), {task['running']} run,"
            f" {task['delivered']} delivered, the oldest for {format_seconds(task['queue_s'])}"
            + ("" if task["there"] else "; AWAY")
        )
    return lines


def _share(last: Mapping[str, Any], name: str, form: str) -> str:
    return form.format(last[name]) if name in last else ""
