"""The other architectures of the handbook's table, each with each adapter: as
tests/unit/sources/test_hf_table.py, which has one of each kind.
"""

from __future__ import annotations

import pytest

from replicas.sources.models import experts
from tests.support.models.architectures import ARCHITECTURES, ONE_OF_EACH_KIND
from tests.support.models.table import row, rows_of_page

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ONE_OF_EACH_KIND])
def test_the_row_of_the_handbook_is_true(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "SLICE_NBYTES", 1)  # as there
    assert rows_of_page()[architecture] == row(architecture)
