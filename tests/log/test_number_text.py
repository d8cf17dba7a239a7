"""Numbers in the terminal, in tables and in reports: one table of examples."""

import math

import pytest

from nrl.log import format_number, format_seconds

EXAMPLES = [
    (0.0, "0"),
    (-0.0, "0"),
    (5.488e-14, "0"),
    (-1.2345678e-07, "0"),
    (9.99e-7, "0"),
    (1e-6, "1e-6"),
    (-0.0000123, "-1.23e-5"),
    (0.00012, "0.00012"),
    (0.001174172, "0.001174"),
    (0.29999999, "0.3"),
    (0.9999999, "1"),
    (-0.0113, "-0.0113"),
    (2.94921875, "2.949"),
    (19.6182, "19.62"),
    (512, "512"),
    (999.97, "1,000"),
    (1234.4, "1,234"),
    (-4096, "-4,096"),
    (41142.86, "41,143"),
    (123456, "123,456"),
    (999999.7, "1M"),
    (1234567, "1.235M"),
    (999_999_999, "1B"),
    (7_615_616_512, "7.616B"),
    (2.5e12, "2.5T"),
    (9.9e17, "9.9e17"),
    (math.nan, "nan"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
]


@pytest.mark.parametrize(("value", "text"), EXAMPLES)
def test_numbers_have_few_digits_and_no_noise(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize("name", ["lr", "critic/lr", "lr/head", "optimizer.weight_decay", "learning_rate"])
def test_small_learning_rates_are_no_noise(name: str) -> None:
    assert format_number(3.21e-7, name) == "3.21e-7"
    assert format_number(0.0, name) == "0"


@pytest.mark.parametrize("name", ["lrange", "mismatch/kl", "reward/early", "steps"])
def test_tiny_values_of_other_metrics_are_noise(name: str) -> None:
    assert format_number(3.21e-7, name) == "0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.00004, "4e-5 s"),
        (0.123456, "0.123 s"),
        (12.54, "12.5 s"),
        (999.6, "1,000 s"),
        (3600, "3,600 s"),
    ],
)
def test_times_are_in_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
