"""A descriptor is needed as before; a disk is not waited for."""

import os

import pytest


def test_a_closed_file_cannot_be_written_to_disk(tmp_path):
    with (tmp_path / "file").open("w") as file:
        os.fsync(file)
        os.fsync(file.fileno())
        descriptor = os.dup(file.fileno())
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fsync(descriptor)
    with pytest.raises(ValueError, match="closed"):
        os.fsync(file)
