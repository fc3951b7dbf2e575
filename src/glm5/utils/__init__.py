"""What every room may use: errors, files, run logs. Imports nothing else of glm5."""
