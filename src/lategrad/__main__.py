"""``python -m lategrad`` is the command line."""

from lategrad.cli.main import main

main()
