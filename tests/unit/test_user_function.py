import pytest

from trainer.errors import UserError
from trainer.user_function import check_arguments, load_function


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_is_found_in_the_working_directory(folder):
    (folder / "found_module.py").write_text("def seven():\n    return 7\n")
    assert load_function("found_module:seven", "env.source.path")() == 7


def test_a_module_that_raises_is_refused(folder):
    (folder / "raising_module.py").write_text("raise LookupError('no data here')\n")
    with pytest.raises(UserError, match=r"cannot be imported \(LookupError: no data here\)"):
        load_function("raising_module:rows", "env.source.path")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:f", r"here\.path='no_such_module_here:f'.*cannot be imported"),
        ("math:no_such", r"here\.path='math:no_such'.*no function 'no_such'"),
        ("math:pi", r"no function 'pi'"),
    ],
)
def test_a_function_that_is_not_there_is_refused(path, message):
    with pytest.raises(UserError, match=message):
        load_function(path, "here.path")


def test_an_async_function_is_refused(folder):
    (folder / "async_module.py").write_text("async def score(sample):\n    return 1.0\n")
    with pytest.raises(UserError, match="'async_module:score' is async"):
        load_function("async_module:score", "env.rewards.path")


def two_arguments(given, limit=3):
    return given, limit


def test_arguments_are_checked_before_the_call():
    check_arguments(two_arguments, 1, {"limit": 4}, "module:two_arguments", "here")
    message = r"^here\.params=\{'limits': 4\}: 'module:two_arguments' .* takes \(given, limit=3\)"
    with pytest.raises(UserError, match=message):
        check_arguments(two_arguments, 1, {"limits": 4}, "module:two_arguments", "here")
    with pytest.raises(UserError, match="missing a required argument: 'given'"):
        check_arguments(two_arguments, 0, {}, "module:two_arguments", "here")
