"""Rows from a user's function: what it may return, and what is refused when it is opened."""

import itertools
import sys
import types

import pytest

from trainer.config.data import FunctionSource, MixSource
from trainer.data.rows import BadRow
from trainer.data.sources import open_rows, open_sources
from trainer.errors import UserError

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(5)]


class OnTheFly:
    """Makes a row when it is asked for."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"question": f"{index} + 1?", "answer": str(index + 1)}


class Unseeded(OnTheFly):
    count = itertools.count()

    def __getitem__(self, index):
        return {"question": str(next(self.count)), "answer": "1"}


class Failing(OnTheFly):
    def __getitem__(self, index):
        if index == 3:
            raise RuntimeError("no third row")
        return super().__getitem__(index)


@pytest.fixture
def open_function(monkeypatch):
    module = types.ModuleType("rows_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def open_(function, **params):
        module.rows = function
        return open_rows(FunctionSource(path="rows_of_this_test:rows", params=params), "env.source")

    return open_


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS)], ids=["list", "tuple"])
def test_a_sequence_is_read_by_index(open_function, rows):
    opened = open_function(lambda: rows)
    assert len(opened) == 5
    assert [opened[i] for i in range(5)] == ROWS
    assert opened.where(4) == "rows_of_this_test:rows[4]"


def test_params_reach_the_function(open_function):
    assert len(open_function(lambda num, offset=0: ROWS[offset:num], num=4, offset=1)) == 3
    with pytest.raises(UserError, match=r"env\.source\.params=\{'size': 4\}.*takes \(num\)"):
        open_function(lambda num: ROWS, size=4)


def test_rows_may_be_made_on_the_fly(open_function):
    opened = open_function(OnTheFly)
    assert (len(opened), opened[999]) == (1000, {"question": "999 + 1?", "answer": "1000"})


def raising():
    raise OSError("no such file")


REFUSED = {
    "an iterator": (
        lambda: iter(ROWS),
        r"returned a list_iterator: return a list .*list\(\.\.\.\)",
    ),
    "nothing": (lambda: None, "returned a NoneType"),
    "text": (lambda: "question", "returned a str"),
    "a table": (lambda: {"question": ["a"]}, "returned a dict"),
    "no rows": (list, "has no rows"),
    "an error": (raising, r"failed \(OSError: no such file\)"),
    "chance": (Unseeded, "row 0 is another each time it is read"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_sequence_of_rows_is_refused(open_function, function, message):
    with pytest.raises(UserError, match=rf"^env\.source\.path='rows_of_this_test:rows'.*{message}"):
        open_function(function)


def test_a_row_that_is_none_is_a_bad_row(open_function):
    with pytest.raises(BadRow, match="it is a tuple: give a dict"):
        open_function(lambda: [("2+2?", "4")])[0]
    opened = open_function(Failing)
    assert opened[2] == {"question": "2 + 1?", "answer": "3"}
    with pytest.raises(BadRow, match="RuntimeError: no third row: mend the function"):
        opened[3]


def test_values_that_json_lacks_are_no_chance(open_function):
    class Objects(OnTheFly):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "tests": object()}

    assert open_function(Objects).fingerprint() == open_function(Objects).fingerprint()


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_fingerprint_tells_the_order_of_any_two_rows_of_a_list(open_function, kind):
    rows = [{"question": f"{i} + 1?"} for i in range(1000)]
    swapped = [rows[0], rows[2], rows[1], *rows[3:]]
    first, again, other = (
        open_function(lambda rows=rows: kind(rows)).fingerprint() for rows in (rows, rows, swapped)
    )
    assert first == again != other


def test_a_fingerprint_reads_few_of_rows_made_on_the_fly_and_tells_their_number(open_function):
    read = []

    class Costly(OnTheFly):
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    sizes = {open_function(Costly, size=size).fingerprint() for size in (1000, 1001)}
    assert len(sizes) == 2
    assert len(read) < 100


def test_a_fingerprint_samples_a_list_that_is_too_long(open_function, monkeypatch):
    monkeypatch.setattr("trainer.data.function.NUM_WHOLE", 39)
    rows = [{"question": str(i)} for i in range(40)]
    swapped = [rows[0], rows[3], rows[2], rows[1], *rows[4:]]  # every second row is read
    prints = {open_function(lambda rows=rows: rows).fingerprint() for rows in (rows, swapped)}
    assert len(prints) == 1


def test_functions_may_be_mixed(open_function):
    open_function(lambda: ROWS)
    part = FunctionSource(path="rows_of_this_test:rows")
    assert [len(rows) for rows in open_sources(MixSource(sources=(part, part)), "env.source")] == [
        5,
        5,
    ]
