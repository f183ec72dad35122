"""Drives live engines. Entry points are :mod:`~kvpolicy_vllm.bench.run_profile`, :mod:`~kvpolicy_vllm.bench.run_demo`
and :mod:`~kvpolicy_vllm.bench.run_characterize`; the overload and its statistics are also used by benchmarks.
"""
