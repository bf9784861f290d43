"""`python -m jcoll plan`: show, prove, simulate and draw plans.

command.py     the flags and actions; show and draw
arguments.py   from what was typed to ops, ranks, plans, ...; what is wrong with it
proofs.py      verify
comparison.py  simulate: table, crossovers, curves
"""
