"""`python -m jcoll tune`, which measures the algorithms here, and `python -m jcoll explain`.

command.py   tune's flags, its progress, the file it writes and the summary
combine.py   several measurements of one row as one
summary.py   the winners
runs.py      the measuring processes, and their rows as they come
child.py     one measuring process
explain.py   explain: what auto would choose for a call, and why
"""
