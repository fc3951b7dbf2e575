"""`glm5 sparsify CHECKPOINT`: from dense to sparse attention, in DSA's two stages. Read next: `glm5.train.sparsify`."""

from __future__ import annotations

from collections.abc import Sequence

from glm5.cli.pretrain import describe
from glm5.utils.config_io import parse, to_dict

DESCRIPTION = """Adapt a dense model to sparse attention: glm5 sparsify CHECKPOINT [options].

First the indexers alone learn to find what the dense attention looks at (warmup), then the whole model learns to live
with what they select (adapt). --warmup.FIELD and --adapt.FIELD change one field of a stage."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0."""
    from glm5.train.sparsify import SparsifyConfig, sparsify

    config = parse(SparsifyConfig, argv, prog="glm5 sparsify", description=DESCRIPTION, first="checkpoint")
    for line in describe(to_dict(config)):
        print(line)
    found = sparsify(config)
    if found.bits_per_byte:
        width = max(map(len, found.bits_per_byte))
        print("\nheld-out bits per byte")
        for name, bits in found.bits_per_byte.items():
            print(f"  {name:<{width}}  {bits:.4f}")
        print("indexer recall of the attention mass, where a query sees more than it selects")
        for name, recall in found.recall.items():
            print(f"  {name:<{width}}  {recall:.3f}")
    print(f"run       {found.run}  (warmup/ and adapt/ hold metrics; result.json)")
    print(f"next      glm5 chat {found.model}")
    return 0
