"""Measuring collectives: `python -m jcoll bench` puts jcoll beside jax.lax in one process.

The parent process (`command`) never starts jax; every device count and allocator setting gets a
fresh child (`child`), because both must be in the environment before jax starts.

    command -> options -> spawn -> child -> measure -> programs, cases
                    \\-> report, plot
"""
