"""Functions that users name in a config as `module:function`.

Owns the import and the check that a function takes what it will be called with, so that neither a
reward nor a source of prompts fails in mid-run for a wrong name. What it returns is its caller's.
"""

import importlib
import inspect
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from typing import Any

from trainer.errors import UserError

FAILURES = (Exception, SystemExit, CancelledError)
"""With what a user's code may end: `sys.exit()` and a cancelled task are no `Exception`."""


def load_function(path: str, field: str) -> Callable[..., Any]:
    """Import `module:function`, the working directory included.

    Args:
        path: As the user gives it.
        field: What it is called there.

    Raises:
        UserError: there is no such module or function, importing the module fails, or the function
            is async.
    """
    module_name, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    # What runs at import is the user's.
    except FAILURES as error:
        raise UserError(
            f"{field}={path!r}: module {module_name!r} cannot be imported "
            f"({describe_failure(error)}); run from its folder, install it, or correct the path"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        raise UserError(
            f"{field}={path!r}: {module_name!r} has no function {name!r}; correct the path"
        )
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise UserError(
            f"{field}={path!r} is async, and nothing here awaits it: make it an ordinary function"
        )
    return function


def check_arguments(
    function: Callable[..., Any], num_given: int, params: Mapping[str, Any], path: str, field: str
) -> None:
    """Refuse `params` that a function does not take, beside what the trainer gives it.

    Args:
        function: To be called.
        num_given: Positional arguments of the trainer's own.
        params: Keyword arguments of the user's.
        path: The function's, as the user gives it.
        field: The section that holds `path` and `params`.

    Raises:
        UserError: the call would not fit the function's signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # Functions written in C may not tell; the call will.
    try:
        signature.bind(*[None] * num_given, **params)
    except TypeError as error:
        raise UserError(
            f"{field}.params={dict(params)!r}: {path!r} is called with {num_given} argument(s) and "
            f"these, but takes {signature} ({error}); correct params or the function"
        ) from None


def describe_failure(error: BaseException) -> str:
    """Return an error's type and message on one line, whatever its class makes of `str`."""
    return " ".join("".join(traceback.format_exception_only(error)).split())
