"""What tables.py is made of: names, numbers and intervals as text, and rows as a table."""

import math
import re

from extras.comparison.statistics import differences, is_as_good, mean_of


def method(arm):
    """`dppo` (0.7, 0.7); but our rule has no name of the code."""
    return arm if arm.startswith("our rule") else re.sub(r"^[\w-]+", r"`\g<0>`", arm)


def signed(value, digits=3):
    return f"{value:+.{digits}f}".replace("-", "−")


def plain(value, digits=2):
    return "never" if math.isinf(value) else f"{value:.{digits}f}"


def bracketed(of_interval, show=plain):
    """0.81 (0.76 to 0.86)"""
    middle, low, high = map(show, of_interval)
    return "neither gets there" if middle == "nan" else f"{middle} ({low} to {high})"


def difference_cells(measure, runs, control):
    """An arm's accuracy, minus the control's, and the verdict."""
    accuracy = f"{mean_of(measure, runs):.3f}"
    if runs is control:
        return [accuracy, "", ""]
    difference = differences(measure, runs, control)
    return [accuracy, bracketed(difference, signed), is_as_good(difference)]


def compared_cell(compare, runs, control, show=plain):
    """compare(runs, control), or nothing beside the control itself."""
    return "" if runs is control else bracketed(compare(runs, control), show)


def thousands(value):
    return f"{value:,.0f}"


def rows_of(runs, cells):
    """A row for each arm: its name, and cells(its runs)."""
    return [[method(arm), *cells(of_arm)] for arm, of_arm in runs.items()]


def markdown(rows):
    """Rows of cells, of which the first is the head, as a table."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
