"""`python -m kvpolicy.cli`, for where the command is not on the path."""

from kvpolicy.cli import main

main()
