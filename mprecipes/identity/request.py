# SPDX-License-Identifier: Apache-2.0
"""A file in a run's folder by which a person asks the running process for something."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


class RequestFile:
    """Looked for at most once a second; removed when the request is answered.

    A folder that cannot be read asks for nothing. A file that cannot be removed is logged and
    ignored from then on, since it would ask for ever.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._looked_at, self._asked, self._ignored = float("-inf"), False, False

    @property
    def asked(self) -> bool:
        """Whether the file was there when it was last looked for."""
        if not self._ignored and self._clock() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = self._clock()
            try:
                self._asked = self._path.exists()
            except OSError:  # a network disk that is away for a while
                self._asked = False
        return self._asked

    def answer(self) -> None:
        """Removes the file, whether or not it has been seen."""
        self._asked = False
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._ignored = True
            name = self._path.name
            log.warning("%s cannot be removed (%s); it is ignored from now on", name, error)
