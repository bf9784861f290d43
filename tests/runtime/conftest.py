"""For the tests of the runtime: a watchdog."""

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def _watchdog():
    """A hang ends the run, with a traceback: there is no other way out of native code."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
