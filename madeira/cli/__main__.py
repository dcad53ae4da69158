"""`python -m madeira.cli`: the same as the console script, also where that is not installed."""

from madeira.cli.main import main

main(prog_name="madeira")
