"""What a sidecar is told of the packing of its images.

Covers: sidecar/mailbox.py.
"""

from __future__ import annotations

from replicas.sidecar.mailbox import KEPT_TRANSFERS, PackingProgress


def test_what_is_told_grows_and_stays_with_its_transfer() -> None:
    progress = PackingProgress()
    assert progress.of(1) == 0
    progress.report_packed(2, 10)  # before it began
    progress.report_packed(1, 30)
    progress.report_packed(1, 20)
    assert (progress.of(1), progress.of(2)) == (30, 10)
    progress.drop_transfer(1)
    progress.drop_transfer(1)
    assert (progress.of(1), progress.of(2)) == (0, 10)


def test_transfers_that_never_come_do_not_pile_up() -> None:
    progress = PackingProgress()
    for transfer in range(3 * KEPT_TRANSFERS):
        progress.report_packed(0, transfer)
        progress.report_packed(transfer + 1, 7)
    known = [transfer for transfer in range(3 * KEPT_TRANSFERS + 1) if progress.of(transfer)]
    assert len(known) == KEPT_TRANSFERS
    assert known[0] == 0
    assert known[-1] == 3 * KEPT_TRANSFERS
