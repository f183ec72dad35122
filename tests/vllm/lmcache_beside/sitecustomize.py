"""Lets vLLM's CPU build start where LMCache has imported Numba.

Python runs this at the start of every process that has this folder on its path. vLLM looks through all modules for
objects that hold a kernel, and asks each for its ``__dict__``; the library object of llvmlite, on which Numba stands,
answers any name with a function of that name, also this one. Here it is given an empty one.
"""

from llvmlite.binding import ffi

ffi.lib._fntab["__dict__"] = {}
