"""`glm5 sparsify CHECKPOINT`: from dense to sparse attention, in DSA's two stages. Read next: `glm5.train.sparsify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm5.cli.launch import several, spoken_once
from glm5.cli.pretrain import show
from glm5.utils.config_io import parse

DESCRIPTION = """Adapt a dense model to sparse attention: glm5 sparsify CHECKPOINT [options].

First the indexers alone learn to find what the dense attention looks at (warmup), then the whole model learns to live
with what they select (adapt). --warmup.FIELD and --adapt.FIELD change one field of a stage; --mesh runs both on several
devices."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0, or what a process of several returned."""
    return spoken_once(lambda say: _main(argv, say))


def _main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    from glm5.train.sparsify import SparsifyConfig, sparsify

    config = parse(SparsifyConfig, argv, prog="glm5 sparsify", description=DESCRIPTION, first="checkpoint")
    if (status := several("sparsify", config, argv)) is not None:
        return status
    found = sparsify(config, say, lambda: show(config, say))
    if found.bits_per_byte:
        width = max(map(len, found.bits_per_byte))
        say("\nheld-out bits per byte")
        for name, bits in found.bits_per_byte.items():
            say(f"  {name:<{width}}  {bits:.4f}")
        say("indexer recall of the attention mass, where a query sees more than it selects")
        for name, recall in found.recall.items():
            say(f"  {name:<{width}}  {recall:.3f}")
    say(f"run       {found.run}  (warmup/ and adapt/ hold metrics; result.json)")
    say(f"next      glm5 chat {found.model}")
    return 0
