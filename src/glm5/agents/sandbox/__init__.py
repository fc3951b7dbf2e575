"""Code that a model wrote, run where it can do no harm, or not at all.

A sandbox has no network, a read-only system, writable directories of a bounded size that only it sees, a clean
environment, and limits of time, memory, processes, files and output; what is started ends with the command that
started it. Where the host cannot give all of this there is no sandbox: `SandboxError` says what is missing.
Source: the report's section 4.2.2. Read next: `limits`, `host`, `bubblewrap`.
"""

from glm5.agents.sandbox.bubblewrap import Sandbox
from glm5.agents.sandbox.host import SandboxError, describe, require
from glm5.agents.sandbox.limits import Finished, Limits

__all__ = ["Finished", "Limits", "Sandbox", "SandboxError", "describe", "require"]
