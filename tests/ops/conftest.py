import pytest

from lln_fairseq.ops.backends import MODULES
from tests.ops.mixes import backend_or_skip


@pytest.fixture(params=sorted(MODULES))
def backend(request):
    """Return the name of each backend that runs here."""
    return backend_or_skip(request.param)
