"""`python -m twostroke`, the same as the command `twostroke`."""

from twostroke.cli import main

main()
