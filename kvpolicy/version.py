"""The version: its one home, which the package and its build read."""

__version__ = "0.1.0"
