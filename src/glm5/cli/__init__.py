"""The command line: one module a command, each with `main(argv) -> int`. Read `main` first."""
