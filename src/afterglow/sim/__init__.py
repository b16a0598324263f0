"""The plan's own code on a modelled machine: what a workload would get from a cache, before anybody buys it.

Standard library only: it starts where neither torch nor numpy is installed.
"""
