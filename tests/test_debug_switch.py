"""``SACCADE_DEBUG=1`` (set by conftest) catches what kernels would read outside of the keys."""

import pytest
import torch

from saccade.errors import SaccadeError
from saccade.kv.view import KVView
from saccade.ops import attend, debug
from saccade.selection import Shape, Tokens


@pytest.mark.parametrize("indices", [[5, 40], [7, 3], [2, 2], [-1, 3]])
def test_a_list_that_leads_outside_of_the_keys_is_caught(monkeypatch, indices):
    monkeypatch.setattr(debug, "ON", True)
    k, v, q = torch.randn(1, 20, 16), torch.randn(1, 20, 16), torch.randn(1, 1, 16)
    shape = Shape.suffix(1, 1, 1, 20)
    bad = Tokens(shape, torch.tensor([0, 2]), torch.tensor(indices, dtype=torch.int32))
    with pytest.raises(SaccadeError):
        attend(q, KVView.from_tensors(k, v), bad)
