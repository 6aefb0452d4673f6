import pytest

from trainer.errors import UserError
from trainer.optim.coefficients import TABLES, resolve_coefficients


@pytest.mark.parametrize("steps", range(1, 9))
def test_steps_beyond_the_table_repeat_its_last_row(steps):
    rows = resolve_coefficients("quintic", steps)
    table = TABLES["quintic"]
    assert rows == tuple(table[min(step, len(table) - 1)] for step in range(steps))


def test_a_list_is_a_table():
    assert resolve_coefficients([[1, 2, 3], [4, 5, 6]], 3) == (
        (1.0, 2.0, 3.0),
        (4.0, 5.0, 6.0),
        (4.0, 5.0, 6.0),
    )


def test_quintic_is_the_documented_table():
    assert resolve_coefficients("quintic", 5) == (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )


def test_polar_express_divides_its_input_by_the_safety_factor():
    a, b, c = TABLES["polar_express"][0]
    x = 0.37
    y = x / 1.02
    expected = 8.156554524902461 * y - 22.48329292557795 * y**3 + 15.878769915207462 * y**5
    assert a * x + b * x**3 + c * x**5 == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("table", "steps", "message"),
    [
        ("quintic", 0, r"optim\.ns_steps=0"),
        ("cubic", 5, r"optim\.ns_coefficients='cubic'"),
        ([], 5, r"optim\.ns_coefficients=\[\]"),
        ([(1.0, 2.0)], 5, r"row \[1\.0, 2\.0\] has 2 numbers"),
        ([1.0, 2.0, 3.0], 5, r"optim\.ns_coefficients=\[1\.0, 2\.0, 3\.0\]: give"),
        (None, 5, r"optim\.ns_coefficients=None"),
        ([(1.0, 2.0, float("nan"))], 5, r"row \[1\.0, 2\.0, nan\] must be three finite"),
        ([("1", 2.0, 3.0)], 5, r"row \['1', 2\.0, 3\.0\] must be three finite"),
        ([(1.0, 2.0, None)], 5, r"row \[1\.0, 2\.0, None\] must be three finite"),
        ([(1.0, 2.0, True)], 5, r"row \[1\.0, 2\.0, True\] must be three finite"),
        ([(1j, 2.0, 3.0)], 5, r"row \[1j, 2\.0, 3\.0\] must be three finite"),
        ([(1.0, 2.0, 10**400)], 5, r"row \[1\.0, 2\.0, 10{400}\] must be three finite"),
        ("quintic", 2.5, r"optim\.ns_steps=2\.5"),
        ("quintic", True, r"optim\.ns_steps=True"),
    ],
)
def test_what_cannot_be_resolved_is_refused_by_name(table, steps, message):
    with pytest.raises(UserError, match=message):
        resolve_coefficients(table, steps)
