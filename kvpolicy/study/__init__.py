"""Many simulations: grids of workload x policy x memory x link x seed, and what to deploy by them.

:func:`kvpolicy.simulate` and :func:`kvpolicy.recommend` are the ways in.
"""
