"""Studies of many simulations: grids of workload x policy x memory x link x seed, and what to deploy.

The entry points are :func:`kvpolicy.simulate` and :func:`kvpolicy.recommend`.
"""
