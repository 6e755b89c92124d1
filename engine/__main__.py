"""`python -m engine` is the `engine` command."""

from engine.cli.main import main

main()
