from collections.abc import Iterator

import pytest
import runs


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Runs are started by an interpreter that has imported what they need, verl included."""
    with runs.interpreter(verl=True) as runs.warm_interpreter:
        yield
