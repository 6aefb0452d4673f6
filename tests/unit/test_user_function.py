import pytest

from trainer.errors import UserError
from trainer.user_function import check_arguments, describe_failure, load_function


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_is_found_in_the_working_directory(folder):
    (folder / "found_module.py").write_text("def seven():\n    return 7\n")
    assert load_function("found_module:seven", "env.source.path")() == 7


@pytest.mark.parametrize(
    ("name", "code", "cause"),
    [
        ("raising_module", "raise LookupError('no data here')", "LookupError: no data here"),
        ("exiting_module", "import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_a_module_that_raises_is_refused(folder, name, code, cause):
    (folder / f"{name}.py").write_text(code)
    with pytest.raises(UserError, match=rf"cannot be imported \({cause}\)"):
        load_function(f"{name}:rows", "env.source.path")


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


ASYNC = """
async def score(sample):
    return 1.0

class Judge:
    async def __call__(self, sample):
        return 1.0

judge = Judge()
"""


@pytest.mark.parametrize("name", ["score", "judge"])
def test_an_async_function_is_refused(folder, name):
    (folder / "async_module.py").write_text(ASYNC)
    with pytest.raises(UserError, match=f"'async_module:{name}' is async"):
        load_function(f"async_module:{name}", "env.rewards.path")


def two_arguments(given, limit=3):
    return given, limit


def test_arguments_are_checked_before_the_call():
    check_arguments(two_arguments, 1, {"limit": 4}, "module:two_arguments", "here")
    message = r"^here\.params=\{'limits': 4\}: 'module:two_arguments' .* takes \(given, limit=3\)"
    with pytest.raises(UserError, match=message):
        check_arguments(two_arguments, 1, {"limits": 4}, "module:two_arguments", "here")
    with pytest.raises(UserError, match="missing a required argument: 'given'"):
        check_arguments(two_arguments, 0, {}, "module:two_arguments", "here")


class Untold(Exception):  # noqa: N818 - of a user
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_failure_is_told_on_one_line_whatever_it_is():
    assert describe_failure(ValueError("first\n  second")) == "ValueError: first second"
    assert describe_failure(SystemExit(3)) == "SystemExit: 3"
    assert "Untold: <exception str() failed>" in describe_failure(Untold())
