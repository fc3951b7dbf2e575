"""Where an agent acts: the sandbox that its commands run in, tasks with verifiers, and programs held against tests.

Never imports `glm5.model`, `glm5.train` or `glm5.serve`, and needs no torch. Read next: `sandbox`, `tasks`, `code`.
"""
