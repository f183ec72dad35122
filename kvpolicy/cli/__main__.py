"""`python -m kvpolicy.cli`, for environments in which the command is not on the path."""

from kvpolicy.cli import main

main()
