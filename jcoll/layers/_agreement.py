"""Steps that the processes of a job take together: an error in one is an error in all.

Each step ends in a barrier of jax.distributed. A process that fails says so in the job's key-value
store before it comes to the barrier, so that the others learn of it there and do not wait in vain;
and all of them leave the work at the same step, so that the next attempt finds them together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import jax

from jcoll import _compat, errors
from jcoll.comm.mesh import real_number
from jcoll.config import LONGEST_S

_T = TypeVar("_T")
_attempts: Counter[str] = Counter()


class Agreement:
    """The steps of one piece of work, called `name`, the same in all processes.

    A name may be worked on again. Attempts are counted by name, so that a process that has missed
    the work of another name is still in step.
    """

    def __init__(self, where: str, name: str, timeout_s: float) -> None:
        seconds = real_number(timeout_s)
        if seconds is None or not 0 < seconds < math.inf:
            problem = f"timeout_s={timeout_s!r} is not a positive number of seconds."
            raise ValueError(errors.text(where, problem, "Pass e.g. 600.0."))
        self._where = where
        self._prefix = f"jcoll/{name}/{_attempts[name]}"
        self._timeout_s = min(seconds, LONGEST_S)
        _attempts[name] += 1

    def step(self, name: str, work: Callable[[], _T]) -> _T:
        """work(), once all processes have done theirs.

        Raises: what work() does; RuntimeError if another process's did; TimeoutError.
        """
        if jax.process_count() == 1:
            return work()
        error = result = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        failures = self._exchange(name, error)
        if error is not None:
            raise error
        if failures:
            problem = f"{'; '.join(sorted(failures))} in its step {name!r}, so that all stop here."
            raise RuntimeError(errors.text(self._where, problem, "Mend it there; call again."))
        return result  # type: ignore[return-value]

    def _exchange(self, name: str, error: Exception | None) -> list[str]:
        """What has failed in which process, this one's included."""
        client, key = _compat.distributed_client(), f"{self._prefix}/{name}"
        if error is not None:
            text = f"process {jax.process_index()} failed ({type(error).__name__}: {error})"
            client.key_value_set(f"{key}/{jax.process_index()}", text)
        try:
            client.wait_at_barrier(key, int(self._timeout_s * 1000))
        except Exception as late:
            raise self._timed_out(name, late) from error
        return [text for _, text in client.key_value_dir_get(key)]

    def _timed_out(self, name: str, late: Exception) -> Exception:
        problem = (
            f"not all {jax.process_count()} processes have come to the end of step {name!r} "
            f"within {self._timeout_s:g} s ({str(late).splitlines()[0]})."
        )
        fix = "All processes must call it; where one is only slow, raise timeout_s."
        return TimeoutError(errors.text(self._where, problem, fix))
