"""Plans: collectives as data. No jax.

ops.py       what every op promises: the input and output blocks of each rank
ir.py        the plan: for every rank a list of steps over (buffer, chunk, peer)
builder.py   how algorithms write plans
form.py      what a plan must look like: fields in range
order.py     which send meets which receive; an order in which all steps can be done
verify.py    the proof that a plan does what its op promises, whatever the timing
bits.py      whether all ranks add in one order
ragged.py    whether blocks may differ in size
counts.py    rounds, chunks, messages, memory
topology.py  machines: link classes, ports, presets; topology_file.py: one's own
simulate.py  how long a plan would take on one
encode.py    the flat form that the native executors read
render.py    text and pictures
"""
