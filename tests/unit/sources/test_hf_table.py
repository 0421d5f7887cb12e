"""One architecture of each kind in the handbook's table, with each adapter.

Against what transformers and PEFT save themselves: names, dtypes, bits, a reader's
answers, the trainer's own state. The other rows:
tests/integration/sources/test_hf_rows.py.

Covers: sources/hf.py, sources/models/plan.py, sources/models/recording.py,
sources/models/saving.py, sources/models/experts.py.
"""

from __future__ import annotations

import pytest

from replicas.sources.models import experts
from tests.support.models.architectures import ARCHITECTURES, ONE_OF_EACH_KIND
from tests.support.models.table import row, rows_of_page

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ONE_OF_EACH_KIND)
def test_the_row_of_the_handbook_is_true(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "SLICE_NBYTES", 1)  # else the few small experts of these models are one slice
    assert rows_of_page()[architecture] == row(architecture)


def test_the_table_has_enough_rows_and_no_others() -> None:
    assert list(rows_of_page()) == list(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 24
