import pytest

from helpers.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Starts ranks that run the functions of pipeline_cases.py."""
    started = Ranks("pipeline_cases")
    yield started
    started.close()
