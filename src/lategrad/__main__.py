"""``python -m lategrad`` is the command line."""

from lategrad.cli import main

main()
