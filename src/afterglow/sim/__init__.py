"""The plan's own code on a modelled machine: hit rates, times and costs that a workload would get from a cache of any size.

Standard library only: it starts where neither torch nor numpy is installed.
"""
