"""`python -m jcoll doctor`: what this machine has, what jcoll uses of it, and why not more.

    probes.py      the facts, section by section
    features.py    what follows from them for each platform
    command.py     the report

It is for machines where something is wrong. So nothing here imports jax, or a part of jcoll that
does, but inside a probe, whose failure is a line of the report.
"""
