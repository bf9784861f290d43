"""Which algorithm `algorithm="auto"` means. No jax.

candidates.py   what is asked (a Request), and who could serve it, with reasons where not
table.py        measured costs: the shipped table and the user's own
cost_model.py   an estimate where nothing is measured
select.py       the choice and its reason
tables/         what is shipped, a file for each kind of device; `python -m jcoll tune` makes them
"""
