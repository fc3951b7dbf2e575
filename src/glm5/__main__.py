"""`python -m glm5`, and `torchrun -m glm5`: the command line."""

import sys

from glm5.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
