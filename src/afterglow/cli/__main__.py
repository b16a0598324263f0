"""`python -m afterglow.cli`: the same as the `afterglow` command."""

from afterglow.cli import main

main()
