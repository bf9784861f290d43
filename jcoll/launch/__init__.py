"""`python -m jcoll launch`: N local processes that form one jax.distributed job on CPU.

command.py     the flags; what is wrong with them; the exit status
job.py         what to run: the environment and the command line of each process
supervise.py   starting, watching and ending the processes
verdict.py     who failed first, and what is said about it
output.py      whole lines with their rank in front; log files
child.py       runs inside each process: joins the job, then runs the user's program
"""
