# SPDX-License-Identifier: Apache-2.0
"""The data that every launch here trains on."""

import pytest

from tests.fix64 import write_rows


@pytest.fixture(scope="session")
def fix64(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("fix64") / "rows.jsonl")
