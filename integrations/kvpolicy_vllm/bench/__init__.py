"""Drives live engines: :mod:`~kvpolicy_vllm.bench.run_profile`, :mod:`~kvpolicy_vllm.bench.run_demo` and
:mod:`~kvpolicy_vllm.bench.run_characterize` are the ways in, an overload and its statistics beside them.
"""
