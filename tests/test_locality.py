"""Where PSAW's windows begin: by a model's measured locality, or by depth, and the report says which."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_helpers import GREEDY, make
from helpers import planted_heads
from tiny_models import make_checkpoint, random_ids

from saccade.errors import PolicyError
from saccade.kv.view import KVView
from saccade.methods.base import Chunk
from saccade.methods.offline import Locality
from saccade.methods.prehoc import HIDDEN, LOCALITY, MOST_HIDDEN, PSAW, SINKS
from saccade.models.calibration import save_calibration

LAYERS = 8


def test_it_is_the_weight_of_keys_in_the_first_share_of_the_context():
    q, k, v = planted_heads(4, 2, 90, seed=5)
    found = Locality()
    found.add(Chunk.of(q[:, 40:], KVView.from_tensors(k, v)))  # a chunk that ends the prompt
    own = found.result()[LOCALITY]
    rows = range(67, 90)  # the last quarter: fewer than are taken at most
    for head in range(4):
        for at, share in enumerate(HIDDEN):
            sums = 0.0
            for row in rows:
                weights = torch.softmax(
                    q[head, row].double() @ k[head // 2, : row + 1].double().T / q.shape[-1] ** 0.5, 0
                )
                sums += sum(float(weights[key]) for key in range(SINKS, int(share * (row + 1))))
            assert float(own[head, at]) == pytest.approx(sums / len(rows), abs=1e-5)


def table(*hidden: float | None) -> list[torch.Tensor | None]:
    """By layer, at every share alike."""
    return [None if one is None else torch.full((4, len(HIDDEN)), one) for one in hidden]


@pytest.mark.parametrize(
    ("hidden", "begin"),
    [
        ([0.0] * 8, 6),  # near everywhere: the paper's three quarters
        ([0.0] * 7 + [0.5], 8),  # the last layer looks far: no window at all
        ([0.0] * 6 + [0.5, 0.0], 7),
        ([0.5] * 6 + [0.0, 0.0], 6),
        ([0.5] * 6 + [0.0, None], 6),  # the model's own window decides there
        ([0.0] * 6 + [0.5, None], 7),
        ([0.0] * 7 + [MOST_HIDDEN], 6),
    ],
)
def test_windows_begin_where_all_deeper_layers_look_near(hidden, begin):
    assert PSAW(phi=0.5).measured(table(*hidden)) == PSAW(phi=0.5, start_layer=begin)


def test_what_counts_is_the_weight_that_the_deepest_window_hides():
    far = torch.linspace(0, 0.6, len(HIDDEN)).expand(4, -1)  # at a share of 0.2 0.1, at 0.3 0.167
    assert PSAW(phi=0.8).measured([far] * 8).start_layer == 6
    assert PSAW(phi=0.7).measured([far] * 8).start_layer == 8


def test_the_report_says_where_windows_come_from(tmp_path, capsys):
    from saccade.cli.main import main

    folder = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=2048, num_hidden_layers=LAYERS)
    ids, policy = random_ids(400, seed=1), "dense+psaw(phi=0.3, block_size=16)"

    def ran(policy: str = policy):
        return make(folder, chunk=512).generate(ids, GREEDY, policy=policy)[0]

    before = ran()
    assert [note for note in before.report["notes"] if "locality" in note] == [
        "'psaw' hides keys from the deepest quarter of the layers, however far these look: the locality of this model "
        "is not measured; saccade calibrate locality does"
    ]
    (cpe,) = (note for note in ran("cpe").report["notes"] if "locality" in note)
    assert cpe.startswith("'psaw' hides keys from the deepest quarter")
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "locality", "-m", str(folder), "--tokens", "2047"])
    assert ended.value.code == 0
    file, said = capsys.readouterr().out.strip().splitlines()
    assert file == str(folder / "calibration" / "locality.safetensors")
    assert said.endswith("by this model's measured locality")
    for far, where, densities in ((0.0, "from layer 6 on", "same"), (0.5, "in no layer", "dense")):
        save_calibration(folder, LOCALITY, [{LOCALITY: torch.full((4, len(HIDDEN)), far)} for _ in range(LAYERS)])
        after = ran()
        assert f"'psaw' hides keys {where}, by this model's measured locality" in after.report["notes"]
        wanted = before.report["decode"]["density"] if densities == "same" else 1.0
        assert after.report["decode"]["density"] == pytest.approx(wanted)
    given = ran(replace(PSAW(phi=0.3, block_size=16), start_layer=6).text)
    assert not any("locality" in note for note in given.report["notes"])
    assert given.report["decode"]["density"] == pytest.approx(before.report["decode"]["density"])
    save_calibration(folder, LOCALITY, [{LOCALITY: torch.ones(3, 3)} for _ in range(LAYERS)])
    with pytest.raises(PolicyError, match="belongs to another model"):
        ran()
