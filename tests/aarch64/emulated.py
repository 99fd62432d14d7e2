"""What tests of kernels need of tests/conftest.py, which imports models: unwritten keys are NaN."""

import pytest
from kv_helpers import PoisonedStorage

from saccade.kv import view


@pytest.fixture(autouse=True, scope="session")
def _unwritten_keys_are_nan():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "KVStorage", PoisonedStorage)
        yield
