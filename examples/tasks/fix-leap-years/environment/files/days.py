"""Days between dates, without the standard library's calendars."""

LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def leap(year):
    return year % 4 == 0


def ordinal(text):
    year, month, day = (int(part) for part in text.split("-"))
    days = year * 365 + year // 4
    days += sum(LENGTHS[: month - 1])
    if leap(year) and month >= 2:
        days += 1
    return days + day


def days_between(a, b):
    return ordinal(b) - ordinal(a)
