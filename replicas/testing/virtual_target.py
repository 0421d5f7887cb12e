"""`VirtualTarget`: a member that loads every version, on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from replicas import errors
from replicas.channel import Channel, Update
from replicas.common.logs import Log

logger = Log("replicas.testing")

END_TIMEOUT_S = 30.0


class VirtualTarget:
    """A target in place of an inference server: made by :meth:`FakeRun.target`.

    :ivar channel: its :class:`replicas.Channel`.
    :ivar versions: numbers of the versions that it has loaded, in order.
    :ivar weights: the tensors of the newest one, copied (without a ``load`` function).
    :ivar error: the error that ended its thread; None while it runs, or after the end
        of the run.
    """

    def __init__(self, channel: Channel, load: Callable[[Update], object] | None) -> None:
        """Start the daemon thread, which loads the channel's versions from now on.

        :param load: called with each version on that thread; None: copy the tensors.
        """
        self.channel = channel
        self.versions: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.error: errors.ReplicasError | None = None
        self._load = load or self._copy
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"virtual {channel.member}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Thread: receive and load versions until the channel ends; keep the error that
        ended it in ``error``, unless :meth:`end` was called."""
        try:
            while True:
                self._load_update(self.channel.receive().wait())
        except errors.ReplicasError as error:
            if not self._over:
                self.error = error

    def _load_update(self, update: Update) -> None:
        """Load one version by the ``load`` function, on this thread, and report it to
        the run as loaded or failed; after a failure, block until a newer version is
        committed. Skip it if the targets decided together not to load it.

        :raises replicas.errors.ReplicasError: the channel has ended.
        """
        try:
            update.adopt().wait()
            self._load(update)
        except errors.NotAdopted:
            return  # wait for the next version
        except BaseException as error:  # noqa: BLE001  # reported to the run, as in a program; the thread continues
            update.failed(error)
            self.channel.committed(after=update.version).wait()  # else receive() would return the same version again
            return
        self.versions.append(update.version)
        update.loaded()

    def _copy(self, update: Update) -> None:
        """Keep copies of the version's tensors in ``weights``."""
        self.weights = {name: tensor.clone() for name, tensor in update.tensors().items()}

    def end(self) -> None:
        """Close the channel, and wait up to 30 s for the thread to finish its load; log
        a load that still runs then."""
        self._over = True
        self.channel.close(wait=False)
        self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("leaving the load of %s, which still runs at the end of its run", self.channel.member)
