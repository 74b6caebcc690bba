"""A file that cannot be written is an error in words."""

import pytest

from logitless.errors import TrainingError
from logitless.train.store.atomic import write_atomically


def test_a_place_where_nothing_can_be_written_or_removed_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"room and permission to write .*file/page"):
        write_atomically(tmp_path / "file" / "page.html", b"")
