"""Plans: collectives as data. No jax.

ops.py       what every op promises: the input and output blocks of each rank
ir.py        the plan: for every rank a list of steps over (buffer, chunk, peer)
builder.py   how algorithms write plans
verify.py    the proof that a plan does what its op promises, whatever the timing
simulate.py  how long it would take on a topology
encode.py    the flat form that the native executors read
render.py    text and pictures
"""
