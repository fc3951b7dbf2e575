"""Tasks with tools as services: mathematics with Python, files to mend, or terminal tasks in Harbor's format.

python examples/services/tools.py maths    http://127.0.0.1:9100 prompts.jsonl
python examples/services/tools.py edits    http://127.0.0.1:9100 examples/edits
python examples/services/tools.py terminal http://127.0.0.1:9100 examples/tasks [podman | docker]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from glm5.agents.sandbox.container import Engine
from glm5.agents.service import serve
from glm5.agents.services.editing import EditingService, read_edits
from glm5.agents.services.terminal import TerminalService
from glm5.agents.tasks import InContainer, InSandbox, read_tasks


def main(kind: str, orchestrator: str, data: str, engine: Any = None) -> None:
    if kind == "maths":
        from glm5.posttrain.prompts import read_prompts
        from glm5.posttrain.verify import VerifierPool
        from glm5.posttrain.verify.service import with_python

        with VerifierPool(workers=2, timeout_s=30) as pool:
            serve(with_python("maths", read_prompts(data), pool), orchestrator)
    elif kind == "edits":
        serve(EditingService("edits", read_edits(Path(data))), orchestrator)
    elif kind == "terminal":
        where = InSandbox() if engine is None else InContainer(Engine(engine))
        serve(TerminalService("terminal", read_tasks(Path(data)), where), orchestrator)
    else:
        sys.exit(str(__doc__))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) in (4, 5) else sys.exit(str(__doc__))
