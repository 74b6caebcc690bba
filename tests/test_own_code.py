"""Code of a user by its path: a module's or a file's, imported once, and errors that say where they are from."""

import pytest

from logitless.errors import ConfigurationError
from logitless.own_code import imported, made


def test_a_file_is_imported_once_and_hides_no_package_of_its_name(tmp_path):
    (tmp_path / "json.py").write_text(
        "import json\n\n\nclass Own:\n    def text(self):\n        return json.dumps([1])\n"
    )
    own = imported(f"{tmp_path}/json.py:Own")
    assert own().text() == "[1]"
    assert imported(f"{tmp_path}/json.py:Own.text") is own.text


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder, number in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"NUMBER = {number}\n")
    assert [imported(f"{tmp_path}/{folder}/mine.py:NUMBER") for folder in "ab"] == [1, 2]


def test_a_file_that_fails_while_it_is_imported_is_imported_again_next_time(tmp_path):
    (tmp_path / "mine.py").write_text("NUMBER = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        imported(f"{tmp_path}/mine.py:NUMBER")
    (tmp_path / "mine.py").write_text("NUMBER = 1234\n")
    assert imported(f"{tmp_path}/mine.py:NUMBER") == 1234


@pytest.mark.parametrize("path", ["", "json", "json:", ":dumps", "./absent.py:x", "nowhere:x", "json:nothing"])
def test_a_path_without_an_object_is_an_import_or_attribute_error(path):
    with pytest.raises((ImportError, AttributeError)):
        imported(path)


def test_what_goes_wrong_while_it_is_made_is_told_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def make(size):\n    return [1] / size\n")
    for name, options, said in (
        ("make", {"size": 1}, r"something from .*'size': 1.*; given TypeError.*mine.py, line 2. Correct that line"),
        ("make", {"sise": 1}, r"unexpected keyword argument 'sise'. Correct what some.key names, or some.options"),
        ("mkae", {}, r"an import path like .*no 'mkae' in .*mine.py, which has make\). Correct some.key"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            made(f"{tmp_path}/mine.py:{name}", options, what="something", key="some.key")
    (tmp_path / "broken.py").write_text("NUMBER = 1 / 0\n")
    with pytest.raises(ConfigurationError, match=r"ZeroDivisionError.*broken.py, line 1\). Correct that line"):
        made(f"{tmp_path}/broken.py:make", {}, what="something", key="some.key")
