"""Base class of all errors caused by invalid input. Each package derives its own."""


class KVPolicyError(ValueError):
    """Something from outside is not as it should be; the message names it and what would be right.

    A subclass with a constructor of its own hands all its arguments on to this one's and has a ``__str__``: worker
    processes hand errors on as pickles, which call the constructor with ``args``.

    The command line shows such an error, and OSError, in one line. Any other exception is a fault of this package.
    """


class InputError(KVPolicyError):
    """A wrong value: an argument, a flag, a setting or a field of a file."""


class EngineFailed(KVPolicyError, RuntimeError):
    """An engine's process ended badly; carries the end of what it printed, in lines of its own."""
