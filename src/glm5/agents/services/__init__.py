"""Tasks of our own as services, and adapters for those of others. Each is a `glm5.agents.service.TaskService`.

`maths` with a Python tool; `editing`, files to be mended until tests pass; `terminal`, tasks in Harbor's format;
`environments`, of the package verifiers. Read next: `tools`, `glm5.agents.service`.
"""
