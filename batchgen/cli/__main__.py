"""`python -m batchgen.cli`: the `batchgen` command without an installed script."""

from batchgen.cli.main import main

main()
